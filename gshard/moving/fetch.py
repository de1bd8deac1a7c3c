"""Rows at the borders of tiles: sent, or recomputed from fewer rows of what they are made of.

What is computed by element, a reshape that merges dims, and a row map are computed after their
rows are sent, where that sends fewer: a convolution of a padded tensor fetches rows of the tensor,
whose tiles begin elsewhere than those of the padded one. Rows of several dims come along one after
the other, with the corners.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer
from gshard.moving import halo
from gshard.moving.costs import STEP_COST
from gshard.moving.recompute import DEPTH, Made
from gshard.moving.row_windows import Move, Runs, Widths, Windows, are_apart, plan_windows
from gshard.tensors.devices import Place
from gshard.tensors.painting import Mask, all_of, any_of, painted
from gshard.tensors.sharding import Split
from gshard.tensors.tile import Tile, row_bytes, rows_within


class Along(NamedTuple):
    """Rows `starts[c]` to `starts[c] + widths` of a dim, for the holders of tile c.

    An unsplit dim has the tiles of `split` instead of its own. If there are `moves`, only their
    rows are needed, in the places where they move them; all others are garbage.
    """

    dim: int
    starts: np.ndarray
    widths: Widths
    moves: tuple[Move, ...] = ()
    split: Split | None = None

    @property
    def width(self) -> int:
        """The most rows that a tile needs."""
        return int(np.max(self.widths))

    def windows(self, tile: Tile) -> Windows:
        """The windows that tiles need of each other."""
        held, rows = Runs.of(tile, self.dim), tile.array.shape[self.dim]
        return Windows.of(held, rows, self.starts, self.widths, self.moves)


@dataclass(frozen=True)
class Rows:
    """Rows of a tensor, along one dim after the other."""

    tile: Tile
    along: tuple[Along, ...]

    @property
    def width(self) -> dict[int, int]:
        """The most rows that a tile needs, by dims."""
        return {a.dim: a.width for a in self.along}

    @property
    def splits(self) -> dict[int, Split]:
        """The split of each dim, in whose tiles the rows are needed."""
        own = self.tile.sharding.splits
        return {a.dim: s for a in self.along if (s := a.split or own[a.dim])}

    def sent(self) -> float:
        """Bytes that a device sends to fetch the rows directly."""
        tile, local, sent = self.tile, list(self.tile.array.shape), 0.0
        for along in self.along:
            if tile.sharding.splits[along.dim]:
                plan = plan_windows(along.windows(tile))
                row = row_bytes(local, along.dim, tile.array.dtype)
                sent += plan.sent * row + STEP_COST * plan.steps if plan.sent else 0.0
            local[along.dim] = along.width
        return sent

    def fetched(self, place: Place, reason: Reason) -> jax.Array:
        """The rows, sent."""
        tile, x = self.tile, self.tile.array
        for along in self.along:
            if tile.sharding.splits[along.dim]:
                x = halo.align(place, x, tile.sharding, along.dim, along.windows(tile), reason)
            else:
                first = along.starts[self.splits[along.dim].own]
                x = halo.window(place, x, along.dim, first, along.width)
        return x


def fetch(place: Place, tile: Tile, reason: Reason, *along: Along) -> jax.Array:
    """Rows along some dims: sent, or recomputed from fewer bytes; once, if asked for again."""
    _, make = _cheapest(place, Rows(tile, along), DEPTH)
    return make(reason)


def retile(place: Place, tile: Tile, sizes: Sequence[int], reason: Reason) -> Tile:
    """`tile` with tiles of these sizes; it had as many rows as the operands of its maker."""
    for dim, size in enumerate(sizes):
        split = tile.sharding.splits[dim]
        if tile.array.shape[dim] == size or split is None:
            tile = halo.retiled(place, tile, dim, size, reason)
        else:
            why = reason.then(f"even out tiles of dim {dim}")
            x = fetch(place, tile, why, Along(dim, np.arange(split.tiles) * size, size))
            tile = Tile(x, tile.sharding, tile.shape)
    return tile


_Way = tuple[float, Callable[[Reason], jax.Array]]  # its cost, and its parts


def _cheapest(place: Place, rows: Rows, depth: int) -> _Way:
    """The cheapest way to get rows, or a tensor that is broadcast along their dims."""
    tile, direct = rows.tile, rows.sent()
    made = tile.value.made if tile.value else None
    able = made and depth and not any(len(a.moves) > 1 for a in rows.along) and made.gives(tile)
    needed = _needed(made, rows) if made and able and direct else None
    ways = [_cheapest(place, need, depth - 1) for need in needed or ()]
    total = sum(cost for cost, _ in ways)
    if made is None or needed is None or total >= direct:
        return direct, functools.partial(rows.fetched, place)

    def recompute(reason: Reason) -> jax.Array:
        arrays = [way(reason) for _, way in ways]
        if made.layers_of:
            return _painted(place, made, rows, arrays)
        width, (along, *_) = rows.width, rows.along
        _, step = _merged(made, along.dim)
        if step > 1:  # rows of the result per row of the operand, possibly more than needed
            width[along.dim] = needed[0].along[0].width * step
        x = made.run(arrays, [width.get(d, n) for d, n in enumerate(tile.array.shape)])
        if step == 1:
            return x
        first = (along.starts % step)[rows.splits[along.dim].own]
        return halo.window(place, x, along.dim, first, along.width)

    return total, recompute


def _needed(made: Made, rows: Rows) -> list[Rows] | None:
    """The rows of the operands that are needed; None if their shardings differ."""
    if made.layers_of:
        return _before_row_map(made, rows)
    splits, found = made.result.sharding.splits, list[Rows]()
    if not made.is_made_by_parts_of({*rows.width, *(d for d, s in enumerate(splits) if s)}):
        return _before_reshape(made, rows) if made.eqn.primitive is p.reshape_p else None
    for tile, named in zip(made.operands, made.dims, strict=True):
        for here, to in zip(tile.sharding.splits, named, strict=True):
            there = None if to is None else splits[to]
            if here is not there and (here or to not in rows.width):
                return None
        own = [a for a in rows.along if a.dim in named]
        along = [a._replace(dim=named.index(a.dim), split=rows.splits[a.dim]) for a in own]
        found.append(Rows(tile, tuple(along)))
    return found


def _before_row_map(made: Made, rows: Rows) -> list[Rows] | None:
    """For a row map that shifts rows: those of its operands that are needed.

    None if it does something else with them, or with another split dim.
    """
    assert made.layers_of
    result, layers, found = made.result, made.layers_of(made.eqn), list[Rows]()
    for number, tile in enumerate(made.operands):
        own = [layer for layer in layers if layer.source == number]
        if not tile.shape or not own:
            found.append(Rows(tile, ()))
            continue
        splits = zip(tile.sharding.splits, result.sharding.splits, strict=True)
        for d, (here, there) in enumerate(splits):
            kept = all(n.is_aligned and n.keeps(d, result.shape[d], tile.shape) for n in own)
            if here is not there or (here and d not in rows.width and not kept):
                return None
        along = [a for n in rows.along if (a := _before_shift(own, n, result.shape[n.dim]))]
        if len(along) < len(rows.along):
            return None
        found.append(Rows(tile, tuple(along)))
    return found


def _before_shift(layers: Sequence[Layer], rows: Along, size: int) -> Along | None:
    """The rows of a source that are needed along a dim, if layers shift runs of them."""
    first, end = rows.moves[0][:2] if rows.moves else (0, size)
    moves = []
    for axis, base in {(n.axes[rows.dim], n.base[rows.dim]): None for n in layers}:
        low, high = max(axis.at, first), min(axis.end, end)
        if low < high:
            moves.append(Move(low - axis.at + base, high - axis.at + base, axis.at - base))
    if not all(n.is_aligned and n.axes[rows.dim].is_run for n in layers) or not are_apart(moves):
        return None
    by = moves[0].by if len(moves) == 1 else 0
    moves = [move._replace(by=move.by - by) for move in moves] or [Move(0, 0, 0)]
    return rows._replace(starts=rows.starts - by, moves=tuple(moves))


def _painted(place: Place, made: Made, rows: Rows, arrays: Sequence[jax.Array]) -> jax.Array:
    """Windows of a row map, of the rows that are needed of its operands, in their places."""
    assert made.layers_of
    shape, splits = made.result.shape, made.result.sharding.splits
    local = [rows.width.get(d, n) for d, n in enumerate(made.result.array.shape)]
    parts, masks = list[Layer](), list[list[Mask]]()
    for layer in made.layers_of(made.eqn):
        part = layer
        for d, split in enumerate(splits):
            part = part.along(d, Axis(0, local[d], layer.axes[d].dim), 0) if split else part

        def mask(a: Along, axis: Axis) -> Mask:
            first = a.starts[rows.splits[a.dim].own]
            return lambda shape: rows_within(shape, a.dim, place.lookup(first), axis.at, axis.end)

        if not parts or parts[-1] != part:
            parts.append(part)
            masks.append([])
        own = [(a, layer.axes[a.dim]) for a in rows.along]
        masks[-1].append(all_of([mask(a, n) for a, n in own if n[:2] != (0, shape[a.dim])]))
    return painted(local, parts, arrays, [any_of(m) for m in masks])


def _before_reshape(made: Made, rows: Rows) -> list[Rows] | None:
    """For a reshape that merges the split dim with minor ones: its rows that are needed.

    None for any other reshape, or if another dim is split.
    """
    (tile,), result, ((dim, starts, widths, *_), *more) = made.operands, made.result, rows.along
    source, step = _merged(made, dim)
    others = [s for d, s in enumerate(tile.sharding.splits) if d != source]
    others += [s for d, s in enumerate(result.sharding.splits) if d != dim]
    here, there = tile.sharding.splits[source], result.sharding.splits[dim]
    if more or not step or any(others) or here is not there:
        return None
    first = starts // step
    return [Rows(tile, (Along(source, first, -(-(starts + widths) // step) - first),))]


def _merged(made: Made, dim: int) -> tuple[int, int]:
    """The operand's dim that a dim begins with, and rows per row of it: 0 if it is not merged."""
    if made.eqn.primitive is not p.reshape_p:
        return dim, 1
    sizes, shape = made.operands[0].shape, made.result.shape
    ends = [1, *itertools.accumulate(sizes, operator.mul)]
    first, end = math.prod(shape[:dim]), math.prod(shape[: dim + 1])
    source = max((d for d in range(len(sizes)) if ends[d] == first), default=0)
    fits = ends[source] == first and end in ends[source + 1 :]
    return source, end // ends[source + 1] if fits else 0
