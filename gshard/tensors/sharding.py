"""`Sharding`: which device holds which tile of a tensor (appendix "General Sharding API").

A `Split` divides one dim into equal tiles and says which tile each device holds. A `Sharding` is
one `Split` (or None) per dim, so that the splits of two tensors combine dim by dim, like the
letters of an einsum; `Sharding.devices` is the paper's device assignment.

A dim that does not divide is rounded up: every tile has `ceil(size / tiles)` rows, the last tiles
may be partly or entirely padding, whose contents are garbage. The tiles of a `Ragged` split have
as many rows as their experts got, up to a capacity.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gshard.graph.caching import cached


@dataclass(frozen=True)
class Ragged:
    """Rows sorted by group, split where groups end: the sizes of the groups are data.

    `number` tells the lists of sizes of a program apart. A tile has room for `capacity` rows; those
    after its own are garbage.
    """

    number: int
    capacity: int


@dataclass(frozen=True, eq=False)
class Split:
    """One dim in `tiles` tiles: device d holds tile `coords[d]`, or none where that is -1.

    The tiles are equal, or `ragged`. Interned by `Split.of`, so that equality is identity:
    shardings of 2048 devices hash at once.
    """

    tiles: int
    coords: np.ndarray
    ragged: Ragged | None = None

    @staticmethod
    def of(coords: Sequence[int] | np.ndarray) -> Split | None:
        """The split in which device d holds tile `coords[d]`; None if that is a single tile."""
        array = np.ascontiguousarray(coords, dtype=np.int32)
        return _intern(array.tobytes())

    @functools.cache  # noqa: B019  (splits are interned and live forever)
    def ragged_by(self, ragged: Ragged) -> Split:
        """The same tiles on the same devices, with other numbers of rows."""
        return Split(self.tiles, self.coords, ragged)

    @functools.cached_property
    def even(self) -> Split:
        """The same tiles with equal numbers of rows."""
        split = Split.of(self.coords) if self.ragged else self
        assert split
        return split

    def rows(self, size: int) -> int:
        """The rows of a tile of a dim of `size` rows, padding included."""
        return self.ragged.capacity if self.ragged else -(-size // self.tiles)

    @functools.cached_property
    def own(self) -> np.ndarray:
        """For every device the tile that it holds; 0 where it holds none."""
        return np.maximum(self.coords, 0)

    @functools.cached_property
    def idle(self) -> bool:
        """Whether some devices hold no tile."""
        return bool((self.coords < 0).any())

    @cached
    def major(self, tiles: int) -> Split | None:
        """This split coarsened to `tiles` tiles, a divisor of its own count."""
        return Split.of(np.where(self.coords < 0, -1, self.coords // (self.tiles // tiles)))

    @cached
    def minor(self, tiles: int) -> Split | None:
        """Which of `tiles` equal parts of its coarse tile a device holds: what `major` forgets."""
        return Split.of(np.where(self.coords < 0, -1, self.coords % tiles))

    def times(self, minor: Split) -> Split:
        """Each tile of this split divided further by `minor`."""
        coords = np.where(self.coords < 0, -1, self.coords * minor.tiles + minor.coords)
        split = Split.of(coords)
        assert split is not None
        return split

    def __repr__(self) -> str:
        ragged = f", {self.ragged}" if self.ragged else ""
        return f"Split({self.tiles}, {_ids(self.coords)}{ragged})"

    def __reduce__(self) -> Any:  # interned where it is unpickled, too
        if self.ragged:
            return Split.ragged_by, (self.even, self.ragged)
        return Split.of, (self.coords,)


@cached
def divisors(n: int) -> list[int]:
    """The divisors of a tile count, the count itself last."""
    return [k for k in range(1, n + 1) if n % k == 0]


def towards(split: Split | None, wanted: Split | None) -> list[Split]:
    """The refinements of `split` that `wanted` refines in turn, and itself; coarse ones first."""
    now = split.tiles if split else 1
    if wanted is None or wanted.tiles % now or wanted.major(now) is not split:
        return []
    finer = (wanted.major(k) for k in divisors(wanted.tiles) if k > now and k % now == 0)
    return [each for each in finer if each]


@functools.cache
def _intern(raw: bytes) -> Split | None:
    coords = np.frombuffer(raw, dtype=np.int32)
    coords.flags.writeable = False
    tiles = int(coords.max(initial=0)) + 1
    return Split(tiles, coords) if tiles > 1 else None


@dataclass(frozen=True, repr=False, eq=False, init=False)
class Sharding:
    """The splits of a tensor's dims, over `num_devices` devices; None for an unsplit dim.

    Devices with equal coordinates in every dim hold copies of one tile (partial replication). In a
    `manual` region every device has a value of its own, and the shape is the local one. A value
    that is `unreduced` over some splits is the sum (or another reduction) of what the devices hold
    that differ in their parts of these splits. Interned like its splits: equality is identity, and
    derived properties are computed once.
    """

    splits: tuple[Split | None, ...]
    num_devices: int
    manual: bool = False
    unreduced: tuple[Split, ...] = ()

    def __new__(
        cls,
        splits: tuple[Split | None, ...],
        num_devices: int,
        manual: bool = False,
        unreduced: tuple[Split, ...] = (),
    ) -> Sharding:
        """The one sharding with these splits."""
        key = (splits, num_devices, manual, unreduced)
        found = _shardings.get(key)
        if found is None:
            found = object.__new__(cls)
            found.__dict__.update(splits=splits, num_devices=num_devices)
            found.__dict__.update(manual=manual, unreduced=unreduced)
            found = _shardings.setdefault(key, found)
        return found

    def __reduce__(self) -> Any:
        return Sharding, (self.splits, self.num_devices, self.manual, self.unreduced)

    @staticmethod
    def replicated(rank: int, num_devices: int) -> Sharding:
        """Every device holds the entire tensor."""
        return Sharding((None,) * rank, num_devices)

    @staticmethod
    def of_assignment(assignment: np.ndarray, num_devices: int) -> Sharding:
        """The paper's device assignment: `assignment[tile]` is the device that holds that tile.

        Devices that it omits hold copies if that works out evenly, by shifting the
        assignment: `[[0], [4]]` of 8 puts the first tile on 0 to 3 and the second on 4 to 7, and
        `[0, 1]` of 8 alternates. Otherwise they hold nothing.
        """
        assignment = np.asarray(assignment)
        held = _with_copies(assignment.ravel(), num_devices)
        tile_of = np.full(num_devices, -1)
        tile_of[held.ravel()] = np.tile(np.arange(assignment.size), held.shape[0])
        splits = []
        for dim, tiles in enumerate(assignment.shape):
            stride = math.prod(assignment.shape[dim + 1 :])
            coords = np.where(tile_of < 0, -1, tile_of // stride % tiles)
            splits.append(Split.of(coords) if tiles > 1 else None)
        return Sharding(tuple(splits), num_devices)

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.splits)

    @functools.cached_property
    def tiles(self) -> tuple[int, ...]:
        """The number of tiles along each dim."""
        return tuple(s.tiles if s else 1 for s in self.splits)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the entire tensor."""
        return not any(self.splits) and not self.manual and not self.unreduced

    @functools.cached_property
    def is_tiling(self) -> bool:
        """Whether devices hold equal tiles of the value itself: it is not manual, and reduced."""
        return not self.manual and not self.unreduced and self.ragged is None

    @functools.cached_property
    def ragged(self) -> int | None:
        """The dim whose tiles have as many rows as data say, if there is one."""
        return next((d for d, s in enumerate(self.splits) if s and s.ragged), None)

    @functools.cached_property
    def idle(self) -> bool:
        """Whether some devices hold nothing."""
        return any(s.idle for s in self.splits if s)

    @functools.cached_property
    def tile_index(self) -> np.ndarray:
        """The row-major number of the tile on each device; -1 where a device holds nothing."""
        index = np.zeros(self.num_devices, np.int64)
        for split in self.splits:
            if split:
                index = np.where(split.coords < 0, -1, index * split.tiles + split.coords)
        return index

    @functools.cached_property
    def devices(self) -> np.ndarray:
        """The paper's device assignment, `tiles` in shape, with a last dim for the copies."""
        order = np.argsort(self.tile_index, kind="stable")
        holding = order[self.tile_index[order] >= 0]
        return holding.reshape(*self.tiles, -1)

    @property
    def replicas(self) -> int:
        """How many devices hold each tile."""
        return self.devices.shape[-1]

    @property
    def copies(self) -> list[list[int]]:
        """The devices that hold copies of one tile, for every tile."""
        found: list[list[int]] = self.devices.reshape(-1, self.replicas).tolist()
        return found

    @property
    def first_copies(self) -> np.ndarray:
        """Which devices hold the first copy of a tile."""
        first = np.zeros(self.num_devices, bool)
        first[self.devices[..., 0].ravel()] = True
        return first

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tile on a device, padding included."""
        local = _local_shape(tuple(shape), self.tiles)
        if self.ragged is None:
            return local
        split = self.splits[self.ragged]
        assert split
        return (*local[: self.ragged], split.rows(shape[self.ragged]), *local[self.ragged + 1 :])

    def padded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The logical shape rounded up to whole tiles."""
        return tuple(l * t for l, t in zip(self.local_shape(shape), self.tiles, strict=True))

    def is_even(self, shape: Sequence[int]) -> bool:
        """Whether there is no padding in any tile."""
        return self.padded_shape(shape) == tuple(shape)

    @functools.cached_property
    def even(self) -> Sharding:
        """The same tiles, with equal numbers of rows where they are ragged."""
        return Sharding(tuple(s and s.even for s in self.splits), self.num_devices)

    @functools.cached_property
    def reduced(self) -> Sharding:
        """This sharding once the value is reduced."""
        return Sharding(self.splits, self.num_devices, self.manual) if self.unreduced else self

    def unreduced_over(self, splits: Iterable[Split]) -> Sharding:
        """The same tiles, of which each device has reduced only its own part of `splits`."""
        return Sharding(self.splits, self.num_devices, self.manual, tuple(splits))

    def project(self, dims: Iterable[int | None]) -> Sharding:
        """The sharding of a tensor whose i-th dim is split like dim `dims[i]` (None: unsplit)."""
        splits = tuple(None if d is None else self.splits[d] for d in dims)
        return Sharding(splits, self.num_devices)

    def replace(self, dim: int, split: Split | None) -> Sharding:
        """This sharding with another split on `dim`."""
        return Sharding((*self.splits[:dim], split, *self.splits[dim + 1 :]), self.num_devices)

    def unsplit(self, dims: Iterable[int]) -> Sharding:
        """This sharding without the splits of `dims`."""
        gone = set(dims)
        return self.project(None if d in gone else d for d in range(self.rank))

    def extended(self, dims: int) -> Sharding:
        """The sharding of a tensor with this many more dims at the end, unsplit."""
        return Sharding((*self.splits, *(None,) * dims), self.num_devices)

    def __str__(self) -> str:
        if self.manual:
            return "manual"
        if self.unreduced:
            over = math.prod(s.tiles for s in self.unreduced)
            return f"unreduced over {over}, {self.reduced}"
        if self.is_replicated:
            return "replicated"
        dims = " x ".join(
            f"dim {d} by {s.tiles}{' ragged' if s.ragged else ''}"
            for d, s in enumerate(self.splits)
            if s
        )
        copies = f", {self.replicas} copies" if self.replicas > 1 else ""
        flat = self.devices.ravel()
        order = "" if (flat == np.arange(flat.size)).all() else f", devices {_ids(flat)}"
        return f"split {dims}{copies}{order}"

    __repr__ = __str__


