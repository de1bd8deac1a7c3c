"""Algorithm 2 of the paper: the Mixture-of-Experts layer in linear algebra.

Tokens go from their group to their experts and back. There are two ways to move them, with the
same result: the paper's one-hot einsums, and gathers by index. Both leave tokens [E, G, C, M] split
by expert and results [G, E, C, M] split by group, so that the two reshards between these are the
layer's two AllToAlls. By index is the default: it was faster wherever it was measured, on CPU and
on an H200, and more so the larger a group is (the einsums do S * E * C * M
multiplications per group to move 2 * S * M numbers). On one device, where nothing has to be split,
`flat` gathers from all groups at once (`gshard.nn.flat`), and moves nothing between the gathers and
the experts' products. `dropless` has no capacity: every choice that the router keeps is computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn import float8
from gshard.nn.config import (
    PAPER_GATING,
    Dispatch,
    Exchange,
    GatingConfig,
    Int8,
    Products,
    Random,
)
from gshard.nn.flat import flat_dropless, flat_groups
from gshard.nn.float8 import Annotate, exchanged
from gshard.nn.gating import Routed, RouterMetrics, Routing, float32_logits, route
from gshard.nn.grouped import feed_forward, times
from gshard.nn.int8 import product
from gshard.nn.kernels import with_gradient
from gshard.nn.layers import biased, dropout, init_weight, relu, split_key
from gshard.nn.strategy import ONE_DEVICE, Strategy

Drop = Callable[[Array], Array]


def _same(x: Array) -> Array:
    return x


class Experts(eqx.Module):
    """E feed-forward networks: FFN_e(x) = wo_e . relu(wi_e . x)."""

    wi: Array
    wo: Array
    bi: Array | None  # [E, H]
    bo: Array | None  # [E, M]

    def __init__(
        self,
        experts: int,
        model_dim: int,
        hidden_dim: int,
        dtype: str,
        key: Array,
        *,
        biases: bool = False,
    ):
        key_in, key_out = jax.random.split(key)
        self.bi = jnp.zeros((experts, hidden_dim), dtype) if biases else None
        self.bo = jnp.zeros((experts, model_dim), dtype) if biases else None
        self.wi = init_weight(key_in, (experts, model_dim, hidden_dim), model_dim, dtype)
        self.wo = init_weight(key_out, (experts, hidden_dim, model_dim), hidden_dim, dtype)

    @jax.named_scope("experts")
    def __call__(self, x_EGCM: Array, drop: Drop = lambda h: h) -> Array:
        """Every expert on its own tokens; the results are group-major.

        `drop` is the dropout between an expert's two products.
        """
        h_EGCH = product("EGCM,EMH->EGCH", x_EGCM, self.wi)
        h_EGCH = drop(relu(biased(h_EGCH, _along(self.bi, 1, 2))))
        y_GECM = product("EGCH,EHM->GECM", h_EGCH, self.wo)
        return biased(y_GECM, _along(self.bo, 0, 2))

    @jax.named_scope("experts")
    def in_eight_bits(self, x_ECM: Array, drop: Drop | None = None) -> Array:
        """Every expert on its own tokens, by products in eight bits."""
        wi_EMH, wo_EHM = (w.astype(x_ECM.dtype) for w in (self.wi, self.wo))
        if drop is None:
            return float8.feed_forward(x_ECM, wi_EMH, wo_EHM)
        return float8.product(drop(relu(float8.product(x_ECM, wi_EMH))), wo_EHM)

    @jax.named_scope("experts")
    def in_place(self, x_ECM: Array, drop: Drop = lambda h: h) -> Array:
        """Every expert on its own tokens; results have the order of the tokens."""
        h_ECH = product("ECM,EMH->ECH", x_ECM, self.wi)
        h_ECH = drop(relu(biased(h_ECH, _along(self.bi, 1))))
        return biased(product("ECH,EHM->ECM", h_ECH, self.wo), _along(self.bo, 1))

    @jax.named_scope("experts")
    def in_blocks(self, x_NCM: Array, expert_N: Array, drop: Drop | None = None) -> Array:
        """Each block of tokens by its expert; with biases there are no gradients."""
        wi, wo = (w if isinstance(w, Int8) else w.astype(x_NCM.dtype) for w in (self.wi, self.wo))
        if self.bi is None or self.bo is None:
            units = jnp.ones((*x_NCM.shape[:2], wi.shape[2]), x_NCM.dtype)
            return feed_forward(x_NCM, wi, wo, expert_N, drop(units) if drop else None)
        h_NCH = relu(times(x_NCM, wi, expert_N) + self.bi[expert_N][:, None].astype(x_NCM.dtype))
        return times(h_NCH, wo, expert_N) + self.bo[expert_N][:, None].astype(x_NCM.dtype)

    @jax.named_scope("experts")
    def sorted(self, x_RM: Array, expert_R: Array, kept_R: Array, drop: Drop) -> Array:
        """Each row by its expert, or zeros: in the form that gshard exchanges between devices."""
        E, R = len(self.wi), len(x_RM)
        expert_R = jnp.where(kept_R, expert_R, E)
        order_R = jnp.argsort(expert_R)
        counts_E = jnp.bincount(expert_R, length=E)  # the rows of no expert are the last
        wi, wo = (w.astype(x_RM.dtype) for w in (self.wi, self.wo))
        h_RH = drop(relu(jax.lax.ragged_dot(x_RM[order_R], wi, counts_E)))
        y_RM = jax.lax.ragged_dot(h_RH, wo, counts_E)
        return jnp.zeros((R, y_RM.shape[1]), y_RM.dtype).at[order_R].set(y_RM)


def _along(bias_EM: Array | None, *dims: int) -> Array | None:
    """A bias of each expert, with dims of size 1 where its tokens are."""
    return None if bias_EM is None else jnp.expand_dims(bias_EM, dims)


class MoE(eqx.Module):
    """The position-wise Mixture-of-Experts layer: gate, dispatch, experts, combine."""

    gate: Array
    experts: Experts
    config: GatingConfig = eqx.field(static=True)
    groups: int | None = eqx.field(static=True)
    dispatch: Dispatch = eqx.field(static=True)
    dropout: float = eqx.field(static=True)
    random: Random = eqx.field(static=True)
    products: Products = eqx.field(static=True)
    exchange: Exchange = eqx.field(static=True)

    def __init__(
        self,
        experts: int,
        model_dim: int,
        hidden_dim: int,
        dtype: str,
        key: Array,
        config: GatingConfig = PAPER_GATING,
        groups: int | None = None,
        dispatch: Dispatch = "index",
        dropout: float = 0.0,
        random: Random = "threefry",
        products: Products = "dtype",
        exchange: Exchange = "dtype",
        *,
        biases: bool = False,
    ):
        key_gate, key_experts = jax.random.split(key)
        self.gate = init_weight(key_gate, (model_dim, experts), model_dim, "float32")
        self.experts = Experts(experts, model_dim, hidden_dim, dtype, key_experts, biases=biases)
        self.config = config
        self.groups = groups
        self.dispatch = dispatch
        self.dropout, self.random = dropout, random
        self.products, self.exchange = products, exchange

    def __call__(
        self,
        x_BLM: Array,
        mask_BL: Array,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        *,
        dropless: bool = False,
    ) -> tuple[Array, RouterMetrics]:
        """Mix the experts' results for each token; training if there is a `key`."""
        y_BLM, routed = self.routed(x_BLM, mask_BL, key, strategy, dropless=dropless)
        return y_BLM, routed.metrics

    # Traced once for all layers of a shape.
    @functools.partial(jax.jit, static_argnames=("strategy", "dropless"))
    @jax.named_scope("moe")
    def routed(
        self,
        x_BLM: Array,
        mask_BL: Array,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        *,
        dropless: bool = False,
    ) -> tuple[Array, Routed]:
        """The layer, and where it sent every token.

        The batch is regrouped into `groups` groups of equal size, a microbatch into its share of
        them; None, and `dropless` where grouping has no effect, make each sequence a group.
        """
        B, L, M = x_BLM.shape
        batches = max(strategy.microbatches, 1)
        G = B if dropless or self.groups is None else self.groups // batches
        if B * L % G:
            raise ValueError(f"{B} x {L} tokens do not divide into {G} groups")
        x_GSM = strategy.groups(x_BLM.reshape(G, -1, M))
        mask_GS = mask_BL.reshape(G, -1)

        logits_GSE = self._logits(x_GSM)
        S, E = logits_GSE.shape[1:]
        dropless = dropless or self.dispatch == "dropless"
        C = self.config.capacity(S, E, train=key is not None, dropless=dropless)
        route_key, drop_key = key, None
        if key is not None and self.dropout:
            route_key, drop_key = split_key(key, 2)
        routing, metrics = route(logits_GSE, C, self.config, route_key, mask_GS)

        def drop(h: Array) -> Array:
            return dropout(h, self.dropout, drop_key, self.random)

        # With a slot for every token in every expert, other ways would waste nearly all their work.
        if strategy.devices == 1 and (dropless or self.dispatch == "flat"):
            capacity = None if dropless else C
            y_GSM = self._on_one_device(routing, x_GSM, capacity, drop, drop_key)
            return y_GSM.reshape(B, L, M), Routed(routing, metrics)

        if self.dispatch == "dropless":
            y_RM = self._sorted(strategy, routing, x_GSM.reshape(-1, M), drop)
            return y_RM.reshape(B, L, M), Routed(routing, metrics)

        dispatch, combine = DISPATCHES[self.dispatch]

        def by_group(x_EGCM: Array) -> Array:
            return strategy.groups(x_EGCM.swapaxes(0, 1)).swapaxes(0, 1)

        def by_expert_second(y_GECM: Array) -> Array:
            return strategy.experts(y_GECM, 1)

        x_EGCM = dispatch(strategy, routing, x_GSM, E, C)
        x_EGCM = strategy.experts(self._exchanged(x_EGCM, by_group, strategy.experts))
        y_GECM = self._group_first(x_EGCM, drop, drop_key)
        y_GECM = strategy.groups(self._exchanged(y_GECM, by_expert_second, strategy.groups))
        return combine(strategy, routing, y_GECM).reshape(B, L, M), Routed(routing, metrics)

    def _on_one_device(
        self, routing: Routing, x_GSM: Array, C: int | None, drop: Drop, drop_key: Array | None
    ) -> Array:
        """Tokens gathered from all groups: in slots, or in blocks where there is no capacity."""
        E = self.gate.shape[1]
        if C is None:
            used = None if drop_key is None else drop
            run = functools.partial(self.experts.in_blocks, drop=used)
            return flat_dropless(run, routing, x_GSM, E)
        by_expert = self._experts_by(drop, drop_key)

        def experts(x_ECM: Array) -> Array:
            return self._exchanged(by_expert(self._exchanged(x_ECM)))

        return flat_groups(experts, routing, x_GSM, E, C)

    def _sorted(self, strategy: Strategy, routing: Routing, x_RM: Array, drop: Drop) -> Array:
        """Tokens to the devices of their experts and back, one choice after the other."""
        experts = strategy.weights(self).experts
        choices = zip(routing.expert, routing.kept, routing.weight, strict=True)
        return sum(
            weight_GS.reshape(-1, 1).astype(x_RM.dtype)
            * experts.sorted(x_RM, expert_GS.ravel(), kept_GS.ravel(), drop)
            for expert_GS, kept_GS, weight_GS in choices
        )

    def _exchanged(self, x: Array, here: Annotate = _same, there: Annotate = _same) -> Array:
        """What is sent from one sharding to another."""
        return x if self.exchange == "dtype" else exchanged(here, there, x)

    def _experts_by(self, drop: Drop, drop_key: Array | None) -> Drop:
        """How the experts run on their own tokens, [E, C, M]."""
        if self.products == "float8":
            used = None if drop_key is None else drop
            return functools.partial(self.experts.in_eight_bits, drop=used)
        return functools.partial(self.experts.in_place, drop=drop)

    def _group_first(self, x_EGCM: Array, drop: Drop, drop_key: Array | None) -> Array:
        """The experts on tokens of several groups; the results are group-major."""
        if self.products == "dtype":
            return self.experts(x_EGCM, drop)
        E, G, C, M = x_EGCM.shape
        y_EXM = self._experts_by(drop, drop_key)(x_EGCM.reshape(E, G * C, M))
        return y_EXM.reshape(E, G, C, M).swapaxes(0, 1)

    def _logits(self, x_GSM: Array) -> Array:
        """The router's logits, in float32 whatever the activations are."""
        if x_GSM.dtype == jnp.bfloat16:
            return float32_logits(x_GSM, self.gate)
        return jnp.einsum(
            "GSM,ME->GSE", x_GSM.astype(jnp.float32), self.gate, precision=jax.lax.Precision.HIGHEST
        )


