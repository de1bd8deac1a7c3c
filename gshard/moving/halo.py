"""Halo exchange (section 3.3.3 and the appendix on window-based operators).

Every device needs a window of rows of a split dim that is not quite its tile. Rows that other tiles
have are sent as `row_windows` plans. Rows outside the tensor are garbage, for the caller to mask.

A sharding prescribes the size of its tiles. Before or after a step of a reshard they may have
another one; what it takes to even them out (`retiled`) is a part of what the step sends.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.nodes import TensorNode, communicate
from gshard.moving.row_windows import (
    RowPlan,
    Runs,
    Windows,
    is_remote,
    largest,
    plan_windows,
    retiling,
)
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.keys import as_integers
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, rows_within


@dataclass(frozen=True)
class Halo(TensorNode):
    """A window of rows of `dim` for every tile, which may need rows of other tiles."""

    name: ClassVar[str] = "halo"
    dim: int
    windows: Windows

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The window."""
        return (*local[: self.dim], self.windows.width, *local[self.dim + 1 :])

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """Exchange rows in the cheapest way."""
        x, back = as_integers(array)
        plan = plan_windows(self.windows)
        return back(_RUN[plan.kind](self, place, x, plan))

    @property
    def mine(self) -> np.ndarray:
        """For every device the tile that it has; 0 where it has none."""
        split = self.sharding.splits[self.dim]
        assert split
        return split.own

    def __str__(self) -> str:
        starts = self.windows.starts
        shown = [*map(str, starts[:3]), *("..." for _ in starts[3:4])]
        return f"{self.windows.width} rows of dim {self.dim} from {', '.join(shown)} on"


def align(
    place: Place, x: jax.Array, sharding: Sharding, dim: int, windows: Windows, reason: Reason
) -> jax.Array:
    """The windows of rows that the local arrays `x` have: a node of the plan."""
    return communicate(Halo(reason, sharding, dim, windows), x, place)


def collect(
    place: Place, x: jax.Array, sharding: Sharding, dim: int, held: Runs, size: int, reason: Reason
) -> jax.Array:
    """All logical rows 0 to `size` replicated: for a few rows out of many.

    Every device contributes its rows to a sum, so the bytes are those of the result, wherever the
    rows are. A gather would be as cheap only if all tiles had equally many of them.
    """
    x, back = as_integers(x)
    windows = Windows.of(held, x.shape[dim], np.zeros(len(held.low)), size)
    spread = _spread(Halo(reason, sharding, dim, windows), place, x, size)
    return back(collectives.merge_disjoint(place, spread, groups_along(sharding, dim), reason))


def groups_along(sharding: Sharding, dim: int) -> list[list[int]]:
    """Groups of devices that hold the tiles of `dim` in order, and agree in all other dims."""
    split = sharding.splits[dim]
    assert split
    devices = np.moveaxis(sharding.devices, dim, -1)
    return devices.reshape(-1, split.tiles).tolist()


