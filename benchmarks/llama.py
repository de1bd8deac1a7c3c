"""A Llama in plain JAX, as a user might bring one: RoPE, RMSNorm, SwiGLU, grouped queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Llama:
    """Its dims; `cut` may annotate what enters the first layer."""

    layers: int = 4
    model: int = 128
    heads: int = 8
    shared: int = 2  # heads of keys and values
    hidden: int = 352
    vocab: int = 512
    dtype: str = "float32"
    remat: bool = False

    def params(self) -> dict[str, Any]:
        """Fresh weights: float32, the layers stacked."""
        n, m, d = self.layers, self.model, self.model // self.heads
        shapes = {
            "q": (n, m, self.heads, d),
            "k": (n, m, self.shared, d),
            "v": (n, m, self.shared, d),
            "o": (n, self.heads, d, m),
            "gate": (n, m, self.hidden),
            "up": (n, m, self.hidden),
            "down": (n, self.hidden, m),
            "embed": (self.vocab, m),
            "head": (m, self.vocab),
        }
        keys = jax.random.split(jax.random.key(0), len(shapes))
        weights = {
            name: jax.random.normal(key, shape) * m**-0.5
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms = {name: jnp.ones((n, m)) for name in ("before", "between")}
        return {**weights, **norms, "last": jnp.ones(m)}

    def loss(
        self, params: dict[str, Any], tokens: Array, cut: Callable[[Array], Array] = lambda x: x
    ) -> Array:
        """Cross entropy of each next token."""
        weights = {k: w.astype(self.dtype) for k, w in params.items()}
        outside = {"embed", "head", "last"}
        stacked = {k: w for k, w in weights.items() if k not in outside}
        layer = jax.checkpoint(self._layer) if self.remat else self._layer
        x = cut(weights["embed"][tokens])
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, stacked)
        logits = (_norm(x, weights["last"]) @ weights["head"]).astype(jnp.float32)
        said = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(said)

    def _layer(self, x: Array, w: dict[str, Array]) -> Array:
        h = _norm(x, w["before"])
        q, k, v = (jnp.einsum("btm,mhd->bthd", h, w[name]) for name in "qkv")
        q, k = _rotated(q), _rotated(k)
        grouped = q.reshape(*q.shape[:2], self.shared, -1, q.shape[-1])
        scores = jnp.einsum("btgid,bsgd->bgits", grouped, k) * q.shape[-1] ** -0.5
        length = x.shape[1]
        seen = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(seen, scores.astype(jnp.float32), -1e30)
        attended = jnp.einsum("bgits,bsgd->btgid", jax.nn.softmax(scores).astype(x.dtype), v)
        x = x + jnp.einsum("bthd,hdm->btm", attended.reshape(q.shape), w["o"])
        h = _norm(x, w["between"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]


def _norm(x: Array, scale: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * scale


def _rotated(x: Array) -> Array:
    length, dim = x.shape[1], x.shape[-1]
    angles = jnp.arange(length)[:, None] * 10_000.0 ** (-jnp.arange(0, dim, 2) / dim)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)
