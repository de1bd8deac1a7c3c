"""Reshape between any splits: factors are free, uneven and mixed dims pass elements by permutes."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.oracle import (
    DEVICE_COUNTS,
    assignments,
    check,
    check_grad,
    even_split,
    kinds,
    random_array,
    sent,
)

SHAPES = [
    [(6, 4), (8, 3), (24,), (2, 12), (3, 8), (4, 3, 2), (1, 24), (2, 3, 1, 4)],
    [(13, 4), (52,), (4, 13), (26, 2), (2, 26)],
    [(5, 7, 2), (7, 10), (70,), (10, 7), (14, 5), (35, 2)],
    [(9, 4, 5), (6, 30), (10, 18), (180,), (4, 45), (3, 3, 20)],
    [(0, 3), (3, 0), (0,), (2, 0, 5)],
    [(1,), (1, 1), ()],
]


@st.composite
def reshapes(draw):
    shapes = draw(st.sampled_from(SHAPES))
    before, after = draw(st.sampled_from(shapes)), draw(st.sampled_from(shapes))
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    inputs = [draw(assignments(len(before), devices))]
    outputs = [draw(assignments(len(after), devices))]
    return before, after, {"devices": devices, "inputs": inputs, "outputs": outputs}


def any_reshape(case):
    before, after, how = case
    x = random_array(before)
    check(lambda x: x.reshape(after), x, exact=True, **how)
    check_grad(lambda x: x.reshape(after), x, **how)


def test_any_reshape():
    given(reshapes())(any_reshape)()


def test_a_dim_of_size_1_that_grows_is_not_split():
    def fn(x):
        return lax.broadcast_in_dim(x, (8, 5), (0, 1))

    for rows in (1, 8):
        low = check(fn, random_array((rows, 5)), outputs=[even_split(2, 0, 8)], exact=True)
        assert kinds(low) == {}


@pytest.mark.parametrize("dim", [0, 1])
def test_bits_of_an_element_stay_on_one_device(dim):
    def fn(x):
        return lax.bitcast_convert_type(x, jnp.uint8)

    x, where = random_array((8,)), even_split(2, dim, 4)
    check(fn, x, devices=4, inputs=[even_split(1, 0, 4)], outputs=[where], exact=True)
    wide = np.arange(32, dtype=np.uint8).reshape(8, 4)
    check(lambda x: lax.bitcast_convert_type(x, jnp.uint32), wide, devices=4, inputs=[where])


@pytest.mark.slow
def test_many_reshapes():
    settings(max_examples=300)(given(reshapes())(any_reshape))()


def by_permutes(before, after, devices, elements):
    """A reshape whose first dims are split; permutes of so many elements at most."""
    lowered = check(
        lambda x: x.reshape(after),
        random_array(before),
        exact=True,
        devices=devices,
        inputs=[even_split(len(before), 0, devices)],
        outputs=[even_split(len(after), 0, devices)],
    )
    assert set(kinds(lowered)) <= {"collective_permute"}, lowered.collectives
    assert sent(lowered) <= 4 * elements, lowered.collectives


def test_the_papers_example():
    by_permutes((3, 2), (6,), 2, 2)
    by_permutes((6,), (3, 2), 2, 2)


@pytest.mark.parametrize(
    ("before", "after", "devices", "elements"),
    [
        ((12, 5), (3, 20), 3, 0),
        ((13, 4), (52,), 8, 7),
        ((52,), (13, 4), 8, 7),
        ((6, 4), (8, 3), 2, 0),
        ((6, 4), (8, 3), 3, 6),
        ((30, 7), (35, 6), 5, 0),
        ((64, 9), (18, 32), 8, 5 * 32),
        ((16, 3, 5), (15, 4, 4), 4, 4 * 16),
    ],
)
def test_only_elements_that_change_tiles_move(before, after, devices, elements):
    by_permutes(before, after, devices, elements)


def test_splits_travel_through_mixed_dims():
    lowered = check(
        lambda x: jnp.tanh(x.reshape(18, 32)), random_array((64, 9)), inputs=[even_split(2, 0, 8)]
    )
    assert lowered.out_shardings.tiles == (8, 1)
    assert set(kinds(lowered)) == {"collective_permute"}


def test_new_dims_of_size_one_cost_nothing():
    x, s = random_array((13, 4)), [even_split(2, 0, 8)]
    for fn in (lambda x: lax.expand_dims(x, (0, 2)), lambda x: x[:, None][:, 0], lambda x: x[None]):
        assert kinds(check(fn, x, exact=True, inputs=s)) == {}


def test_a_reshape_that_changes_no_tile():
    """The local array is a tile of both tensors, and neither is recomputed from itself."""
    rows = even_split(2, 0, 2)
    how = {"devices": 2, "inputs": [rows], "outputs": [rows]}
    check(lambda x: x.reshape(1, -1)[:, :13], random_array((2, 7)), exact=True, **how)
    check_grad(lambda x: x.reshape(1, -1)[:, :13], random_array((2, 7)), **how)


def test_copies_and_precision_are_free():
    x, s = random_array((13, 4)), [even_split(2, 0, 8)]
    for fn in (jnp.copy, lambda x: lax.reduce_precision(x, 5, 10)):
        assert kinds(check(fn, x, exact=True, inputs=s)) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((6, 4, 15, 4), (8, 3, 10, 6)),  # two groups of dims that mix
        ((6, 4, 15, 1), (8, 3, 3, 5)),  # beside one whose tiles become uneven
    ],
)
def test_dims_that_mix_comparison_that_are_split(before, after):
    lowered = check(
        lambda x: x.reshape(after),
        random_array(before),
        exact=True,
        inputs=[np.arange(4).reshape(2, 1, 2, 1)],
        outputs=[np.arange(4).reshape(2, 1, 2, 1)],
        devices=4,
    )
    assert kinds(lowered).keys() == {"collective_permute"}, lowered.collectives


def test_the_dim_that_a_bitcast_adds_is_not_split():
    x = random_array((8, 4))
    lowered = check(
        lambda x: lax.bitcast_convert_type(x, jnp.uint8),
        x,
        exact=True,
        inputs=[even_split(2, 0, 8)],
        outputs=[even_split(3, 2, 4)],
    )
    assert sent(lowered) > 0


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_bytes_of_a_number_are_not_split(dim):
    x = random_array((8, 4, 4), jnp.uint8)

    def fn(x):
        wide = lax.bitcast_convert_type(x, jnp.uint32)
        return wide, lax.bitcast_convert_type(wide + 1, jnp.uint8)

    where = even_split(3, dim, 4)
    check(fn, x, devices=4, inputs=[where], outputs=[None, where], exact=True)
