"""Data formatting (section 3.3.3): operators that change which rows a dim has, or their order.

Every such operator works dim by dim. Along a dim that is split, the rows of the result are not on
the devices that hold them in the operand, and have to be realigned: only those move, by halo
exchange or by rounds of CollectivePermutes. Dims that stay as they are cost nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import split_p, tile_p
from gshard.devices import Place
from gshard.factors import Factors
from gshard.moving import reshard
from gshard.moving.halo import fetch, fetch_rows, window
from gshard.moving.rows import Runs, align, collect, plan
from gshard.rule import Context, Doc, Rule, register
from gshard.sharding import Sharding, Split, compatible
from gshard.tile import Tile, itemsize_of


class Change(ABC):
    """What an operator does to one dim."""

    @abstractmethod
    def result(self, size: int) -> int:
        """The rows that come of `size` rows."""

    @abstractmethod
    def sent(self, size: int, tiles: int) -> int:
        """How many rows a device sends if the dim is in `tiles` tiles before and after."""

    @abstractmethod
    def run(
        self, place: Place, tile: Tile, dim: int, split: Split | None, reason: str
    ) -> jax.Array:
        """The local rows of the result, split by `split`; the operand is split alike or whole."""

    collectable = False  # whether `collected` may send less than a gather of the operand

    def collected(self, place: Place, tile: Tile, dim: int, reason: str) -> jax.Array:
        """The whole result on every device."""
        whole = reshard.reshard(place, tile, tile.sharding.replace(dim, None), reason)
        return self.run(place, whole, dim, None, reason)


@dataclass(frozen=True)
class Slice(Change):
    """Rows `start` to `limit`, every `stride`-th: thinned out before they travel."""

    start: int
    limit: int
    stride: int = 1
    collectable = True

    def result(self, size: int) -> int:
        """The rows that are left."""
        return max(0, -(-(self.limit - self.start) // self.stride))

    def sent(self, size: int, tiles: int) -> int:
        """Rows at the borders of the tiles, or every row of a result that is spread out."""
        rows = -(-self.result(size) // tiles)
        starts = np.arange(tiles) * rows
        if self.stride == 1:
            return fetch_rows(tiles, size, starts + self.start, rows, (self.start, self.limit))
        moved = plan(self.runs(tiles, -(-size // tiles), size), starts, rows)
        assert moved
        return moved.sent

    def run(
        self, place: Place, tile: Tile, dim: int, split: Split | None, reason: str
    ) -> jax.Array:
        """Thin out, then align."""
        if split is None:
            return lax.slice_in_dim(tile.array, self.start, self.limit, self.stride, dim)
        size = tile.shape[dim]
        rows = -(-self.result(size) // split.tiles)
        starts = np.arange(split.tiles) * rows
        if tile.sharding.splits[dim] is None or self.stride == 1:
            starts = self.start + starts * self.stride
            width = max(0, (rows - 1) * self.stride + 1)
            needed = (self.start, self.limit)
            x = rows_of(place, tile, dim, split, starts, width, reason, needed)
            return lax.slice_in_dim(x, 0, width, self.stride, dim)
        held, x = self.thinned(place, tile, dim)
        return align(place, x, tile.sharding, dim, held, starts, rows, reason)

    def runs(self, tiles: int, rows: int, size: int) -> Runs:
        """The rows of the result that each tile holds after thinning out."""
        border = np.minimum(np.arange(tiles + 1) * rows, size)
        index = np.clip(-((self.start - border) // self.stride), 0, self.result(size))
        return Runs(index[:-1], index[1:], np.zeros(tiles, np.int64))

    def thinned(self, place: Place, tile: Tile, dim: int) -> tuple[Runs, jax.Array]:
        """Only the rows that the result has, at the start of the local array."""
        split, rows, size = tile.sharding.splits[dim], tile.array.shape[dim], tile.shape[dim]
        assert split
        held = self.runs(split.tiles, rows, size)
        count = -(-rows // self.stride)
        first = self.start + held.low * self.stride - np.arange(split.tiles) * rows
        first = np.clip(first, 0, rows)[np.maximum(split.coords, 0)]
        x = window(place, tile.array, dim, first, (count - 1) * self.stride + 1)
        return held, lax.slice_in_dim(x, 0, None, self.stride, dim)

    def collected(self, place: Place, tile: Tile, dim: int, reason: str) -> jax.Array:
        """The whole result on every device."""
        held, x = self.thinned(place, tile, dim)
        size = self.result(tile.shape[dim])
        return collect(place, x, tile.sharding, dim, held, size, reason)


@dataclass(frozen=True)
class Pad(Change):
    """`low` and `high` rows around (or, if negative, fewer), `interior` between any two.

    The operand's rows travel before the padding is put between them.
    """

    low: int
    high: int
    interior: int
    value: jax.Array | None = None

    def result(self, size: int) -> int:
        """The rows with the padding."""
        return max(0, self.low + self.high + size + max(0, size - 1) * self.interior)

    def sent(self, size: int, tiles: int) -> int:
        """The operand's rows that a tile of the result has, and the operand's tile has not."""
        rows = -(-self.result(size) // tiles)
        first, count = self._needed(tiles, rows)
        return fetch_rows(tiles, size, first, count)

    def run(
        self, place: Place, tile: Tile, dim: int, split: Split | None, reason: str
    ) -> jax.Array:
        """Fetch, put the rows apart, cut to size, and write the padding."""
        value, size, step = self.value, tile.shape[dim], self.interior + 1
        assert value is not None
        if split is None:
            pads = [
                (self.low, self.high, self.interior) if d == dim else (0, 0, 0)
                for d in range(tile.array.ndim)
            ]
            return lax.pad(tile.array, value, pads)
        rows = -(-self.result(size) // split.tiles)
        mine = np.maximum(split.coords, 0)
        first, count = self._needed(split.tiles, rows)
        x = rows_of(place, tile, dim, split, first, count, reason)
        if self.interior:
            pads = [(0, 0, self.interior * (d == dim)) for d in range(x.ndim)]
            x = lax.pad(x, value, pads)
        ahead = first * step + self.low - np.arange(split.tiles) * rows
        x = window(place, x, dim, -ahead[mine], rows)
        at = place.lookup((np.arange(split.tiles) * rows - self.low)[mine])
        index = lax.broadcasted_iota(jnp.int32, x.shape, dim) + at
        inside = (index >= 0) & (index <= (size - 1) * step)
        if self.interior:
            inside &= index % step == 0
        return lax.select(inside, x, jnp.broadcast_to(value, x.shape))

    def _needed(self, tiles: int, rows: int) -> tuple[np.ndarray, int]:
        """The first operand row in each tile of the result, and how many there are at most."""
        step = self.interior + 1
        return -((self.low - np.arange(tiles) * rows) // step), -(-rows // step)


@dataclass(frozen=True)
class Reverse(Change):
    """The last row first: tiles change places, and shift where the last one was not full."""

    def result(self, size: int) -> int:
        """As many rows as before."""
        return size

    def sent(self, size: int, tiles: int) -> int:
        """One tile."""
        rows = -(-size // tiles)
        moved = plan(self._runs(tiles, rows, size), np.arange(tiles) * rows, rows)
        assert moved
        return moved.sent

    def run(
        self, place: Place, tile: Tile, dim: int, split: Split | None, reason: str
    ) -> jax.Array:
        """Reverse within the tile, then align."""
        size = tile.shape[dim]
        if split is None:
            return lax.rev(tile.array, (dim,))
        rows = -(-size // split.tiles)
        starts = np.arange(split.tiles) * rows
        if tile.sharding.splits[dim] is None:
            x = rows_of(place, tile, dim, split, size - starts - rows, rows, reason)
            return lax.rev(x, (dim,))
        held = self._runs(split.tiles, rows, size)
        x = lax.rev(tile.array, (dim,))
        return align(place, x, tile.sharding, dim, held, starts, rows, reason)

    def _runs(self, tiles: int, rows: int, size: int) -> Runs:
        high = size - np.arange(tiles) * rows
        return Runs.clipped(high - rows, high, size)


@dataclass(frozen=True)
class Repeat(Change):
    """All rows `times` over."""

    times: int

    def result(self, size: int) -> int:
        """Times as many rows."""
        return size * self.times

    def sent(self, size: int, tiles: int) -> int:
        """The rows of the operand that a device has not, if it needs them all."""
        rows = -(-self.result(size) // tiles)
        if self.times >= tiles:
            return -(-size // tiles) * (tiles - 1)
        moved = plan(
            Runs.even(tiles, -(-size // tiles), size),
            np.arange(tiles) * rows,
            rows,
            self._moves(size),
        )
        assert moved
        return moved.sent

    def run(
        self, place: Place, tile: Tile, dim: int, split: Split | None, reason: str
    ) -> jax.Array:
        """Align with every copy; where a tile needs the whole operand, gather that."""
        size, here = tile.shape[dim], tile.sharding.splits[dim]
        reps = [self.times if d == dim else 1 for d in range(tile.array.ndim)]
        if split is None:
            return jnp.tile(tile.array, reps)
        rows = -(-self.result(size) // split.tiles)
        starts = np.arange(split.tiles) * rows
        if here and self.times < split.tiles:
            held = Runs.of(tile, dim)
            moves = self._moves(size)
            return align(place, tile.array, tile.sharding, dim, held, starts, rows, reason, moves)
        if here:
            tile = reshard.reshard(place, tile, tile.sharding.replace(dim, None), reason)
        reps[dim] = -(-rows // size) + 1
        copies = jnp.tile(tile.array, reps)
        return window(place, copies, dim, (starts % size)[np.maximum(split.coords, 0)], rows)

    def _moves(self, size: int) -> list[tuple[int, int, int]]:
        return [(0, size, i * size) for i in range(self.times)]


def rows_of(
    place: Place,
    tile: Tile,
    dim: int,
    split: Split,
    starts: np.ndarray,
    width: int,
    reason: str,
    only: tuple[int, int] | None = None,
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + width` for tile c of `split`; free if the dim is whole."""
    if tile.sharding.splits[dim] is split:
        return fetch(place, tile, dim, starts, width, reason, only)
    return window(place, tile.array, dim, starts[np.maximum(split.coords, 0)], width)