def one_hots(routing: Routing, weight_KGS: Array, E: int, C: int) -> Array:
    """The [G, S, E, C] tensor with a token's weight at its expert and slot, and 0 elsewhere."""
    choices = zip(routing.expert, routing.slot, weight_KGS, strict=True)
    dtype = weight_KGS.dtype
    return sum(
        jax.nn.one_hot(expert_GS, E, dtype=dtype)[..., :, None]
        * (jax.nn.one_hot(slot_GS, C, dtype=dtype) * weight_GS[..., None])[..., None, :]
        for expert_GS, slot_GS, weight_GS in choices
    )


def dispatch_einsum(strategy: Strategy, routing: Routing, x_GSM: Array, E: int, C: int) -> Array:
    """Move tokens to their experts by the paper's einsum with the dispatch mask."""
    mask_GSEC = one_hots(routing, routing.kept.astype(x_GSM.dtype), E, C)
    return jnp.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM)


def combine_einsum(strategy: Strategy, routing: Routing, y_GECM: Array) -> Array:
    """Bring results back by the paper's einsum with the combine weights."""
    E, C = y_GECM.shape[1:3]
    combine_GSEC = one_hots(routing, routing.weight.astype(y_GECM.dtype), E, C)
    return jnp.einsum("GSEC,GECM->GSM", combine_GSEC, y_GECM)


