"""Indices that count up, or in a few runs: batches of gathers, and row maps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard.capture.simplify.known_windows import known_numbers
from gshard.graph import Graph
from tests.oracle import check, even_split, kinds, random_array, sent

B, N, K, M = 16, 12, 3, 4
ROWS = jnp.arange
BATCH = [even_split(3, 0, 8), even_split(2, 0, 8)]

READS = {
    "pairs": lambda x, i: x[ROWS(B)[:, None], i],
    "one for each": lambda x, i: x[ROWS(B), i[:, 0]],
    "part of a row": lambda x, i: x[ROWS(B)[:, None], i, 1:3],
    "other order": lambda x, i: x.transpose(1, 0, 2)[i, ROWS(B)[:, None]],
    "three": lambda x, i: x[ROWS(B)[:, None], i, ROWS(K)[None]],
    "two batches": lambda x, i: x[ROWS(B)[:, None], ROWS(N)[None], i[:, :1] % M],
}
WRITES = {
    "set": lambda x, i: x.at[ROWS(B)[:, None], i[:, :1]].set(1.0),
    "add": lambda x, i: x.at[ROWS(B)[:, None], i].add(jnp.cos(i)[..., None]),
    "max": lambda x, i: x.at[ROWS(B), i[:, 1]].max(0.5),
}


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_a_batch_of_rows_is_looked_up_where_it_is(name):
    fn = (READS | WRITES)[name]
    x, i = random_array((B, N, M)), np.random.default_rng(0).integers(-N, N, (B, K))

    def both(x, i):
        grad = jax.grad(lambda x: jnp.sum(jnp.sin(fn(x, i))))(x)
        return fn(x, i), grad

    assert kinds(check(both, x, i.astype(np.int32), inputs=BATCH, rtol=1e-5)) == {}


@pytest.mark.parametrize(
    "rows",
    [lambda: ROWS(B)[::-1], lambda: ROWS(B) - 1, lambda: ROWS(B) // 2, lambda: 2 * ROWS(B // 2)],
)
def test_other_indices_are_looked_up_as_they_are(rows):
    x, i = random_array((B, N, M)), np.random.default_rng(0).integers(0, N, (B, K))

    def fn(x, i):
        return x[rows()[:, None], i[: len(rows())]]

    check(fn, x, i.astype(np.int32), inputs=BATCH, exact=True)


def test_a_lookup_that_is_the_same_in_every_row_of_a_batch():
    """The learned positions of a BART: known places of the table, broadcast over the batch."""

    def f(table, x):
        places = jnp.broadcast_to(jnp.arange(6) + 2, (16, 6))
        return gshard.split(x, 0, 8) + table.at[places].get(mode="promise_in_bounds")

    table = jax.random.normal(jax.random.key(0), (12, 4))
    x = jnp.ones((16, 6, 4))
    lowered = gshard.jit(f).lower(table, x)
    assert not list(lowered.collectives)
    np.testing.assert_array_equal(lowered.compile()(table, x), x + table[2:8])


# --------------------------------------------------------------- indices that are a few runs


def periodic(x):
    i = jnp.arange(len(x))
    return x[(i + 1) % len(x)] - 2 * x + x[i - 1]


def clipped(x):
    i = jnp.arange(len(x))
    return jnp.take(x, i + 1, axis=0, mode="clip") + x[jnp.maximum(i - 1, 0)]


def in_a_loop(x):
    right = (jnp.arange(len(x)) + 1) % len(x)
    return lax.fori_loop(0, 3, lambda _, x: x + 0.1 * x[right], x)


def updated(x):
    i = (jnp.arange(len(x)) + 1) % len(x)
    return x.at[i].add(x)


@pytest.mark.parametrize(
    ("fn", "rows"),
    [
        (periodic, 2),
        (clipped, 2),
        (in_a_loop, 3),
        (updated, 1),
        (jax.grad(lambda x: (periodic(x) ** 3).sum()), 4),
        (jax.grad(lambda x: (clipped(x) ** 3).sum()), 4),
    ],
)
@pytest.mark.parametrize("size", [64, 61])
def test_neighbours_by_index_are_borders(fn, rows, size):
    """As slices and rolls are; XLA gathers all rows."""
    x = random_array((size, 5))
    low = check(fn, x, inputs=[even_split(2, 0, 8)], rtol=1e-4, atol=1e-4)
    ends = 0 if size % 8 == 0 else 2 * rows  # rows that go around, by themselves
    assert sent(low) <= (rows + ends) * x[:1].nbytes, low.collectives


def both_dims(x):
    i, j = ((np.arange(n) + 1) % n for n in x.shape)
    return x[i[:, None], j[None]] + x[jnp.meshgrid(*map(jnp.arange, x.shape), indexing="ij")[0], j]


def test_neighbours_in_two_dims_at_once():
    """A corner is a row, too: windows are as many as there are runs in both dims."""
    x = random_array((64, 24))
    low = check(both_dims, x, inputs=[even_split(2, 0, 8)], exact=True)
    assert sent(low) <= x[:1].nbytes, low.collectives


def test_numbers_are_held_once():
    """An index of many rows and columns is as many numbers as it has rows."""

    def fn(x):
        rows = jnp.arange(4096)[:, None] * 2 + 1 - jnp.zeros((1, 4096), jnp.int32)
        return rows, lax.rem(rows + 3, 8192), rows + x

    jaxpr = jax.make_jaxpr(fn)(3).jaxpr
    some, wrapped, none = (known_numbers(a, Graph.of(jaxpr)) for a in jaxpr.outvars)
    assert some.strides[1] == wrapped.strides[1] == 0
    assert (some[5, 7], wrapped[4095, 0], none) == (11, 2, None)


@st.composite
def indices(draw):
    """The numbers of some rows of 24, in at most ten runs."""
    found = []
    for _ in range(draw(st.integers(1, 10))):
        step, count = draw(st.sampled_from([1, 1, 1, -1, 2, 0, -3])), draw(st.integers(1, 8))
        start = draw(st.integers(0, 23))
        found += [start + step * k for k in range(count) if 0 <= start + step * k < 24]
    return np.array(found[:40] + found[:1])


@given(indices(), st.sampled_from(["get", "set", "add", "max", "multiply", "grad"]))
def test_any_runs_of_indices(index, kind):
    x, y = random_array((24, 3)), random_array((len(index), 3))
    if kind == "set":  # which of several updates of a row is the last is nobody's promise
        index = np.unique(index)[::-1]
        y = y[: len(index)]

    def fn(x):
        i = jnp.asarray(index)
        if kind == "get":
            return x[i]
        if kind == "grad":
            return jax.grad(lambda x: (x[i] ** 3).sum())(x)
        return getattr(x.at[i], kind)(y)

    check(fn, x, inputs=[even_split(2, 0, 8)], rtol=1e-4, atol=1e-4)


@given(
    st.permutations(range(3)),
    st.lists(st.sampled_from([None, (0, 9, 1), (8, None, -1), (1, 8, 3)]), min_size=3, max_size=3),
    st.sampled_from(["get", "set", "add", "grad"]),
    st.integers(0, 2),
)
@example([1, 0, 2], [(0, 9, 1), (8, None, -1), None], "get", 0)
@example([2, 1, 0], [(1, 8, 3), None, (0, 9, 1)], "set", 1)
def test_indices_in_any_order(order, runs, kind, dim):
    """`x[j[None], i[:, None]]` has the rows of `x` as columns."""
    x = random_array((9, 9, 9))
    index = tuple(
        slice(None)
        if run is None
        else np.expand_dims(np.arange(9)[slice(*run)], [*({0, 1, 2} - {d})])
        for d, run in zip(order, runs, strict=True)
    )
    y = random_array(np.asarray(x)[index].shape)

    def fn(x):
        if kind == "get":
            return x[index]
        if kind == "grad":
            return jax.grad(lambda x: jnp.sum(x[index] ** 2 * y))(x)
        return getattr(x.at[index], kind)(y)

    check(fn, x, inputs=[even_split(3, dim, 8)], rtol=1e-5)


def test_windows_that_are_a_part_of_another_dim_are_updated_as_they_are():
    """A dim of which the updates have one row, though no index is for it: its first."""
    x, rows = random_array((24, 3, 5)), (jnp.arange(24) + 1) % 24
    numbers = lax.ScatterDimensionNumbers((1,), (0, 1), (0,))

    def fn(x, y):
        i = (jnp.arange(24) + 1) % 24
        return lax.scatter_add(x, i[:, None], y, numbers)

    y = random_array((24, 5))
    check(fn, x, y, inputs=[even_split(3, 0, 8)])
    np.testing.assert_allclose(jax.jit(fn)(x, y)[rows, 0], x[rows, 0] + y, rtol=1e-6)
