"""Specs of tensors on a mesh."""

import numpy as np

from gshard.autosharding.cost import mesh_shapes, sharding_of, specs_of


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
