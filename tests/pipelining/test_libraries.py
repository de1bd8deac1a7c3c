"""Blocks of Equinox and Flax, and a recurrent one, in stages: the values of `jax.jit`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import gshard

pytestmark = pytest.mark.slow


def compare(run, arguments, devices, tolerance=2e-3):
    found = gshard.jit(run, devices=jax.devices()[:devices])(*arguments)
    for one, other in zip(*map(jax.tree.leaves, (found, jax.jit(run)(*arguments))), strict=True):
        one, other = np.float32(one), np.float32(other)
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


class Perceptron(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(16)
        self.mlp = eqx.nn.MLP(16, 16, 32, 1, activation=jax.nn.silu, key=key)

    def __call__(self, x):
        return x + jax.vmap(jax.vmap(lambda v: self.mlp(self.norm(v))))(x)


def test_equinox_with_adam_on_two_stages_of_split_rows():
    keys = jax.random.split(jax.random.key(0), 6)
    params, static = eqx.partition(eqx.filter_vmap(Perceptron)(keys), eqx.is_array)
    optimizer = optax.adam(1e-2)

    def block(w, x):
        return eqx.combine(w, static)(gshard.split(x, 0, 2))

    def step(params, state, x, y):
        def loss(params):
            how = {"stages": 2, "microbatches": 4, "targets": y}
            return gshard.pipeline(
                block, params, x, head=lambda h, t: jnp.mean((h - t) ** 2), **how
            )

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    x = jax.random.normal(jax.random.key(1), (16, 5, 16))
    compare(step, (params, optimizer.init(params), x, jnp.sin(x)), 8)


class Residual(linen.Module):
    @linen.compact
    def __call__(self, x):
        h = linen.relu(linen.Conv(4, (3, 3))(linen.GroupNorm(2)(x)))
        return x + linen.Conv(4, (3, 3), feature_group_count=2)(h)


def test_flax_convolutions_in_uneven_stages_with_a_tree_of_scores():
    x, labels = jax.random.normal(jax.random.key(1), (12, 7, 6, 4)), jnp.arange(12) % 3
    keys = jax.random.split(jax.random.key(0), 7)
    params = jax.vmap(lambda key: Residual().init(key, x[:1]))(keys)
    last = jax.random.normal(jax.random.key(4), (4, 3))

    def loss(params, last, x, labels):
        def head(y, labels):
            logits = jnp.mean(y, (1, 2)) @ last
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
            return {"loss": -jnp.sum(chosen), "right": jnp.sum(jnp.argmax(logits, -1) == labels)}

        how = {"stages": 3, "microbatches": 3, "schedule": "zb-h1", "targets": labels}
        found = gshard.pipeline(lambda p, x: Residual().apply(p, x), params, x, head=head, **how)
        return found["loss"], found["right"]

    compare(jax.value_and_grad(loss, (0, 1), has_aux=True), (params, last, x, labels), 6)


def test_a_recurrent_block_on_a_tree_of_half_precision_integers_and_masks():
    def block(w, values):
        (h, state), position, mask = values

        def cell(state, at):
            x, real = at
            new = jnp.tanh(x @ w["x"] + state @ w["h"] + w["bias"] * (position[:, None] % 2))
            return jnp.where(real[:, None], new, state), new

        state, ys = jax.lax.scan(cell, state, (jnp.moveaxis(h, 1, 0), mask.T))
        return (h + jnp.moveaxis(ys, 0, 1), state), position, mask

    key = jax.random.key(0)
    weights = {name: 0.3 * jax.random.normal(key, (4, 8, 8), jnp.bfloat16) for name in "xh"}
    weights["bias"] = jnp.ones((4, 8), jnp.bfloat16)
    x, mask = (
        jax.random.normal(key, (8, 6, 8), jnp.bfloat16),
        jax.random.bernoulli(key, 0.7, (8, 6)),
    )

    def loss(weights, x):
        start = (x, jnp.zeros((8, 8), x.dtype)), jnp.arange(8), mask
        (h, state), *_ = gshard.pipeline(block, weights, start, stages=4, microbatches=4)
        return jnp.mean(h.astype(jnp.float32) ** 2) + jnp.mean(state.astype(jnp.float32))

    compare(jax.value_and_grad(loss), (weights, x), 4, tolerance=3e-2)
