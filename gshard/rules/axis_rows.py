"""Rows of one dim that become rows of a result: fetched by its tiles, or collected by all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis
from gshard.moving.fetch import fetch
from gshard.moving.halo import align, collect, window
from gshard.moving.row_windows import Move, Runs, Windows, plan_fetch, plan_windows
from gshard.rules.base.rule import Context
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Split
from gshard.tensors.tile import Tile


class RowsOfDim(Protocol):
    """The rows of a dim that become rows of a result."""

    def sent(self, size: int, tiles: int) -> float:
        """How many rows a device sends if `size` rows are in `tiles` tiles before and after."""
        ...

    def run(self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason) -> Array:
        """The rows of the result's tiles in their places; the source is split alike or unsplit."""
        ...

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> Array:
        """The rows, one behind the other, on every device."""
        ...


@dataclass(frozen=True)
class AxisRows:
    """The rows of an axis, from `base` on in the source, of a result that has `size` rows.

    They are numbered as the source has them. Rows are subsampled before they are sent, and spread
    afterwards; those between are garbage, for the caller to mask.
    """

    axis: Axis
    base: int
    size: int

    @property
    def only(self) -> tuple[int, int]:
        """The source's rows from the first to the last."""
        last = self.base + (self.axis.rows - 1) * self.axis.stride
        return min(self.base, last), max(self.base, last) + 1

    def sent(self, size: int, tiles: int) -> float:
        """Rows at the borders of the tiles, or every row of a result on other devices."""
        starts, count = self._needed(tiles)
        stride, local = abs(self.axis.stride), -(-size // tiles)
        if stride == 1:
            only = self.only
            return plan_fetch(tiles, size, starts + only[0], count, [Move(*only, 0)]).sent
        if -(-self.size // tiles) % self.axis.step:
            return math.inf  # windows that overlap
        held = self._held(tiles, local, size)
        return plan_windows(Windows.of(held, -(-local // stride), starts, count)).sent

    def run(self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason) -> Array:
        """Fetch rows, and spread them."""
        assert split
        place, (starts, count) = ctx.place, self._needed(split.tiles)
        stride, (first, end) = abs(self.axis.stride), self.only
        if stride == 1:
            only = (Move(first, end, 0),)
            x = fetch(place, tile, dim, starts + first, count, reason, only, split)
        elif tile.sharding.splits[dim] is None:
            x = lax.slice_in_dim(tile.array, first, end, stride, dim)
            x = window(place, x, dim, starts[split.own], count)
        else:
            held, x = self._thinned(place, tile, dim)
            windows = Windows.of(held, x.shape[dim], starts, count)
            x = align(place, x, tile.sharding, dim, windows, reason)
        x = lax.rev(x, (dim,)) if self.axis.stride < 0 else x
        at, rows, step = self.axis.at, self.axis.rows, self.axis.step
        if step == 1:
            return x
        holes = [(0, 0, (step - 1) * (d == dim)) for d in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), holes)
        number = rows - starts - count if self.axis.stride < 0 else starts  # of the first
        local = -(-self.size // split.tiles)
        offset = at + number * step - np.arange(split.tiles) * local
        return window(place, x, dim, -offset[split.own], local)

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> Array:
        """The rows, contributed by the devices that have them."""
        held, x = self._thinned(ctx.place, tile, dim)
        x = collect(ctx.place, x, tile.sharding, dim, held, self.axis.rows, reason)
        return lax.rev(x, (dim,)) if self.axis.stride < 0 else x

    def _needed(self, tiles: int) -> tuple[np.ndarray, int]:
        """The first row that each tile of the result needs, and how many there may be."""
        local, axis = -(-self.size // tiles), self.axis
        first = np.arange(tiles) * local - axis.at
        count = (local - 1) // axis.step + 1
        if axis.stride < 0:
            return axis.rows - 1 - (first + local - 1) // axis.step, count
        return -(-first // axis.step), count

    def _held(self, tiles: int, local: int, size: int) -> Runs:
        """The rows that tiles have, if they are at the start of their arrays."""
        border = np.minimum(np.arange(tiles + 1) * local, size) - self.only[0]
        number = np.clip(-(-border // abs(self.axis.stride)), 0, self.axis.rows)
        return Runs(number[:-1], number[1:], np.zeros(tiles, np.int64))

    def _thinned(self, place: Place, tile: Tile, dim: int) -> tuple[Runs, Array]:
        """Only these rows, at the start of the local array if there is a stride."""
        split, rows, first = tile.sharding.splits[dim], tile.array.shape[dim], self.only[0]
        assert split
        stride = abs(self.axis.stride)
        if stride == 1:
            held = Runs.of(tile, dim).only(self.only)
            return Runs(held.low - first, held.high - first, held.first), tile.array
        held, count = self._held(split.tiles, rows, tile.shape[dim]), -(-rows // stride)
        begin = np.clip(held.low * stride + first - np.arange(split.tiles) * rows, 0, rows)
        x = window(place, tile.array, dim, begin[split.own], (count - 1) * stride + 1)
        return held, lax.slice_in_dim(x, 0, None, stride, dim)
