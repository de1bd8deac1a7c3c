"""Whole arrays and the tiles of all devices: one into the other, on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.moving.partial import reducing_groups
from gshard.moving.seen import Held
from gshard.tensors.keys import is_key
from gshard.tensors.sharding import Sharding
from gshard.tensors.uneven import UnevenArray, stack

Place = tuple[slice, ...]  # where in the whole array a tile belongs


def plain(value: Any) -> np.ndarray:
    """An array of NumPy's; random keys are the integers that they are made of."""
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)


def logical(value: Any) -> Any:
    """An argument as one array on the host, whatever devices hold it; keys stay keys."""
    if isinstance(value, UnevenArray):
        value = value.logical()
    return value if is_key(value) else np.asarray(value)


def cut(value: Any, sharding: Sharding, shape: tuple[int, ...]) -> list[Any]:
    """The tile of every device; devices that hold none repeat the first tile."""
    count = sharding.num_devices
    if 0 in shape:
        return [np.zeros(sharding.local_shape(shape), value.dtype)] * count
    if not any(sharding.splits):
        return [value] * count
    stacked = stack(value, sharding)
    size = stacked.shape[0] // count
    return [stacked[d * size : (d + 1) * size] for d in range(count)]


def place_of(held: Held, device: int, local: Sequence[int]) -> Place | None:
    """Where a device's tile of the shape `local` belongs; None for a device that holds nothing.

    What is beyond the tile's real rows is padding.
    """
    found = []
    for split, size, whole in zip(held.sharding.splits, local, held.shape, strict=False):
        number = int(split.coords[device]) if split else 0
        if number < 0:
            return None
        start = min(number * size, whole)
        found.append(slice(start, min(start + size, whole)))
    return tuple(found)


def real(tile: np.ndarray, place: Place) -> np.ndarray:
    """A tile without its padding."""
    return tile[tuple(slice(0, s.stop - s.start) for s in place)]


def summed(tiles: Sequence[Any], held: Held) -> dict[int, np.ndarray]:
    """The tile of every device that holds one; of a partial sum, of the first of its group.

    Floats are summed in 64 bits, so that this adds no error of its own.
    """
    arrays = {d: plain(t) for d, t in enumerate(tiles) if t is not None}
    if not held.sharding.unreduced:
        return arrays
    found = {}
    for group in reducing_groups(held.sharding):
        parts = [wide(arrays[d]) for d in group]
        found[group[0]] = np.sum(parts, axis=0) if len(parts) > 1 else parts[0]
    return found


def wide(array: np.ndarray) -> np.ndarray:
    """Floats in 64 bits; anything else as it is."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return array.astype(np.complex128)
    return array.astype(np.float64) if jnp.issubdtype(array.dtype, jnp.floating) else array


def assembled(tiles: Sequence[Any], held: Held) -> np.ndarray:
    """The whole array, of the first copy of every tile; a sum is of the type of its parts."""
    dtype = next(plain(t).dtype for t in tiles if t is not None)
    known = summed(tiles, held)
    first = next(iter(known.values()))
    more = first.shape[len(held.shape) :]
    out = np.zeros((*held.shape, *more), dtype)
    if not math.prod(out.shape):
        return out
    done = set()
    for device, tile in known.items():
        number = int(held.sharding.tile_index[device])
        place = place_of(held, device, tile.shape)
        if place is not None and number not in done:
            done.add(number)
            out[place] = real(tile, place).astype(dtype)
    return out
