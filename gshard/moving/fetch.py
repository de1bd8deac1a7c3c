"""Rows at the borders of tiles: sent, or recomputed from fewer rows of what they are made of.

What is computed by element, a reshape that merges dims, and a row map are computed after their
rows are sent, where that sends fewer: a convolution of a padded tensor fetches rows of the tensor,
whose tiles begin elsewhere than those of the padded one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer
from gshard.moving import halo
from gshard.moving.costs import STEP_COST
from gshard.moving.recompute import DEPTH, Made
from gshard.moving.row_windows import Move, Numbers, Runs, Widths, Windows, are_apart, plan_windows
from gshard.tensors.devices import Place
from gshard.tensors.painting import Mask, any_of, painted
from gshard.tensors.sharding import Split
from gshard.tensors.tile import Tile, rows_within


@dataclass(frozen=True)
class Rows:
    """Rows `starts[c]` to `starts[c] + widths` of a tile's dim, for the holders of tile c.

    An unsplit dim has the tiles of `split` instead of its own. If there are `moves`, only their
    rows are needed, in the places where they move them; all others are garbage.
    """

    tile: Tile
    dim: int
    starts: np.ndarray
    widths: Widths
    moves: tuple[Move, ...] = ()
    split: Split | None = None

    @property
    def width(self) -> int:
        """The most rows that a tile needs."""
        return int(np.max(self.widths))

    @property
    def windows(self) -> Windows:
        """The windows that tiles need of each other."""
        held, rows = Runs.of(self.tile, self.dim), self.tile.array.shape[self.dim]
        return Windows.of(held, rows, self.starts, self.widths, self.moves)

    def own(self, numbers: np.ndarray) -> np.ndarray:
        """For every device the number of its tile, of some that tiles have."""
        split = self.split or self.tile.sharding.splits[self.dim]
        assert split
        return numbers[split.own]


def fetch(
    place: Place,
    tile: Tile,
    dim: int,
    starts: Numbers,
    widths: Widths,
    reason: Reason,
    moves: tuple[Move, ...] = (),
    split: Split | None = None,
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + widths` of the logical `dim` on the holders of tile c.

    They are sent, or recomputed from fewer bytes of the operands. For the tiles of `split`, if
    given: all devices have the rows of an unsplit dim. Rows may move to other places in the
    windows, with `moves`. A repeated request moves nothing.
    """
    rows = Rows(tile, dim, np.asarray(starts, np.int64), widths, moves, split)
    _, make = _cheapest(place, rows, DEPTH)
    return make(reason)


