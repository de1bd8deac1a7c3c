"""Slices and updates at run-time offsets that rotate tiles: at every offset."""

import jax
import numpy as np
import pytest
from jax import lax

import gshard
from tests.oracle import annotated, assert_same, even_split, kinds, random_array

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
