"""Arrays in eight bits, in both orders of their last two dims, in one pass over memory.

On Hopper a product of eight-bit matrices reads both with the summed dim innermost. An operand is
summed over one dim in the forward product and over the other in that of a gradient, so it is
needed both ways. XLA writes them in two passes. A kernel reads a block, rounds it, and writes it
both plain and transposed; another does the same for the gradient of relu. Written in Pallas for
Triton; `reference` and `gated_reference` are their oracles, and their replacements elsewhere. They
do not use their program id, so gshard can split the grid over devices.
Dims: E experts (or 1), R rows, C columns.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.tensors.annotate import devices_of_trace, target_platform

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


class KernelBlock(NamedTuple):
    """The blocks of a kernel, and its launch parameters."""

    rows: int = 64
    columns: int = 128
    warps: int = 4
    interpret: bool = False


BLOCK = KernelBlock()


def fits(x_ERC: Array) -> bool:
    """Whether the kernels can be used: on GPUs, on dims that divide into blocks on every device."""
    _, R, C = x_ERC.shape
    rows = R % (BLOCK.rows * devices_of_trace()) == 0
    return target_platform() == "gpu" and rows and C % BLOCK.columns == 0


def both_ways(x_ERC: Array, scale_E: Array, dtype: Any) -> tuple[Array, Array]:
    """`x_ERC` times its scale, rounded to `dtype`, and the same transposed."""
    return (by_kernel if fits(x_ERC) else reference)(x_ERC, scale_E, dtype)


def gated(grads_ERC: Array, units_ERC: Array) -> tuple[Array, Array, Array]:
    """The gradients where a unit is not zero, the same transposed, and the units transposed."""
    return (gated_by_kernel if fits(grads_ERC) else gated_reference)(grads_ERC, units_ERC)


def rounded(x: Array, dtype: Any) -> Array:
    """`x` rounded to `dtype`, saturating."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(dtype)


def reference(x_ERC: Array, scale_E: Array, dtype: Any) -> tuple[Array, Array]:
    """`both_ways` in plain JAX."""
    q_ERC = rounded(x_ERC.astype(jnp.float32) * scale_E[:, None, None], dtype)
    return q_ERC, q_ERC.swapaxes(1, 2)


def gated_reference(grads_ERC: Array, units_ERC: Array) -> tuple[Array, Array, Array]:
    """`gated` in plain JAX."""
    q_ERC = jnp.where(units_ERC != 0, grads_ERC, jnp.zeros_like(grads_ERC))
    return q_ERC, q_ERC.swapaxes(1, 2), units_ERC.swapaxes(1, 2)


@functools.partial(jax.jit, static_argnames=("dtype", "block"))
def by_kernel(
    x_ERC: Array, scale_E: Array, dtype: Any, block: KernelBlock = BLOCK
) -> tuple[Array, Array]:
    """`both_ways` by the kernel."""
    straight, turned = _specs(block)
    number = pl.BlockSpec((1,), lambda c, r, e: (e,))
    (E, R, C), made = x_ERC.shape, [straight, turned]
    shapes = [jax.ShapeDtypeStruct(s, dtype) for s in ((E, R, C), (E, C, R))]
    call = _call(_round_kernel, block, (E, R, C), [straight, number], made, shapes)
    q_ERC, q_ECR = call(x_ERC, scale_E)
    return q_ERC, q_ECR


@functools.partial(jax.jit, static_argnames="block")
def gated_by_kernel(
    grads_ERC: Array, units_ERC: Array, block: KernelBlock = BLOCK
) -> tuple[Array, Array, Array]:
    """`gated` by the kernel."""
    straight, turned = _specs(block)
    (E, R, C), dtype = grads_ERC.shape, grads_ERC.dtype
    shapes = [
        jax.ShapeDtypeStruct((E, R, C), dtype),
        jax.ShapeDtypeStruct((E, C, R), dtype),
        jax.ShapeDtypeStruct((E, C, R), units_ERC.dtype),
    ]
    given, made = [straight, straight], [straight, turned, turned]
    q_ERC, q_ECR, units_ECR = _call(_gate_kernel, block, (E, R, C), given, made, shapes)(
        grads_ERC, units_ERC
    )
    return q_ERC, q_ECR, units_ECR


def _specs(block: KernelBlock) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """What a program sees of an array, and of one whose last two dims are swapped."""
    straight = pl.BlockSpec((None, block.rows, block.columns), lambda c, r, e: (e, r, c))
    return straight, pl.BlockSpec((None, block.columns, block.rows), lambda c, r, e: (e, c, r))


def _call(
    kernel: Any, block: KernelBlock, shape: tuple[int, ...], given: Any, made: Any, shapes: Any
) -> Any:
    E, R, C = shape
    return pl.pallas_call(
        kernel,
        grid=(C // block.columns, R // block.rows, E),
        in_specs=given,
        out_specs=made,
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=block.warps, num_stages=1),
        interpret=block.interpret,
        name="eight_bits",
    )


def _round_kernel(x_ref: Any, scale_ref: Any, straight_ref: Any, turned_ref: Any) -> None:
    q = rounded(x_ref[...].astype(jnp.float32) * scale_ref[0], straight_ref.dtype)
    straight_ref[...] = q
    turned_ref[...] = q.T


def _gate_kernel(
    grads_ref: Any, units_ref: Any, straight_ref: Any, turned_ref: Any, units_turned_ref: Any
) -> None:
    units = units_ref[...]
    wide = jnp.where(units.astype(jnp.float32) != 0.0, grads_ref[...].astype(jnp.float32), 0.0)
    q = wide.astype(straight_ref.dtype)
    straight_ref[...] = q
    turned_ref[...] = q.T
    units_turned_ref[...] = units.T
