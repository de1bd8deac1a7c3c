"""Alignment of rows of a split dim with the tiles of a result.

Formatting operators leave every tile with a run of the result's rows: shifted (slice, pad),
strided, or reversed. The runs then have to be aligned with the result's tiles. Usually a tile needs
rows of two or three others, and gets exactly those in as many CollectivePermutes; if many tiles
feed one, or one feeds many, a ReduceScatter of the result or a gather of the operand sends less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import MAX_ROUNDS
from gshard.moving.nodes import TensorNode, communicate
from gshard.moving.offsets import rows_at, rows_put
from gshard.moving.permute_rounds import in_rounds, is_remote
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.keys import as_integers
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

Move = tuple[int, int, int]  # the logical rows from the first to the second become rows + the third


class Piece(NamedTuple):
    """Logical rows `low` to `high` of the tile `sender`, which become rows + `by` of `receiver`."""

    receiver: int
    sender: int
    low: int
    high: int
    by: int


Rounds = Sequence[Sequence[Piece]]


@dataclass(frozen=True)
class Runs:
    """The logical rows `low[c]` to `high[c]` are the local rows from `first[c]` on of tile c."""

    low: np.ndarray
    high: np.ndarray
    first: np.ndarray

    @staticmethod
    def of(tile: Tile, dim: int) -> Runs:
        """The runs of a tensor's tiles."""
        split, rows = tile.sharding.splits[dim], tile.array.shape[dim]
        return Runs.even(split.tiles if split else 1, rows, tile.shape[dim])

    @staticmethod
    def even(tiles: int, rows: int, size: int) -> Runs:
        """Tiles of `rows` rows each, the last ones clipped at `size`."""
        return Runs.clipped(np.arange(tiles) * rows, np.arange(1, tiles + 1) * rows, size)

    @staticmethod
    def clipped(low: np.ndarray, high: np.ndarray, size: int) -> Runs:
        """Tiles whose local row 0 is the logical row `low[c]`; what exceeds the dim is garbage."""
        inside = np.clip(low, 0, size)
        return Runs(inside, np.maximum(np.clip(high, 0, size), inside), inside - low)

    def only(self, rows: tuple[int, int] | None) -> Runs:
        """The part of them within `rows`."""
        if rows is None:
            return self
        low = np.clip(self.low, *rows)
        return Runs(low, np.maximum(np.clip(self.high, *rows), low), self.first + low - self.low)


@dataclass(frozen=True)
class RowTransfer:
    """The cheapest way to align: `sent` is how many rows a device sends."""

    kind: str  # "rounds" or "scatter"
    sent: int
    steps: int = 1  # collectives
    rounds: Rounds = ()


def plan_rows(
    held: Runs, starts: np.ndarray, width: int, moves: Sequence[Move] | None = None
) -> RowTransfer | None:
    """How to send the rows `starts[c]` to `starts[c] + width` to every tile c, in a few steps."""
    options = []
    rounds = _rounds(held, starts, width, moves or [everything(held)])
    if rounds is not None:
        boxes = [_box(r) for r in rounds if is_remote(r[0])]
        options.append(RowTransfer("rounds", sum(boxes), len(boxes), rounds))
    if (np.diff(starts) == width).all():
        options.append(RowTransfer("scatter", width * (len(starts) - 1)))
    return min(options, key=lambda o: o.sent, default=None)


def everything(held: Runs) -> Move:
    """The move that leaves every row where it is."""
    some = held.low < held.high
    if not some.any():
        return 0, 0, 0
    return int(held.low[some].min()), int(held.high[some].max()), 0


