"""Arrays and the tiles of all devices: one into the other, and compared with each other."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.checking.exact.moving import written
from gshard.checking.exact.number import (
    UNKNOWN,
    Exact,
    Value,
    at,
    beside,
    chosen,
    different,
    is_float,
    moved,
    plain,
    poison,
    spread,
)
from gshard.checking.exact.operators import summed_in
from gshard.checking.exact.pointwise import add, bits_of, minus
from gshard.moving.partial import reducing_groups
from gshard.tensors.keys import is_key
from gshard.tensors.sharding import Sharding
from gshard.tensors.uneven import UnevenArray

Place = tuple[slice, ...]  # where in the whole array a tile belongs


def logical(value: Any) -> Any:
    """An argument as one array on the host, whatever devices hold it; keys stay keys."""
    if isinstance(value, jax.ShapeDtypeStruct):
        given = f"{value.dtype}{list(value.shape)}"
        hint = "give arrays, or use prove, for which types are enough"
        raise TypeError(f"{given} is a type, and both programs run on values: {hint}")
    if isinstance(value, UnevenArray):
        value = value.logical()
    return value if is_key(value) else np.asarray(value)


class Tiling:
    """Where the tiles of an array of `shape` are."""

    def __init__(self, sharding: Sharding, shape: tuple[int, ...]):
        self.sharding, self.shape, self.count = sharding, shape, sharding.num_devices
        self.local = sharding.local_shape(shape)

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every device has a tile, and none has padding."""
        return not self.sharding.idle and self.sharding.is_even(self.shape)

    @functools.cached_property
    def real(self) -> np.ndarray:
        """Which elements of the tiles are no padding; with devices and dims, or to be broadcast."""
        found = np.ones((1,) * (1 + len(self.shape)), bool)
        for dim, split in enumerate(self.sharding.splits):
            if split and not self.is_even:
                rows = split.own[:, None] * self.local[dim] + np.arange(self.local[dim])
                there = (rows < self.shape[dim]) & (split.coords >= 0)[:, None]
                others = [1 + d for d in range(len(self.shape)) if d != dim]
                found = found & np.expand_dims(there, others)
        return found

    def cut(self, value: Value) -> Value:
        """The tiles of all devices; their padding is poisoned."""
        if not any(self.sharding.splits):
            return value
        tiles = moved(self._blocks, value)
        return tiles if self.is_even else chosen(self.real, tiles, poison(tiles.shape, tiles))

    def _blocks(self, a: np.ndarray) -> np.ndarray:
        """The tiles of an array; a view of it if each is a block of one dim, without padding."""
        rank, tiles, rest = len(self.shape), self.sharding.tiles, a.shape[1 + len(self.shape) :]
        if not self.is_even:
            ends = zip(self.sharding.padded_shape(self.shape), self.shape, strict=True)
            a = np.pad(a, [(0, 0), *((0, n - own) for n, own in ends), *((0, 0) for _ in rest)])
        pairs = [n for both in zip(tiles, self.local, strict=True) for n in both]
        a = a.reshape((*pairs, *rest))
        a = a.transpose((*range(0, 2 * rank, 2), *range(1, 2 * rank, 2), *range(2 * rank, a.ndim)))
        a = a.reshape((math.prod(tiles), *self.local, *rest))
        index = self.sharding.tile_index
        return a if np.array_equal(index, np.arange(len(a))) else a[np.maximum(index, 0)]

    def assembled(self, tiles: Value) -> Value:
        """The array, of the first copy of every tile."""
        tiles, devices = self.reduced(tiles)
        index, rank = self.sharding.tile_index[devices], len(self.shape)
        first = np.unique(index, return_index=True)[1]
        order = [n for dim in range(rank) for n in (dim, rank + dim)]

        def put(a: np.ndarray) -> np.ndarray:
            rest = a.shape[1 + rank :]
            a = a.reshape((*self.sharding.tiles, *self.local, *rest))
            a = a.transpose((*order, *range(2 * rank, a.ndim)))
            a = a.reshape((*self.sharding.padded_shape(self.shape), *rest))
            return a[tuple(map(slice, self.shape))][None]

        return moved(put, at(spread(tiles, len(devices)), first[index[first] >= 0]))

    def reduced(self, tiles: Value) -> tuple[Value, np.ndarray]:
        """What devices have of a partial sum, added up, and the devices that have it."""
        if not self.sharding.unreduced:
            return tiles, np.arange(self.count)
        groups = reducing_groups(self.sharding)
        summands = spread(tiles, self.count)
        return summed_in(groups, summands), np.asarray([group[0] for group in groups])

    def place(self, device: int) -> Place | None:
        """Where a device's tile belongs; None for a device that holds nothing."""
        numbers = [int(split.coords[device]) if split else 0 for split in self.sharding.splits]
        if any(number < 0 for number in numbers):
            return None
        each = zip(numbers, self.local, self.shape, strict=True)
        return tuple(slice(min(c * l, n), min((c + 1) * l, n)) for c, l, n in each)


