"""Changes of one dim: slice, pad, reverse, repeat.

Along a split dim, some rows of the result belong to other tiles than in the operand. Only those are
sent, by halo exchange or by CollectivePermutes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving.halo import align, collect, window
from gshard.moving.recompute import fetch
from gshard.moving.row_windows import Move, Runs, Windows, plan_fetch, plan_windows
from gshard.rules.base.rule import Context
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Split
from gshard.tensors.tile import Tile


@dataclass(frozen=True)
class Change(ABC):
    """A change of one dim, of which the result has `rows` rows.

    `collectable` says whether `collected` may send less than a gather of the operand, `value` what
    the rows are that come from no row of the operand, if there are such.
    """

    rows: int
    collectable: bool = False
    value: Any = None

    def tiles(self, tiles: int) -> tuple[np.ndarray, int]:
        """The first row of each tile of the result, and how many rows a tile has."""
        rows = -(-self.rows // tiles)
        return np.arange(tiles) * rows, rows

    @abstractmethod
    def sent(self, size: int, tiles: int) -> int:
        """How many rows a device sends if `size` rows are in `tiles` tiles before and after."""

    @abstractmethod
    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """The local rows of the result, split by `split`; the operand is split alike or unsplit."""

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> jax.Array:
        """The whole result on every device."""
        whole = ctx.reshard(tile, tile.sharding.replace(dim, None), reason)
        return self.run(ctx, whole, dim, None, reason)


@dataclass(frozen=True)
class AffineMap(Change):
    """An affine map of rows: a slice, a pad or a reversal.

    Row j of the result is the operand's row i if `low + i * step` is `j * stride`, and `value` if
    there is none. So a slice has a stride, a pad has steps (interior padding), both may begin at
    any row, and a reversal counts back. Rows are subsampled before they are sent, and padding is
    inserted afterwards.
    """

    low: int = 0
    step: int = 1
    stride: int = 1

    def sent(self, size: int, tiles: int) -> int:
        """Rows at the borders of the tiles, or every row of a result on other devices."""
        if self.stride > 1:
            local = -(-size // tiles)
            held, rows = self._thinned_runs(tiles, local, size), -(-local // self.stride)
            return plan_windows(Windows.of(held, rows, *self.tiles(tiles))).sent
        first, count, only = self._needed(tiles)
        return plan_fetch(tiles, size, first, count, [Move(*only, 0)]).sent

    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """Fetch rows and map them; a stride comes first, where rows are sent."""
        place, size = ctx.place, tile.shape[dim]
        if split is None:
            return self._whole(tile.array, dim)
        if self.stride > 1 and tile.sharding.splits[dim]:
            held, x = self._thinned(place, tile, dim)
            windows = Windows.of(held, x.shape[dim], *self.tiles(split.tiles))
            return align(place, x, tile.sharding, dim, windows, reason)
        first, count, only = self._needed(split.tiles)
        x = fetch(place, tile, dim, first, count, reason, only, split)
        return self._mapped(place, x, dim, split, first, size)

    def _needed(self, tiles: int) -> tuple[np.ndarray, int, tuple[int, int]]:
        """The operand's first row in each tile of the result, how many there may be, and which."""
        starts, rows = self.tiles(tiles)
        count, every = (
            max(0, (n - 1) * abs(self.stride) // self.step + 1) for n in (rows, self.rows)
        )
        first = -((self.low - self._least(starts, rows)) // self.step)
        begin = -((self.low - self._least(0, self.rows)) // self.step)
        return first, count, (begin, begin + every)

    def _least(self, start: Any, rows: int) -> Any:
        """The least `j * stride` among rows of the result."""
        return start * self.stride if self.stride > 0 else (start + rows - 1) * self.stride

    def _whole(self, x: jax.Array, dim: int) -> jax.Array:
        if self.stride < 0:
            return lax.rev(x, (dim,))
        if self.value is None:
            end = (self.rows - 1) * self.stride + 1 - self.low
            return lax.slice_in_dim(x, -self.low, end, self.stride, dim)
        high = self.rows - self.low - (x.shape[dim] - 1) * self.step - 1
        pads = (self.low, high, self.step - 1)
        return lax.pad(x, self.value, [pads if d == dim else (0, 0, 0) for d in range(x.ndim)])

    def _mapped(
        self, place: Place, x: jax.Array, dim: int, split: Split, first: np.ndarray, size: int
    ) -> jax.Array:
        """A tile of the result, of the operand's rows from `first` on."""
        starts, rows = self.tiles(split.tiles)
        if self.step > 1:
            holes = [(0, 0, (self.step - 1) * (d == dim)) for d in range(x.ndim)]
            x = lax.pad(x, jnp.zeros((), x.dtype) if self.value is None else self.value, holes)
        begin = self._least(starts, rows)
        ahead = first * self.step + self.low - begin
        x = window(place, x, dim, -ahead[split.own], (rows - 1) * abs(self.stride) + 1)
        if self.stride < 0:
            x = lax.rev(x, (dim,))
        elif self.stride > 1:
            x = lax.slice_in_dim(x, 0, None, self.stride, dim)
        if self.value is None:
            return x
        offset = place.of_tile(split, begin - self.low)
        index = lax.broadcasted_iota(jnp.int32, x.shape, dim) + offset
        inside = (index >= 0) & (index <= (size - 1) * self.step)
        if self.step > 1:
            inside &= index % self.step == 0
        return lax.select(inside, x, jnp.broadcast_to(self.value, x.shape))

    def _thinned_runs(self, tiles: int, rows: int, size: int) -> Runs:
        """The rows of the result that each tile holds after subsampling."""
        border = np.minimum(np.arange(tiles + 1) * rows, size)
        index = np.clip(-((-self.low - border) // self.stride), 0, self.rows)
        return Runs(index[:-1], index[1:], np.zeros(tiles, np.int64))

    def _thinned(self, place: Place, tile: Tile, dim: int) -> tuple[Runs, jax.Array]:
        """Only the rows that the result has, at the start of the local array."""
        split, rows, size = tile.sharding.splits[dim], tile.array.shape[dim], tile.shape[dim]
        assert split
        held = self._thinned_runs(split.tiles, rows, size)
        count = -(-rows // self.stride)
        first = held.low * self.stride - self.low - np.arange(split.tiles) * rows
        first = np.clip(first, 0, rows)[split.own]
        x = window(place, tile.array, dim, first, (count - 1) * self.stride + 1)
        return held, lax.slice_in_dim(x, 0, None, self.stride, dim)

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> jax.Array:
        """The rows of a slice, contributed by the devices that have them."""
        if not self.collectable:
            return super().collected(ctx, tile, dim, reason)
        held, x = Runs.of(tile, dim).only(self._needed(1)[2]), tile.array
        held = Runs(held.low + self.low, held.high + self.low, held.first)
        if self.stride > 1:
            held, x = self._thinned(ctx.place, tile, dim)
        return collect(ctx.place, x, tile.sharding, dim, held, self.rows, reason)


def slice_rows(start: int, limit: int, stride: int = 1) -> AffineMap:
    """Rows `start` to `limit`, every `stride`-th."""
    rows = max(0, -(-(limit - start) // stride))
    return AffineMap(rows, collectable=True, low=-start, stride=stride)


def pad_rows(size: int, low: int, high: int, interior: int, value: Any) -> AffineMap:
    """`low` and `high` rows around `size` (or, if negative, fewer), `interior` between any two."""
    rows = max(0, low + high + size + max(0, size - 1) * interior)
    return AffineMap(rows, low=low, step=interior + 1, value=value)


def reverse_rows(size: int) -> AffineMap:
    """All rows, the last one first."""
    return AffineMap(size, low=1 - size, stride=-1)


@dataclass(frozen=True)
class Repeat(Change):
    """All rows, several times over."""

    def sent(self, size: int, tiles: int) -> int:
        """The rows of the operand that a device lacks, if it needs them all."""
        if self.rows >= size * tiles:
            return -(-size // tiles) * (tiles - 1)
        return plan_fetch(tiles, size, *self.tiles(tiles), self._moves(size)).sent

    def run(
        self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason
    ) -> jax.Array:
        """Align with every copy; if a tile needs the entire operand, gather that."""
        size, reps = tile.shape[dim], [1] * tile.array.ndim
        if split is None:
            reps[dim] = self.rows // size
            return jnp.tile(tile.array, reps)
        starts, rows = self.tiles(split.tiles)
        if tile.sharding.splits[dim]:
            if self.rows < size * split.tiles:
                held, moves = Runs.of(tile, dim), self._moves(size)
                windows = Windows.of(held, tile.array.shape[dim], starts, rows, moves)
                return align(ctx.place, tile.array, tile.sharding, dim, windows, reason)
            tile = ctx.reshard(tile, tile.sharding.replace(dim, None), reason)
        reps[dim] = -(-rows // size) + 1
        copies = jnp.tile(tile.array, reps)
        return window(ctx.place, copies, dim, (starts % size)[split.own], rows)

    def _moves(self, size: int) -> list[Move]:
        return [Move(0, size, at) for at in range(0, self.rows, size)]
