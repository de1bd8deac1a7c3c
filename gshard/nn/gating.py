"""Algorithm 1 of the paper: group-level top-2 gating with capacity, and what a router reports.

The paper writes it as a loop over the tokens of a group. Here every group runs at once: a token's
place in an expert's buffer is an exclusive cumulative sum over the tokens before it. All groups are
independent, so that splitting G over devices needs no communication except for the final sums.
Dims: G groups, S tokens per group, E experts, C capacity, K choices per token (1 or 2).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.config import GatingConfig
from gshard.nn.kernels import with_gradient


class Routing(NamedTuple):
    """Where each token goes: its k-th choice of expert, the slot there, and its combine weight.

    A choice that is not `kept` (padding, rejected at random, over capacity) has weight 0.
    """

    expert: Array  # all [K, G, S]
    slot: Array
    weight: Array
    kept: Array


class Routed(NamedTuple):
    """The result of one MoE layer's router: the routing of each token, and metrics."""

    routing: Routing
    metrics: RouterMetrics


class RouterMetrics(NamedTuple):
    """The metrics of one MoE layer for the tokens of a step, without padding.

    `aux_loss` is E * sum_e (c_e / S) * m_e, averaged over the groups: a balanced router gives 1.
    The paper's l_aux = (1/E) sum_e (c_e / S) * m_e is this divided by E * E. c_e counts first
    choices before capacity cuts them. `z_loss` is the mean of logsumexp(logits)^2.
    """

    aux_loss: Array
    z_loss: Array
    overflow_first: Array  # share of first choices that found their expert full
    overflow_second: Array  # the same for second choices that asked for a slot
    tokens_0: Array  # share of tokens with no expert: only the residual connection
    tokens_1: Array
    tokens_2: Array
    load: Array  # share of all taken slots that each expert has; sums to 1
    entropy: Array  # mean entropy of the gates, in nats
    dead_experts: Array  # how many experts got no token at all


@jax.named_scope("gating")
def route(
    logits_GSE: Array,
    capacity: int,
    config: GatingConfig,
    key: Array | None = None,
    mask_GS: Array | None = None,
) -> tuple[Routing, RouterMetrics]:
    """Choose experts and slots for every token; Algorithm 1 in all groups at once.

    Without a `key` nothing is random: `random` keeps every second choice, and `sampling` takes
    the best remaining expert. Tokens where `mask_GS` is False are padding: they take no slot.
    """
    G, S, E = logits_GSE.shape
    if not config.top_k <= E:
        raise ValueError(
            f"top-{config.top_k} gating needs at least {config.top_k} experts, got {E}"
        )
    logits_GSE = logits_GSE.astype(jnp.float32)
    real_GS = jnp.ones((G, S), bool) if mask_GS is None else mask_GS.astype(bool)
    gates_GSE = jax.nn.softmax(logits_GSE)

    expert1_GS = jnp.argmax(gates_GSE, axis=-1).astype(jnp.int32)
    first_GSE = jax.nn.one_hot(expert1_GS, E, dtype=jnp.int32)
    gate1_GS = jnp.sum(gates_GSE * first_GSE, axis=-1)
    wanted1_GSE = first_GSE * real_GS[..., None]
    none_GE = jnp.zeros((G, E), jnp.int32)
    slot1_GS, kept1_GS, queue1 = _queue(wanted1_GSE, capacity, none_GE)

    if config.top_k == 1:
        first = (expert1_GS, slot1_GS, gate1_GS * kept1_GS, kept1_GS)
        routing = _masked(Routing(*(x[None] for x in first)), config.output_masking, key)
        return routing, _metrics(logits_GSE, gates_GSE, real_GS, (queue1,), (kept1_GS,))

    keep_key, choose_key = (None, None) if key is None else jax.random.split(key)
    expert2_GS = _second_expert(logits_GSE, gates_GSE, first_GSE, config, choose_key)
    second_GSE = jax.nn.one_hot(expert2_GS, E, dtype=jnp.int32)
    gate2_GS = jnp.sum(gates_GSE * second_GSE, axis=-1)
    total_GS = gate1_GS + gate2_GS + 1e-9
    gate1_GS, gate2_GS = gate1_GS / total_GS, gate2_GS / total_GS

    asks_GS = real_GS
    if config.second_expert == "random" and keep_key is not None:
        asks_GS = real_GS & (jax.random.uniform(keep_key, (G, S)) < 2.0 * gate2_GS)
    wanted2_GSE = second_GSE * asks_GS[..., None]
    slot2_GS, kept2_GS, queue2 = _queue(wanted2_GSE, capacity, queue1.taken)

    routing = Routing(
        jnp.stack([expert1_GS, expert2_GS]),
        jnp.stack([slot1_GS, slot2_GS]),
        jnp.stack([gate1_GS * kept1_GS, gate2_GS * kept2_GS]),
        jnp.stack([kept1_GS, kept2_GS]),
    )
    routing = _masked(routing, config.output_masking, key)
    queues, kept = (queue1, queue2), (kept1_GS, kept2_GS)
    return routing, _metrics(logits_GSE, gates_GSE, real_GS, queues, kept)