# ------------------------------------------------------------------------ comparisons

_ROUNDING = 4096  # units in the last place by which floats alone are compared


@dataclass(frozen=True)
class Gap:
    """How many elements differ; the first: its device, its index, what it is and should be."""

    elements: int = 0
    first: tuple[int, tuple[int, ...], Any, Any] = (0, (), None, None)
    why: str = ""
    proved: bool = True  # equal in the field, and not within rounding
    degree: float = 1.0


def gap_between(got: Value, wanted: Value, tiling: Tiling, active: Any, dtype: Any) -> Gap:
    """What the active devices have, compared with the tiles of what it should be."""
    if 0 in tiling.shape:  # empty results are replicated
        return Gap()
    manual, count = tiling.sharding.manual, tiling.count
    here, devices = (got, np.arange(count)) if manual else tiling.reduced(got)
    there = wanted if manual else tiling.cut(wanted)
    real = np.ones((1,), bool) if manual else tiling.real
    alone = len(plain(here)) == len(plain(there)) == len(real) == 1
    if not alone:
        on = np.broadcast_to(active, (count,)).reshape(-1, *(1,) * (real.ndim - 1))
        real = (real & on)[devices]
        if len(plain(there)) > 1 and len(devices) < count:
            there = at(there, devices)
    proved, degree, why = True, 1.0, ""
    if isinstance(here, Exact) and isinstance(there, Exact):
        proved = UNKNOWN not in (here.sum_bits, there.sum_bits)
        degree = max(here.degree, there.degree)
        needed = min(there.sum_bits, bits_of(dtype)) if is_float(dtype) else 0
        if proved and here.sum_bits < needed:  # a reduction may come after the operator
            why = f"summed in {here.sum_bits} bits instead of {needed}"
        bad = different(here.one, there.one) if proved else _apart(here.f, there.f, dtype)
        if here.sum_bits != UNKNOWN == there.sum_bits:  # exact numbers have no NaN, as for log(-1)
            bad = bad & ~np.isnan(there.f)
    else:
        bad = different(plain(here), plain(there))
    if not why and not bad.any():
        return Gap(proved=proved, degree=degree)
    bad = np.broadcast_to((bad | bool(why)) & beside(real, bad), (len(devices), *bad.shape[1:]))
    rank = 1 + len(tiling.shape) if not manual else bad.ndim
    bad = bad.any(tuple(range(rank, bad.ndim)))  # of keys, and of floats that share an integer
    elements = int(np.count_nonzero(bad)) // (len(devices) if alone else 1)
    if not elements:
        return Gap(proved=proved, degree=degree)
    place = tuple(int(n) for n in np.argwhere(bad)[0])
    device = int(devices[place[0]])
    pairs = zip(tiling.place(device) or (), place[1:], strict=False)
    index = place[1:] if manual else tuple(rows.start + n for rows, n in pairs)
    values = [plain(x)[(place[0] if len(plain(x)) > 1 else 0, *place[1:])] for x in (here, there)]
    return Gap(elements, (device, index, values[0], values[1]), why, proved, degree)


def _apart(got: np.ndarray, wanted: np.ndarray, dtype: Any) -> np.ndarray:
    """Where floats differ by more than rounding in an operator of many steps."""
    unit = float(jnp.finfo(dtype).eps) / 2 if is_float(dtype) else 0.0
    size = np.abs(np.where(np.isfinite(wanted), wanted, 0.0))
    limit = _ROUNDING * unit * (size + size.max(initial=0.0))
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    return ~(same | (np.abs(got - wanted) <= limit))


def adopted(got: Value, wanted: Value, tiling: Tiling, gap: Gap) -> Value:
    """What devices have, taken to be what it should be: one array of both programs where that is
    possible. So nothing differs because something before it does."""
    sharding = tiling.sharding
    right = wanted if sharding.manual else tiling.cut(wanted)
    if not sharding.unreduced and (sharding.manual or tiling.is_even):
        return right
    if gap.proved and not gap.elements:
        return got
    if not sharding.unreduced:
        return chosen(tiling.real, right, got)
    total, first = tiling.reduced(got)
    own, right = (spread(x, tiling.count) for x in (got, right))
    missing = minus(None, at(right, first), total)
    return written(None, own, first, add(None, at(own, first), missing))