def change_dims(
    ctx: Context, tile: Tile, changes: Mapping[int, Change], target: Sharding, name: str
) -> Tile:
    """`tile` with some of its dims changed, in the way that sends the fewest bytes.

    Either the operand keeps its splits, or it takes the result's, or the dims that change are
    gathered. A whole dim is cut as the result wants it, which is free. A slice may be collected
    from its holders into every device.
    """
    shape = list(tile.shape)
    for dim, change in changes.items():
        shape[dim] = change.result(shape[dim])
    if 0 in shape:
        return Tile(jnp.zeros(target.local_shape(shape), tile.array.dtype), target, tuple(shape))
    source, result = min(
        _candidates(tile.sharding, changes, target),
        key=lambda way: _cost(tile, changes, shape, way[0], way[1], target),
    )
    tile = ctx.reshard(tile, source, f"operand of {name}")
    order = sorted(changes, key=lambda d: shape[d] / tile.shape[d])  # the smaller, the earlier
    for dim in order:
        reason = f"{name}: rows of dim {dim} between tiles"
        change, split = changes[dim], result.splits[dim]
        if split is None and tile.sharding.splits[dim]:
            array = change.collected(ctx.place, tile, dim, reason)
        else:
            array = change.run(ctx.place, tile, dim, split, reason)
        after = (*tile.shape[:dim], shape[dim], *tile.shape[dim + 1 :])
        tile = Tile(array, tile.sharding.replace(dim, split), after)
    return tile


