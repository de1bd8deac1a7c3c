"""Arguments and results in any memory layout: the values of `jax.jit`, in every call."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import gshard
from tests.oracle import random_array, run
from tests.shows import shows

P = PartitionSpec
X = np.arange(32, dtype=np.float32).reshape(8, 4)
COLUMNS = Layout((1, 0))


def mesh_of(devices=None) -> Mesh:
    return Mesh(np.array(devices or jax.devices()).reshape(-1, 2), ("a", "b"))


def on(layout, spec, value=X):
    return jax.device_put(value, Format(layout, NamedSharding(mesh_of(), spec)))


FUNCTIONS = {
    "pointwise": lambda x: x * 2 + 1,
    "reversed": lambda x: x - x[::-1],
    "split": lambda x: gshard.split(x, 0, 8) * 2,
    "uneven": lambda x: gshard.split(x, 0, 3) * 2,
    "irregular": lambda x: gshard.shard(x, np.array([5, 1, 6, 2]).reshape(4, 1, 1)) * 2,
    "product": lambda x: jnp.einsum("abc,dbc->ad", x, x),
}


@st.composite
def placements(draw):
    """A layout of a tensor of rank 3, or the default, under a sharding on some of the devices."""
    layout = draw(st.sampled_from([None, *itertools.permutations(range(3))]))
    if draw(st.integers(0, 3)) == 0:
        where = SingleDeviceSharding(jax.devices()[draw(st.integers(0, 7))])
    else:
        devices = jax.devices()[:: draw(st.sampled_from([1, 1, -1, 2]))]
        spec = draw(st.sampled_from([P(), P("a"), P("b", None, "a"), P(None, ("b", "a"))]))
        where = NamedSharding(mesh_of(devices), spec)
    return where if layout is None else Format(Layout(layout), where)


@shows("arguments in any memory layout")
@pytest.mark.parametrize("partitioner", ["gshard", "xla"])
@given(
    st.sampled_from(sorted(FUNCTIONS)),
    st.lists(placements(), min_size=2, max_size=4),
    st.sampled_from([1, 4, 8]),
    st.booleans(),
)
def test_any_layouts_under_any_shardings_in_any_order_of_calls(partitioner, name, places, n, ahead):
    if n < 8 and name in ("split", "uneven", "irregular"):
        n = 8
    value = random_array((8, 8, 8))
    step = gshard.jit(FUNCTIONS[name], devices=jax.devices()[:n], partitioner=partitioner)
    wanted = jax.jit(FUNCTIONS[name])(value)
    call = step.lower(jax.device_put(value, places[0])).compile() if ahead else step
    for _ in range(2):
        for place in places:
            given = jax.device_put(value, place)
            np.testing.assert_allclose(run(call, given), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spec", [P(), P("a"), P("a", "b")], ids=str)
def test_a_result_of_another_layout_is_an_argument(spec):
    made = jax.jit(lambda x: x + 1, out_shardings=Format(COLUMNS, NamedSharding(mesh_of(), spec)))
    step = gshard.jit(lambda x: x * 3)
    np.testing.assert_array_equal(run(step, made(X)), (X + 1) * 3)
    again = gshard.jit(
        lambda x: x - 1, out_shardings=Format(COLUMNS, NamedSharding(mesh_of(), spec))
    )
    assert run(again, made(X)).format == made(X).format
    np.testing.assert_array_equal(run(step, again(made(X))), X * 3)


def test_an_argument_keeps_its_layout_and_is_not_copied():
    x = on(COLUMNS, P("a"))
    compiled = gshard.jit(lambda x: x * 2).lower(x).compile()
    assert compiled.input_formats[0][0] == x.format
    assert compiled.place(x)[0] is x
    assert compiled.place(on(Layout((0, 1)), P("a")))[0].format == x.format


def test_an_array_that_the_function_closes_over():
    x = on(COLUMNS, P("a"))
    np.testing.assert_array_equal(run(gshard.jit(lambda y: y + x), X), X + X)


def test_an_uneven_array():
    uneven = Format(COLUMNS, NamedSharding(mesh_of(), P(("a", "b"))))
    y = run(gshard.jit(lambda x: x[:7] * 2, out_shardings=uneven), X)
    assert isinstance(y, gshard.UnevenArray)
    assert y.format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(run(gshard.jit(lambda y: y + 1), y), X[:7] * 2 + 1)


def formats():
    """Those that `in_shardings` and `out_shardings` of `jax.jit` take."""
    placed = NamedSharding(mesh_of(), P("a", "b"))
    return [
        Format(COLUMNS, placed), Format(Layout((0, 1)), placed), Format(Layout.AUTO, placed),
        Format(Layout.AUTO), Format(None, placed), Format(), placed,
    ]  # fmt: skip


@shows("memory layouts (Format) in in_shardings and out_shardings")
@pytest.mark.parametrize("partitioner", ["gshard", "xla"])
@pytest.mark.parametrize("into", range(7))
def test_formats_as_in_shardings_and_out_shardings(into, partitioner):
    out = formats()[::-1][into]
    keywords = {"in_shardings": (formats()[into],), "out_shardings": {"y": out}}

    def fn(x):
        return {"y": x @ x.T}

    step = gshard.jit(fn, **keywords, partitioner=partitioner)
    theirs = jax.jit(fn, **keywords)(X)["y"]
    for x in (X, jnp.asarray(X), on(COLUMNS, P("a", "b")), on(Layout((0, 1)), P("b"))):
        got = run(step, x)["y"]
        np.testing.assert_allclose(got, X @ X.T, rtol=1e-5)
        if isinstance(out, Format) and isinstance(out.layout, Layout):
            assert got.format.layout == theirs.format.layout
            assert got.sharding.is_equivalent_to(theirs.sharding, 2)
    compiled = step.lower(X).compile()
    given = jax.device_put(X, compiled.input_formats[0][0])
    np.testing.assert_allclose(run(compiled, given)["y"], X @ X.T, rtol=1e-5)


def test_layouts_survive_transformations_and_other_leaves():
    """Leaves that are not arrays, references, and an export take the function apart."""
    columns = Format(COLUMNS, NamedSharding(mesh_of(), P("a")))
    step = gshard.jit(lambda x, how: how(x), in_shardings=(columns, None), out_shardings=columns)
    got = run(step, X, jnp.sin)
    np.testing.assert_allclose(got, np.sin(X), rtol=1e-6)
    assert got.format.layout.major_to_minor == (1, 0)
    one = gshard.jit(lambda x: x * 2, in_shardings=columns, out_shardings=columns)
    np.testing.assert_array_equal(jax.vmap(one)(X[None])[0], X * 2)
    np.testing.assert_array_equal(jax.jit(one)(X), X * 2)
    np.testing.assert_array_equal(jax.grad(lambda x: one(x).sum())(X), np.full_like(X, 2))
    exported = jax.export.export(one)(jax.ShapeDtypeStruct(X.shape, X.dtype))
    with jax.set_mesh(mesh_of()):
        args = [jax.device_put(X, s) for s in exported.in_shardings_jax(mesh_of())]
        np.testing.assert_array_equal(exported.call(*args), X * 2)


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_a_layout_of_another_rank_is_refused(name):
    wrong = Format(Layout((0, 2, 1)), NamedSharding(mesh_of(), P("a")))
    with pytest.raises(ValueError, match=rf"{name}: .* for a value of rank 2"):
        gshard.jit(lambda x: x, **{name: wrong})(X)