def align(
    place: Place,
    x: jax.Array,
    sharding: Sharding,
    dim: int,
    held: Runs,
    starts: Sequence[int] | np.ndarray,
    width: int,
    reason: Reason,
    moves: Sequence[Move] | None = None,
) -> jax.Array:
    """The logical rows `starts[c]` to `starts[c] + width` on the holders of tile c.

    `x` is the local array, `held` says which rows it has, and `moves` which of them become which
    rows of the result (default: all stay). Rows of the result that no tile has are garbage.
    """
    node = Align(
        reason,
        sharding,
        dim,
        (tuple(held.low.tolist()), tuple(held.high.tolist()), tuple(held.first.tolist())),
        tuple(np.asarray(starts).tolist()),
        width,
        None if moves is None else tuple(moves),
    )
    return communicate(node, x, place)


@dataclass(frozen=True)
class Align(TensorNode):
    """Rows of a split dim sent to the tiles of the result: `width` rows from `starts` on."""

    name: ClassVar[str] = "align"
    dim: int
    held: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    width: int
    moves: tuple[Move, ...] | None

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The rows of this device's tile of the result."""
        return (*local[: self.dim], self.width, *local[self.dim + 1 :])

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """Rounds of permutes, or a scatter."""
        held, starts = Runs(*map(np.array, self.held)), np.array(self.starts, np.int64)
        return aligned(
            place, array, self.sharding, self.dim, held, starts, self.width, self.reason, self.moves
        )

    def __str__(self) -> str:
        return f"{self.width} rows a tile of dim {self.dim}"


def aligned(
    place: Place,
    x: jax.Array,
    sharding: Sharding,
    dim: int,
    held: Runs,
    starts: np.ndarray,
    width: int,
    reason: Reason,
    moves: Sequence[Move] | None = None,
) -> jax.Array:
    """The implementation of `Align`."""
    x, back = as_integers(x)
    split = sharding.splits[dim]
    assert split
    best = plan_rows(held, starts, width, moves)
    assert best, "windows that overlap and many rows to each: gather instead"
    if best.kind == "scatter":
        size = width * split.tiles
        spread = _spread(place, x, sharding, dim, held, int(starts[0]), size, moves)
        groups = groups_along(sharding, dim)
        return back(collectives.scatter_disjoint(place, spread, dim, groups, reason))
    return back(_exchange(place, x, sharding, dim, held, starts, width, best.rounds, reason))


def collect(
    place: Place, x: jax.Array, sharding: Sharding, dim: int, held: Runs, size: int, reason: Reason
) -> jax.Array:
    """All logical rows 0 to `size` replicated: for a few rows out of many.

    Every device contributes its rows to a sum, so the bytes are those of the result, wherever the
    rows are. A gather would be as cheap only if all tiles had equally many of them.
    """
    x, back = as_integers(x)
    spread = _spread(place, x, sharding, dim, held, 0, size)
    return back(collectives.merge_disjoint(place, spread, groups_along(sharding, dim), reason))


def groups_along(sharding: Sharding, dim: int) -> list[list[int]]:
    """Groups of devices that hold the tiles of `dim` in order, and agree in all other dims."""
    split = sharding.splits[dim]
    assert split
    devices = np.moveaxis(sharding.devices, dim, -1)
    return devices.reshape(-1, split.tiles).tolist()


def _rounds(held: Runs, starts: np.ndarray, width: int, moves: Sequence[Move]) -> Rounds | None:
    """The pieces in rounds, those of one size together, the large ones first; None if too many."""
    order = np.flatnonzero(held.low < held.high)
    order = order[np.argsort(held.low[order], kind="stable")]
    low, high = held.low[order], held.high[order]
    found: list[Piece] = []
    for move in moves:
        begin = np.searchsorted(high, np.maximum(starts - move[2], move[0]), side="right")
        end = np.searchsorted(low, np.minimum(starts + width - move[2], move[1]), side="left")
        if (end - begin).max(initial=0) > MAX_ROUNDS + 1:
            return None
        for c, start in enumerate((starts - move[2]).tolist()):
            for s in range(begin[c], end[c]):
                a = max(int(low[s]), start, move[0])
                b = min(int(high[s]), start + width, move[1])
                if a < b:
                    found.append(Piece(c, int(order[s]), a, b, move[2]))
    found.sort(key=lambda p: (p.low - p.high, abs(p.receiver - p.sender), p))
    return in_rounds(found, limit=MAX_ROUNDS)


