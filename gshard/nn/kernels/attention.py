"""The kernels of attention without its scores in memory, in Pallas for Triton.

A program handles a block of queries (or, for the gradients of keys and values, of keys) of one head
of one row, and loops over the other side block by block. The caller, `gshard.nn.flash`, decides
which blocks of which arrays it gets.

While a search decodes, a few queries attend to a cache of keys and values, in buffers as long as
its longest translation. By einsums every step reads all of them; the kernel `attend_to_cache` reads
what some query sees, and keeps scores and probabilities in registers. `cache_reference` is its
oracle. It is not differentiated: decoding has no gradients. Dims: B sequences, T queries, N heads,
L positions, D key dim, U value dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.nn.hashing import hashed_row_bits, kept
from gshard.tensors.annotate import target_platform

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


_ROWS = 16  # the least that a product of blocks takes


def fits_cache(q_BTND: Array, k_BNLD: Array, v_BNLU: Array) -> bool:
    """Whether the kernel can be used: on a GPU, on halves, with dims that its blocks divide."""
    dims = q_BTND.shape[-1], v_BNLU.shape[-1]
    return (
        target_platform() == "gpu"
        and q_BTND.dtype == k_BNLD.dtype == v_BNLU.dtype
        and q_BTND.dtype.itemsize == 2
        and all(16 <= dim <= 256 and dim & (dim - 1) == 0 for dim in dims)
        and k_BNLD.shape[2] % _ROWS == 0
    )


def cache_reference(q_BTND: Array, k_BNLD: Array, v_BNLU: Array, mask_BTL: Array) -> Array:
    """Softmax of queries times keys, where the mask lets them see, times values: by einsums."""
    scores_BNTL = jnp.einsum("BTND,BNLD->BNTL", q_BTND, k_BNLD, preferred_element_type=jnp.float32)
    probs_BNTL = jax.nn.softmax(jnp.where(mask_BTL[:, None], scores_BNTL, -1e9))
    return jnp.einsum("BNTL,BNLU->BTNU", probs_BNTL.astype(v_BNLU.dtype), v_BNLU)


def attend_to_cache(
    q_BTND: Array, k_BNLD: Array, v_BNLU: Array, mask_BTL: Array, blocks: Blocks | None = None
) -> Array:
    """The same by the kernel, which reads the positions that some query of a sequence sees.

    Its own side is the queries, in a block at least so large.
    """
    (B, T, N, D), (L, U) = q_BTND.shape, v_BNLU.shape[2:]
    if blocks is None:
        blocks = Blocks(_ROWS, 32 if L % 32 == 0 else _ROWS, warps=2, stages=2)
    rows, mask_BTL = max(blocks.own, pl.next_power_of_2(T)), mask_BTL.astype(jnp.int32)
    span_B2 = _span(mask_BTL, L // blocks.other)
    return pl.pallas_call(
        functools.partial(_cache_kernel, queries=T, rows=rows, positions=blocks.other),
        grid=(N, B),
        in_specs=[
            pl.BlockSpec((None, rows, None, D), lambda n, b: (b, 0, n, 0)),
            pl.BlockSpec((None, None, L, D), lambda n, b: (b, n, 0, 0)),
            pl.BlockSpec((None, None, L, U), lambda n, b: (b, n, 0, 0)),
            pl.BlockSpec((None, rows, L), lambda n, b: (b, 0, 0)),
            pl.BlockSpec((None, 2), lambda n, b: (b, 0)),
        ],
        out_specs=pl.BlockSpec((None, rows, None, U), lambda n, b: (b, 0, n, 0)),
        out_shape=jax.ShapeDtypeStruct((B, T, N, U), q_BTND.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * B * T * N * L * (D + U),
            transcendentals=B * T * N * L,
            bytes_accessed=(B * N * L * (D + U) + B * T * N * (D + U)) * q_BTND.dtype.itemsize,
        ),
        interpret=blocks.interpret,
        name="cached_attention",
    )(q_BTND, k_BNLD, v_BNLU, mask_BTL, span_B2)


def _span(mask_BTL: Array, count: int) -> Array:
    """The first and the end of the blocks to read, of `count` in a ring, for each sequence.

    The first block that is seen after one that is not, up to the last that is seen from there on.
    """
    B, T, L = mask_BTL.shape
    seen_BX = jnp.any(mask_BTL.reshape(B, T, count, L // count) != 0, axis=(1, 3))
    first_B1 = jnp.argmax(seen_BX & ~jnp.roll(seen_BX, 1, axis=1), axis=1, keepdims=True)
    behind_BX = (jnp.arange(count) - first_B1) % count
    end_B1 = first_B1 + jnp.max(jnp.where(seen_BX, behind_BX + 1, 0), axis=1, keepdims=True)
    return jnp.concatenate([first_B1, end_B1], axis=1).astype(jnp.int32)


def _cache_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, mask_ref: Any, span_ref: Any, out_ref: Any,
    *, queries: int, rows: int, positions: int,
) -> None:  # fmt: skip
    """One head of one sequence: `queries` in a block of `rows`."""
    given, every, U = (jnp.arange(rows) < queries)[:, None], pl.ds(0, rows), v_ref.shape[-1]
    blocks = k_ref.shape[0] // positions
    q = plgpu.load(q_ref.at[every, :], mask=given, other=0.0)

    def body(j: Any, carry: Any) -> Any:
        acc, top, total = carry
        place = pl.ds(jax.lax.rem(j, blocks) * positions, positions)
        scores = plgpu.dot(q, k_ref[place, :].T) * _LOG2_E
        mask = plgpu.load(mask_ref.at[every, place], mask=given, other=0) != 0
        probs, shrink, new_top, total = online_softmax(scores, mask, top, total)
        acc = acc * shrink[:, None] + plgpu.dot(probs.astype(v_ref.dtype), v_ref[place, :])
        return acc, new_top, total

    empty = before_any_score(rows, U)
    acc, _, total = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
    out = (acc / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[every, :], out, mask=given)
