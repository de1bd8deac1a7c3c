"""Layer normalization whose backward pass is one pass over memory.

In a layer `x + f(norm(x))` the gradient of `x` is that of the sum plus that of the normalization.
XLA computes it in several passes, one of them in float32 for the gradient of the scale.
The kernel here reads `x` and both gradients once, and writes the gradient of `x` and some partial
sums for scale and bias. It is written in Pallas for Triton; `normalize` is its oracle, and its
replacement without a GPU. On several devices each runs the kernel on its own rows, in a manual
region. Dims: R rows, M numbers in each.
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

from gshard.nn.config import EPSILON
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.tensors.annotate import target_platform


class NormBlocks(NamedTuple):
    """The blocks of the kernel, and its launch parameters."""

    numbers: int = 2048  # in the rows that a program handles at a time
    programs: int = 1024  # at most
    warps: int = 2
    interpret: bool = False


CUT = NormBlocks()


@jax.jit  # traced once for all of a shape
def normalize(x: Array, scale: Array, bias: Array) -> Array:
    """Mean 0 and variance 1 over the last dim, in float32, then scale and bias."""
    wide = x.astype(jnp.float32)
    centered = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centered * centered, axis=-1, keepdims=True)
    return (centered * jax.lax.rsqrt(variance + EPSILON) * scale + bias).astype(x.dtype)


def fits(x: Array, devices: int = 1) -> bool:
    """Whether the kernel can be used: on GPUs, with rows that divide among its programs."""
    M = x.shape[-1]
    power_of_two = M & (M - 1) == 0
    return (
        target_platform() == "gpu"
        and power_of_two
        and 64 <= M <= CUT.numbers
        and len(x) % devices == 0
        and x.size % (256 * CUT.numbers * devices) == 0
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalize_beside(
    x: Array, scale: Array, bias: Array, strategy: Strategy = ONE_DEVICE, cut: NormBlocks = CUT
) -> tuple[Array, Array]:
    """`x` normalized, and `x` itself for the residual path: one kernel computes both gradients."""
    return normalize(x, scale, bias), x


def _forward(
    x: Array, scale: Array, bias: Array, strategy: Strategy, cut: NormBlocks
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return normalize_beside(x, scale, bias, strategy, cut), (x, scale)


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all of a shape
def _backward(
    strategy: Strategy, cut: NormBlocks, kept: tuple[Array, Array], grads: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    x, scale = kept
    own_x, grad, beside = (strategy.own_groups(a) for a in (x, *grads))
    made, scale_PM, bias_PM = _gradients(own_x, grad, beside, scale, cut)
    # Each device has sums of its own rows, which an AllReduce completes.
    programs = strategy.devices * len(scale_PM)
    sums = (strategy.all_groups(part, programs) for part in (scale_PM, bias_PM))
    summed = (jnp.sum(part, axis=0).astype(scale.dtype) for part in sums)
    return strategy.all_groups(made, len(x)), *summed


def _gradients(
    x: Array, grad: Array, beside: Array, scale: Array, cut: NormBlocks
) -> tuple[Array, Array, Array]:
    """The gradient of `x`, and sums over some rows each for scale and bias, [P, M]."""
    M = x.shape[-1]
    rows, R = cut.numbers // M, x.size // M
    P = math.gcd(R // rows, cut.programs)
    block = pl.BlockSpec((R // P, M), lambda p: (p, 0))
    sums = pl.BlockSpec((None, M), lambda p: (p, 0))
    made, scale_PM, bias_PM = pl.pallas_call(
        functools.partial(_kernel, rows=rows),
        grid=(P,),
        in_specs=[block, block, block, pl.BlockSpec((M,), lambda p: (0,))],
        out_specs=[block, sums, sums],
        out_shape=[
            jax.ShapeDtypeStruct((R, M), x.dtype),
            *[jax.ShapeDtypeStruct((P, M), jnp.float32)] * 2,
        ],
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps),
        interpret=cut.interpret,
        name="norm_grads",
    )(*(a.reshape(R, M) for a in (x, grad, beside)), scale)
    return made.reshape(x.shape), scale_PM, bias_PM


normalize_beside.defvjp(_forward, _backward)


def _kernel(
    x_ref: Any, grad_ref: Any, beside_ref: Any, scale_ref: Any, made_ref: Any, scale_sum_ref: Any,
    bias_sum_ref: Any, *, rows: int,
) -> None:  # fmt: skip
    """Rows in order; sums over rows are accumulated and written at the end."""
    M = x_ref.shape[-1]
    scale = scale_ref[...].astype(jnp.float32)[None, :]

    def body(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        place = pl.ds(i * rows, rows)
        x, grad, beside = (
            ref[place, :].astype(jnp.float32) for ref in (x_ref, grad_ref, beside_ref)
        )
        x = x - jnp.sum(x, axis=1, keepdims=True) / M
        steep = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / M + EPSILON)
        x, scaled = x * steep, grad * scale
        mean = jnp.sum(scaled, axis=1, keepdims=True) / M
        along = jnp.sum(scaled * x, axis=1, keepdims=True) / M
        made = beside + steep * (scaled - mean - x * along)
        made_ref[place, :] = made.astype(made_ref.dtype)
        return sums[0] + grad * x, sums[1] + grad

    empty = jnp.zeros((rows, M), jnp.float32)
    scale_sum, bias_sum = jax.lax.fori_loop(0, x_ref.shape[0] // rows, body, (empty, empty))
    scale_sum_ref[...], bias_sum_ref[...] = jnp.sum(scale_sum, axis=0), jnp.sum(bias_sum, axis=0)
