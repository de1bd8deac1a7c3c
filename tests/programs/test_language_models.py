"""Models as users write them, in Equinox and Flax, trained with Optax: the unpartitioned curve."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gshard

LAYERS, MODEL, HEADS, HIDDEN, LENGTH = 4, 16, 4, 32, 6
MESH = np.arange(8).reshape(2, 4)  # for 2-D sharding: batch by rows, features by columns

# How the batch, and a weight [in, out] that widens or narrows, are cut under each strategy.
STRATEGIES = {
    "data": lambda x, kind: gshard.split(x, 0, 8) if kind == "batch" else gshard.replicate(x),
    "tensor": lambda x, kind: {
        "batch": gshard.replicate,
        "widen": lambda w: gshard.split(w, 1, 8),
        "narrow": lambda w: gshard.split(w, 0, 8),
    }[kind](x),
    "2d": lambda x, kind: {
        "batch": lambda x: gshard.shard(x, MESH[:, :1]),
        "widen": lambda w: gshard.shard(w, MESH[:1]),
        "narrow": lambda w: gshard.shard(w, MESH[:1].T),
    }[kind](x),
}  # fmt: skip


def identity(x, kind):
    return x


def attention(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)


class Block(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    qkv: jax.Array
    out: jax.Array
    wide: jax.Array
    narrow: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(MODEL), eqx.nn.LayerNorm(MODEL)
        self.qkv = jax.random.normal(keys[0], (MODEL, 3 * MODEL)) / 4
        self.out = jax.random.normal(keys[1], (MODEL, MODEL)) / 4
        self.wide = jax.random.normal(keys[2], (MODEL, HIDDEN)) / 4
        self.narrow = jax.random.normal(keys[3], (HIDDEN, MODEL)) / 4

    def __call__(self, x, cut):
        h = jax.vmap(jax.vmap(self.norm1))(x)
        qkv = (h @ cut(self.qkv, "widen")).reshape(*x.shape[:2], 3, HEADS, -1)
        mixed = attention(*(qkv[:, :, i] for i in range(3))).reshape(x.shape)
        x = x + mixed @ cut(self.out, "narrow")
        h = jax.vmap(jax.vmap(self.norm2))(x)
        return x + jax.nn.gelu(h @ cut(self.wide, "widen")) @ cut(self.narrow, "narrow")


class EquinoxModel(eqx.Module):
    """An Equinox language model; the activation is a leaf that is no array."""

    embed: eqx.nn.Embedding
    blocks: list[Block]
    activation: Callable

    def __init__(self, vocabulary, key):
        keys = jax.random.split(key, LAYERS + 1)
        self.embed = eqx.nn.Embedding(vocabulary, MODEL, key=keys[0])
        self.blocks = [Block(k) for k in keys[1:]]
        self.activation = jnp.tanh

    def __call__(self, tokens, cut):
        x = jax.vmap(jax.vmap(self.embed))(cut(tokens, "batch"))
        for block in self.blocks:
            x = block(x, cut)
        return self.activation(x) @ cut(self.embed.weight, "narrow").T


class FlaxModel(nnx.Module):
    """The same in Flax, with its own layers."""

    def __init__(self, vocabulary, rngs):
        self.embed = nnx.Embed(vocabulary, MODEL, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(MODEL, rngs=rngs) for _ in range(2 * LAYERS)])
        self.qkv = nnx.List([nnx.Linear(MODEL, 3 * MODEL, rngs=rngs) for _ in range(LAYERS)])
        self.out = nnx.List([nnx.Linear(MODEL, MODEL, rngs=rngs) for _ in range(LAYERS)])
        self.wide = nnx.List([nnx.Linear(MODEL, HIDDEN, rngs=rngs) for _ in range(LAYERS)])
        self.narrow = nnx.List([nnx.Linear(HIDDEN, MODEL, rngs=rngs) for _ in range(LAYERS)])

    def __call__(self, tokens, cut):
        x = self.embed(cut(tokens, "batch"))
        for i in range(LAYERS):
            qkv = self.qkv[i](self.norms[2 * i](x)).reshape(*x.shape[:2], 3, HEADS, -1)
            x = x + self.out[i](attention(*(qkv[:, :, j] for j in range(3))).reshape(x.shape))
            x = x + self.narrow[i](jax.nn.gelu(self.wide[i](self.norms[2 * i + 1](x))))
        return self.embed.attend(x)


def equinox_model(vocabulary):
    model = EquinoxModel(vocabulary, jax.random.key(0))

    def predict(model, tokens, cut):
        return model(tokens, cut)

    return model, predict


def flax_model(vocabulary):
    graph, weights = nnx.split(FlaxModel(vocabulary, nnx.Rngs(0)))

    def cut_weight(path, w, cut):
        name = jax.tree_util.keystr(path)
        if "kernel" not in name:
            return w
        return cut(w, "narrow" if "out" in name or "narrow" in name else "widen")

    def predict(weights, tokens, cut):
        weights = jax.tree_util.tree_map_with_path(lambda p, w: cut_weight(p, w, cut), weights)
        return nnx.merge(graph, weights)(tokens, cut)

    return weights, predict


def loss_curve(jit, make, optimizer, cut, batch, vocabulary, steps):
    weights, predict = make(vocabulary)

    def loss_fn(weights, tokens):
        logits = predict(weights, tokens[:, :-1], cut)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def step(weights, state, tokens):
        arrays, rest = eqx.partition(weights, eqx.is_array)
        loss, grads = jax.value_and_grad(lambda a: loss_fn(eqx.combine(a, rest), tokens))(arrays)
        updates, state = optimizer.update(grads, state, arrays)
        return eqx.combine(optax.apply_updates(arrays, updates), rest), state, loss

    state = optimizer.init(eqx.filter(weights, eqx.is_array))
    run = jit(step)
    data = np.random.default_rng(0).integers(0, vocabulary, (4, batch, LENGTH + 1), dtype=np.int32)
    losses = []
    for i in range(steps):
        weights, state, loss = run(weights, state, data[i % 4])
        losses.append(float(loss))
    return np.array(losses)


OPTIMIZERS = {
    "adam": lambda: optax.adam(3e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "2d")) for name in STRATEGIES],
)
@pytest.mark.parametrize(
    ("make", "optimizer"),
    [
        pytest.param(equinox_model, "adafactor", marks=pytest.mark.slow),
        (flax_model, "adam"),
    ],
    ids=["equinox", "flax"],
)
def test_trains_to_the_unpartitioned_curve(make, optimizer, strategy):
    """Batch 13 and vocabulary 37 divide by nothing."""
    setting = {"batch": 13, "vocabulary": 37, "steps": 20}
    plain = eqx.filter_jit if make is equinox_model else jax.jit
    wanted = loss_curve(plain, make, OPTIMIZERS[optimizer](), identity, **setting)
    got = loss_curve(gshard.jit, make, OPTIMIZERS[optimizer](), STRATEGIES[strategy], **setting)
    assert wanted[-1] < wanted[0] - 0.1, "it does not learn"
    np.testing.assert_allclose(got, wanted, rtol=1e-5)
