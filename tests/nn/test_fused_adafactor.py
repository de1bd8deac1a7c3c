"""Adafactor in few passes against the chain of optax transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gshard.nn import adafactor
from tests.nn.models import config, shapes


def weights(dtype=jnp.float32):
    """A model with matrices in all layouts, some large enough to be factored."""
    model = shapes(config(model_dim=16, hidden_dim=24, encoder_layers=4))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), dtype), model)


def gradients(params, seed, dtype=jnp.float32):
    """Very different from row to row, and some loud enough to be clipped."""
    rng = np.random.default_rng(seed)

    def draw(p):
        rows = np.exp(2.0 * rng.normal(size=(*p.shape[:-1], 1)))
        return jnp.asarray(rows * rng.normal(size=p.shape), dtype)

    return jax.tree.map(draw, params)


@pytest.mark.slow
@pytest.mark.parametrize("min_dim", [8, 128])
def test_is_adafactor(min_dim):
    plain = adafactor(warmup=10, min_dim_to_factor=min_dim)
    fused = adafactor(warmup=10, min_dim_to_factor=min_dim, fused=True)
    params = weights()
    want, want_state = params, plain.init(params)
    got, got_state = params, fused.init(params)
    assert jax.tree.structure(want_state) == jax.tree.structure(got_state)
    update, apply = jax.jit(plain.update), jax.jit(fused.apply)
    seed = jnp.zeros(2, jnp.uint32)
    for step in range(3):
        grads = gradients(params, step)
        updates, want_state = update(grads, want_state, want)
        want = optax.apply_updates(want, updates)
        got, got_state, norm = apply(grads, got_state, got, seed)
        np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-5)
    for tree, other in ((got, want), (got_state, want_state)):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    moved = np.abs(got.source.table - params.source.table).max()
    assert moved > 1e-2


def test_small_updates_of_bfloat16_are_not_lost():
    """Each step is a hundredth of a weight's last bit: rounded to the nearest, nothing moves."""
    params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    grads = {"w": jnp.ones((64, 64), jnp.bfloat16)}
    rate = 4e-5  # and a bfloat16 just below 1 has steps of 4e-3
    steps = 300

    def run(optimizer, change):
        state, now = optimizer.init(params), params
        change = jax.jit(change)
        for step in range(steps):
            now, state = change(state, now, jnp.array([step, 1], jnp.uint32))
        return np.float32(now["w"])

    plain = adafactor(lambda t: rate)
    fused = adafactor(lambda t: rate, fused=True)

    def nearest(state, now, seed):
        updates, state = plain.update(grads, state, now)
        return optax.apply_updates(now, updates), state

    stuck = run(plain, nearest)
    moved = run(fused, lambda state, now, seed: fused.apply(grads, state, now, seed)[:2])
    assert np.all(stuck == 1.0)
    np.testing.assert_allclose(moved.mean(), 1.0 - steps * rate, rtol=1e-3)


def test_second_moments_are_float32():
    state = jax.eval_shape(adafactor(fused=True).init, weights(jnp.bfloat16))
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(state))
