"""Samplers: chains or observations split over the devices, draw for draw as on one."""

import jax
import jax.numpy as jnp
import pytest

from tests.libraries.programs import check_program, data

# Their warnings are theirs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

X = data(16, 3)
Y = (X.sum(1) > 0).astype("float32")


def test_blackjax_nuts_over_chains():
    blackjax = pytest.importorskip("blackjax")

    def logdensity(w):
        z = X @ w
        likelihood = Y * jax.nn.log_sigmoid(z) + (1 - Y) * jax.nn.log_sigmoid(-z)
        return jnp.sum(likelihood) - 0.5 * jnp.sum(w**2)

    sampler = blackjax.nuts(logdensity, step_size=0.2, inverse_mass_matrix=jnp.ones(3))

    def chain(key, start):
        def step(state, key):
            state, _ = sampler.step(key, state)
            return state, state.position

        return jax.lax.scan(step, sampler.init(start), jax.random.split(key, 5))[1]

    keys = jax.random.split(jax.random.key(0), 8)
    assert check_program(jax.vmap(chain), keys, jnp.zeros((8, 3)), split={0: 0, 1: 0}) == []


def test_numpyro_nuts_over_observations():
    numpyro = pytest.importorskip("numpyro")
    dist = numpyro.distributions
    from numpyro.infer import NUTS

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(jnp.zeros(3), 1.0).to_event(1))
        b = numpyro.sample("b", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Bernoulli(logits=x @ w + b), obs=y)

    kernel = NUTS(model)

    def run(key, x, y):
        def step(state, _):
            state = kernel.sample(state, (x, y), {})
            return state, state.z

        start = kernel.init(key, 5, None, (x, y), {})
        return jax.lax.scan(step, start, None, length=5)[1]

    x = data(16384, 3)  # with a few rows it is cheaper to gather them than to sum in every step
    y = (x.sum(1) > 0).astype("float32")
    assert check_program(run, jax.random.key(0), x, y, split={1: 0, 2: 0}, tolerance=1e-3) == []


def test_numpyro_distributions():
    """`platform_index` stands in some of them."""
    numpyro = pytest.importorskip("numpyro")
    dist = numpyro.distributions

    def draw(key, x):
        normal = dist.MultivariateNormal(jnp.zeros(3), covariance_matrix=jnp.eye(3) * 2)
        return [
            normal.sample(key, (8,)),
            normal.log_prob(x),
            dist.Dirichlet(jnp.ones(3)).sample(key, (4,)),
            dist.Categorical(logits=x).sample(key),
            dist.LKJ(3).log_prob(jnp.eye(3)),
        ]

    moved = check_program(draw, jax.random.key(0), X, split={1: 0})
    assert all("triangular_solve" in reason for reason in moved), moved
