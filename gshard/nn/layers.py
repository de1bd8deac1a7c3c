"""The small parts of a Transformer: normalization, embeddings, feed-forward, dropout, positions.

Weights are stored in one dtype and used in the dtype of the activations; normalization is always
computed in float32.

In a layer `x + f(norm(x))` the gradient of `x` is that of the sum plus that of the normalization.
XLA computes it in several passes, one of them in float32 for the gradient of the scale. The kernel
here (`normalize_with_residual`) reads `x` and both gradients once, and writes the gradient of `x`
and some partial sums for scale and bias. It is written in Pallas for Triton; `normalize` is its
oracle, and its replacement without a GPU. On several devices each runs the kernel on its own rows,
in a manual region. Dims: R rows, M numbers in each.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from gshard.nn import float8
from gshard.nn.config import EPSILON, Products, Random
from gshard.nn.hashing import hash_dropout, seed_of
from gshard.nn.int8 import looked_up, product
from gshard.nn.kernels import with_gradient
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


def fits_norm(x: Array, devices: int = 1) -> bool:
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


@functools.partial(jax.jit, static_argnums=(0, 1))  # traced and lowered once for all of a shape
def _norm_backward(
    strategy: Strategy, cut: NormBlocks, kept: tuple[Array, Array], grads: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    x, scale = kept
    own_x, grad, residual = (strategy.own_groups(a) for a in (x, *grads))
    made, scale_PM, bias_PM = _gradients(own_x, grad, residual, scale, cut)
    # Each device has sums of its own rows, which an AllReduce completes.
    programs = strategy.devices * len(scale_PM)
    sums = (strategy.all_groups(part, programs) for part in (scale_PM, bias_PM))
    summed = (jnp.sum(part, axis=0).astype(scale.dtype) for part in sums)
    return strategy.all_groups(made, len(x)), *summed


def _gradients(
    x: Array, grad: Array, residual: Array, scale: Array, cut: NormBlocks
) -> tuple[Array, Array, Array]:
    """The gradient of `x`, and sums over some rows each for scale and bias, [P, M]."""
    M = x.shape[-1]
    rows, R = cut.numbers // M, x.size // M
    P = math.gcd(R // rows, cut.programs)
    block = pl.BlockSpec((R // P, M), lambda p: (p, 0))
    sums = pl.BlockSpec((None, M), lambda p: (p, 0))
    made, scale_PM, bias_PM = pl.pallas_call(
        functools.partial(_norm_kernel, rows=rows),
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
    )(*(a.reshape(R, M) for a in (x, grad, residual)), scale)
    return made.reshape(x.shape), scale_PM, bias_PM


@with_gradient(_norm_backward, lambda _, x, scale, *rest: (x, scale), nondiff=(3, 4))
def normalize_with_residual(
    x: Array, scale: Array, bias: Array, strategy: Strategy = ONE_DEVICE, cut: NormBlocks = CUT
) -> tuple[Array, Array]:
    """`x` normalized, and `x` itself for the residual path: one kernel computes both gradients."""
    return normalize(x, scale, bias), x


def _norm_kernel(
    x_ref: Any, grad_ref: Any, residual_ref: Any, scale_ref: Any, made_ref: Any, scale_sum_ref: Any,
    bias_sum_ref: Any, *, rows: int,
) -> None:  # fmt: skip
    """Rows in order; sums over rows are accumulated and written at the end."""
    M = x_ref.shape[-1]
    scale = scale_ref[...].astype(jnp.float32)[None, :]

    def body(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        place = pl.ds(i * rows, rows)
        x, grad, residual = (
            ref[place, :].astype(jnp.float32) for ref in (x_ref, grad_ref, residual_ref)
        )
        x = x - jnp.sum(x, axis=1, keepdims=True) / M
        steep = jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) / M + EPSILON)
        x, scaled = x * steep, grad * scale
        mean = jnp.sum(scaled, axis=1, keepdims=True) / M
        along = jnp.sum(scaled * x, axis=1, keepdims=True) / M
        made = residual + steep * (scaled - mean - x * along)
        made_ref[place, :] = made.astype(made_ref.dtype)
        return sums[0] + grad * x, sums[1] + grad

    empty = jnp.zeros((rows, M), jnp.float32)
    scale_sum, bias_sum = jax.lax.fori_loop(0, x_ref.shape[0] // rows, body, (empty, empty))
    scale_sum_ref[...], bias_sum_ref[...] = jnp.sum(scale_sum, axis=0), jnp.sum(bias_sum, axis=0)


def init_weight(key: Array, shape: tuple[int, ...], fan_in: int, dtype: str) -> Array:
    """A weight drawn from a truncated normal with standard deviation fan_in^-0.5."""
    scale = fan_in**-0.5 / 0.87962566  # the standard deviation after truncation at 2
    drawn = jax.random.truncated_normal(key, -2.0, 2.0, shape, jnp.float32)
    return (scale * drawn).astype(dtype)


def split_key(key: Array | None, count: int) -> list[Array | None]:
    """`count` keys, or as many Nones: without a key nothing is random."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def dropout(x: Array, rate: float, key: Array | None, random: Random = "threefry") -> Array:
    """Zero a share `rate` of `x` and scale up the rest; the identity without a key."""
    if key is None or rate == 0.0:
        return x
    if random == "hash":
        return hash_dropout(x, seed_of(key), rate)
    keep = jax.random.bernoulli(key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))