def shifted_pairs(
    sharding: Sharding, dim: int, shift: int, used: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """(source, destination): the holder of tile c + shift along `dim` sends to that of tile c."""
    tiles = sharding.tiles[dim]
    near = range(max(0, -shift), min(tiles, tiles - shift))
    return pairs_along(sharding, dim, [(c + shift, c) for c in near if used is None or used[c]])


def pairs_along(
    sharding: Sharding, dim: int, tiles: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Pairs of devices for pairs of tiles along `dim`; they agree in all other dims."""
    devices = np.moveaxis(sharding.devices, dim, 0)
    return [
        (int(s), int(d))
        for source, to in tiles
        for s, d in zip(devices[source].ravel(), devices[to].ravel(), strict=True)
    ]


def window(
    place: Place, x: jax.Array, dim: int, starts: int | np.ndarray, width: int, fill: Any = None
) -> jax.Array:
    """`width` rows of the local `x` from `starts` (per device) on.

    Where `x` has none there is `fill`, or garbage.
    """
    starts = np.asarray(starts)
    before = int(max(0, -starts.min()))
    after = int(max(0, starts.max() + width - x.shape[dim]))
    if before or after:
        x = padding.pad(x, dim, before, after, fill)
    if width == x.shape[dim]:
        return x
    start = int(starts + before) if starts.ndim == 0 else place.lookup(starts + before)
    return rows_at(x, start, width, dim)


def rows_at(x: jax.Array, start: jax.Array | int, size: int, dim: int) -> jax.Array:
    """`size` rows of `x` along `dim`, from `start` on.

    Offsets are not negative: without the equations by which `lax` wraps them.
    """
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    sizes = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return p.dynamic_slice_p.bind(x, *_starts(x, start, dim), slice_sizes=sizes)


def rows_put(x: jax.Array, rows: jax.Array, start: jax.Array | int, dim: int) -> jax.Array:
    """`x` with other rows along `dim`, from `start` on."""
    return p.dynamic_update_slice_p.bind(x, rows, *_starts(x, start, dim))


def _starts(x: jax.Array, start: jax.Array | int, dim: int) -> list[Any]:
    first = np.int32(start) if isinstance(start, int) else start
    return [first if d == dim else np.int32(0) for d in range(x.ndim)]


# ---------------------------------------------------------------- how rows are sent


def _by_shifts(halo: Halo, place: Place, x: jax.Array, plan: RowPlan) -> jax.Array:
    """Rows of some neighbours, joined, of which each device takes its window."""
    dim, shifts = halo.dim, plan.parts
    if not shifts:
        return padding.filled(halo.result(x.shape), x.dtype)
    pieces = []
    for s in shifts:
        piece = lax.slice_in_dim(x, s.skip, s.keep, axis=dim)
        if s.by:
            pairs = shifted_pairs(halo.sharding, dim, s.by, s.used)
            piece = collectives.collective_permute(place, piece, pairs, halo.reason)
        pieces.append(piece)
    joined = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    begin = halo.windows.held.begins + shifts[0].by * x.shape[dim] + shifts[0].skip
    return _own_window(halo, place, joined, begin)


def _by_gather(halo: Halo, place: Place, x: jax.Array, plan: RowPlan) -> jax.Array:
    groups = groups_along(halo.sharding, halo.dim)
    gathered = collectives.all_gather(place, x, halo.dim, groups, halo.reason)
    return _own_window(halo, place, gathered, halo.windows.held.begins[0])


def _own_window(halo: Halo, place: Place, x: jax.Array, begin: np.ndarray) -> jax.Array:
    """This device's window, of rows that begin with the logical row `begin` (per tile)."""
    starts, ends = np.array([halo.windows.starts, halo.windows.ends])
    first, end = halo.windows.held.extent
    at = np.where((starts < end) & (ends > first), starts - begin, 0)
    return window(place, x, halo.dim, at[halo.mine], halo.windows.width)


def _by_scatter(halo: Halo, place: Place, x: jax.Array, plan: RowPlan) -> jax.Array:
    spread = _spread(halo, place, x, halo.windows.width * len(halo.windows.starts))
    groups = groups_along(halo.sharding, halo.dim)
    return collectives.scatter_disjoint(place, spread, halo.dim, groups, halo.reason)


def _by_rounds(halo: Halo, place: Place, x: jax.Array, plan: RowPlan) -> jax.Array:
    """Send the pieces, round by round, and write them to their rows."""
    dim, mine, windows, begins = halo.dim, halo.mine, halo.windows, halo.windows.held.begins
    margin = max(map(largest, plan.parts), default=0)
    shape = halo.result(x.shape)
    buffer = padding.filled([n + 2 * margin * (d == dim) for d, n in enumerate(shape)], x.dtype)
    for pieces in plan.parts:
        box = largest(pieces)
        send, at, low, high = np.zeros((4, len(begins)), np.int64)
        for c, s, a, b, by in pieces:
            send[s] = min(a - begins[s], x.shape[dim] - box)
            origin = begins[s] + send[s]  # the logical row that box row 0 is
            at[c] = margin + origin + by - windows.starts[c]
            low[c], high[c] = a - origin, b - origin
        box_rows = rows_at(x, place.lookup(send[mine]), box, dim)
        if is_remote(pieces[0]):
            pairs = pairs_along(halo.sharding, dim, [(q.sender, q.receiver) for q in pieces])
            box_rows = collectives.collective_permute(place, box_rows, pairs, halo.reason)
        where = place.lookup(at[mine])
        if windows.has_strays and (high - low < box).any():
            ends = place.lookup(low[mine]), place.lookup(high[mine])
            wanted = rows_within(box_rows.shape, dim, 0, *ends)
            there = rows_at(buffer, where, box, dim)
            box_rows = lax.select(wanted, box_rows, there)
        buffer = rows_put(buffer, box_rows, where, dim)
    return lax.slice_in_dim(buffer, margin, margin + windows.width, axis=dim)


def _spread(halo: Halo, place: Place, x: jax.Array, size: int) -> jax.Array:
    """The first window, and rows up to `size`: this device's own rows, and zeros elsewhere."""
    dim, mine, held, rows = halo.dim, halo.mine, halo.windows.held, x.shape[halo.dim]
    start, begins = halo.windows.starts[0], held.begins
    owners = np.flatnonzero((held.low <= start) & (held.high >= start + size))
    if not halo.windows.moves and len(owners) == 1:  # one tile has all rows
        first = int(start - begins[owners[0]])
        found = lax.slice_in_dim(x, first, first + size, axis=dim)
        return place.where(mine == owners[0], found)
    row = lax.broadcasted_iota(jnp.int32, x.shape, dim)
    wide = padding.blank(
        [n if d != dim else size + 2 * rows for d, n in enumerate(x.shape)], x.dtype
    )
    for first, end, by in halo.windows.every_move:
        first, end = max(first, start - by), min(end, start + size - by)
        low, high = np.clip(held.low, first, end), np.clip(held.high, first, end)
        own = row >= place.lookup((low - begins)[mine])
        own &= row < place.lookup((high - begins)[mine])
        at = place.lookup(np.clip(begins + by - start + rows, 0, size + rows)[mine])
        there = rows_at(wide, at, rows, dim)
        wide = rows_put(wide, lax.select(own, x, there), at, dim)
    return lax.slice_in_dim(wide, rows, rows + size, axis=dim)


_RUN = {"shifts": _by_shifts, "rounds": _by_rounds, "scatter": _by_scatter, "gather": _by_gather}


# ---------------------------------------------------------------- tiles of another size

Shape = tuple[int, ...]


def retiled(place: Place, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
    """`tile` with tiles of `size` rows along `dim`."""
    if tile.array.shape[dim] == size:
        return tile
    x, rows = tile.array, tile.array.shape[dim]
    if tile.sharding.splits[dim]:
        why = reason.then(f"even out tiles of dim {dim}")
        windows = retiling(tile.sharding.tiles[dim], rows, size, tile.shape[dim])
        x = Halo(why, tile.sharding, dim, windows).run(place, x)
    else:
        x = lax.slice_in_dim(x, 0, size, axis=dim) if size < rows else padding.pad_end(x, dim, size)
    return Tile(x, tile.sharding, tile.shape)


def standardized(place: Place, tile: Tile, reason: Reason) -> Tile:
    """`tile` with the local shape that its sharding prescribes."""
    for dim, size in enumerate(tile.sharding.local_shape(tile.shape)):
        tile = retiled(place, tile, dim, size, reason)
    return tile


@cached
def retile_elements(sharding: Sharding, local: Shape, dim: int, size: int, shape: Shape) -> int:
    """Elements that a device sends to have tiles of `size` rows along `dim`."""
    if local[dim] == size or sharding.splits[dim] is None:
        return 0
    windows = retiling(sharding.tiles[dim], local[dim], size, shape[dim])
    others = math.prod(n for d, n in enumerate(local) if d != dim)
    return plan_windows(windows).sent * others


def standard_elements(
    sharding: Sharding, local: Shape, shape: Shape, wanted: Shape | None = None
) -> int:
    """Elements that a device sends to give its tile the size that the sharding prescribes.

    Or, if given, the `wanted` one.
    """
    wanted = sharding.local_shape(shape) if wanted is None else wanted
    sent = 0
    for dim, size in enumerate(wanted if local != wanted else ()):
        sent += retile_elements(sharding, local, dim, size, shape)
        local = (*local[:dim], size, *local[dim + 1 :])
    return sent
