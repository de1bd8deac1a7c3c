"""A grouped product: each block of rows is multiplied by the weight of its expert.

Without a capacity an expert may have any number of tokens. They are sorted by expert, and each
expert's are padded to entire blocks, which adds few rows. The kernel looks up the weight of each
block's expert: weights that no token needs are not read. Written in Pallas for Triton; `reference`
is its oracle, and computes its gradients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.nn.int8 import Int8, Weight, product
from gshard.tensors.annotate import target_platform

ROWS = 64  # of a block: the least that Hopper's matrix units take at full speed


class Tiles(NamedTuple):
    """The tiles of a weight, and the launch parameters."""

    columns: int = 128
    depth: int = 64
    warps: int = 4
    stages: int = 4
    interpret: bool = False


TILES = Tiles()


def fits(x: Array, *weights: Weight) -> bool:
    """Whether the kernel can be used: on a GPU, on halves, with dims that its tiles divide."""
    return (
        target_platform() == "gpu"
        and x.dtype.itemsize == 2
        and all(
            (isinstance(w, Int8) or w.dtype == x.dtype)
            and w.shape[1] % TILES.depth == w.shape[2] % TILES.columns == 0
            and w.size < 1 << 31  # numbers of 32 bits count places
            for w in weights
        )
    )


def reference(x_NCM: Array, w_EMH: Weight, expert_N: Array, relu: bool) -> Array:
    """Each block times the weight of its expert; zeros for a block that has none."""
    E = len(w_EMH)
    w_NMH = w_EMH[jnp.minimum(expert_N, E - 1)]
    y_NCH = product("NCM,NMH->NCH", x_NCM, w_NMH)
    y_NCH = jnp.maximum(y_NCH, 0) if relu else y_NCH
    return jnp.where((expert_N < E)[:, None, None], y_NCH, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_product(
    x_NCM: Array, w_EMH: Weight, expert_N: Array, relu: bool, tiles: Tiles = TILES
) -> Array:
    """The same by the kernel."""
    (N, C, M), (E, _, H) = x_NCM.shape, w_EMH.shape
    if isinstance(w_EMH, Int8):
        values_EMH, scale_EH = w_EMH.values, w_EMH.scale[:, 0]
    else:
        values_EMH, scale_EH = w_EMH, jnp.ones((1, 1), jnp.float32)
    columns, depth = min(tiles.columns, H), min(tiles.depth, M)
    # Triton needs both bounds of a loop to be run-time values, as here, or both constants.
    end_N = jnp.where(expert_N < E, M // depth, 0)
    span_N2 = jnp.stack([jnp.zeros_like(end_N), end_N], axis=1).astype(jnp.int32)

    def kernel(
        x_ref: Any, w_ref: Any, scale_ref: Any, expert_ref: Any, span_ref: Any, y_ref: Any
    ) -> None:
        expert = expert_ref[0]
        place = pl.ds(pl.program_id(0) * columns, columns)

        def body(i: Any, sums: Array) -> Array:
            deep = pl.ds(i * depth, depth)
            return sums + plgpu.dot(x_ref[:, deep], w_ref[expert, deep, place].astype(x_ref.dtype))

        empty = jnp.zeros((C, columns), jnp.float32)
        sums = jax.lax.fori_loop(span_ref[0], span_ref[1], body, empty)
        if isinstance(w_EMH, Int8):  # that of a block without an expert does not matter
            sums *= scale_ref[jnp.minimum(expert, E - 1), place][None]
        y_ref[...] = (jnp.maximum(sums, 0.0) if relu else sums).astype(y_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(H // columns, N),
        in_specs=[
            pl.BlockSpec((None, C, M), lambda h, n: (n, 0, 0)),
            pl.BlockSpec((E, M, H), lambda h, n: (0, 0, 0)),
            pl.BlockSpec(scale_EH.shape, lambda h, n: (0, 0)),
            pl.BlockSpec((1,), lambda h, n: (n,)),
            pl.BlockSpec((None, 2), lambda h, n: (n, 0)),
        ],
        out_specs=pl.BlockSpec((None, C, columns), lambda h, n: (n, 0, h)),
        out_shape=jax.ShapeDtypeStruct((N, C, H), x_NCM.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * N * C * M * H,
            transcendentals=0,
            bytes_accessed=N * C * (M + H) * x_NCM.dtype.itemsize
            + min(E, N) * M * H * values_EMH.dtype.itemsize,
        ),
        interpret=tiles.interpret,
        name="grouped_product",
    )(x_NCM, values_EMH, scale_EH, expert_N, span_N2)


def _forward(
    x_NCM: Array, w_EMH: Weight, expert_N: Array, relu: bool, tiles: Tiles
) -> tuple[Array, tuple[Any, ...]]:
    return grouped_product(x_NCM, w_EMH, expert_N, relu, tiles), (x_NCM, w_EMH, expert_N)


def _backward(
    relu: bool, tiles: Tiles, kept: tuple[Any, ...], grads: Array
) -> tuple[Array, Any, None]:
    x_NCM, w_EMH, expert_N = kept
    _, pull = jax.vjp(lambda x, w: reference(x, w, expert_N, relu), x_NCM, w_EMH)
    return (*pull(grads), None)


grouped_product.defvjp(_forward, _backward)
