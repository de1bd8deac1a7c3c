"""Attention without its scores in memory: a kernel for packed sentences, with dropout.

Scores between all tokens of a row are made, used and dropped block by block (FlashAttention), and
made again in the backward pass. Blocks in which no query may see a key are not made at all: with
several sentences in a row these are most of them. Dropout's bits are hashed from the place of each
score, so that forward and backward draw the same ones.

The kernel is written in Pallas for Triton. `reference` computes the same from the same bits in
plain JAX: it is the kernel's oracle in the tests, and takes its place where there is no GPU.
A query that may see nothing gets zeros. Dims as in `gshard.nn.attention`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.nn.hashing import hashed_row_bits, kept
from gshard.nn.segments import Segments

_NEVER = -1e30  # a score that may not be seen; finite, so that differences are never NaN
_LOG2_E = math.log2(math.e)


class Blocks(NamedTuple):
    """How the kernels cut their work: rows of the side that a program has, and of the other."""

    own: int = 64
    other: int = 32
    warps: int = 4
    stages: int = 3
    interpret: bool = False


def flash_attention(
    q_BTND: Array,
    k_BLND: Array,
    v_BLNU: Array,
    segments: Segments,
    rate: float,
    seed: Array,
    blocks: Blocks | None = None,
) -> Array:
    """Softmax of queries times keys, over the root of their dim; dropped out; times values."""
    T, L = q_BTND.shape[1], k_BLND.shape[1]
    if blocks is None:
        if jax.default_backend() != "gpu" or not _fits(q_BTND, v_BLNU):
            return reference(q_BTND, k_BLND, v_BLNU, segments, rate, seed)
        own = _block(math.gcd(T, L))
        blocks = Blocks(own, min(own, 32))
    q_BTND, q_BT = (_padded(x, blocks.own) for x in (q_BTND, segments.queries))
    k_BLND, v_BLNU, k_BL = (_padded(x, blocks.own) for x in (k_BLND, v_BLNU, segments.keys))
    settings = Settings(rate, segments.causal, q_BTND.shape[-1] ** -0.5, blocks)
    spans = _spans(q_BT, k_BL, settings)
    out_BTNU = _attend(q_BTND, k_BLND, v_BLNU, q_BT, k_BL, spans, seed, settings)
    return out_BTNU[:, :T]


def reference(
    q_BTND: Array, k_BLND: Array, v_BLNU: Array, segments: Segments, rate: float, seed: Array
) -> Array:
    """The same by einsums, which hold all scores."""
    mask_BNTL = segments.mask()[:, None]
    scores_BNTL = jnp.einsum("BTND,BLND->BNTL", q_BTND, k_BLND, preferred_element_type=jnp.float32)
    scores_BNTL = scores_BNTL * q_BTND.shape[-1] ** -0.5
    probs_BNTL = jax.nn.softmax(jnp.where(mask_BNTL, scores_BNTL, _NEVER))
    probs_BNTL = jnp.where(mask_BNTL, probs_BNTL, 0.0)
    if rate > 0.0:
        keep_BNTL = _reference_keep(probs_BNTL.shape, rate, seed)
        probs_BNTL = jnp.where(keep_BNTL, probs_BNTL / (1.0 - rate), 0.0)
    return jnp.einsum("BNTL,BLNU->BTNU", probs_BNTL.astype(v_BLNU.dtype), v_BLNU)


def seed_from_row(seed: Array, row: Array, heads: int) -> Array:
    """The seed with which a part of a batch that begins at `row` draws what the whole would."""
    return jnp.stack([seed[0] + row.astype(jnp.uint32) * np.uint32(heads * _ROWS), seed[1]])


def _reference_keep(shape: tuple[int, ...], rate: float, seed: Array) -> Array:
    B, N, T, L = shape
    heads = jnp.arange(B * N, dtype=jnp.uint32).reshape(B, N, 1, 1)
    rows = heads * jnp.uint32(_ROWS) + jnp.arange(T, dtype=jnp.uint32)[:, None]
    columns = jnp.arange(L, dtype=jnp.uint32)
    return kept(hashed_row_bits((seed[0], seed[1]), rows, columns), rate)


_ROWS = 1 << 13  # queries of a head, for numbering rows; more of them share bits, which is harmless


class Settings(NamedTuple):
    """What a kernel knows when it is compiled."""

    rate: float
    causal: bool
    scale: float  # of the scores
    blocks: Blocks


def _fits(q_BTND: Array, v_BLNU: Array) -> bool:
    """Whether a block's rows are such as the hardware's products take."""
    dims = (q_BTND.shape[-1], v_BLNU.shape[-1])
    return all(16 <= dim <= 256 and dim & (dim - 1) == 0 for dim in dims)


def _block(length: int) -> int:
    """The largest block that cuts a row without a rest; the largest of all if there is none."""
    return next((size for size in (64, 32, 16) if length % size == 0), 64)


def _padded(x: Array, block: int) -> Array:
    """Dim 1 up to a multiple of `block`, by zeros: as segments, these are padding."""
    missing = -x.shape[1] % block
    return x if not missing else jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))


def _spans(q_BT: Array, k_BL: Array, settings: Settings) -> tuple[Array, Array]:
    """For each block of queries the blocks of keys, from first to last, in which it sees any.

    And the same for each block of keys; [B, blocks, 2], the end exclusive.
    """
    own, other = settings.blocks.own, settings.blocks.other
    mask_BTL = Segments(q_BT, k_BL, settings.causal).mask()

    def span(mask_BXY: Array) -> Array:
        B, X, Y = mask_BXY.shape
        cut = mask_BXY.reshape(B, X // own, own, Y // other, other)
        any_BXY = jnp.any(cut, axis=(2, 4))
        places_Y = jnp.arange(Y // other)
        first_BX = jnp.min(jnp.where(any_BXY, places_Y, Y // other), axis=2)
        end_BX = jnp.max(jnp.where(any_BXY, places_Y + 1, 0), axis=2)
        return jnp.stack([first_BX, end_BX], axis=2).astype(jnp.int32)

    return span(mask_BTL), span(mask_BTL.swapaxes(1, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _attend(
    q: Array,
    k: Array,
    v: Array,
    q_BT: Array,
    k_BL: Array,
    spans: tuple[Array, Array],
    seed: Array,
    settings: Settings,
) -> Array:
    return _forward(q, k, v, q_BT, k_BL, spans, seed, settings)[0]


def _forward(
    q: Array,
    k: Array,
    v: Array,
    q_BT: Array,
    k_BL: Array,
    spans: tuple[Array, Array],
    seed: Array,
    settings: Settings,
) -> tuple[Array, Any]:
    B, T, N, _ = q.shape
    out, log_z = _call(
        _forward_kernel,
        settings,
        "queries",
        (q, k, v, q_BT, k_BL, spans[0], seed),
        (jax.ShapeDtypeStruct((B, T, N, v.shape[-1]), q.dtype), _per_query(q)),
        "flash_forward",
    )
    return out, (q, k, v, q_BT, k_BL, spans, seed, out, log_z)


def _backward(settings: Settings, kept_: Any, grad: Array) -> tuple[Any, ...]:
    q, k, v, q_BT, k_BL, spans, seed, out, log_z = kept_
    given = (q, k, v, q_BT, k_BL)
    dq, delta = _call(
        _query_kernel,
        settings,
        "queries",
        (*given, spans[0], seed, grad, log_z, out),
        (q, _per_query(q)),
        "flash_query_grads",
    )
    dk, dv = _call(
        _key_kernel,
        settings,
        "keys",
        (*given, spans[1], seed, grad, log_z, delta),
        (k, v),
        "flash_key_grads",
    )
    return dq, dk, dv, None, None, None, None


_attend.defvjp(_forward, _backward)


def _per_query(q: Array) -> jax.ShapeDtypeStruct:
    B, T, N, _ = q.shape
    return jax.ShapeDtypeStruct((B, N, T), jnp.float32)


def _call(kernel: Any, settings: Settings, over: str, given: Any, made: Any, name: str) -> Any:
    """Run `kernel` for every block of queries (or keys) of every head of every row.

    What belongs to that side comes to it as its block, everything else whole.
    """
    q, k = given[:2]
    B, T, N, _ = q.shape
    L = k.shape[1]
    block = settings.blocks.own
    last = "q" if over == "queries" else "q_BNT"
    shapes = ("q", "k", "k", "q_BT", "k_BL", "span", "seed", "q", "q_BNT", last)
    sides = {"queries": "q", "keys": "k"}

    def spec(kind: str, array: Any) -> pl.BlockSpec:
        own = kind[0] == sides[over]
        size = block if own else (T if kind[0] == "q" else L)
        if kind == "seed":
            return pl.BlockSpec((2,), lambda i, n, b: (0,))
        if kind == "span":
            return pl.BlockSpec((None, None, 2), lambda i, n, b: (b, i, 0))
        if kind.endswith(("_BT", "_BL")):
            return pl.BlockSpec((None, size), lambda i, n, b: (b, i if own else 0))
        if kind.endswith("_BNT"):
            return pl.BlockSpec((None, None, size), lambda i, n, b: (b, n, i if own else 0))
        dim = array.shape[-1]
        return pl.BlockSpec((None, size, None, dim), lambda i, n, b: (b, i if own else 0, n, 0))

    out_kinds = [sides[over] + "_BNT" * (len(x.shape) == 3) for x in made]
    return pl.pallas_call(
        functools.partial(kernel, settings=settings),
        grid=((T if over == "queries" else L) // block, N, B),
        in_specs=[spec(kind, x) for kind, x in zip(shapes, given, strict=False)],
        out_specs=[spec(kind, x) for kind, x in zip(out_kinds, made, strict=True)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made],
        compiler_params=plgpu.CompilerParams(
            num_warps=settings.blocks.warps, num_stages=settings.blocks.stages
        ),
        interpret=settings.blocks.interpret,
        name=name,
    )(*given)


class Tile(NamedTuple):
    """A block of scores: whose they are, which dim counts queries, and where it begins."""

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


def _visible(tile: Tile, q_seg: Array, k_seg: Array, causal: bool) -> Array:
    """Which of a tile's scores count."""
    q_seg, k_seg = (
        jnp.expand_dims(x, dim) for x, dim in ((q_seg, 1 - tile.query_dim), (k_seg, tile.query_dim))
    )
    mask = (q_seg == k_seg) & (k_seg > 0)
    return mask & (tile.queries() >= tile.keys()) if causal else mask