def retile(place: Place, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
    """`tile` with tiles of `size` rows along `dim`; it had as many as the operands of its maker."""
    split = tile.sharding.splits[dim]
    if tile.array.shape[dim] == size or split is None:
        return halo.retiled(place, tile, dim, size, reason)
    starts, reason = np.arange(split.tiles) * size, reason.then(f"even out tiles of dim {dim}")
    return Tile(fetch(place, tile, dim, starts, size, reason), tile.sharding, tile.shape)


_Way = tuple[float, Callable[[Reason], jax.Array]]  # its cost, and its parts


def _cheapest(place: Place, rows: Rows | Tile, depth: int) -> _Way:
    """The cheapest way to get rows, or a tensor that is broadcast along their dim."""
    if isinstance(rows, Tile):
        array = rows.array
        return 0.0, lambda reason: array
    tile, dim = rows.tile, rows.dim
    if tile.sharding.splits[dim] is None:
        first = rows.own(rows.starts)
        return 0.0, lambda reason: halo.window(place, tile.array, dim, first, rows.width)

    def directly(reason: Reason) -> jax.Array:
        return halo.align(place, tile.array, tile.sharding, dim, rows.windows, reason)

    made = tile.value.made if tile.value else None
    if made is None or not depth or len(rows.moves) > 1 or not made.gives(tile):
        return _sent(rows), directly
    direct, total, ways = _sent(rows), 0.0, []
    needed = _needed(made, rows) if direct else None
    for need in needed or ():
        cost, way = _cheapest(place, need, depth - 1)
        total += cost
        ways.append(way)
    if needed is None or total >= direct:
        return direct, directly

    def recompute(reason: Reason) -> jax.Array:
        if made.layers_of:
            return _painted(place, made, rows, [way(reason) for way in ways])
        local, width = list(tile.array.shape), rows.width
        step = _rows_for_one(made, dim)
        if step > 1:  # rows of the result per row of the operand, possibly more than needed
            (need,) = needed
            assert isinstance(need, Rows)
            width = need.width * step
        local[dim] = width
        x = made.run([way(reason) for way in ways], local)
        first = rows.own(rows.starts % step)
        return halo.window(place, x, dim, first, rows.width) if width > rows.width else x

    return total, recompute


def _sent(rows: Rows) -> float:
    """Bytes that a device sends to fetch rows directly."""
    plan = plan_windows(rows.windows)
    row = rows.tile.nbytes // max(rows.tile.array.shape[rows.dim], 1)
    return plan.sent * row + STEP_COST * plan.steps if plan.sent else 0.0


def _needed(made: Made, rows: Rows) -> list[Rows | Tile] | None:
    """The rows of the operands that are needed; None if their shardings differ."""
    primitive, dim, result = made.eqn.primitive, rows.dim, made.result
    if primitive is p.reshape_p:
        return _before_reshape(made, rows)
    if made.layers_of:
        return _before_row_map(made, rows)
    dims = made.dims()
    if dims is None:
        return None
    found: list[Rows | Tile] = []
    for tile, named in zip(made.operands, dims, strict=True):
        for d, to in enumerate(named):
            whole = to is None or (to == dim and tile.sharding.splits[d] is None)
            here, there = tile.sharding.splits[d], result.sharding.splits[to or 0]
            if here is not there and not whole:
                return None
        if dim in named:
            split = rows.split or rows.tile.sharding.splits[dim]
            found.append(replace(rows, tile=tile, dim=named.index(dim), split=split))
        else:
            found.append(tile)
    return found


def _before_row_map(made: Made, rows: Rows) -> list[Rows | Tile] | None:
    """For a row map that shifts rows: those of its operands that are needed.

    None if it does something else with them, or with another split dim.
    """
    assert made.layers_of
    dim, result, layers = rows.dim, made.result, made.layers_of(made.eqn)
    first, end = rows.moves[0][:2] if rows.moves else (0, result.shape[dim])
    found: list[Rows | Tile] = []
    for number, tile in enumerate(made.operands):
        own = [layer for layer in layers if layer.source == number]
        if not tile.shape or not own:
            found.append(tile)
            continue
        splits = zip(tile.sharding.splits, result.sharding.splits, strict=True)
        for d, (here, there) in enumerate(splits):
            kept = all(n.is_aligned and n.keeps(d, result.shape[d], tile.shape) for n in own)
            if here is not there or (here and d != dim and not kept):
                return None
        moves = []
        for axis, base in {(n.axes[dim], n.base[dim]): None for n in own}:
            low, high = max(axis.at, first), min(axis.end, end)
            if low < high:
                moves.append(Move(low - axis.at + base, high - axis.at + base, axis.at - base))
        if not all(n.is_aligned and n.axes[dim].is_run for n in own) or not are_apart(moves):
            return None
        by = moves[0].by if len(moves) == 1 else 0
        moves = [move._replace(by=move.by - by) for move in moves] or [Move(0, 0, 0)]
        found.append(replace(rows, tile=tile, starts=rows.starts - by, moves=tuple(moves)))
    return found


def _painted(place: Place, made: Made, rows: Rows, arrays: Sequence[jax.Array]) -> jax.Array:
    """Windows of a row map, of the rows that are needed of its operands, in their places."""
    assert made.layers_of
    dim, local, offset = rows.dim, list(made.result.array.shape), rows.own(rows.starts)
    local[dim], parts, masks = rows.width, list[Layer](), list[list[Mask]]()
    for layer in made.layers_of(made.eqn):
        axis, part = layer.axes[dim], layer
        for d, split in enumerate(made.result.sharding.splits):
            part = part.along(d, Axis(0, local[d], layer.axes[d].dim), 0) if split else part

        def mask(shape: Sequence[int], axis: Axis = axis) -> jax.Array:
            return rows_within(shape, dim, place.lookup(offset), axis.at, axis.end)

        if not parts or parts[-1] != part:
            parts.append(part)
            masks.append([])
        masks[-1].append(None if axis[:2] == (0, made.result.shape[dim]) else mask)
    return painted(local, parts, arrays, [any_of(m) for m in masks])


def _before_reshape(made: Made, rows: Rows) -> list[Rows | Tile] | None:
    """For a reshape that merges the split dim with minor ones: its rows that are needed.

    None for any other reshape, or if another dim is split.
    """
    (tile,), result, dim = made.operands, made.result, rows.dim
    source, step = _dim_before_reshape(made, dim), _rows_for_one(made, dim)
    others = [s for d, s in enumerate(tile.sharding.splits) if d != source]
    others += [s for d, s in enumerate(result.sharding.splits) if d != dim]
    if not step or any(others) or tile.sharding.splits[source] is not result.sharding.splits[dim]:
        return None
    first = rows.starts // step
    return [Rows(tile, source, first, -(-(rows.starts + rows.widths) // step) - first)]


def _rows_for_one(made: Made, dim: int) -> int:
    """The rows of the result per row of the operand; 0 if dims are not simply merged."""
    if made.eqn.primitive is not p.reshape_p:
        return 1
    sizes, rows = made.operands[0].shape, made.result.shape[dim]
    source = _dim_before_reshape(made, dim)
    if rows % sizes[source]:
        return 0
    step = rows // sizes[source]
    joined = [math.prod(sizes[source + 1 : end]) for end in range(source + 1, len(sizes) + 1)]
    return step if step in joined else 0


def _dim_before_reshape(made: Made, dim: int) -> int:
    """The operand's last dim that begins where `dim` of the result does."""
    before, sizes = math.prod(made.result.shape[:dim]), made.operands[0].shape
    starts = [math.prod(sizes[:d]) for d in range(len(sizes))]
    return max((d for d, start in enumerate(starts) if start == before), default=0)