def _masked(routing: Routing, rate: float, key: Array | None) -> Routing:
    """Mask a share of the experts' results, and rescale the rest; slots stay taken."""
    if key is None or rate == 0.0:
        return routing
    keep_KGS = jax.random.bernoulli(jax.random.fold_in(key, 2), 1.0 - rate, routing.weight.shape)
    return routing._replace(weight=routing.weight * keep_KGS / (1.0 - rate))


class Queue(NamedTuple):
    """The counts of one choice at each expert, [G, E]."""

    wanted: Array  # how many came
    taken: Array  # how many slots are taken then, those of an earlier choice included


def _queue(wanted_GSE: Array, capacity: int, taken_GE: Array) -> tuple[Array, Array, Queue]:
    """Line up the tokens before each expert, behind the slots already taken.

    Returns each token's slot, whether that is within capacity, and the counts, which are the last
    row of the cumulative sum: counting again would take longer than everything else.
    """
    until_GSE = jnp.cumsum(wanted_GSE, axis=1)
    place_GSE = until_GSE - wanted_GSE + taken_GE[:, None, :]
    slot_GS = jnp.sum(place_GSE * wanted_GSE, axis=-1)
    kept_GS = jnp.sum(wanted_GSE * (place_GSE < capacity), axis=-1) > 0
    wanted_GE = until_GSE[:, -1]
    return slot_GS, kept_GS, Queue(wanted_GE, jnp.minimum(taken_GE + wanted_GE, capacity))


def _second_expert(
    logits_GSE: Array, gates_GSE: Array, first_GSE: Array, config: GatingConfig, key: Array | None
) -> Array:
    """The best expert after the first; for `sampling`, one drawn from the remaining gates.

    Adding Gumbel noise to the logits and taking the largest draws from their softmax.
    """
    scores_GSE = gates_GSE
    if config.second_expert == "sampling" and key is not None:
        scores_GSE = logits_GSE + jax.random.gumbel(key, logits_GSE.shape)
    rest_GSE = jnp.where(first_GSE > 0, -jnp.inf, scores_GSE)
    return jnp.argmax(rest_GSE, axis=-1).astype(jnp.int32)