def _candidates(
    here: Sharding, changes: Mapping[int, Change], target: Sharding
) -> list[tuple[Sharding, Sharding]]:
    """Shardings for operand and result between which the dims can change."""
    whole = here
    for dim in changes:
        whole = whole.replace(dim, None)
    found = []
    for source in (here, whole, target):
        for dim in range(here.rank):
            if dim not in changes:
                source = filled(source, dim, target)
        result = source
        for dim in changes:
            result = filled(result, dim, target)
        found.append((source, result))
        for dim, change in changes.items():
            split = source.splits[dim]
            if split and not target.splits[dim] and change.collectable and not split.idle:
                result = result.replace(dim, None)
        found.append((source, result))
    return list(dict.fromkeys(found))


def filled(sharding: Sharding, dim: int, target: Sharding) -> Sharding:
    """`sharding`, with the target's split on a dim that is whole, if that fits in."""
    if sharding.splits[dim] or not target.splits[dim]:
        return sharding
    more = sharding.replace(dim, target.splits[dim])
    return more if compatible(more.splits) else sharding


def _cost(
    tile: Tile,
    changes: Mapping[int, Change],
    shape: Sequence[int],
    source: Sharding,
    result: Sharding,
    target: Sharding,
) -> float:
    dtype = tile.array.dtype
    total = reshard.cost(tile.sharding, source, tile.shape, dtype)
    now = list(source.local_shape(tile.shape))
    after = result.local_shape(shape)
    for dim in sorted(changes, key=lambda d: shape[d] / tile.shape[d]):
        row = math.prod(n for d, n in enumerate(now) if d != dim) * itemsize_of(dtype)
        split = source.splits[dim]
        if split and result.splits[dim]:
            total += changes[dim].sent(tile.shape[dim], split.tiles) * row
        elif split:
            total += 2 * shape[dim] * row * (split.tiles - 1) // split.tiles
        now[dim] = after[dim]
    return total + reshard.cost(result, target, tuple(shape), dtype)


