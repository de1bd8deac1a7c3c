"""Halo exchange (section 3.3.3 and the appendix on window-based operators).

Every device needs a window of rows of a split dim that is not quite its tile: shifted, wider, or
larger on some devices than on others. As in the paper: exchange the maximum that any device needs
with the neighbours, concatenate the pieces, and slice out this device's window. Rows outside the
tensor are garbage, for the caller to mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving.collectives import all_gather, collective_permute
from gshard.moving.costs import MAX_SHIFTS
from gshard.moving.nodes import TensorNode, communicate
from gshard.moving.offsets import rows_at
from gshard.moving.rows import Runs, aligned, everything, groups_along, plan_rows
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.keys import as_integers
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


@dataclass(frozen=True)
class _Shift:
    """Rows `skip` to `keep` of tile c + `by` go to every tile c that is `used`."""

    by: int
    skip: int
    keep: int
    used: np.ndarray


@dataclass(frozen=True)
class HaloTransfer:
    """The cheapest way to fetch: `sent` is how many rows a device sends."""

    kind: str  # "shifts", "align" or "gather"
    sent: int
    steps: int = 1  # collectives
    shifts: tuple[_Shift, ...] = ()


def fetch(
    place: Place,
    tile: Tile,
    dim: int,
    starts: Sequence[int] | np.ndarray,
    width: int,
    reason: Reason,
    only: tuple[int, int] | None = None,
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + width` of the logical `dim` on the holders of tile c.

    If `only` some rows are needed, the others are garbage as well.

    Windows near the tiles are a halo exchange. If the windows are far from the tiles (half of a
    dim, spread over all devices), `align` sends fewer rows; if every window needs most of the dim,
    a gather does. A repeated request moves nothing.
    """
    split = tile.sharding.splits[dim]
    if split is None:
        return window(place, tile.array, dim, int(starts[0]), width)
    listed = tuple(np.asarray(starts).tolist())
    node = Halo(reason, tile.sharding, tile.shape, dim, listed, width, only)
    return communicate(node, tile.array, place)


