"""Specs of tensors on a mesh, and the copies of an exchange between two of them."""

import numpy as np
import pytest

from gshard.autosharding.cost import mesh_shapes, sharding_of, specs_of, transposes


@pytest.mark.parametrize(
    ("dims", "here", "there", "expected"),
    [
        (None, 0, 1, 1),  # transposed before it is sent; tiles of dim 0 arrive one after the other
        (None, 1, 0, 1),
        (None, 1, 2, 2),
        ((1, 0, 2), 0, 1, 0),  # dim 1 comes first where it is written, and dim 0 where it is read
        ((1, 0, 2), 1, 0, 1),
        ((0, 2, 1), 1, 2, 1),
        (None, 0, -1, 0),  # nothing is exchanged
        (None, 1, 1, 0),
    ],
)
def test_copies_of_an_exchange(dims, here, there, expected):
    assert transposes((16, 16, 16), dims, (here,), (there,), (8,)) == expected


def test_dims_with_one_row_need_no_copies():
    assert transposes((8, 16, 16), None, (0,), (1,), (8,)) == 0
    assert transposes((8, 16, 16), None, (0,), (1,), (4,)) == 1


def test_two_axes_between_the_same_dims_are_one_exchange():
    assert transposes((16, 16, 16), None, (0, 0), (1, 1), (2, 4)) == 1
    assert transposes((16, 16, 16), None, (0, 0), (1, 2), (2, 4)) == 0


def test_meshes():
    assert mesh_shapes(6) == [(2, 3), (3, 2), (6,)]
    assert mesh_shapes(8, 3) == [(2, 2, 2), (2, 4), (4, 2), (8,)]
    assert mesh_shapes(1) == [(1,)]


def test_specs_are_shardings():
    for spec in specs_of((4, 6), (2, 3)):
        sharding = sharding_of(spec, 2, (2, 3))
        for dim in range(2):
            tiles = int(np.prod([n for n, d in zip((2, 3), spec, strict=True) if d == dim]))
            assert sharding.tiles[dim] == tiles
