"""Training steps with meshes, shardings of arguments and Optax: the bytes of an expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding

import gshard
from tests.oracle import assert_same, run, sent
from tests.programs.in_jax_words import PROGRAMS, P, lie, mesh_of, shape


@pytest.mark.parametrize("name", PROGRAMS)
def test_bytes_of_an_expert(name):
    step, arguments, expert = PROGRAMS[name]()
    lowered = gshard.jit(step).lower(*arguments)
    assert sent(lowered) <= 1.05 * expert


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_more_than_xla(name):
    step, arguments, _ = PROGRAMS[name]()
    ours, theirs = (gshard.jit(step, partitioner=p).lower(*arguments) for p in ("gshard", "xla"))
    assert sent(ours) <= sent(theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_values(name):
    step, arguments, _ = PROGRAMS[name]()
    rng = np.random.default_rng(0)

    def draw(x):
        if np.issubdtype(x.dtype, np.integer):
            value = rng.integers(0, 64, x.shape).astype(x.dtype)
        else:
            value = (np.abs(rng.normal(size=x.shape)) / 8).astype(x.dtype)
        return jax.device_put(value, x.sharding)

    placed = jax.tree.map(draw, arguments)
    wide = 5e-2 if "narrow" in name else 2e-3
    close = {"rtol": wide, "atol": wide / 10}
    wanted = jax.jit(step)(*jax.tree.map(np.asarray, placed))
    assert_same(run(gshard.jit(step), *placed, **close), wanted, **close)


def test_an_argument_that_is_whole_everywhere_stays_so_if_it_would_be_gathered():
    mesh = mesh_of(data=8)
    arguments = {"w": shape(512, 64), "m": shape(512, 64), "x": shape(4096, 512)}
    arguments = lie(arguments, mesh, lambda name, _: P() if name == "w" else P("data"))

    def step(w, m, x):
        m = m + jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
        return w - m, m

    whole, rows = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    lowered = gshard.jit(step, out_shardings=(whole, rows)).lower(*(arguments[n] for n in "wmx"))
    assert [c.kind for c in lowered.collectives] == ["reduce_scatter", "all_gather"]


def test_types_say_nothing_of_axes_that_are_not_explicit():
    """Where a mesh is known, JAX gives many operators a sharding of their own: all None."""
    mesh = mesh_of(data=2, model=4)
    x = lie(shape(16, 8), mesh, lambda *_: P("data"))

    def fn(x):
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
        y = x * jnp.mean(x, axis=-1, keepdims=True)  # a broadcast with such a sharding
        return y.reshape(4, 4, 8)

    lowered = gshard.jit(fn).lower(x)
    assert not lowered.collectives
    assert lowered.out_shardings.tiles[0] > 1
