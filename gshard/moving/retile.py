"""Tiles of another size along a split dim: rows shift between neighbours, or are cut off or padded.

A sharding prescribes the size of its tiles. Before or after a step of a reshard they may have
another one; what it takes to even them out is a part of what the step sends.
"""

from __future__ import annotations

import math

import jax
from jax import lax

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving.halo import Halo
from gshard.moving.nodes import communicate
from gshard.moving.row_windows import plan_windows, retiling
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

Shape = tuple[int, ...]


def retile(place: Place, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
    """`tile` with tiles of `size` rows along `dim`: a node of the plan, if rows have to move."""
    if tile.array.shape[dim] == size or tile.sharding.splits[dim] is None:
        return retiled(place, tile, dim, size, reason)
    array = communicate(_evening_out(tile, dim, size, reason), tile.array, place)
    return Tile(array, tile.sharding, tile.shape)


def retiled(place: Place, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
    """`tile` with tiles of `size` rows along `dim`."""
    if tile.array.shape[dim] == size:
        return tile
    if tile.sharding.splits[dim] is None:
        return Tile(_resize(tile.array, dim, size), tile.sharding, tile.shape)
    array = _evening_out(tile, dim, size, reason).run(place, tile.array)
    return Tile(array, tile.sharding, tile.shape)


def standardized(place: Place, tile: Tile, reason: Reason) -> Tile:
    """`tile` with the local shape that its sharding prescribes."""
    for dim, size in enumerate(tile.sharding.local_shape(tile.shape)):
        tile = retiled(place, tile, dim, size, reason)
    return tile


def _evening_out(tile: Tile, dim: int, size: int, reason: Reason) -> Halo:
    """The halo that leaves tiles of `size` rows."""
    windows = retiling(tile.sharding.tiles[dim], tile.array.shape[dim], size, tile.shape[dim])
    return Halo(reason.then(f"even out tiles of dim {dim}"), tile.sharding, dim, windows)


def _resize(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Slice or pad a dim at its end."""
    if size < x.shape[dim]:
        return lax.slice_in_dim(x, 0, size, axis=dim)
    return padding.pad_end(x, dim, size)


@cached
def retile_elements(sharding: Sharding, local: Shape, dim: int, size: int, shape: Shape) -> int:
    """Elements that a device sends to have tiles of `size` rows along `dim`."""
    if local[dim] == size or sharding.splits[dim] is None:
        return 0
    windows = retiling(sharding.tiles[dim], local[dim], size, shape[dim])
    others = math.prod(n for d, n in enumerate(local) if d != dim)
    return plan_windows(windows).sent * others


def standard_elements(
    sharding: Sharding, local: Shape, shape: Shape, wanted: Shape | None = None
) -> int:
    """Elements that a device sends to give its tile the size that the sharding prescribes.

    Or, if given, the `wanted` one.
    """
    wanted = sharding.local_shape(shape) if wanted is None else wanted
    sent = 0
    for dim, size in enumerate(wanted if local != wanted else ()):
        sent += retile_elements(sharding, local, dim, size, shape)
        local = (*local[:dim], size, *local[dim + 1 :])
    return sent
