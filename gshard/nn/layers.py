"""The small parts of a Transformer: normalization, embeddings, feed-forward, dropout, positions.

Weights are stored in one dtype and used in the dtype of the activations; normalization is always
computed in float32.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn import float8
from gshard.nn.config import Products, Random
from gshard.nn.hashing import hash_dropout, seed_of
from gshard.nn.int8 import looked_up, product
from gshard.nn.norm import fits, normalize, normalize_beside
from gshard.nn.strategy import Strategy


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


@jax.custom_vjp
def relu(x: Array) -> Array:
    """max(x, 0); the backward pass needs its result only, which the next product keeps anyway."""
    return jnp.maximum(x, 0)


def _relu_forward(x: Array) -> tuple[Array, Array]:
    y = relu(x)
    return y, y


def _relu_backward(y: Array, grad: Array) -> tuple[Array]:
    # Not y > 0: XLA would turn that into x > 0 and keep x as well, the largest activation.
    return (jnp.where(y != 0, grad, jnp.zeros_like(grad)),)


relu.defvjp(_relu_forward, _relu_backward)


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

    def beside(self, x_BLM: Array, kernels: Strategy | None = None) -> tuple[Array, Array]:
        """The same, and `x_BLM` for the residual path.

        With `kernels`, one computes the gradients of both, on each device of that strategy.
        """
        if kernels is not None and fits(x_BLM, kernels.devices):
            return normalize_beside(x_BLM, self.scale, self.bias, kernels)
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
