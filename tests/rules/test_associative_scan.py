"""`lax.associative_scan` over a split dim: a carry a tile, whatever the recursion looks like."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import annotated, assignments, check, even_split, kinds, random_array, sent


def recurrence(axis=0, reverse=False):
    """h = a * h + u, and its gradients."""

    def combine(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    def states(a, u):
        return lax.associative_scan(combine, (a, u), reverse, axis)[1]

    def total(a, u):
        return ((h := states(a, u)) ** 2).sum(), h

    def with_gradients(a, u):
        return jax.grad(total, (0, 1), has_aux=True)(a, u)

    return states, with_gradients


def inputs(shape):
    return np.tanh(random_array(shape, seed=1)), random_array(shape, seed=2)


def test_carries_are_gathered_and_the_last_row_is_sent_once():
    """On every level of the recursion the last row of a tile is the same."""
    states, with_gradients = recurrence()
    rows, args = [even_split(2, 0, 8)] * 2, inputs((64, 3))
    low = check(states, *args, inputs=rows, outputs=rows[:1], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_gather": 2, "collective_permute": 1}
    assert sent(low) == 2 * 7 * 12 + 12  # of both tensors; and a row
    low = check(with_gradients, *args, inputs=rows, rtol=1e-3, atol=1e-3)
    assert sent(low) == 3 * 7 * 12 + 2 * 12, low.collectives


def test_its_gradient_sends_as_much_for_any_number_of_rows_a_tile():
    """The products that belong to the row before a tile are added up, and sent once."""
    split = even_split(2, 0, 8)
    fn = gshard.jit(annotated(recurrence()[1], [split] * 2), devices=8)
    low = fn.lower(*[jax.ShapeDtypeStruct((1024, 16), np.float32)] * 2)
    assert sent(low) == 3 * 7 * 64 + 2 * 64, low.collectives


@pytest.mark.slow
@settings(max_examples=8)
@given(st.sampled_from([8, 16, 21, 64, 72]), st.sampled_from([2, 3, 8]), st.data(), st.booleans())
def test_any_rows_and_devices(rows, devices, data, reverse):
    axis = data.draw(st.integers(0, 1))
    shape = (rows, 3) if axis == 0 else (3, rows)
    split = data.draw(assignments(2, devices))
    _, with_gradients = recurrence(axis, reverse)
    check(with_gradients, *inputs(shape), devices=devices, inputs=[split] * 2, rtol=1e-2, atol=1e-2)
