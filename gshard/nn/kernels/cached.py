"""Attention of a few queries to a cache of keys and values: a kernel for decoding.

A search decodes into buffers as long as its longest translation. By einsums every step reads all of
them; this kernel stops where the cache is filled, and keeps scores and probabilities in registers.
Written in Pallas for Triton; `reference` is its oracle. It is not differentiated: decoding has no
gradients. Dims: B sequences, T queries, N heads, L positions, D key dim, U value dim.
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

from gshard.nn.kernels.attention import before_any_score, online_softmax
from gshard.tensors.annotate import target_platform

_LOG2_E = math.log2(math.e)
_ROWS = 16  # the least that a product of blocks takes


class CacheBlocks(NamedTuple):
    """How many positions are read at a time, and the launch parameters."""

    positions: int = 32
    warps: int = 2
    stages: int = 2
    interpret: bool = False


def fits(q_BTND: Array, k_BNLD: Array, v_BNLU: Array) -> bool:
    """Whether the kernel can be used: on a GPU, on halves, with dims that its blocks divide."""
    dims = q_BTND.shape[-1], v_BNLU.shape[-1]
    return (
        target_platform() == "gpu"
        and q_BTND.dtype == k_BNLD.dtype == v_BNLU.dtype
        and q_BTND.dtype.itemsize == 2
        and all(16 <= dim <= 256 and dim & (dim - 1) == 0 for dim in dims)
        and k_BNLD.shape[2] % _ROWS == 0
    )


def reference(q_BTND: Array, k_BNLD: Array, v_BNLU: Array, mask_BTL: Array) -> Array:
    """Softmax of queries times keys, where the mask lets them see, times values: by einsums."""
    scores_BNTL = jnp.einsum("BTND,BNLD->BNTL", q_BTND, k_BNLD, preferred_element_type=jnp.float32)
    probs_BNTL = jax.nn.softmax(jnp.where(mask_BTL[:, None], scores_BNTL, -1e9))
    return jnp.einsum("BNTL,BNLU->BTNU", probs_BNTL.astype(v_BNLU.dtype), v_BNLU)


def attend(
    q_BTND: Array,
    k_BNLD: Array,
    v_BNLU: Array,
    mask_BTL: Array,
    filled: Array | int,
    blocks: CacheBlocks | None = None,
) -> Array:
    """The same by the kernel, of which no query may see positions from `filled` on."""
    (B, T, N, D), (L, U) = q_BTND.shape, v_BNLU.shape[2:]
    if blocks is None:
        blocks = CacheBlocks(32 if L % 32 == 0 else _ROWS)
    rows = max(_ROWS, pl.next_power_of_2(T))
    # Triton needs both bounds of a loop to be run-time values.
    end = (jnp.asarray(filled, jnp.int32) + blocks.positions - 1) // blocks.positions
    span = jnp.stack([jnp.zeros_like(end), end])
    return pl.pallas_call(
        functools.partial(_kernel, queries=T, rows=rows, positions=blocks.positions),
        grid=(N, B),
        in_specs=[
            pl.BlockSpec((None, rows, None, D), lambda n, b: (b, 0, n, 0)),
            pl.BlockSpec((None, None, L, D), lambda n, b: (b, n, 0, 0)),
            pl.BlockSpec((None, None, L, U), lambda n, b: (b, n, 0, 0)),
            pl.BlockSpec((None, rows, L), lambda n, b: (b, 0, 0)),
            pl.BlockSpec((2,), lambda n, b: (0,)),
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
    )(q_BTND, k_BNLD, v_BNLU, mask_BTL.astype(jnp.int32), span)


def _kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, mask_ref: Any, span_ref: Any, out_ref: Any,
    *, queries: int, rows: int, positions: int,
) -> None:  # fmt: skip
    """One head of one sequence: `queries` in a block of `rows`."""
    given, every, U = (jnp.arange(rows) < queries)[:, None], pl.ds(0, rows), v_ref.shape[-1]
    q = plgpu.load(q_ref.at[every, :], mask=given, other=0.0)

    def body(j: Any, carry: Any) -> Any:
        acc, top, total = carry
        place = pl.ds(j * positions, positions)
        scores = plgpu.dot(q, k_ref[place, :].T) * _LOG2_E
        mask = plgpu.load(mask_ref.at[every, place], mask=given, other=0) != 0
        probs, shrink, new_top, total = online_softmax(scores, mask, top, total)
        acc = acc * shrink[:, None] + plgpu.dot(probs.astype(v_ref.dtype), v_ref[place, :])
        return acc, new_top, total

    empty = before_any_score(rows, U)
    acc, _, total = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
    out = (acc / jnp.maximum(total, 1e-30)[:, None]).astype(out_ref.dtype)
    plgpu.store(out_ref.at[every, :], out, mask=given)