def _keep(tile: Tile, seed_ref: Any, rate: float) -> Array | None:
    """Which of a tile's scores dropout lets through: `_reference_keep`'s bits."""
    if rate == 0.0:
        return None
    rows = (tile.head * _ROWS + tile.queries()).astype(jnp.uint32)
    columns = tile.keys().astype(jnp.uint32)
    return kept(hashed_row_bits((seed_ref[0], seed_ref[1]), rows, columns), rate)


def _head() -> Any:
    """The number of the head at work, among all of the batch."""
    return pl.program_id(2) * pl.num_programs(1) + pl.program_id(1)


def _forward_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_seg_ref: Any, k_seg_ref: Any, span_ref: Any,
    seed_ref: Any, out_ref: Any, log_z_ref: Any, *, settings: Settings,
) -> None:  # fmt: skip
    rate, causal, scale, blocks = settings
    q, q_seg = q_ref[...], q_seg_ref[...]
    Q, K, U = blocks.own, blocks.other, v_ref.shape[-1]
    q_start, head = pl.program_id(0) * Q, _head()

    def body(j: Any, carry: Any) -> Any:
        acc, top, total = carry
        place = pl.ds(j * K, K)
        scores = plgpu.dot(q, k_ref[place, :].T) * (scale * _LOG2_E)
        tile = Tile(head, (Q, K), 0, q_start, j * K)
        mask, keep = _visible(tile, q_seg, k_seg_ref[place], causal), _keep(tile, seed_ref, rate)
        new_top = jnp.maximum(top, jnp.max(jnp.where(mask, scores, _NEVER), axis=1))
        probs = jnp.where(mask, jnp.exp2(scores - new_top[:, None]), 0.0)
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(probs, axis=1)
        if keep is not None:
            probs = jnp.where(keep, probs, 0.0)
        acc = acc * shrink[:, None] + plgpu.dot(probs.astype(v_ref.dtype), v_ref[place, :])
        return acc, new_top, total

    empty = (
        jnp.zeros((Q, U), jnp.float32),
        jnp.full((Q,), _NEVER, jnp.float32),
        jnp.zeros((Q,), jnp.float32),
    )
    acc, top, total = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
    total = jnp.maximum(total, 1e-30)
    out_ref[...] = (acc / (total * (1.0 - rate))[:, None]).astype(out_ref.dtype)
    log_z_ref[...] = top + jnp.log2(total)


