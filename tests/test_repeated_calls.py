"""Calls after the first: JAX's dispatch runs them, past everything that gshard checks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gshard
from tests.oracle import assert_same, random_array, run
from tests.shows import shows

P = PartitionSpec
X, Y = random_array((16, 8)), random_array((16, 8), seed=1)


def mesh_of(devices=None) -> Mesh:
    return Mesh(np.array(devices or jax.devices()), ("x",))


def on(mesh, spec, value):
    return jax.device_put(value, NamedSharding(mesh, spec))


def constrained(x, y):
    return lax.with_sharding_constraint(x, NamedSharding(mesh_of(), P("x"))) * 2


def biased(x, scores):
    """Scores of queries that are sharded, with a bias that is replicated."""
    return jax.nn.softmax(scores[:, None] + x[:, :, None], axis=0)


def trees(x, y):
    return {"sum": gshard.split(x, 0, 8) + y, "both": [x, y]}


FUNCTIONS = {
    "product": (lambda x, y: x * y, {}),
    "constraint": (constrained, {}),
    "out_shardings": (lambda x, y: x + 1, {"out_shardings": P("x")}),
    "in_shardings": (lambda x, y: x - y, {"in_shardings": (P("x"), None)}),
    "split": (lambda x, y: gshard.split(x, 1, 8) - 1, {}),
    "position bias": (biased, {}),
    "trees": (trees, {}),
    "uneven result": (lambda x, y: gshard.split(x[:13] * 2, 0, 8), {}),
    "unused argument": (lambda x, y: gshard.split(y, 0, 8), {}),
    "xla": (lambda x, y: gshard.split(x, 0, 8) * y, {"partitioner": "xla"}),
}


@shows("replicated arguments that the program slices")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("specs", [(P(), P("x")), (P(), P()), (P(None, "x"), P())], ids=str)
def test_arguments_that_have_to_be_sliced(name, specs):
    fn, keywords = FUNCTIONS[name]
    mesh = mesh_of()
    args = [on(mesh, spec, value) for spec, value in zip(specs, (X, Y), strict=True)]
    with jax.set_mesh(mesh):
        wanted = jax.jit(fn)(X, Y)
        step = gshard.jit(fn, **keywords)
        assert_same(run(step, *args), wanted)
        compiled = step.lower(*args).compile()
        assert_same(run(compiled, *args), wanted)
        assert_same(run(compiled, X, Y), wanted)


@pytest.mark.parametrize("first", ["sharded", "replicated"])
def test_the_same_values_however_the_calls_alternate(first):
    """The program of one placement is not used for another, nor its path."""
    mesh, backwards = mesh_of(), mesh_of(jax.devices()[::-1])
    x = [
        on(mesh, P("x"), X),
        on(mesh, P(), X),
        on(mesh, P(None, "x"), X),
        on(backwards, P("x"), X),
        on(mesh_of(jax.devices()[:4]), P("x"), X),
        on(mesh_of(jax.devices()[4:]), P(), X),
        jax.device_put(X, jax.devices()[5]),
        jnp.asarray(X),
        X,
    ]
    order = x if first == "sharded" else x[::-1]
    step = gshard.jit(lambda x, y: jnp.cumsum(gshard.split(x, 0, 8) * y, 0), devices=jax.devices())
    compiled = step.lower(X, Y).compile()
    wanted = np.cumsum(X * Y, 0)
    for _ in range(3):
        for a in order:
            np.testing.assert_allclose(step(a, Y), wanted, rtol=1e-5)
            np.testing.assert_allclose(compiled(a, Y), wanted, rtol=1e-5)


def test_arguments_in_place_take_the_quick_path_and_others_do_not(monkeypatch):
    ran = []
    execute = gshard.runtime.stages._jax.execute
    monkeypatch.setattr(
        gshard.runtime.stages._jax, "execute", lambda *args: ran.append(1) or execute(*args)
    )
    mesh = mesh_of()
    for value, slow in (
        (on(mesh, P("x"), X), 1),
        (X, 1),
        (jnp.asarray(X), 1),
        (on(mesh, P(), X), 3),
    ):
        step = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2)
        for call in (step, step.lower(value).compile()):
            ran.clear()
            for _ in range(3):
                np.testing.assert_array_equal(call(value), 2 * X)
            assert len(ran) == slow


def test_donated_arguments_that_have_to_be_sliced():
    """What is given up is the slice; the user's replicated array stays, in every call."""
    x = on(mesh_of(), P(), X)
    step = gshard.jit(lambda x: gshard.split(x, 0, 8) * 2, donate_argnums=0)
    for _ in range(3):
        np.testing.assert_array_equal(step(x), 2 * X)