def dispatch_index(strategy: Strategy, routing: Routing, x_GSM: Array, E: int, C: int) -> Array:
    """Move tokens to their experts by looking up, for each slot, the token that has it."""
    G, S, M = x_GSM.shape
    slot_GKS, choice_GX = _tables(routing, E, C)
    token_GX = jnp.where(choice_GX < slot_GKS[0].size, choice_GX % S, S)
    return _lookup(strategy, x_GSM, token_GX, slot_GKS).reshape(G, E, C, M).swapaxes(0, 1)


def combine_index(strategy: Strategy, routing: Routing, y_GECM: Array) -> Array:
    """Bring results back by looking up, for each token, the slots that it has."""
    G, E, C, M = y_GECM.shape
    slot_GKS, choice_GX = _tables(routing, E, C)
    rows_GXM = y_GECM.reshape(G, E * C, M)
    y_GYM = _lookup(strategy, rows_GXM, slot_GKS.reshape(G, -1), choice_GX[:, None])
    y_GKSM = y_GYM.reshape(*slot_GKS.shape, M)
    return jnp.einsum("KGS,GKSM->GSM", routing.weight.astype(y_GECM.dtype), y_GKSM)


def _tables(routing: Routing, E: int, C: int) -> tuple[Array, Array]:
    """For each choice its slot among the group's X = E * C, and for each slot its choice.

    A choice without a slot has X, a slot without a choice has K * S: one past the end. All index
    work is local to a group, so the groups may be split in any way.
    """
    K, _, S = routing.expert.shape
    X = E * C
    slot_KGS = jnp.where(routing.kept, routing.expert * C + routing.slot, X)
    slot_GKS = slot_KGS.swapaxes(0, 1)

    def invert(slot_KS: Array) -> Array:
        empty_X = jnp.full((X,), K * S, jnp.int32)
        return empty_X.at[slot_KS.ravel()].set(jnp.arange(K * S, dtype=jnp.int32), mode="drop")

    return slot_GKS, jax.vmap(invert)(slot_GKS)


