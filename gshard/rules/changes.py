"""Changes of one dim: slice, pad, reverse, repeat.

Along a split dim, some rows of the result belong to other tiles than in the operand. Only those are
sent, by halo exchange or by CollectivePermutes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving.halo import plan_fetch, window
from gshard.moving.recompute import fetch
from gshard.moving.rows import Runs, align, collect, plan_rows
from gshard.rules.base.rule import Context
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Split
from gshard.tensors.tile import Tile


class Change(ABC):
    """A change of one dim."""

    @abstractmethod
    def result(self, size: int) -> int:
        """The number of rows of the result, of `size` rows."""

    @abstractmethod
    def sent(self, size: int, tiles: int) -> int:
        """How many rows a device sends if the dim is in `tiles` tiles before and after."""

    @abstractmethod
    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """The local rows of the result, split by `split`; the operand is split alike or unsplit."""

    collectable = False  # whether `collected` may send less than a gather of the operand

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> jax.Array:
        """The whole result on every device."""
        whole = ctx.reshard(tile, tile.sharding.replace(dim, None), reason)
        return self.run(ctx, whole, dim, None, reason)


@dataclass(frozen=True)
class Slice(Change):
    """Rows `start` to `limit`, every `stride`-th: subsampled before they are sent."""

    start: int
    limit: int
    stride: int = 1
    collectable = True

    def result(self, size: int) -> int:
        """The rows that are left."""
        return max(0, -(-(self.limit - self.start) // self.stride))

    def sent(self, size: int, tiles: int) -> int:
        """Rows at the borders of the tiles, or every row of a result on other devices."""
        rows = -(-self.result(size) // tiles)
        starts = np.arange(tiles) * rows
        if self.stride == 1:
            return plan_fetch(tiles, size, starts + self.start, rows, (self.start, self.limit)).sent
        moved = plan_rows(self.runs(tiles, -(-size // tiles), size), starts, rows)
        assert moved
        return moved.sent

    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """Subsample, then align."""
        if split is None:
            return lax.slice_in_dim(tile.array, self.start, self.limit, self.stride, dim)
        size = tile.shape[dim]
        rows = -(-self.result(size) // split.tiles)
        starts = np.arange(split.tiles) * rows
        if tile.sharding.splits[dim] is None or self.stride == 1:
            starts = self.start + starts * self.stride
            width = max(0, (rows - 1) * self.stride + 1)
            needed = (self.start, self.limit)
            x = rows_of(ctx.place, tile, dim, split, starts, width, reason, needed)
            return lax.slice_in_dim(x, 0, width, self.stride, dim)
        held, x = self.thinned(ctx.place, tile, dim)
        return align(ctx.place, x, tile.sharding, dim, held, starts, rows, reason)

    def runs(self, tiles: int, rows: int, size: int) -> Runs:
        """The rows of the result that each tile holds after subsampling."""
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

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> jax.Array:
        """The whole result on every device."""
        if self.stride == 1:
            rows = Runs.of(tile, dim).only((self.start, self.limit))
            held, x = Runs(rows.low - self.start, rows.high - self.start, rows.first), tile.array
        else:
            held, x = self.thinned(ctx.place, tile, dim)
        size = self.result(tile.shape[dim])
        return collect(ctx.place, x, tile.sharding, dim, held, size, reason)


@dataclass(frozen=True)
class Pad(Change):
    """`low` and `high` rows around (or, if negative, fewer), `interior` between any two.

    The operand's rows are sent before the padding is inserted.
    """

    low: int
    high: int
    interior: int
    value: jax.Array | None = None

    def result(self, size: int) -> int:
        """The rows with the padding."""
        return max(0, self.low + self.high + size + max(0, size - 1) * self.interior)

    def sent(self, size: int, tiles: int) -> int:
        """The operand's rows that a tile of the result needs and the operand's tile lacks."""
        rows = -(-self.result(size) // tiles)
        first, count = self._needed(tiles, rows)
        return plan_fetch(tiles, size, first, count).sent

    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """Fetch rows, insert the interior padding, slice, and write the padding."""
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
        x = rows_of(ctx.place, tile, dim, split, first, count, reason)
        if self.interior:
            pads = [(0, 0, self.interior * (d == dim)) for d in range(x.ndim)]
            x = lax.pad(x, value, pads)
        ahead = first * step + self.low - np.arange(split.tiles) * rows
        x = window(ctx.place, x, dim, -ahead[mine], rows)
        at = ctx.place.lookup((np.arange(split.tiles) * rows - self.low)[mine])
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
    """Reversed rows: tiles change places, and shift if the last one was not full."""

    def result(self, size: int) -> int:
        """As many rows as before."""
        return size

    def sent(self, size: int, tiles: int) -> int:
        """One tile."""
        rows = -(-size // tiles)
        moved = plan_rows(self._runs(tiles, rows, size), np.arange(tiles) * rows, rows)
        assert moved
        return moved.sent

    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """Reverse within the tile, then align."""
        size = tile.shape[dim]
        if split is None:
            return lax.rev(tile.array, (dim,))
        rows = -(-size // split.tiles)
        starts = np.arange(split.tiles) * rows
        if tile.sharding.splits[dim] is None:
            x = rows_of(ctx.place, tile, dim, split, size - starts - rows, rows, reason)
            return lax.rev(x, (dim,))
        held = self._runs(split.tiles, rows, size)
        x = lax.rev(tile.array, (dim,))
        return align(ctx.place, x, tile.sharding, dim, held, starts, rows, reason)

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
        """The rows of the operand that a device lacks, if it needs them all."""
        rows = -(-self.result(size) // tiles)
        if self.times >= tiles:
            return -(-size // tiles) * (tiles - 1)
        moved = plan_rows(
            Runs.even(tiles, -(-size // tiles), size),
            np.arange(tiles) * rows,
            rows,
            self._moves(size),
        )
        assert moved
        return moved.sent

    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """Align with every copy; if a tile needs the entire operand, gather that."""
        size, here = tile.shape[dim], tile.sharding.splits[dim]
        reps = [self.times if d == dim else 1 for d in range(tile.array.ndim)]
        if split is None:
            return jnp.tile(tile.array, reps)
        rows = -(-self.result(size) // split.tiles)
        starts = np.arange(split.tiles) * rows
        if here and self.times < split.tiles:
            held = Runs.of(tile, dim)
            moves = self._moves(size)
            return align(
                ctx.place, tile.array, tile.sharding, dim, held, starts, rows, reason, moves
            )
        if here:
            tile = ctx.reshard(tile, tile.sharding.replace(dim, None), reason)
        reps[dim] = -(-rows // size) + 1
        copies = jnp.tile(tile.array, reps)
        return window(ctx.place, copies, dim, (starts % size)[np.maximum(split.coords, 0)], rows)

    def _moves(self, size: int) -> list[tuple[int, int, int]]:
        return [(0, size, i * size) for i in range(self.times)]


def rows_of(
    place: Place,
    tile: Tile,
    dim: int,
    split: Split,
    starts: np.ndarray,
    width: int,
    reason: Reason,
    only: tuple[int, int] | None = None,
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + width` for tile c of `split`; free if the dim is unsplit."""
    if tile.sharding.splits[dim] is split:
        return fetch(place, tile, dim, starts, width, reason, only)
    return window(place, tile.array, dim, starts[np.maximum(split.coords, 0)], width)
