"""What a program costs on a mesh. Here: how tensors can be sharded over a mesh.

A spec has for each mesh axis the dim that it cuts, or none.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

from gshard.tensors.sharding import Sharding, Split

MeshShape = tuple[int, ...]
Spec = tuple[int, ...]  # one entry per mesh axis: a dim, or NONE
NONE = -1


def mesh_shapes(devices: int, most_axes: int = 2) -> list[MeshShape]:
    """All ways to write a number of devices as a product, in order, of at most so many factors."""
    found: list[MeshShape] = []

    def extend(left: int, chosen: MeshShape) -> None:
        if left == 1 and chosen:
            found.append(chosen)
        if len(chosen) < most_axes:
            for factor in range(2, left + 1):
                if left % factor == 0:
                    extend(left // factor, (*chosen, factor))

    extend(devices, ())
    return found or [(1,)]


@functools.cache
def specs_of(shape: tuple[int, ...], mesh: MeshShape) -> tuple[Spec, ...]:
    """The specs of a tensor in which every tile of a dim has at least one row."""
    choices = itertools.product((NONE, *range(len(shape))), repeat=len(mesh))
    return tuple(s for s in choices if _has_rows(shape, s, mesh))


def _has_rows(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> bool:
    return all(
        size >= tiles for size, tiles in zip(shape, tiles_of(spec, mesh, len(shape)), strict=True)
    )


def tiles_of(spec: Spec, mesh: MeshShape, rank: int) -> tuple[int, ...]:
    """The number of tiles along each dim."""
    tiles = [1] * rank
    for dim, size in zip(spec, mesh, strict=True):
        if dim != NONE:
            tiles[dim] *= size
    return tuple(tiles)


def local_elements(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> int:
    """The elements of a tile, padding included."""
    tiles = tiles_of(spec, mesh, len(shape))
    return math.prod(-(-n // t) for n, t in zip(shape, tiles, strict=True))


def sharding_of(spec: Spec, rank: int, mesh: MeshShape) -> Sharding:
    """The sharding over devices that are numbered row by row in the mesh."""
    devices = math.prod(mesh)
    coordinates = np.unravel_index(np.arange(devices), mesh)
    splits: list[Split | None] = []
    for dim in range(rank):
        index = np.zeros(devices, dtype=np.int64)
        for axis, at in enumerate(spec):
            if at == dim:
                index = index * mesh[axis] + coordinates[axis]
        splits.append(Split.of(index))
    return Sharding(tuple(splits), devices)