def changed_dims(eqn: JaxprEqn) -> Factors:
    """Every dim passes its splits on, if it changes, to a dim that has a row for every tile."""
    shape = eqn.invars[0].aval.shape
    names = [f"d{i}" for i in range(len(shape))]
    resized = [
        name
        for i, name in enumerate(names)
        if any(v.aval.shape[i] != shape[i] for v in eqn.outvars)
    ]
    operands = [names, *([] for _ in eqn.invars[1:])]
    return Factors.of(eqn, operands, [names] * len(eqn.outvars), resized=resized)


def _slice(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    (tile,) = tiles
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    changes = {
        d: Slice(int(a), int(b), int(s))
        for d, (a, b, s) in enumerate(zip(starts, limits, strides, strict=True))
        if (a, b) != (0, tile.shape[d]) or s != 1
    }
    return [change_dims(ctx, tile, changes, targets[0], "slice")]


def _split(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    (tile,) = tiles
    dim = eqn.params["axis"]
    ends = np.cumsum(eqn.params["sizes"]).tolist()
    return [
        change_dims(ctx, tile, {dim: Slice(end - int(size), end)}, target, "split")
        for size, end, target in zip(eqn.params["sizes"], ends, targets, strict=True)
    ]


def _pad(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    tile, value = tiles
    shape = tuple(eqn.outvars[0].aval.shape)
    if 0 in tile.shape:
        full = jnp.broadcast_to(value.array, targets[0].local_shape(shape))
        return [Tile(full, targets[0], shape)]
    changes = {
        d: Pad(int(low), int(high), int(interior), value.array)
        for d, (low, high, interior) in enumerate(eqn.params["padding_config"])
        if low or high or interior
    }
    return [change_dims(ctx, tile, changes, targets[0], "pad")]


def _rev(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    changes = {d: Reverse() for d in eqn.params["dimensions"]}
    return [change_dims(ctx, tiles[0], changes, targets[0], "rev")]


def _tile(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    changes = {d: Repeat(int(n)) for d, n in enumerate(eqn.params["reps"]) if n != 1}
    return [change_dims(ctx, tiles[0], changes, targets[0], "tile")]


_CUT = Doc(
    free="dims that stay as they are",
    halo="others: the rows that change tiles",
    gather="few rows to all devices: AllReduce of them; to many tiles: ReduceScatter of them",
)
register(Rule(changed_dims, partition=_slice, doc=_CUT), p.slice_p)
register(Rule(changed_dims, partition=_split, doc=_CUT), split_p)
_MOVED = Doc(free="dims that stay as they are", halo="others: the rows that change tiles")
register(Rule(changed_dims, partition=_pad, doc=_MOVED), p.pad_p)
register(Rule(changed_dims, partition=_rev, doc=_MOVED), p.rev_p)
_REPEATED = Doc(
    free="dims that stay as they are",
    halo="others: the rows that a tile of the result has",
    gather="as many copies as tiles: AllGather, every device needs all rows",
)
register(Rule(changed_dims, partition=_tile, doc=_REPEATED), tile_p)
