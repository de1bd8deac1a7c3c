"""Windows of rows of a split dim, one for every tile: which rows tiles send to each other for them.

A halo (section 3.3.3) is such windows: shifted, wider, or larger on some devices than on others. So
are the tiles of a slice, of a concatenation or of reversed rows, and tiles of another size. As in
the paper, neighbours may send the maximum that any tile needs (shifts). A tile that needs rows of
two or three others gets exactly those in as many CollectivePermutes (rounds). If many tiles feed
one, or one feeds many, a ReduceScatter of the windows or a gather of the tiles sends less.
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gshard.graph.caching import cached
from gshard.moving.costs import MAX_ROUNDS, MAX_SHIFTS
from gshard.tensors.tile import Tile

Numbers = Sequence[int] | np.ndarray  # one for every tile
Widths = int | np.ndarray  # the same for every tile, or one each


class Move(NamedTuple):
    """The logical rows `first` to `end` become rows + `by`."""

    first: int
    end: int
    by: int


class RowShift(NamedTuple):
    """Logical rows `low` to `high` of the tile `sender`, which become rows + `by` of `receiver`."""

    receiver: int
    sender: int
    low: int
    high: int
    by: int


class Shift(NamedTuple):
    """Rows `skip` to `keep` of tile c + `by` go to every tile c that is `used`."""

    by: int
    skip: int
    keep: int
    used: np.ndarray


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
        low = np.arange(tiles) * rows
        return Runs(low, low + rows, np.zeros(tiles, np.int64)).only((0, size))

    def only(self, rows: tuple[int, int] | None) -> Runs:
        """The part of them within `rows`; `np.clip` would take three times as long."""
        if rows is None:
            return self
        low, high = (np.minimum(np.maximum(x, rows[0]), rows[1]) for x in (self.low, self.high))
        return Runs(low, np.maximum(high, low), self.first + low - self.low)

    @property
    def begins(self) -> np.ndarray:
        """The logical row that the local row 0 of each tile is."""
        return self.low - self.first

    @property
    def extent(self) -> tuple[int, int]:
        """The first row and the end row that any tile has."""
        some = self.low < self.high
        if not some.any():
            return 0, 0
        return int(self.low[some].min()), int(self.high[some].max())


@dataclass(frozen=True)
class Windows:
    """Rows `starts[c]` to `ends[c]` for every tile c, of `width`; other rows of these are garbage.

    Tiles of `rows` rows have the logical rows from `low` to `high`, from the local row `first` on.
    `moves` says which of them become which rows of the windows; without any, all stay.
    """

    rows: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    first: tuple[int, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    width: int
    moves: tuple[Move, ...] = ()

    @staticmethod
    def of(
        held: Runs, rows: int, starts: Numbers, widths: Widths, moves: Sequence[Move] = ()
    ) -> Windows:
        """The windows on tiles that have the runs `held`; a single move is another numbering."""
        starts, width = np.asarray(starts, np.int64), int(np.max(widths))
        if len(moves) == 1:
            (move,) = moves
            held, starts, moves = held.only(move[:2]), starts - move.by, ()
        low, high, first, begin, end = (
            tuple(x.tolist()) for x in (held.low, held.high, held.first, starts, starts + widths)
        )
        return Windows(rows, low, high, first, begin, end, width, tuple(moves))

    @property
    def held(self) -> Runs:
        """The rows that tiles have."""
        return Runs(*(np.array(x, np.int64) for x in (self.low, self.high, self.first)))

    @property
    def every_move(self) -> Sequence[Move]:
        """The moves; that of all rows to their own numbers if there are none."""
        return self.moves or [Move(*self.held.extent, 0)]

    @property
    def is_plain(self) -> bool:
        """Whether tiles are one behind the other, and rows keep their numbers."""
        return not self.moves and bool((np.diff(self.held.begins) == self.rows).all())

    @property
    def has_strays(self) -> bool:
        """Whether tiles have other rows than `held` where the rows of another tile belong."""
        begins = np.sort(self.held.begins)
        return bool(self.moves) or bool((np.diff(begins) < self.rows).any())


@dataclass(frozen=True)
class RowPlan:
    """The cheapest way to send the rows of windows: `sent` is how many rows a device sends."""

    kind: (
        str  # "shifts", "rounds", "scatter" or "gather"; "none" if many tiles feed overlapping ones
    )
    sent: int
    steps: int = 1  # collectives
    parts: Sequence[Any] = ()  # shifts, or rounds of pieces


@cached
def plan_windows(windows: Windows) -> RowPlan:
    """The way that sends the fewest rows; the first of equal ones."""
    options, tiles = list[RowPlan](), len(windows.starts)
    shifts = _shifts(windows) if windows.is_plain else None
    if shifts is not None:
        widths = [s.keep - s.skip for s in shifts if s.by]
        options.append(RowPlan("shifts", sum(widths), len(widths), shifts))
    rounds = _rounds(windows)
    if rounds is not None:
        boxes = [largest(r) for r in rounds if is_remote(r[0])]
        options.append(RowPlan("rounds", sum(boxes), len(boxes), rounds))
    if (np.diff(windows.starts) == windows.width).all():
        options.append(RowPlan("scatter", windows.width * (tiles - 1)))
    if windows.is_plain:
        options.append(RowPlan("gather", windows.rows * (tiles - 1)))
    return min(options, key=lambda o: o.sent, default=RowPlan("none", sys.maxsize))


def plan_fetch(
    tiles: int,
    size: int,
    starts: Numbers,
    widths: Widths,
    moves: Sequence[Move] = (),
    rows: int | None = None,
) -> RowPlan:
    """The plan for windows of even tiles, of `rows` rows if given."""
    rows = rows or -(-size // tiles)
    return plan_windows(Windows.of(Runs.even(tiles, rows, size), rows, starts, widths, moves))


def retiling(tiles: int, rows: int, size: int, total: int) -> Windows:
    """The windows that make tiles of `rows` rows tiles of `size` rows, of `total` rows in all."""
    return Windows.of(Runs.even(tiles, rows, total), rows, np.arange(tiles) * size, size)


def largest(pieces: Sequence[RowShift]) -> int:
    """The rows of the largest piece, which all messages of a round have."""
    return max(p.high - p.low for p in pieces)


def _rounds(windows: Windows) -> list[list[RowShift]] | None:
    """The pieces in rounds, those of one size together, the large ones first; None if too many."""
    held, starts, ends = windows.held, *np.array([windows.starts, windows.ends], np.int64)
    order = np.flatnonzero(held.low < held.high)
    order = order[np.argsort(held.low[order], kind="stable")]
    low, high = held.low[order], held.high[order]
    found: list[RowShift] = []
    for move in windows.every_move:
        begin = np.searchsorted(high, np.maximum(starts - move.by, move.first), side="right")
        end = np.searchsorted(low, np.minimum(ends - move.by, move.end), side="left")
        if (end - begin).max(initial=0) > MAX_ROUNDS + 1:
            return None
        for c, (start, stop) in enumerate(zip(*(x - move.by for x in (starts, ends)), strict=True)):
            for s in range(begin[c], end[c]):
                a = int(max(low[s], start, move.first))
                b = int(min(high[s], stop, move.end))
                if a < b:
                    found.append(RowShift(c, int(order[s]), a, b, move.by))
    found.sort(key=lambda p: (p.low - p.high, abs(p.receiver - p.sender), p))
    return in_rounds(found, limit=MAX_ROUNDS)


def _shifts(windows: Windows) -> list[Shift] | None:
    """The neighbours between the leftmost and the rightmost that any tile needs rows of.

    None if they are too many.
    """
    rows, number = windows.rows, np.arange(len(windows.starts))
    held, wanted = windows.held, np.array([windows.starts, windows.ends], np.int64)
    low, high = np.clip(wanted, *held.extent) - held.begins[0]
    needed = low < high
    if not needed.any():
        return []
    first = np.where(needed, low // rows - number, 0)
    last = np.where(needed, (high - 1) // rows - number, 0)
    left, right = int(first[needed].min()), int(last[needed].max())
    if right - left >= MAX_SHIFTS:
        return None
    shifts = []
    for by in range(left, right + 1):
        used = needed & (first <= by) & (by <= last)
        source = (number + by)[used] * rows
        skip = int(np.clip(low[used] - source, 0, rows).min()) if by == left else 0
        keep = int(np.clip(high[used] - source, 0, rows).max()) if by == right else rows
        shifts.append(Shift(by, skip, keep, used))
    return shifts


def are_apart(moves: Iterable[Move]) -> bool:
    """Whether no two rows become one."""
    ends = sorted((m.first + m.by, m.end + m.by) for m in moves)
    return all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


# -------------------------------------------------- pieces in rounds of CollectivePermutes


def is_remote(piece: Any) -> bool:
    """Whether a piece has to be sent, from its `sender` to its `receiver`: devices, or tiles."""
    return bool(piece.sender != piece.receiver)


def in_rounds(pieces: Iterable[Any], limit: int | None = None) -> list[list[Any]] | None:
    """`pieces` in rounds, in each of which a device sends and receives at most once.

    Local ones are in rounds of their own; None if more than `limit` rounds would send.
    """
    rounds: dict[bool, list[list[Any]]] = {False: [], True: []}
    taken: dict[Any, set[int]] = defaultdict(set)  # rounds, by who sends and who receives in them
    for piece in pieces:
        remote = is_remote(piece)
        both = taken[remote, "from", piece.sender], taken[remote, "to", piece.receiver]
        number = next(n for n in itertools.count() if not any(n in each for each in both))
        if number == len(rounds[remote]):
            if remote and number == limit:
                return None
            rounds[remote].append([])
        rounds[remote][number].append(piece)
        for each in both:
            each.add(number)
    return rounds[False] + rounds[True]
