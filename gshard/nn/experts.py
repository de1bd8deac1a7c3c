"""Algorithm 2 of the paper: the Mixture-of-Experts layer in linear algebra.

Tokens go from their group to their experts and back. There are two ways to move them, with the
same result: the paper's one-hot einsums, and gathers by index. Both leave tokens [E, G, C, M] split
by expert and results [G, E, C, M] split by group, so that the two changes between these are the
layer's two AllToAlls.
"""

from __future__ import annotations

from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.gating import PAPER_GATING, GatingConfig, RouterMetrics, Routing, route
from gshard.nn.layers import init_weight
from gshard.nn.strategy import ONE_DEVICE, Strategy

Dispatch = Literal["einsum", "index"]


class Experts(eqx.Module):
    """E feed-forward networks side by side: FFN_e(x) = wo_e . relu(wi_e . x)."""

    wi: Array
    wo: Array

    def __init__(self, experts: int, model_dim: int, hidden_dim: int, dtype: str, key: Array):
        key_in, key_out = jax.random.split(key)
        self.wi = init_weight(key_in, (experts, model_dim, hidden_dim), model_dim, dtype)
        self.wo = init_weight(key_out, (experts, hidden_dim, model_dim), hidden_dim, dtype)

    def __call__(self, x_EGCM: Array) -> Array:
        """Every expert on its own tokens; the results stand group first."""
        dtype = x_EGCM.dtype
        h_EGCH = jax.nn.relu(jnp.einsum("EGCM,EMH->EGCH", x_EGCM, self.wi.astype(dtype)))
        return jnp.einsum("EGCH,EHM->GECM", h_EGCH, self.wo.astype(dtype))


class MoE(eqx.Module):
    """The position-wise Mixture-of-Experts layer: gate, dispatch, experts, combine."""

    gate: Array
    experts: Experts
    config: GatingConfig = eqx.field(static=True)
    groups: int | None = eqx.field(static=True)
    dispatch: Dispatch = eqx.field(static=True)

    def __init__(
        self,
        experts: int,
        model_dim: int,
        hidden_dim: int,
        dtype: str,
        key: Array,
        config: GatingConfig = PAPER_GATING,
        groups: int | None = None,
        dispatch: Dispatch = "einsum",
    ):
        key_gate, key_experts = jax.random.split(key)
        self.gate = init_weight(key_gate, (model_dim, experts), model_dim, "float32")
        self.experts = Experts(experts, model_dim, hidden_dim, dtype, key_experts)
        self.config = config
        self.groups = groups
        self.dispatch = dispatch

    def __call__(
        self,
        x_BLM: Array,
        mask_BL: Array,
        key: Array | None = None,
        strategy: Strategy = ONE_DEVICE,
        *,
        dropless: bool = False,
    ) -> tuple[Array, RouterMetrics]:
        """Mix the experts' results for each token; training if there is a `key`.

        The batch is regrouped into `groups` groups of equal size; None, and dropless decoding
        where grouping has no effect, make each sequence a group.
        """
        B, L, M = x_BLM.shape
        G = B if dropless or self.groups is None else self.groups
        if B * L % G:
            raise ValueError(f"{B} x {L} tokens do not divide into {G} groups")
        x_GSM = strategy.groups(x_BLM.reshape(G, -1, M))
        mask_GS = mask_BL.reshape(G, -1)

        logits_GSE = jnp.einsum(
            "GSM,ME->GSE", x_GSM.astype(jnp.float32), self.gate, precision=jax.lax.Precision.HIGHEST
        )
        S, E = logits_GSE.shape[1:]
        C = self.config.capacity(S, E, train=key is not None, dropless=dropless)
        routing, metrics = route(logits_GSE, C, self.config, key, mask_GS)

        dispatch, combine = DISPATCHES[self.dispatch]
        x_EGCM = strategy.experts(dispatch(routing, x_GSM, E, C))
        y_GECM = strategy.groups(self.experts(x_EGCM))
        return combine(routing, y_GECM).reshape(B, L, M), metrics


def one_hots(routing: Routing, weight_KGS: Array, E: int, C: int) -> Array:
    """The [G, S, E, C] tensor with a token's weight at its expert and slot, and 0 elsewhere."""
    choices = zip(routing.expert, routing.slot, weight_KGS, strict=True)
    dtype = weight_KGS.dtype
    return sum(
        jax.nn.one_hot(expert_GS, E, dtype=dtype)[..., :, None]
        * (jax.nn.one_hot(slot_GS, C, dtype=dtype) * weight_GS[..., None])[..., None, :]
        for expert_GS, slot_GS, weight_GS in choices
    )


def dispatch_einsum(routing: Routing, x_GSM: Array, E: int, C: int) -> Array:
    """Move tokens to their experts by the paper's einsum with the dispatch mask."""
    mask_GSEC = one_hots(routing, routing.kept.astype(x_GSM.dtype), E, C)
    return jnp.einsum("GSEC,GSM->EGCM", mask_GSEC, x_GSM)


def combine_einsum(routing: Routing, y_GECM: Array) -> Array:
    """Bring results back by the paper's einsum with the combine weights."""
    E, C = y_GECM.shape[1:3]
    combine_GSEC = one_hots(routing, routing.weight.astype(y_GECM.dtype), E, C)
    return jnp.einsum("GSEC,GECM->GSM", combine_GSEC, y_GECM)


def dispatch_index(routing: Routing, x_GSM: Array, E: int, C: int) -> Array:
    """Move tokens to their experts by looking up, for each slot, the token that has it."""
    G, S, M = x_GSM.shape
    slots_GKS = _flat_slots(routing, E, C)
    tokens_GKS = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), slots_GKS.shape)
    empty_GX = jnp.full((G, E * C), S, jnp.int32)
    token_GX = jax.vmap(lambda table, slot, token: table.at[slot].set(token, mode="drop"))(
        empty_GX, slots_GKS, tokens_GKS
    )
    return _take(x_GSM, token_GX).reshape(G, E, C, M).swapaxes(0, 1)


def combine_index(routing: Routing, y_GECM: Array) -> Array:
    """Bring results back by looking up, for each token, the slots that it has."""
    G, E, C, M = y_GECM.shape
    K, _, S = routing.expert.shape
    slots_GKS = _flat_slots(routing, E, C)
    y_GKSM = _take(y_GECM.reshape(G, E * C, M), slots_GKS.reshape(G, K * S)).reshape(G, K, S, M)
    return jnp.einsum("KGS,GKSM->GSM", routing.weight.astype(y_GECM.dtype), y_GKSM)


def _flat_slots(routing: Routing, E: int, C: int) -> Array:
    """Each choice's row in its group's [E * C] slots; one past the end where it is not kept."""
    flat_KGS = routing.expert * C + routing.slot
    return jnp.where(routing.kept, flat_KGS, E * C).swapaxes(0, 1)


def _take(rows_GRM: Array, index_GX: Array) -> Array:
    """Rows by index within each group; an index past the end gives zeros.

    All index work is local to a group, so the groups may be split in any way.
    """
    return jax.vmap(lambda rows, index: rows.at[index].get(mode="fill", fill_value=0))(
        rows_GRM, index_GX
    )


DISPATCHES = {
    "einsum": (dispatch_einsum, combine_einsum),
    "index": (dispatch_index, combine_index),
}
