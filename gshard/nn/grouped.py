"""Experts on any number of tokens each: a product whose weight changes from block to block.

Without a capacity an expert may have any number of tokens. Sorted by expert, and each expert's
padded to whole blocks, they take little more room than they are; every block is multiplied by its
own expert's weight, which the kernel looks up as it goes: weights that no token needs are not read.
Written in Pallas for Triton; `reference` is its oracle, and computes its gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

ROWS = 64  # of a block: the least that Hopper's matrix units take at full speed
_COLUMNS, _DEPTH = 128, 64  # of a tile of the weight


def fits(x: Array, weights: tuple[Array, ...]) -> bool:
    """Whether the kernel can be used: on a GPU, with dims that its tiles divide."""
    return jax.default_backend() == "gpu" and all(
        w.shape[1] % _DEPTH == 0 and w.shape[2] % _COLUMNS == 0 and w.dtype == x.dtype
        for w in weights
    )


def reference(x_XM: Array, w_EMN: Array, expert_B: Array, relu: bool) -> Array:
    """Each block times the weight of its expert; zeros for a block that has none."""
    E = len(w_EMN)
    x_BRM = x_XM.reshape(len(expert_B), -1, x_XM.shape[1])
    w_BMN = w_EMN[jnp.minimum(expert_B, E - 1)]
    y_BRN = jnp.einsum("BRM,BMN->BRN", x_BRM, w_BMN)
    y_BRN = jnp.maximum(y_BRN, 0) if relu else y_BRN
    y_BRN = jnp.where((expert_B < E)[:, None, None], y_BRN, 0)
    return y_BRN.reshape(len(x_XM), -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_product(
    x_XM: Array, w_EMN: Array, expert_B: Array, relu: bool, interpret: bool = False
) -> Array:
    """The product by the kernel; the X rows are the blocks of `expert_B`, one after another."""
    (X, M), (E, _, N) = x_XM.shape, w_EMN.shape
    rows = X // len(expert_B)
    columns, depth = min(_COLUMNS, N), min(_DEPTH, M)

    def kernel(x_ref: Any, w_ref: Any, expert_ref: Any, y_ref: Any) -> None:
        expert = expert_ref[0]
        place = pl.ds(pl.program_id(0) * columns, columns)

        def body(i: Any, sums: Array) -> Array:
            deep = pl.ds(i * depth, depth)
            return sums + plgpu.dot(x_ref[:, deep], w_ref[expert, deep, place])

        steps = jnp.where(expert < E, M // depth, 0)
        sums = jax.lax.fori_loop(0, steps, body, jnp.zeros((rows, columns), jnp.float32))
        y_ref[...] = (jnp.maximum(sums, 0.0) if relu else sums).astype(y_ref.dtype)

    return pl.pallas_call(
        kernel,
        grid=(N // columns, len(expert_B)),
        in_specs=[
            pl.BlockSpec((rows, M), lambda n, b: (b, 0)),
            pl.BlockSpec((E, M, N), lambda n, b: (0, 0, 0)),
            pl.BlockSpec((1,), lambda n, b: (b,)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda n, b: (b, n)),
        out_shape=jax.ShapeDtypeStruct((X, N), x_XM.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name="grouped_product",
    )(x_XM, w_EMN, expert_B)


def _forward(
    x_XM: Array, w_EMN: Array, expert_B: Array, relu: bool, interpret: bool
) -> tuple[Array, tuple[Array, ...]]:
    y_XN = grouped_product(x_XM, w_EMN, expert_B, relu, interpret)
    return y_XN, (x_XM, w_EMN, expert_B)


def _backward(
    relu: bool, interpret: bool, kept: tuple[Array, ...], grads: Array
) -> tuple[Array, Array, None]:
    x_XM, w_EMN, expert_B = kept
    _, pull = jax.vjp(lambda x, w: reference(x, w, expert_B, relu), x_XM, w_EMN)
    return (*pull(grads), None)


grouped_product.defvjp(_forward, _backward)