def _score_grads(
    scores: Array, mask: Array, keep: Array | None, prob_grads: Array, log_z: Array, delta: Array,
    rate: float,
) -> tuple[Array, Array]:  # fmt: skip
    """The probabilities as dropout left them, and the gradients of the scores.

    `scores` and `log_z` are logarithms to the base of 2.
    """
    probs = jnp.where(mask, jnp.exp2(scores - log_z), 0.0)
    dropped = probs
    if keep is not None:
        scale = 1.0 / (1.0 - rate)
        dropped = jnp.where(keep, probs * scale, 0.0)
        prob_grads = jnp.where(keep, prob_grads * scale, 0.0)
    return dropped, probs * (prob_grads - delta)


def _query_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_seg_ref: Any, k_seg_ref: Any, span_ref: Any,
    seed_ref: Any, grad_ref: Any, log_z_ref: Any, out_ref: Any, dq_ref: Any, delta_ref: Any,
    *, settings: Settings,
) -> None:  # fmt: skip
    rate, causal, scale, blocks = settings
    Q, K = blocks.own, blocks.other
    q, q_seg, grad = q_ref[...], q_seg_ref[...], grad_ref[...]
    delta_Q = jnp.sum(out_ref[...].astype(jnp.float32) * grad.astype(jnp.float32), axis=1)
    log_z, delta = log_z_ref[...][:, None], delta_Q[:, None]
    q_start, head = pl.program_id(0) * Q, _head()

    def body(j: Any, dq: Array) -> Array:
        place = pl.ds(j * K, K)
        k, v = k_ref[place, :], v_ref[place, :]
        tile = Tile(head, (Q, K), 0, q_start, j * K)
        mask, keep = _visible(tile, q_seg, k_seg_ref[place], causal), _keep(tile, seed_ref, rate)
        scores, prob_grads = plgpu.dot(q, k.T) * (scale * _LOG2_E), plgpu.dot(grad, v.T)
        _, ds = _score_grads(scores, mask, keep, prob_grads, log_z, delta, rate)
        return dq + plgpu.dot(ds.astype(k.dtype), k)

    dq = jax.lax.fori_loop(span_ref[0], span_ref[1], body, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...], delta_ref[...] = (dq * scale).astype(dq_ref.dtype), delta_Q


