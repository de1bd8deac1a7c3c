"""Adafactor in few passes against the chain of optax transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gshard.nn import adafactor, optimizer
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


def moments(state, params):
    """Of every weight those that optax keeps of it: rows and columns, or all."""
    factored = [own[0] for own in jax.tree.structure(params).flatten_up_to(state)]
    return [
        (f.v,) if f.v.shape == p.shape else (f.v_row, f.v_col)
        for f, p in zip(factored, jax.tree.leaves(params), strict=True)
    ]


def per_weight(state, params):
    """The same of a state in which weights of one shape share an array."""
    found = jax.tree.structure(params).flatten_up_to(state.own)
    shared = iter(state.shared)
    for alike in optimizer._alike(params):
        if alike.shared:
            together = next(shared)
            for n, place in enumerate(alike.places):
                found[place] = [m if m is None else m[n] for m in together]
    return [[m for m in moments if m is not None] for moments in found]


def few_weights():
    """Two of a shape, one as large that stays apart, and some that are not factored."""
    rng = np.random.default_rng(0)
    shapes = {"a": (12, 10), "b": (12, 10), "c": (9, 3, 11), "d": (7,), "e": (7,)}
    return {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("weights", "min_dim"),
    [
        pytest.param(few_weights, 8, id="few"),
        pytest.param(weights, 8, marks=pytest.mark.slow, id="a model, factored"),
        pytest.param(weights, 128, marks=pytest.mark.slow, id="a model"),
    ],
)
def test_is_adafactor(weights, min_dim, monkeypatch):
    monkeypatch.setattr(optimizer, "_STACKED", 200)
    plain = adafactor(warmup=10, min_dim_to_factor=min_dim)
    fused = adafactor(warmup=10, min_dim_to_factor=min_dim, fused=True)
    params = weights()
    want, want_state = params, plain.init(params)
    got, got_state = params, fused.init(params)
    update, apply = jax.jit(plain.update), jax.jit(fused.apply)
    seed = jnp.zeros(2, jnp.uint32)
    for step in range(3):
        grads = gradients(params, step)
        updates, want_state = update(grads, want_state, want)
        want = optax.apply_updates(want, updates)
        got, got_state, norm = apply(grads, got_state, got, seed)
        np.testing.assert_allclose(norm, optax.tree.norm(grads), rtol=1e-5)
    for tree, other in ((got, want), (per_weight(got_state, got), moments(want_state, want))):
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    leaves = zip(*map(jax.tree.leaves, (got, params)), strict=True)
    largest = [np.abs(a - b).max() for a, b in leaves]
    assert min(largest) > 0
    assert max(largest) > 1e-2


def test_weights_of_one_shape_share_their_sums():
    optimizer = adafactor(min_dim_to_factor=8, fused=True)

    def sums(count):
        params = {str(n): jnp.ones((16, 8)) for n in range(count)}
        state = optimizer.init(params)
        seed = jnp.zeros(2, jnp.uint32)
        found = str(jax.make_jaxpr(optimizer.apply)(params, state, params, seed))
        return found.count("reduce_sum"), len(jax.tree.leaves(state))

    assert sums(20) == sums(2)


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


def test_equal_weights_are_not_rounded_alike():
    """Whether they share an array or not; and with the same seed everything is the same again."""
    one = jnp.ones((64, 64), jnp.bfloat16)
    params = {"a": one, "b": one, "experts": {"a": one, "b": one}}
    optimizer = adafactor(lambda t: 1e-3, fused=True)
    apply, state = jax.jit(optimizer.apply), optimizer.init(params)
    seed = jnp.array([3, 4], jnp.uint32)
    (first, *_), (again, *_) = (apply(params, state, params, seed) for _ in range(2))
    leaves = [np.float32(x) for x in jax.tree.leaves(first)]
    for i, x in enumerate(leaves):
        assert 0.1 < np.mean(x != 1.0) < 0.9
        assert not any(np.array_equal(x, y) for y in leaves[:i])
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_second_moments_are_float32():
    state = jax.eval_shape(adafactor(fused=True).init, weights(jnp.bfloat16))
    assert all(x.dtype in (jnp.float32, jnp.int32) for x in jax.tree.leaves(state))