Shardings = Sequence[Sharding]  # of operands
Targets = Sequence[Sharding]  # that results are wanted under
_shardings: dict[Any, Sharding] = {}


@cached
def _local_shape(shape: tuple[int, ...], tiles: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-n // t) for n, t in zip(shape, tiles, strict=True))


@cached
def compatible(splits: tuple[Split | None, ...]) -> bool:
    """Whether one tensor can have these splits: every tile is held by equally many devices."""
    present = [s for s in splits if s]
    if len(present) < 2:
        return not present or _balanced(present[0].coords, present[0].tiles)
    index = np.zeros(len(present[0].coords), np.int64)
    for split in present:
        if ((split.coords < 0) != (present[0].coords < 0)).any():
            return False
        index = index * split.tiles + split.coords
    return _balanced(
        np.where(present[0].coords < 0, -1, index), math.prod(s.tiles for s in present)
    )


@cached
def fitting_part(others: tuple[Split | None, ...], split: Split) -> Split | None:
    """The split, or the finest coarser one, that is compatible with others; else None."""
    if split.ragged:
        return split if compatible((*others, split)) else None
    for tiles in range(split.tiles, 1, -1):
        part = split.major(tiles) if split.tiles % tiles == 0 else None
        if part and compatible((*others, part)):
            return part
    return None


def _balanced(index: np.ndarray, tiles: int) -> bool:
    holding = index[index >= 0]
    if holding.size % tiles:
        return False
    counts = np.bincount(holding, minlength=tiles)
    return bool((counts == counts[0]).all())


def _with_copies(devices: np.ndarray, num_devices: int) -> np.ndarray:
    """`devices`, then shifted rows of it that together use every device once, if there are any."""
    if num_devices % devices.size or num_devices == devices.size:
        return devices[None]
    rows, used = [devices], set(devices.tolist())
    for free in range(num_devices):
        if free in used:
            continue
        row = devices + (free - devices.min())
        if row.max() >= num_devices or used & set(row.tolist()):
            rest = np.setdiff1d(np.arange(num_devices), devices)
            return np.concatenate([devices[None], rest.reshape(-1, devices.size)])
        rows.append(row)
        used |= set(row.tolist())
    return np.stack(rows)


def _ids(ids: np.ndarray) -> str:
    """Device ids, the middle left out of a long list."""
    shown = ids.tolist()
    return str(shown) if len(shown) <= 16 else f"[{shown[0]}, {shown[1]}, ..., {shown[-1]}]"