def _relu_backward(y: Array, grad: Array) -> tuple[Array]:
    # Not y > 0: XLA would turn that into x > 0 and keep x as well, the largest activation.
    return (jnp.where(y != 0, grad, jnp.zeros_like(grad)),)


@with_gradient(_relu_backward, keep=lambda y, x: y)
def relu(x: Array) -> Array:
    """max(x, 0); the backward pass needs its result only, which the next product keeps anyway."""
    return jnp.maximum(x, 0)


def biased(x: Array, bias: Array | None) -> Array:
    """The sum with a bias, if there is one."""
    return x if bias is None else x + bias.astype(x.dtype)


def sinusoids(positions_BL: Array, model_dim: int) -> Array:
    """The sines and cosines of "Attention is all you need": position information, no weights."""
    half = model_dim // 2
    rates_H = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angles_BLH = positions_BL[..., None].astype(jnp.float32) * rates_H
    return jnp.concatenate([jnp.sin(angles_BLH), jnp.cos(angles_BLH)], axis=-1)


class LayerNorm(eqx.Module):
    """Layer normalization over the model dim, in float32."""

    scale: Array
    bias: Array

    def __init__(self, model_dim: int, dtype: str):
        self.scale = jnp.ones((model_dim,), dtype)
        self.bias = jnp.zeros((model_dim,), dtype)

    def __call__(self, x_BLM: Array) -> Array:
        """Mean 0 and variance 1 over the last dim, then scale and bias."""
        return normalize(x_BLM, self.scale, self.bias)

    def with_residual(self, x_BLM: Array, kernels: Strategy | None = None) -> tuple[Array, Array]:
        """The same, and `x_BLM` for the residual path.

        With `kernels`, one computes the gradients of both, on each device of that strategy.
        """
        if kernels is not None and fits_norm(x_BLM, kernels.devices):
            return normalize_with_residual(x_BLM, self.scale, self.bias, kernels)
        return self(x_BLM), x_BLM


class FeedForward(eqx.Module):
    """wo . relu(wi . x): the position-wise layer, of an expert's shape."""

    wi: Array
    wo: Array
    bi: Array | None
    bo: Array | None

    def __init__(
        self, model_dim: int, hidden_dim: int, dtype: str, key: Array, *, biases: bool = False
    ):
        key_in, key_out = jax.random.split(key)
        self.bi = jnp.zeros((hidden_dim,), dtype) if biases else None
        self.bo = jnp.zeros((model_dim,), dtype) if biases else None
        self.wi = init_weight(key_in, (model_dim, hidden_dim), model_dim, dtype)
        self.wo = init_weight(key_out, (hidden_dim, model_dim), hidden_dim, dtype)

    def __call__(self, x_BLM: Array, products: Products = "dtype") -> Array:
        """The layer at every position."""
        if products == "float8":
            rows_1RM = x_BLM.reshape(1, -1, x_BLM.shape[-1])
            wi_1MH, wo_1HM = (w.astype(x_BLM.dtype)[None] for w in (self.wi, self.wo))
            return float8.feed_forward(rows_1RM, wi_1MH, wo_1HM).reshape(x_BLM.shape)
        h_BLH = product("BLM,MH->BLH", x_BLM, self.wi)
        h_BLH = relu(biased(h_BLH, self.bi))
        return biased(product("BLH,HM->BLM", h_BLH, self.wo), self.bo)


class Embedding(eqx.Module):
    """A vector per token; the target's table is also the output projection."""

    table: Array

    def __init__(self, vocab: int, model_dim: int, dtype: str, key: Array):
        self.table = init_weight(key, (vocab, model_dim), model_dim, dtype)

    @jax.named_scope("embedding")
    def __call__(self, tokens_BL: Array, positions_BL: Array, dtype: str) -> Array:
        """Embed the tokens with unit variance and add their positions."""
        model_dim = self.table.shape[1]
        x_BLM = looked_up(self.table, tokens_BL)
        return (x_BLM * model_dim**0.5 + sinusoids(positions_BL, model_dim)).astype(dtype)

    @jax.named_scope("embedding")
    def logits(self, x_BLM: Array) -> Array:
        """The score of every token of the vocabulary, in float32."""
        return product("BLM,VM->BLV", x_BLM, self.table, jnp.float32)