def _box(pieces: Sequence[Piece]) -> int:
    return max(p.high - p.low for p in pieces)


def _exchange(
    place: Place,
    x: jax.Array,
    sharding: Sharding,
    dim: int,
    held: Runs,
    starts: np.ndarray,
    width: int,
    rounds: Rounds,
    reason: Reason,
) -> jax.Array:
    """Send the pieces, round by round, and write them to their rows."""
    split = sharding.splits[dim]
    assert split
    holders = np.moveaxis(sharding.devices, dim, 0).reshape(split.tiles, -1)
    mine = np.maximum(split.coords, 0)
    shape = [*x.shape[:dim], width, *x.shape[dim + 1 :]]
    margin = max(map(_box, rounds), default=0)
    buffer = padding.filled([n + 2 * margin * (d == dim) for d, n in enumerate(shape)], x.dtype)
    for pieces in rounds:
        box = _box(pieces)
        send, at = np.zeros(split.tiles, np.int64), np.zeros(split.tiles, np.int64)
        low, high = np.zeros(split.tiles, np.int64), np.zeros(split.tiles, np.int64)
        for c, s, a, b, by in pieces:
            send[s] = min(held.first[s] + a - held.low[s], x.shape[dim] - box)
            begins = held.low[s] - held.first[s] + send[s]  # the logical row that box row 0 is
            at[c] = margin + begins + by - starts[c]
            low[c], high[c] = a - begins, b - begins
        box_rows = rows_at(x, place.lookup(send[mine]), box, dim)
        if is_remote(pieces[0]):
            pairs = [
                (int(f), int(t))
                for c, s, _, _, _ in pieces
                for f, t in zip(holders[s], holders[c], strict=True)
            ]
            box_rows = collectives.collective_permute(place, box_rows, pairs, reason)
        where = place.lookup(at[mine])
        if (high - low < box).any():
            row = lax.broadcasted_iota(jnp.int32, box_rows.shape, dim)
            wanted = (row >= place.lookup(low[mine])) & (row < place.lookup(high[mine]))
            there = rows_at(buffer, where, box, dim)
            box_rows = lax.select(wanted, box_rows, there)
        buffer = rows_put(buffer, box_rows, where, dim)
    return lax.slice_in_dim(buffer, margin, margin + width, axis=dim)


def _spread(
    place: Place,
    x: jax.Array,
    sharding: Sharding,
    dim: int,
    held: Runs,
    start: int,
    size: int,
    moves: Sequence[Move] | None = None,
) -> jax.Array:
    """Rows `start` to `start + size`: this device's own rows, and zeros elsewhere."""
    split = sharding.splits[dim]
    assert split
    mine, rows = np.maximum(split.coords, 0), x.shape[dim]
    begins = held.low - held.first  # the logical row that local row 0 is
    owners = np.flatnonzero((held.low <= start) & (held.high >= start + size))
    if moves is None and len(owners) == 1:  # one tile has all rows
        first = int(start - begins[owners[0]])
        found = lax.slice_in_dim(x, first, first + size, axis=dim)
        return place.where(mine == owners[0], found)
    row = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    wide = jnp.zeros([n if d != dim else size + 2 * rows for d, n in enumerate(x.shape)], x.dtype)
    for first, end, by in moves or [everything(held)]:
        first, end = max(first, start - by), min(end, start + size - by)
        low, high = np.clip(held.low, first, end), np.clip(held.high, first, end)
        own = row >= place.lookup((low - begins)[mine])
        own &= row < place.lookup((high - begins)[mine])
        at = place.lookup(np.clip(begins + by - start + rows, 0, size + rows)[mine])
        there = rows_at(wide, at, rows, dim)
        wide = rows_put(wide, lax.select(own, x, there), at, dim)
    return lax.slice_in_dim(wide, rows, rows + size, axis=dim)