def _key_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, q_seg_ref: Any, k_seg_ref: Any, span_ref: Any,
    seed_ref: Any, grad_ref: Any, log_z_ref: Any, delta_ref: Any, dk_ref: Any, dv_ref: Any, *,
    settings: Settings,
) -> None:  # fmt: skip
    rate, causal, scale, blocks = settings
    Q, K = blocks.other, blocks.own
    k, v, k_seg = k_ref[...], v_ref[...], k_seg_ref[...]
    k_start, head = pl.program_id(0) * K, _head()

    def body(i: Any, carry: Any) -> Any:
        dk, dv = carry
        place = pl.ds(i * Q, Q)
        q, grad = q_ref[place, :], grad_ref[place, :]
        tile = Tile(head, (K, Q), 1, i * Q, k_start)
        mask, keep = _visible(tile, q_seg_ref[place], k_seg, causal), _keep(tile, seed_ref, rate)
        log_z, delta = log_z_ref[place][None, :], delta_ref[place][None, :]
        scores, prob_grads = plgpu.dot(k, q.T) * (scale * _LOG2_E), plgpu.dot(v, grad.T)
        dropped, ds = _score_grads(scores, mask, keep, prob_grads, log_z, delta, rate)
        dv = dv + plgpu.dot(dropped.astype(grad.dtype), grad)
        return dk + plgpu.dot(ds.astype(q.dtype), q), dv

    empty = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    dk, dv = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
    dk_ref[...], dv_ref[...] = (dk * scale).astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
