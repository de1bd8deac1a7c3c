"""Arrays and the tiles of all devices: one into the other, and compared."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from gshard.checking.exact.number import Exact, Value, chosen, joined, moved, plain, poison, spread
from gshard.checking.exact.sums import summed_in
from gshard.moving.partial import reducing_groups
from gshard.tensors.sharding import Sharding


class Tiling:
    """Where the tiles of an array of `shape` are."""

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]):
        self.sharding, self.shape = sharding, shape
        self.is_split = any(sharding.splits)

    @functools.cached_property
    def _rows(self) -> list[np.ndarray]:
        """The rows of each dim that the devices hold; what is beyond the last is padding."""
        found = []
        local = self.sharding.local_shape(self.shape)
        for dim, (split, size) in enumerate(zip(self.sharding.splits, local, strict=True)):
            numbers = np.maximum(split.coords, 0) * size if split else np.zeros(1, np.int64)
            rows = numbers[:, None] + np.arange(size)
            places = [size if d == dim else 1 for d in range(len(local))]
            found.append(rows.reshape(len(numbers), *places))
        return found

    @functools.cached_property
    def real(self) -> np.ndarray:
        """Which elements of the tiles are no padding; with devices and dims, or to be broadcast."""
        found = np.ones((1, *(1,) * len(self.shape)), bool)
        for dim, rows in enumerate(self._rows):
            found = found & (rows < self.shape[dim])
        for split in filter(None, self.sharding.splits):
            if split.idle:
                found = found & (split.coords >= 0).reshape(-1, *(1,) * len(self.shape))
        return found

    @property
    def _index(self) -> tuple[np.ndarray, ...]:
        return tuple(np.minimum(r, n - 1) for r, n in zip(self._rows, self.shape, strict=True))

    def cut(self, value: Value) -> Value:
        """The tiles of all devices; their padding is poisoned."""
        if not self.is_split:
            return value
        if 0 in self.shape:
            local = self.sharding.local_shape(self.shape)
            count, rest = self.sharding.num_devices, len(self.shape) + 1
            return moved(lambda a: np.zeros((count, *local, *a.shape[rest:]), a.dtype), value)
        tiles = moved(lambda a: a[0][self._index], value)
        if self.real.all():
            return tiles
        garbage = poison(plain(tiles).shape, plain(tiles).dtype)
        if isinstance(tiles, (Exact, np.ndarray)):
            return chosen(self.real, tiles, garbage)
        return tiles

    def assembled(self, tiles: Value) -> Value:
        """The array, of the first copy of every tile."""
        first = np.unique(self.sharding.tile_index, return_index=True)[1]
        first = first[self.sharding.tile_index[first] >= 0]
        tiles = moved(lambda a: a[first], spread(tiles, self.sharding.num_devices))
        own = [r if len(r) == 1 else r[first] for r in self._rows]
        real = self.real if len(self.real) == 1 else self.real[first]
        full = np.broadcast_shapes(real.shape, (len(first), *(1,) * len(self.shape)))
        local = tuple(r.shape[1 + d] for d, r in enumerate(own))
        real = np.broadcast_to(real, (full[0], *local))
        index = tuple(np.broadcast_to(r, real.shape)[real] for r in own)

        def put(one: Any) -> np.ndarray:
            (a,) = one
            out = np.zeros((1, *self.shape, *a.shape[1 + len(self.shape) :]), a.dtype)
            out[(0, *index)] = a[real]
            return out

        return joined(put, [tiles])

    def reduced(self, tiles: Value) -> tuple[Value, np.ndarray]:
        """What devices have of a partial sum, added up, and the devices that have it."""
        count = self.sharding.num_devices
        if not self.sharding.unreduced:
            return tiles, np.arange(count)
        groups = reducing_groups(self.sharding)
        return summed_in(groups, spread(tiles, count)), np.asarray([group[0] for group in groups])

    def position(self, device: int, at: tuple[int, ...]) -> tuple[int, ...]:
        """The index in the array of an element of a device's tile."""
        inside = zip(self._rows, at, strict=False)
        rows = [r.reshape(len(r), -1)[device if len(r) > 1 else 0, n] for r, n in inside]
        return tuple(map(int, rows)) + tuple(map(int, at[len(rows) :]))
