"""Slices and updates at run-time offsets that rotate tiles: at every offset."""

import jax
import numpy as np
import pytest
from jax import lax

import gshard
from tests.oracle import annotated, assert_same, check, even_split, kinds, random_array, sent

ROWS = [even_split(2, 0, 8)]


def at_every_start(fn, size, rows, *args):
    """One program for all of them; those beyond the last are moved back, as JAX does."""
    step = gshard.jit(annotated(fn, ROWS * len(args), ROWS))
    for start in range(-1, size - rows + 2):
        assert_same(step(*args, np.int32(start)), jax.jit(fn)(*args, np.int32(start)), exact=True)
    assert kinds(step.lower(*args, np.int32(0))).keys() == {"collective_permute"}


@pytest.mark.parametrize("rows", [30, 28, 20])  # by rows alone, by a tile, by up to three tiles
def test_a_slice_of_most_rows(rows):
    x = random_array((32, 2))
    at_every_start(lambda x, i: lax.dynamic_slice_in_dim(x, i, rows, 0), 32, rows, x)


@pytest.mark.parametrize("rows", [30, 28])
def test_an_update_of_most_rows(rows):
    x, u = random_array((32, 2)), random_array((rows, 2), seed=1)
    at_every_start(lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 0), 32, rows, x, u)


@pytest.mark.parametrize("start", [0, 3])
def test_a_window_up_to_the_last_row_of_a_replicated_operand(start):
    """The result's tiles are cut from it, those of the last devices beyond its end."""
    lowered = check(
        lambda x, i: lax.dynamic_slice_in_dim(x, i, 13, 0),
        random_array((16, 3)),
        np.int32(start),
        inputs=[np.arange(1).reshape(1, 1)],
        outputs=[even_split(2, 0, 8)],
        exact=True,
    )
    assert sent(lowered) == 0
