"""Rows of one dim that become rows of a result: fetched by its tiles, or collected by all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer
from gshard.moving.fetch import Along, fetch
from gshard.moving.halo import align, collect, window
from gshard.moving.row_windows import Move, Runs, Windows, are_apart, plan_fetch, plan_windows
from gshard.rules.base.rule import Context
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Split
from gshard.tensors.tile import Tile


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
        stride, local = abs(self.axis.stride), -(-size // tiles)
        if stride == 1:
            return plan_fetch(tiles, size, *self.read(tiles), [Move(*self.only, 0)]).sent
        held = self._held(tiles, local, size)
        return plan_windows(Windows.of(held, -(-local // stride), *self._needed(tiles))).sent

    def read(self, tiles: int) -> tuple[np.ndarray, np.ndarray]:
        """The source's rows that each tile of the result needs: the first, and how many."""
        (starts, counts), stride = self._needed(tiles), abs(self.axis.stride)
        return self.only[0] + starts * stride, np.maximum((counts - 1) * stride + 1, 0)

    def run(self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason) -> Array:
        """Fetch rows, and spread them."""
        assert split
        place, (starts, counts) = ctx.place, self.read(split.tiles)
        if tile.sharding.splits[dim] is None or abs(self.axis.stride) == 1:
            along = Along(dim, starts, counts, (Move(*self.only, 0),), split)
            x = fetch(place, tile, reason, along)
            return self.placed(place, x, dim, split, starts)
        held, x = self._thinned(place, tile, dim)
        windows = Windows.of(held, x.shape[dim], *self._needed(split.tiles))
        return self._spread(place, align(place, x, tile.sharding, dim, windows, reason), dim, split)

    def placed(self, place: Place, x: Array, dim: int, split: Split, low: np.ndarray) -> Array:
        """Such rows in their places, of the source's rows from `low` on in each tile."""
        starts, counts = self.read(split.tiles)
        some = (low <= starts) & (starts < low + x.shape[dim])  # or its tile reads none of them
        first = np.where(some, starts - low, 0)
        x = window(place, x, dim, first[split.own], int(counts.max()))
        x = lax.slice_in_dim(x, 0, None, abs(self.axis.stride), dim)
        return self._spread(place, x, dim, split)

    def _spread(self, place: Place, x: Array, dim: int, split: Split) -> Array:
        """The rows that each tile needs, one behind the other, in their places."""
        x = lax.rev(x, (dim,)) if self.axis.stride < 0 else x
        at, rows, step = self.axis.at, self.axis.rows, self.axis.step
        if step == 1:
            return x
        starts, _ = self._needed(split.tiles)
        holes = [(0, 0, (step - 1) * (d == dim)) for d in range(x.ndim)]
        number = rows - starts - x.shape[dim] if self.axis.stride < 0 else starts  # of the first
        x = lax.pad(x, jnp.zeros((), x.dtype), holes)
        local = -(-self.size // split.tiles)
        offset = at + number * step - np.arange(split.tiles) * local
        return window(place, x, dim, -offset[split.own], local)

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> Array:
        """The rows, contributed by the devices that have them."""
        held, x = self._thinned(ctx.place, tile, dim)
        x = collect(ctx.place, x, tile.sharding, dim, held, self.axis.rows, reason)
        return lax.rev(x, (dim,)) if self.axis.stride < 0 else x

    def _needed(self, tiles: int) -> tuple[np.ndarray, np.ndarray]:
        """The first row that each tile of the result needs, and how many."""
        local, axis = -(-self.size // tiles), self.axis
        border = -(-(np.arange(tiles + 1) * local - axis.at) // axis.step)
        return axis.rows - border[1:] if axis.stride < 0 else border[:-1], np.diff(border)

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


# ---------------------------------------------------------------- rows for several row maps

Moves = tuple[Move, ...]


class Reader(NamedTuple):
    """The rows of a source that tiles of a result read, and how many are sent for them alone.

    Beyond the source's ends they are `copies` of others: as in a roll, or at a border with an edge.
    A tile that reads none has no rows, from a row on that is behind all others.
    """

    rows: AxisRows
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    copies: Moves
    sent: float


def reader(layers: Sequence[Layer], dim: int, size: int, rows: int, tiles: int) -> Reader | None:
    """Who reads layers of a source with `size` rows, for tiles of a result with `rows`.

    None if some rows are rearranged. Rows are numbered so that they are near the tiles that read
    them: at the border of a ring, those of the other end are beyond this one.
    """
    most = max(layers, key=lambda n: (n.axes[dim].rows, -abs(n.axes[dim].at - n.base[dim])))
    axis, moves, found = most.axes[dim], moves_of(layers, dim), dict[int, Reader]()
    if axis.stride < 0:
        return None
    local = -(-size // tiles)
    begins = np.arange(tiles) * local
    for turn in (0, size, -size) if moves else (0,):
        own = AxisRows(axis, most.base[dim] + turn, rows)
        copies = tuple(m._replace(by=m.by - axis.at + own.base) for m in moves)
        ends = [own.only, *((m.first + m.by, m.end + m.by) for m in copies)]
        starts, counts = own.read(tiles)
        some = (starts < max(e[1] for e in ends)) & (starts + counts > min(e[0] for e in ends))
        away = np.maximum(begins - starts, starts + counts - begins - local)[some].sum()
        starts, counts = np.where(some, starts, 2**40), np.where(some, counts, 0)
        one = Reader(own, tuple(starts.tolist()), tuple(counts.tolist()), copies, 0)
        found.setdefault(away, one)
    best = found[min(found)]
    if axis.stride > 1:
        return best._replace(sent=best.rows.sent(size, tiles))
    starts, counts = np.array(best.starts), np.array(best.counts)
    every = _with_rows([best], best.copies, size)
    return best._replace(sent=plan_fetch(tiles, size, starts, counts, every).sent)


class Together:
    """What several readers of a source have in common: rows from `low` on for each tile."""

    low = widths = np.zeros(0, np.int64)
    moves: Moves = ()
    alone = sent = 0.0

    def __init__(self, readers: Sequence[Reader], size: int):
        self.are_several, self.readers = len(readers) > 1, list[Reader]()
        for reader in sorted(dict.fromkeys(readers), key=lambda r: 0 in r.counts):
            self._join(reader, size)

    def _join(self, reader: Reader, size: int) -> None:
        """Have what one more of them reads; few rows at a border only if that sends no more."""
        joined = [*self.readers, reader]
        copies = _joined_moves([m for r in joined for m in r.copies])
        moves = _with_rows(joined, copies, size)
        starts, counts = (np.array([r[k] for r in joined]) for k in (1, 2))
        low = starts.min(axis=0) * (counts > 0).any(axis=0)
        widths = np.where(counts > 0, starts + counts - low, 0).max(axis=0)
        sent = plan_fetch(len(low), size, low, widths, moves).sent
        if are_apart(moves) and (0 not in reader.counts or sent <= self.sent + reader.sent):
            self.readers, self.low, self.widths, self.moves = joined, low, widths, moves
            self.alone, self.sent = self.alone + reader.sent, sent

    def is_less(self, several: bool) -> bool:
        """Whether fewer rows are sent at once; not more, if rows move along `several` dims."""
        return self.sent < self.alone or (several and self.sent == self.alone)


def moves_of(layers: Sequence[Layer], dim: int) -> Moves:
    """The rows of all layers of a source, if those can be fetched at once."""
    if not all(layer.axes[dim].is_run for layer in layers):
        return ()
    found = dict.fromkeys(
        Move(n.base[dim], n.base[dim] + n.axes[dim].rows, n.axes[dim].at - n.base[dim])
        for n in layers
    )
    return tuple(found) if are_apart(found) else ()


def _joined_moves(moves: Sequence[Move]) -> Moves:
    """Moves without repetitions."""
    found: list[Move] = []
    for move in sorted(moves, key=lambda m: (m.by, m.first)):
        if found and found[-1].by == move.by and move.first <= found[-1].end:
            last = found.pop()
            move = last._replace(end=max(last.end, move.end))
        found.append(move)
    return tuple(found)


def _with_rows(readers: Sequence[Reader], copies: Moves, size: int) -> Moves:
    """Copies, and rows that are read in their own places; with those between if there is room."""
    stay = [*(r.rows.only for r in readers), *(m[:2] for m in copies if not m.by)]
    moved = [m for m in copies if m.by]
    own = Move(max(min(stay)[0], 0), min(max(end for _, end in stay), size), 0)
    if not are_apart([own, *moved]):
        kept = [Move(max(a, 0), min(b, size), 0) for a, b in stay if a < size and b > 0]
        return (*_joined_moves(kept), *moved)
    return (own, *moved) if moved or own[:2] != (0, size) else ()
