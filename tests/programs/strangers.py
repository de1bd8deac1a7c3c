"""Models that the recipes were not made for, each as its loss, its weights and a batch.

A Llama (rotary positions, grouped queries, gated units; also with its layers in a scan), an
MLP-Mixer, an LSTM, and a selective state space model whose table is also its head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Model = tuple[Callable[[Any, Any], jax.Array], Any, Any]


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def rms_norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale + bias


def cross_entropy(logits, targets):
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
    return -jnp.mean(chosen)


def rotated(x):
    """Rotary positions of [batch, time, heads, dims]."""
    time, dims = x.shape[1], x.shape[-1]
    angle = jnp.arange(time)[:, None] * 1e4 ** (-jnp.arange(0, dims, 2) / dims)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    even, odd = x[..., ::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], -1).reshape(x.shape)


def llama(layers=2, batch=48, time=32, M=96, N=6, G=2, F=192, V=240, scan=False) -> Model:
    H = M // N
    weights = {
        "norm1": shape(M), "q": shape(M, N * H), "k": shape(M, G * H), "v": shape(M, G * H),
        "out": shape(N * H, M), "norm2": shape(M), "gate": shape(M, F), "up": shape(M, F),
        "down": shape(F, M),
    }  # fmt: skip
    stack = jax.tree.map(lambda w: shape(layers, *w.shape), weights)
    params = {
        "embed": shape(V, M),
        "layers": stack if scan else [dict(weights) for _ in range(layers)],
        "norm": shape(M),
        "head": shape(M, V),
    }

    def block(x, w):
        h = rms_norm(x, w["norm1"])
        q = rotated((h @ w["q"]).reshape(*h.shape[:2], N, H))
        k = rotated((h @ w["k"]).reshape(*h.shape[:2], G, H))
        v = (h @ w["v"]).reshape(*h.shape[:2], G, H)
        k, v = jnp.repeat(k, N // G, 2), jnp.repeat(v, N // G, 2)
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(H)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weight = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        x = x + jnp.einsum("bnqk,bknh->bqnh", weight, v).reshape(h.shape) @ w["out"]
        h = rms_norm(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x, params["layers"])
        else:
            for w in params["layers"]:
                x = block(x, w)
        return cross_entropy(rms_norm(x, params["norm"]) @ params["head"], tokens[:, 1:])

    return loss, params, shape(batch, time + 1, dtype=jnp.int32)


def mixer(layers=2, batch=48, P=24, C=96, tokens=48, channels=192) -> Model:
    weights = {
        "scale1": shape(C), "bias1": shape(C), "t1": shape(P, tokens), "t2": shape(tokens, P),
        "scale2": shape(C), "bias2": shape(C), "c1": shape(C, channels), "c2": shape(channels, C),
    }  # fmt: skip
    params = {
        "stem": shape(48, C),
        "layers": [dict(weights) for _ in range(layers)],
        "head": shape(C, 24),
        "bias": shape(24),
    }

    def loss(params, batch):
        patches, labels = batch
        x = patches @ params["stem"]
        for w in params["layers"]:
            h = layer_norm(x, w["scale1"], w["bias1"]).swapaxes(1, 2)
            x = x + (jax.nn.gelu(h @ w["t1"]) @ w["t2"]).swapaxes(1, 2)
            h = layer_norm(x, w["scale2"], w["bias2"])
            x = x + jax.nn.gelu(h @ w["c1"]) @ w["c2"]
        return cross_entropy(x.mean(1) @ params["head"] + params["bias"], labels)

    return loss, params, (shape(batch, P, 48), shape(batch, dtype=jnp.int32))


def lstm(batch=48, time=12, M=24, H=96, V=48) -> Model:
    params = {
        "embed": shape(V, M), "x": shape(M, 4 * H), "h": shape(H, 4 * H), "bias": shape(4 * H),
        "head": shape(H, V),
    }  # fmt: skip

    def loss(params, tokens):
        def cell(state, x):
            h, memory = state
            gates = x @ params["x"] + h @ params["h"] + params["bias"]
            i, f, g, o = jnp.split(gates, 4, -1)
            memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(memory)
            return (h, memory), h

        x = params["embed"][tokens[:, :-1]].swapaxes(0, 1)
        nothing = jnp.zeros((x.shape[1], H))
        _, hs = jax.lax.scan(cell, (nothing, nothing), x)
        return cross_entropy(hs @ params["head"], tokens[:, 1:].T)

    return loss, params, shape(batch, time + 1, dtype=jnp.int32)


def state_space(layers=2, batch=48, time=16, M=48, E=96, N=8, V=96) -> Model:
    weights = {
        "norm": shape(M), "in": shape(M, 2 * E), "conv": shape(4, E), "bcd": shape(E, 2 * N + 1),
        "step": shape(E), "A": shape(E, N), "D": shape(E), "out": shape(E, M),
    }  # fmt: skip
    params = {
        "embed": shape(V, M),
        "layers": [dict(weights) for _ in range(layers)],
        "norm": shape(M),
    }

    def mixed(x, w):
        u, z = jnp.split(rms_norm(x, w["norm"]) @ w["in"], 2, -1)
        padded = jnp.pad(u, ((0, 0), (3, 0), (0, 0)))
        u = sum(padded[:, i : i + u.shape[1]] * w["conv"][i] for i in range(4))
        u = jax.nn.silu(u)
        b, c, d = jnp.split(u @ w["bcd"], [N, 2 * N], -1)
        step = jax.nn.softplus(d + w["step"])
        kept = jnp.exp(-step[..., None] * jnp.exp(w["A"]))
        added = (step * u)[..., None] * b[..., None, :]

        def after(first, second):
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, states = jax.lax.associative_scan(after, (kept, added), axis=1)
        y = jnp.einsum("bten,btn->bte", states, c) + u * w["D"]
        return (y * jax.nn.silu(z)) @ w["out"]

    def loss(params, tokens):
        x = params["embed"][tokens[:, :-1]]
        for w in params["layers"]:
            x = x + mixed(x, w)
        return cross_entropy(rms_norm(x, params["norm"]) @ params["embed"].T, tokens[:, 1:])

    return loss, params, shape(batch, time + 1, dtype=jnp.int32)