def _lookup_backward(
    strategy: Strategy, back_GKR: Array, grads_GXM: Array
) -> tuple[Array, None, None]:
    G, K, R = back_GKR.shape
    taken = _lookup(strategy, grads_GXM, back_GKR.reshape(G, K * R), back_GKR)
    return jnp.sum(taken.reshape(G, K, R, -1), axis=1), None, None


@with_gradient(_lookup_backward, keep=lambda found, *args: args[-1], nondiff=(0,))
def _lookup(strategy: Strategy, rows_GRM: Array, index_GX: Array, back_GKR: Array) -> Array:
    """Rows by index within each group; an index past the end gives zeros.

    The paper's example of manual partitioning: indices stay within a group, so each device looks up
    in its own groups, which a partitioner cannot know.

    `back_GKR` has the K positions of each row: with it the derivative is a gather too, instead of a
    scatter-add.
    """
    found_GXM = jax.vmap(lambda rows, index: rows.at[index].get(mode="fill", fill_value=0))(
        strategy.own_groups(rows_GRM), strategy.own_groups(index_GX)
    )
    return strategy.all_groups(found_GXM, len(rows_GRM))


DISPATCHES = {
    "einsum": (dispatch_einsum, combine_einsum),
    "index": (dispatch_index, combine_index),
    "flat": (dispatch_index, combine_index),  # on several devices
}
