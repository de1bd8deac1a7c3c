"""A small Transformer in plain JAX, without a single annotation: the recipes bring those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Layers, batch B, tokens S of a sequence, model dim M, heads N, hidden dim F, vocabulary V."""

    L: int = 4
    B: int = 32
    S: int = 64
    M: int = 128
    N: int = 8
    F: int = 512
    V: int = 1000

    @property
    def stream(self) -> int:
        """Bytes of the activations between layers, [B, S, M]."""
        return self.B * self.S * self.M * 4

    def few_tokens(self) -> Size:
        """An eighth of the batch: where the activations are smaller than the weights."""
        return replace(self, B=self.B // 8)


SMALL = Size()
LARGE = Size(L=4, B=32, S=2048, M=4096, N=32, F=16384, V=32000)


def shapes(size: Size) -> Params:
    """The shapes of all weights."""

    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    M, N, H, F = size.M, size.N, size.M // size.N, size.F
    layer = {
        "norm1": f32(M), "q": f32(M, N, H), "k": f32(M, N, H), "v": f32(M, N, H),
        "out": f32(N, H, M), "norm2": f32(M), "up": f32(M, F), "down": f32(F, M),
    }  # fmt: skip
    layers = [dict(layer) for _ in range(size.L)]
    return {"embed": f32(size.V, M), "layers": layers, "norm": f32(M), "head": f32(M, size.V)}


def stacked(params: Params) -> Params:
    """The shapes with all layers in one, for `scan`."""
    layers = jax.tree.map(
        lambda *xs: jax.ShapeDtypeStruct((len(xs), *xs[0].shape), xs[0].dtype), *params["layers"]
    )
    return params | {"layers": layers}


def tokens(size: Size) -> jax.ShapeDtypeStruct:
    """A batch: inputs are all tokens but the last, targets all but the first."""
    return jax.ShapeDtypeStruct((size.B, size.S + 1), jnp.int32)


def norm(x_BSM, scale_M):
    """RMS norm."""
    return x_BSM * jax.lax.rsqrt(jnp.mean(x_BSM**2, -1, keepdims=True) + 1e-6) * scale_M


def attention(x_BSM, layer):
    """Causal self-attention."""
    q, k, v = (jnp.einsum("BSM,MNH->BSNH", x_BSM, layer[name]) for name in "qkv")
    logits = jnp.einsum("BSNH,BTNH->BNST", q, k) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, logits, -1e9))
    return jnp.einsum("BNST,BTNH,NHM->BSM", weights, v, layer["out"])


def block(x_BSM, layer):
    """Attention and a hidden layer, each with its norm and its residual."""
    x_BSM = x_BSM + attention(norm(x_BSM, layer["norm1"]), layer)
    hidden = jax.nn.gelu(norm(x_BSM, layer["norm2"]) @ layer["up"])
    return x_BSM + hidden @ layer["down"]


def loss(params: Params, batch, block: Callable = block, between: Callable = lambda x: x):
    """Mean cross-entropy; `between` gets the activations after every layer."""
    x = between(params["embed"][batch[:, :-1]])
    if isinstance(params["layers"], list):
        for layer in params["layers"]:
            x = between(block(x, layer))
    else:
        x, _ = jax.lax.scan(lambda x, layer: (between(block(x, layer)), None), x, params["layers"])
    logits = norm(x, params["norm"]) @ params["head"]
    chosen = jnp.take_along_axis(logits, batch[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def sgd(params: Params, batch, loss: Callable = loss):
    """One step of plain gradient descent: the new weights and the loss."""
    value, grads = jax.value_and_grad(loss)(params, batch)
    return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value


def adam(params: Params, moments, grads):
    """One update by Adam (without its bias correction): new weights and moments."""
    first, second = moments
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
    new = jax.tree.map(lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return new, (first, second)


remat_loss = functools.partial(loss, block=jax.checkpoint(block))
