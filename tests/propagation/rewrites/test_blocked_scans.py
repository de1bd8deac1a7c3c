"""`lax.associative_scan` over a split dim: a carry a tile, whatever the recursion looks like."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import annotated, assignments, check, even_split, kinds, random_array, sent


def recurrence(axis=0, reverse=False):
    """h = a * h + u, and its gradients."""

    def states(a, u):
        return lax.associative_scan(combine, (a, u), reverse, axis)[1]

    def total(a, u):
        return ((h := states(a, u)) ** 2).sum(), h

    def with_gradients(a, u):
        return jax.grad(total, (0, 1), has_aux=True)(a, u)

    return states, with_gradients


def inputs(shape):
    return np.tanh(random_array(shape, seed=1)), random_array(shape, seed=2)


def test_a_row_of_each_tile_is_gathered_and_one_for_the_gradients():
    """With rows that tiles do not divide, from the last one on: padding would come first."""
    _, with_gradients = recurrence(reverse=True)
    low = check(with_gradients, *inputs((21, 3)), inputs=[even_split(2, 0, 8)] * 2, rtol=1e-4)
    assert set(kinds(low)) == {"all_gather"}
    assert sent(low) == 3 * 7 * 12 + 7, low.collectives  # and which tiles have rows


def combine(left, right):
    return left[0] * right[0], right[0] * left[1] + right[1]


def one_decay_for_a_batch(a_TC, u_BTC):
    return jax.vmap(lambda u_TC: lax.associative_scan(combine, (a_TC, u_TC))[1])(u_BTC)


def both_results(a, u):
    def total(a, u):
        kept, states = lax.associative_scan(combine, (a, u))
        return (jnp.sin(states) * kept * u).sum()  # an element is read again, later

    return jax.grad(total, (0, 1))(a, u)


def smoother(gain_TNN, mean_TN, spread_TNN):
    """A Kalman smoother, backwards in time."""

    @jax.vmap
    def combine(after, before):
        (gain, mean, spread), (own, more, noise) = after, before
        return own @ gain, own @ mean + more, own @ spread @ own.T + noise

    return lax.associative_scan(combine, (gain_TNN, mean_TN, spread_TNN), reverse=True)[1:]


def rematerialized(a, u):
    states = jax.checkpoint(lambda a, u: lax.associative_scan(combine, (jnp.tanh(a), u))[1])
    return jax.grad(lambda a, u: (states(a, u) ** 3).sum(), (0, 1))(a, u)


def maxima_since(flags, values):
    def combine(left, right):
        return left[0] | right[0], jnp.where(right[0], right[1], jnp.maximum(left[1], right[1]))

    return lax.associative_scan(combine, (flags > 0, values), axis=1)[1]


SPELLINGS = {
    one_decay_for_a_batch: ([(100, 3), (5, 100, 3)], [0, 1], 12 + 5 * 12),
    both_results: ([(90, 3)] * 2, [0, 0], 4 * 12),
    smoother: ([(96, 4, 4), (96, 4), (96, 4, 4)], [0, 0, 0], 64 + 16 + 64),
    rematerialized: ([(1000, 3)] * 2, [0, 0], 2 * 12 + 3 * 12),
    maxima_since: ([(3, 77)] * 2, [1, 1], 3 + 12),
}


def test_spellings():
    """One gather of a row of each tile for every element, and for every gradient that passes."""
    for fn, (shapes, dims, row) in SPELLINGS.items():
        splits = [even_split(len(s), d, 8) for s, d in zip(shapes, dims, strict=True)]
        structs = [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]
        low = gshard.jit(annotated(fn, splits), devices=8).lower(*structs)
        assert sent(low) == 7 * row, (fn, low.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("fn", SPELLINGS)
def test_values_of_spellings(fn):
    shapes, dims, _ = SPELLINGS[fn]
    splits = [even_split(len(s), d, 8) for s, d in zip(shapes, dims, strict=True)]
    args = [0.4 * np.tanh(random_array(s, seed=n)) for n, s in enumerate(shapes)]  # it decays
    check(fn, *args, inputs=splits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([8, 16, 21, 64, 72]), st.sampled_from([2, 3, 8]), st.data(), st.booleans())
def test_any_rows_and_devices(rows, devices, data, reverse):
    axis = data.draw(st.integers(0, 1))
    shape = (rows, 3) if axis == 0 else (3, rows)
    split = data.draw(assignments(2, devices))
    _, with_gradients = recurrence(axis, reverse)
    check(with_gradients, *inputs(shape), devices=devices, inputs=[split] * 2, rtol=1e-2, atol=1e-2)


def test_what_is_written_twice():
    """One tensor is scanned twice, and so is its cotangent: each result is a variable."""

    def twice(x):
        one, other = (lax.associative_scan(jnp.add, x, reverse=True) for _ in range(2))
        return jnp.sin(one), jnp.tanh(other)

    def gradients(x):
        both = (jax.grad(lambda x: lax.associative_scan(jnp.multiply, x).sum()) for _ in range(2))
        return [gradient(x) * n for n, gradient in enumerate(both, 2)]

    for fn in (twice, gradients):
        check(fn, inputs((24, 3))[0], inputs=[even_split(2, 0, 8)], rtol=1e-4)


def test_check_compares_no_partial_sum_of_a_gradient():
    """The first of its terms has the sum of all: terms are no values of the user's any more."""

    def loss(a, u):
        a, u = (gshard.split(x, 0, 4) for x in (a, u))
        scanned = lax.associative_scan(lambda x, y: (x[0] * y[0], y[0] * x[1] + y[1]), (a, u))
        return (scanned[1] ** 2).sum()

    x = np.linspace(0.1, 0.9, 24, dtype=np.float32).reshape(12, 2)
    report = gshard.check(jax.grad(loss, (0, 1)), x, x, devices=4)
    assert report.ok, report
    assert report.exact