def _metrics(
    logits_GSE: Array,
    gates_GSE: Array,
    real_GS: Array,
    queues: tuple[Queue, ...],
    kept: tuple[Array, ...],
) -> RouterMetrics:
    """The losses and counts of one router, reduced over the groups in a single sum.

    With G split over devices that single sum is a single all-reduce of 11 + E numbers.
    """
    E = gates_GSE.shape[-1]
    real_G = jnp.sum(real_GS, axis=1).astype(jnp.float32)
    tokens_G1 = jnp.maximum(real_G, 1.0)[:, None]
    density_GE = queues[0].wanted / tokens_G1
    mean_gate_GE = jnp.sum(gates_GSE * real_GS[..., None], axis=1) / tokens_G1
    z_GS = jax.nn.logsumexp(logits_GSE, axis=-1) ** 2
    entropy_GS = -jnp.sum(gates_GSE * jax.nn.log_softmax(logits_GSE), axis=-1)

    experts_GS = sum(k.astype(jnp.int32) for k in kept)
    none_G = jnp.zeros_like(real_G)
    second_wanted_G = jnp.sum(queues[1].wanted, axis=1) if len(queues) > 1 else none_G
    second_kept_G = jnp.sum(kept[1], axis=1) if len(kept) > 1 else none_G
    scalars_G = [
        E * jnp.sum(density_GE * mean_gate_GE, axis=-1),
        real_G > 0,
        jnp.sum(z_GS * real_GS, axis=1),
        real_G,
        jnp.sum(kept[0], axis=1),
        second_wanted_G,
        second_kept_G,
        *(jnp.sum(real_GS & (experts_GS == n), axis=1) for n in range(3)),
        jax.lax.stop_gradient(jnp.sum(entropy_GS * real_GS, axis=1)),
    ]
    columns = [jnp.stack([s.astype(jnp.float32) for s in scalars_G], axis=1)]
    columns.append(queues[-1].taken.astype(jnp.float32))
    sums = jnp.sum(jnp.concatenate(columns, axis=1), axis=0)

    aux, groups, z, real, kept1, wanted2, kept2, none, one, two, entropy = sums[:11]
    load_E = sums[11:]
    tokens = jnp.maximum(real, 1.0)
    return RouterMetrics(
        aux_loss=aux / jnp.maximum(groups, 1.0),
        z_loss=z / tokens,
        overflow_first=(real - kept1) / tokens,
        overflow_second=(wanted2 - kept2) / jnp.maximum(wanted2, 1.0),
        tokens_0=none / tokens,
        tokens_1=one / tokens,
        tokens_2=two / tokens,
        load=load_E / jnp.maximum(jnp.sum(load_E), 1.0),
        entropy=entropy / tokens,
        dead_experts=jnp.sum(load_E == 0).astype(jnp.float32),
    )


def parts(x: Array) -> Array:
    """Float32 as the sum of three bfloat16 numbers, in a new dim before the last."""
    found = []
    for _ in range(3):
        # Not a conversion there and back: XLA may leave that out, as it only loses precision.
        part = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        found.append(part.astype(jnp.bfloat16))
        x = x - part
    return jnp.stack(found, axis=-2)


def _logits_backward(kept: tuple[Array, Array], grads_GSE: Array) -> tuple[Array, Array]:
    """The gate's gradient is exact too; the activations' is rounded to bfloat16 in any case."""
    x_GSM, gate_ME = kept
    grads_GSKE = parts(grads_GSE)
    gate_MKE = jnp.einsum("GSM,GSKE->MKE", x_GSM, grads_GSKE, preferred_element_type=jnp.float32)
    x_grad = jnp.einsum("GSE,ME->GSM", grads_GSKE[:, :, 0], gate_ME.astype(jnp.bfloat16))
    return x_grad, jnp.sum(gate_MKE, axis=1)


@with_gradient(_logits_backward)
def float32_logits(x_GSM: Array, gate_ME: Array) -> Array:
    """`x_GSM` (bfloat16) times `gate_ME` (float32), as exact as in float32.

    The choice of an expert must not depend on rounding, but a float32 product runs at a fifteenth
    of the speed of a bfloat16 one. A float32 weight is the sum of three bfloat16 numbers of 8 bits
    each: three products with float32 sums, in one matrix product, are the float32 product.
    """
    logits_GSKE = jnp.einsum(
        "GSM,MKE->GSKE", x_GSM, parts(gate_ME), preferred_element_type=jnp.float32
    )
    return jnp.sum(logits_GSKE, axis=2)
