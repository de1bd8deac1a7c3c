"""The kernels of attention without its scores in memory, in Pallas for Triton.

A program handles a block of queries (or, for the gradients of keys and values, of keys) of one head
of one row, and loops over the other side block by block. The caller, `gshard.nn.flash`, decides
which blocks of which arrays it gets.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.nn.hashing import hashed_row_bits, kept

NEVER = -1e30  # a masked score; finite, so that differences are never NaN
ROWS = 1 << 13  # queries of a head, for numbering rows; more of them share bits, which is harmless
_LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """How the kernels cut their work: rows of the side that a program has, and of the other."""

    own: int = 64
    other: int = 32
    warps: int = 4
    stages: int = 3
    interpret: bool = False


class KernelSettings(NamedTuple):
    """The static settings of a kernel."""

    rate: float
    causal: bool
    scale: float  # of the scores
    blocks: Blocks


class ScoreBlock(NamedTuple):
    """A block of scores: its head, the dim of queries, and its offsets."""

    head: Any  # counted over all rows of the batch
    shape: tuple[int, int]
    query_dim: int
    q_start: Any
    k_start: Any

    def queries(self) -> Array:
        """The number of each query, to be broadcast."""
        return self.q_start + self._places(self.query_dim)

    def keys(self) -> Array:
        """The number of each key, to be broadcast."""
        return self.k_start + self._places(1 - self.query_dim)

    def _places(self, dim: int) -> Array:
        line = tuple(size if d == dim else 1 for d, size in enumerate(self.shape))
        return jax.lax.broadcasted_iota(jnp.int32, line, dim)


def _visible(tile: ScoreBlock, q_seg: Array, k_seg: Array, causal: bool) -> Array:
    """The mask of a tile's scores."""
    q_seg, k_seg = (
        jnp.expand_dims(x, dim) for x, dim in ((q_seg, 1 - tile.query_dim), (k_seg, tile.query_dim))
    )
    mask = (q_seg == k_seg) & (k_seg > 0)
    return mask & (tile.queries() >= tile.keys()) if causal else mask


def _keep(tile: ScoreBlock, seed_ref: Any, rate: float) -> Array | None:
    """The dropout mask of a tile's scores, with the bits of `reference`."""
    if rate == 0.0:
        return None
    rows = (tile.head * ROWS + tile.queries()).astype(jnp.uint32)
    columns = tile.keys().astype(jnp.uint32)
    return kept(hashed_row_bits((seed_ref[0], seed_ref[1]), rows, columns), rate)


def _head() -> Any:
    """The number of the head at work, among all of the batch."""
    return pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)


def online_softmax(
    scores: Array, mask: Array, top: Array, total: Array
) -> tuple[Array, Array, Array, Array]:
    """Probabilities of more scores, by powers of 2, before they are divided by their total; the
    factor for what was added up before; the new maximum and the new total of each query."""
    new_top = jnp.maximum(top, jnp.max(jnp.where(mask, scores, NEVER), axis=1))
    probs = jnp.where(mask, jnp.exp2(scores - new_top[:, None]), 0.0)
    shrink = jnp.exp2(top - new_top)
    return probs, shrink, new_top, total * shrink + jnp.sum(probs, axis=1)


def before_any_score(queries: int, values: int) -> tuple[Array, Array, Array]:
    """The sum of values, the maximum and the total of an online softmax that begins."""
    total = jnp.zeros((queries,), jnp.float32)
    return (
        jnp.zeros((queries, values), jnp.float32),
        jnp.full((queries,), NEVER, jnp.float32),
        total,
    )


def forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_seg_ref: Any, k_seg_ref: Any, span_ref: Any,
    seed_ref: Any, out_ref: Any, log_z_ref: Any, *, settings: KernelSettings,
) -> None:  # fmt: skip
    """Attention's output, and the logarithm of each query's sum of scores."""
    rate, causal, scale, blocks = settings
    q, q_seg = q_ref[...], q_seg_ref[...]
    Q, K, U = blocks.own, blocks.other, v_ref.shape[-1]
    q_start, head = pl.program_id(0) * Q, _head()

    def body(j: Any, carry: Any) -> Any:
        acc, top, total = carry
        place = pl.ds(j * K, K)
        scores = plgpu.dot(q, k_ref[place, :].T) * (scale * _LOG2_E)
        tile = ScoreBlock(head, (Q, K), 0, q_start, j * K)
        mask, keep = _visible(tile, q_seg, k_seg_ref[place], causal), _keep(tile, seed_ref, rate)
        probs, shrink, new_top, total = online_softmax(scores, mask, top, total)
        if keep is not None:
            probs = jnp.where(keep, probs, 0.0)
        acc = acc * shrink[:, None] + plgpu.dot(probs.astype(v_ref.dtype), v_ref[place, :])
        return acc, new_top, total

    empty = before_any_score(Q, U)
    acc, top, total = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
    total = jnp.maximum(total, 1e-30)
    out_ref[...] = (acc / (total * (1.0 - rate))[:, None]).astype(out_ref.dtype)
    log_z_ref[...] = top + jnp.log2(total)


