import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gshard.nn import adafactor, adam, inverse_sqrt
from gshard.nn.optimizer import per_matrix
from tests.nn.models import config, shapes


def test_learning_rate_is_constant_then_decays():
    schedule = inverse_sqrt(1.0, 10_000)
    got = [float(schedule(t - 1)) for t in (1, 10_000, 40_000, 1_000_000)]
    np.testing.assert_allclose(got, [0.01, 0.01, 0.005, 0.001], rtol=1e-6)


def run(optimizer, params, steps=3):
    """Some steps on fixed gradients; returns the params."""
    rng = np.random.default_rng(1)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for _ in range(steps):
        grads = jax.tree.map(lambda p: jnp.float32(rng.normal(size=p.shape)), params)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_one_matrix_is_optaxs_adafactor():
    """Before the cap on the decay bites (step 317) the two are the same."""
    params = {"w": jnp.float32(np.random.default_rng(0).normal(size=(130, 140)))}
    got, _ = run(adafactor(), params)
    want, _ = run(optax.adafactor(inverse_sqrt(), eps=1e-30), params)
    assert np.abs(got["w"] - params["w"]).max() > 1e-3
    np.testing.assert_allclose(got["w"], want["w"], rtol=1e-6)


@pytest.mark.parametrize(("count", "want"), [(0, 0.0), (99, 1 - 100**-0.8), (9_999, 0.99)])
def test_decay_of_the_second_moment_is_capped(count, want):
    optimizer = adafactor(clipping=1e9)
    params = jnp.ones((2, 3))
    state = optimizer.init(params)
    factored = state[0]._replace(count=jnp.int32(count), v=jnp.full((2, 3), 5.0))
    _, after = optimizer.update(jnp.full((2, 3), 2.0), (factored, *state[1:]), params)
    np.testing.assert_allclose(after[0].v, want * 5.0 + (1 - want) * 4.0, rtol=1e-5)


def test_each_layer_and_expert_is_a_matrix_of_its_own():
    """Scaling one expert's gradient and weight must not change how another is updated."""
    model = shapes(config(model_dim=16))
    params = jax.tree.map(lambda s: np.random.default_rng(0).normal(size=s.shape), model)
    params = jax.tree.map(jnp.float32, params)
    optimizer = adafactor(min_dim_to_factor=8)
    state = jax.eval_shape(optimizer.init, params)
    factored = state.encoder.sparse.moe.experts.wi[0]
    assert factored.v_row.shape == (1, 4, 16)
    assert factored.v_col.shape == (1, 4, 24)
    assert state.encoder.dense.feed_forward.wi[0].v_row.shape == (1, 16)
    assert state.source.table[0].v_row.shape == (16,)

    stacked = per_matrix(optimizer_of_one())
    tree = Stack(jnp.stack([params.encoder.sparse.moe.experts.wi[0]] * 2))
    grads = jax.tree.map(lambda p: p * 0.1, tree)
    one = jax.jit(stacked.update)(grads, stacked.init(tree), tree)[0].encoder
    loud = Stack(grads.encoder.at[0].multiply(1e3))
    other = jax.jit(stacked.update)(loud, stacked.init(tree), tree)[0].encoder
    np.testing.assert_array_equal(one[1], other[1])


def optimizer_of_one():
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))


@jax.tree_util.register_pytree_with_keys_class
class Stack:
    """A tree whose only leaf is stacked like an encoder's."""

    def __init__(self, encoder):
        self.encoder = encoder

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("encoder"), self.encoder)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_updates_are_clipped_and_relative_to_the_weights():
    params = {"w": jnp.full((4, 5), 3.0)}
    grads = {"w": jnp.zeros((4, 5)).at[0, 0].set(100.0)}
    optimizer = adafactor()
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    rms = float(jnp.sqrt(jnp.mean(updates["w"] ** 2)))
    assert rms <= 0.01 * 3.0 * 1.0001
    np.testing.assert_allclose(updates["w"][0, 0], -0.01 * 3.0, rtol=1e-5)


def test_adam_state_has_the_shapes_of_the_weights():
    model = shapes(config())
    state = jax.eval_shape(adam().init, model)
    assert jax.tree.map(lambda s: s.shape, state[0].mu) == jax.tree.map(lambda s: s.shape, model)