@dataclass(frozen=True)
class Halo(TensorNode):
    """A window of `width` rows of `dim` for every tile, from `starts` on, beyond its own rows."""

    name: ClassVar[str] = "halo"
    shape: tuple[int, ...]
    dim: int
    starts: tuple[int, ...]
    width: int
    only: tuple[int, int] | None

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The window."""
        return (*local[: self.dim], self.width, *local[self.dim + 1 :])

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """Exchange rows with the neighbours."""
        tile = Tile(array, self.sharding, self.shape)
        return _fetch(place, tile, self.dim, self.starts, self.width, self.reason, self.only)

    def __str__(self) -> str:
        shown = [*map(str, self.starts[:3]), *("..." for _ in self.starts[3:4])]
        return f"{self.width} rows of dim {self.dim} from {', '.join(shown)} on"


def _fetch(
    place: Place,
    tile: Tile,
    dim: int,
    starts: Sequence[int] | np.ndarray,
    width: int,
    reason: Reason,
    only: tuple[int, int] | None,
) -> jax.Array:
    split = tile.sharding.splits[dim]
    assert split
    x, back = as_integers(tile.array)
    starts, rows = np.asarray(starts, np.int64), x.shape[dim]
    held = Runs.of(tile, dim).only(only)
    best = plan_halo(held, rows, starts, width)
    if best.kind == "align":
        return back(aligned(place, x, tile.sharding, dim, held, starts, width, reason))
    mine = np.maximum(split.coords, 0)
    needed = (starts < tile.shape[dim]) & (starts + width > 0)
    if best.kind == "gather":
        whole = all_gather(place, x, dim, groups_along(tile.sharding, dim), reason)
        return back(window(place, whole, dim, np.where(needed, starts, 0)[mine], width))
    if not best.shifts:
        return back(padding.filled((*x.shape[:dim], width, *x.shape[dim + 1 :]), x.dtype))
    pieces = []
    for s in best.shifts:
        piece = lax.slice_in_dim(x, s.skip, s.keep, axis=dim)
        if s.by:
            pairs = shifted_pairs(tile.sharding, dim, s.by, s.used)
            piece = collective_permute(place, piece, pairs, reason)
        pieces.append(piece)
    joined = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    begin = (np.arange(split.tiles) + best.shifts[0].by) * rows + best.shifts[0].skip
    return back(window(place, joined, dim, np.where(needed, starts - begin, 0)[mine], width))


def plan_fetch(
    tiles: int,
    size: int,
    starts: np.ndarray,
    width: int,
    only: tuple[int, int] | None = None,
    rows: int | None = None,
) -> HaloTransfer:
    """The plan of `fetch` for even tiles, of `rows` rows if given."""
    rows = rows or -(-size // tiles)
    held = Runs.even(tiles, rows, size).only(only)
    return plan_halo(held, rows, np.asarray(starts, np.int64), width)


def plan_halo(held: Runs, rows: int, starts: np.ndarray, width: int) -> HaloTransfer:
    """The way that sends the fewest rows."""
    shifts = _shifts(held, rows, starts, width)
    options = [HaloTransfer("gather", rows * (len(starts) - 1))]
    routed = plan_rows(held, starts, width)
    if routed:
        options.insert(0, HaloTransfer("align", routed.sent, routed.steps))
    if len(shifts) <= MAX_SHIFTS:
        widths = [s.keep - s.skip for s in shifts if s.by]
        options.insert(0, HaloTransfer("shifts", sum(widths), len(widths), shifts))
    return min(options, key=lambda o: o.sent)


def _shifts(held: Runs, rows: int, starts: np.ndarray, width: int) -> tuple[_Shift, ...]:
    """The neighbours between the leftmost and the rightmost that any tile needs rows of."""
    number = np.arange(len(starts))
    first_row, end_row, _ = everything(held)
    low, high = np.clip(starts, first_row, end_row), np.clip(starts + width, first_row, end_row)
    needed = low < high
    if not needed.any():
        return ()
    first = np.where(needed, low // rows - number, 0)
    last = np.where(needed, (high - 1) // rows - number, 0)
    left, right = int(first[needed].min()), int(last[needed].max())
    if right - left >= MAX_SHIFTS:
        return tuple(_Shift(by, 0, rows, needed) for by in range(left, right + 1))
    shifts = []
    for by in range(left, right + 1):
        used = needed & (first <= by) & (by <= last)
        source = (number + by)[used] * rows
        skip = int(np.clip(low[used] - source, 0, rows).min()) if by == left else 0
        keep = int(np.clip(high[used] - source, 0, rows).max()) if by == right else rows
        shifts.append(_Shift(by, skip, keep, used))
    return tuple(shifts)


def shifted_pairs(
    sharding: Sharding, dim: int, shift: int, used: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """(source, destination): the holder of tile c + shift along `dim` sends to that of tile c."""
    devices = np.moveaxis(sharding.devices, dim, 0)
    tiles = len(devices)
    return [
        (int(s), int(d))
        for c in range(tiles)
        if 0 <= c + shift < tiles and (used is None or used[c])
        for s, d in zip(devices[c + shift].ravel(), devices[c].ravel(), strict=True)
    ]


def window(place: Place, x: jax.Array, dim: int, starts: int | np.ndarray, width: int) -> jax.Array:
    """`width` rows of the local `x` from `starts` (per device) on; garbage where `x` has none."""
    starts = np.asarray(starts)
    before = int(max(0, -starts.min()))
    after = int(max(0, starts.max() + width - x.shape[dim]))
    if before or after:
        x = padding.pad(x, dim, before, after)
    if width == x.shape[dim]:
        return x
    start = int(starts + before) if starts.ndim == 0 else place.lookup(starts + before)
    return rows_at(x, start, width, dim)