def _score_grads(
    scores: Array, mask: Array, keep: Array | None, prob_grads: Array, log_z: Array, delta: Array,
    rate: float,
) -> tuple[Array, Array]:  # fmt: skip
    """The probabilities after dropout, and the gradients of the scores.

    `scores` and `log_z` are logarithms to the base of 2.
    """
    probs = jnp.where(mask, jnp.exp2(scores - log_z), 0.0)
    dropped = probs
    if keep is not None:
        scale = 1.0 / (1.0 - rate)
        dropped = jnp.where(keep, probs * scale, 0.0)
        prob_grads = jnp.where(keep, prob_grads * scale, 0.0)
    return dropped, probs * (prob_grads - delta)


def query_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_seg_ref: Any, k_seg_ref: Any, span_ref: Any,
    seed_ref: Any, grad_ref: Any, log_z_ref: Any, out_ref: Any, dq_ref: Any, delta_ref: Any,
    *, settings: KernelSettings,
) -> None:  # fmt: skip
    """The gradients of queries, and the sum that those of keys need too."""
    rate, causal, scale, blocks = settings
    Q, K = blocks.own, blocks.other
    q, q_seg, grad = q_ref[...], q_seg_ref[...], grad_ref[...]
    delta_Q = jnp.sum(out_ref[...].astype(jnp.float32) * grad.astype(jnp.float32), axis=1)
    log_z, delta = log_z_ref[...][:, None], delta_Q[:, None]
    q_start, head = pl.program_id(0) * Q, _head()

    def body(j: Any, dq: Array) -> Array:
        place = pl.ds(j * K, K)
        k, v = k_ref[place, :], v_ref[place, :]
        tile = ScoreBlock(head, (Q, K), 0, q_start, j * K)
        mask, keep = _visible(tile, q_seg, k_seg_ref[place], causal), _keep(tile, seed_ref, rate)
        scores, prob_grads = plgpu.dot(q, k.T) * (scale * _LOG2_E), plgpu.dot(grad, v.T)
        _, ds = _score_grads(scores, mask, keep, prob_grads, log_z, delta, rate)
        return dq + plgpu.dot(ds.astype(k.dtype), k)

    dq = jax.lax.fori_loop(span_ref[0], span_ref[1], body, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...], delta_ref[...] = (dq * scale).astype(dq_ref.dtype), delta_Q


def key_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_seg_ref: Any, k_seg_ref: Any, span_ref: Any,
    seed_ref: Any, grad_ref: Any, log_z_ref: Any, delta_ref: Any, *refs: Any,
    settings: KernelSettings,
) -> None:  # fmt: skip
    """The gradients of keys and values, at their parts of the arrays that `refs` are blocks of.

    These are the last two parts: an array with the queries' gradients too comes first as it was.
    """
    rate, causal, scale, blocks = settings
    Q, K = blocks.other, blocks.own
    k, v, k_seg = k_ref[...], v_ref[...], k_seg_ref[...]
    k_start, head = pl.program_id(0) * K, _head()

    def body(i: Any, carry: Any) -> Any:
        dk, dv = carry
        place = pl.ds(i * Q, Q)
        q, grad = q_ref[place, :], grad_ref[place, :]
        tile = ScoreBlock(head, (K, Q), 1, i * Q, k_start)
        mask, keep = _visible(tile, q_seg_ref[place], k_seg, causal), _keep(tile, seed_ref, rate)
        log_z, delta = log_z_ref[place][None, :], delta_ref[place][None, :]
        scores, prob_grads = plgpu.dot(k, q.T) * (scale * _LOG2_E), plgpu.dot(v, grad.T)
        dropped, ds = _score_grads(scores, mask, keep, prob_grads, log_z, delta, rate)
        dv = dv + plgpu.dot(dropped.astype(grad.dtype), grad)
        return dk + plgpu.dot(ds.astype(q.dtype), q), dv

    empty = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
    places = [(ref, part) for ref in refs for part in range(ref.shape[1])][-2:]
    for (ref, part), grads in zip(places, (dk * scale, dv), strict=True):
        ref[:, part, :] = grads.astype(ref.dtype)
