"""Slices and updates at known rows of a split dim: few equations; what is used often moves once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent

ROWS = even_split(2, 0, 8)


def windows_of(x):
    return sum(x[i : i + 4] for i in range(40))


def many_windows(x):
    return sum(x[i : i + 16] for i in range(40))


def rows_of(x):
    return sum(x[i] * 2.0 for i in range(40))


def rows_set(x):
    for i in range(40):
        x = x.at[i].set(i * 1.0)
    return x


def gradient(x):
    return jax.grad(lambda x: sum(jnp.sum(jnp.sin(x[i])) for i in range(40)))(x)


@pytest.mark.parametrize("fn", [windows_of, many_windows, rows_of, rows_set, gradient])
def test_equations_at_most_two_and_a_half_times_as_many(fn):
    x = jax.ShapeDtypeStruct((128, 4), jnp.float32)
    before = len(jax.make_jaxpr(fn)(x).eqns)
    lowered = gshard.jit(lambda x: fn(gshard.split(x, 0, 8)), devices=8).lower(x)
    assert len(lowered.jaxpr.eqns) <= 2.5 * before + 20


def test_what_is_cut_many_times_is_gathered_once():
    low = check(windows_of, random_array((128, 4)), inputs=[ROWS], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_gather": 1}


def test_a_few_rows_are_sent_by_themselves():
    low = check(lambda x: x[3] + x[100], random_array((128, 4)), inputs=[ROWS])
    assert sent(low) == 2 * 2 * 4 * 4 * 7 // 8


def test_nothing_is_gathered_beyond_the_memory_limit():
    x = jax.ShapeDtypeStruct((128, 4), jnp.float32)
    fn = gshard.jit(lambda x: windows_of(gshard.split(x, 0, 8)), devices=8, memory_limit=1024)
    assert "all_gather" not in kinds(fn.lower(x))


@st.composite
def rows_in_place(draw):
    """Updates, slices and sums of rows at any places, one after the other."""
    size = draw(st.sampled_from([8, 13, 24]))
    steps = []
    for _ in range(draw(st.integers(1, 5))):
        start = draw(st.integers(0, size - 1))
        steps.append((draw(st.sampled_from("usar")), start, draw(st.integers(start + 1, size))))

    def fn(x):
        total = jnp.zeros(3)
        for kind, start, limit in steps:
            if kind == "u":
                x = x.at[start:limit].set(start * 1.0)
            elif kind == "a":
                x = x.at[start].set(x[limit - 1] + 1)
            elif kind == "r":
                x = jnp.roll(x, start, 0)
            else:
                total = total + x[start:limit].sum(0)
        return x, total

    devices = draw(st.sampled_from([2, 3, 8]))
    return fn, random_array((size, 3)), devices


def any_rows(program):
    fn, x, devices = program
    check(fn, x, devices=devices, inputs=[even_split(2, 0, devices)], rtol=1e-4, atol=1e-4)


@settings(max_examples=4)
@given(rows_in_place())
def test_random_rows_in_place(program):
    any_rows(program)


@pytest.mark.slow
@settings(max_examples=200)
@given(rows_in_place())
def test_many_random_rows_in_place(program):
    any_rows(program)


def test_updates_that_lie_across_tiles():
    def fn(x, y):
        return x.at[3:9].set(y)

    args = random_array((32, 3)), random_array((6, 3), seed=1)
    low = check(fn, *args, inputs=[ROWS], exact=True)
    assert sent(low) == 0


def test_slices_of_which_the_results_are_split_along_another_dim_too():
    """Rows that change tiles are sent, once the other dim is split without communication."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    before, after = NamedSharding(mesh, P(None, "b")), NamedSharding(mesh, P("a", "b"))
    jitted = gshard.jit(
        lambda x: (x[:, :64], x[:, 8:72]), in_shardings=before, out_shardings=(after, after)
    )
    x = random_array((16, 96))
    assert kinds(jitted.lower(x)) == {"collective_permute": 1}
    for result, expected in zip(jitted(x), (x[:, :64], x[:, 8:72]), strict=True):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("start", [1, -3, 300])  # out of range: clamped, as JAX does
def test_dynamic_updates_and_slices_at_known_rows(start):
    def update(u):
        return lax.dynamic_update_slice(u, jnp.sin(u[2:, 1:-1]) + u[:-2, 1:-1], (start, 1))

    def fn(u):
        some = lax.dynamic_slice(u, (start, 0), (9, 4))
        return update(u), jax.grad(lambda u: jnp.sum(update(u) ** 2))(u), some * 2

    check(fn, random_array((13, 6)), devices=4, inputs=[even_split(2, 0, 4)])
    step = gshard.jit(lambda u: gshard.split(update(gshard.split(u, 0, 4)), 0, 4), devices=4)
    bytes_sent = sent(step.lower(random_array((16, 6))))
    assert start != 1 or bytes_sent == 2 * 6 * 4  # a row from each neighbour
