"""A device's tile of a row map: rows are fetched to where they belong, then painted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer
from gshard.moving.fetch import fetch
from gshard.moving.halo import align, window
from gshard.moving.row_windows import Move, Runs, Windows, are_apart, plan_fetch
from gshard.rules.axis_rows import AxisRows, RowsOfDim
from gshard.rules.base.layers import ROW_MAPS, layers_of
from gshard.rules.base.rule import Context
from gshard.tensors.painting import Mask, all_of, any_of, painted
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, rows_within

Moves = tuple[Move, ...]


class RowMap:
    """An operator whose result is painted; the sources of its layers are numbers of operands."""

    def __init__(self, eqn: JaxprEqn):
        self.name = eqn.primitive.name
        self.operands: Sequence[Any] = eqn.invars
        self.shape: tuple[int, ...] = eqn.outvars[0].aval.shape
        self.layers = self.layers_of(eqn)
        shapes = [a.aval.shape for a in eqn.invars]
        self.moving = [  # the dims along which some layer is not all rows of its source
            d
            for d, n in enumerate(self.shape)
            if not all(layer.keeps(d, n, shapes[layer.source]) for layer in self.layers)
        ]

    layers_of = staticmethod(layers_of)
    at_run_time = False  # whether the rows of layers are known when the program runs

    @property
    def sources(self) -> dict[int, list[Layer]]:
        """The layers of each operand that is a tensor."""
        found: dict[int, list[Layer]] = {}
        for layer in self.layers:
            if not layer.is_constant:
                found.setdefault(layer.source, []).append(layer)
        return found

    def rows(self, layer: Layer, dim: int, tiles: Mapping[int, Tile]) -> RowsOfDim:
        """The rows of a layer along a dim."""
        return AxisRows(layer.axes[dim], layer.base[dim], self.shape[dim])

    def moves(self, layers: Sequence[Layer], dim: int) -> Moves:
        """The rows of all layers of a source, if those can be fetched at once."""
        return () if self.at_run_time else _moves(layers, dim)

    def read(self, layers: Sequence[Layer], dim: int) -> slice:
        """The rows of an unsplit dim that layers of a source read."""
        if self.at_run_time:
            return slice(0, layers[0].axes[dim].rows, 1)
        ends = [AxisRows(n.axes[dim], n.base[dim], 0).only for n in layers]
        low, high = min(first for first, _ in ends), max(end for _, end in ends)
        strides = (n.axes[dim].stride for n in layers if n.axes[dim].rows > 1)
        step = math.gcd(*strides, *(first - low for first, _ in ends))
        return slice(low, high, step or 1)

    def order(self, source: Sharding, shape: Sequence[int]) -> list[int]:
        """The dims in the order that sends least: first those that shrink for free."""

        def rank(dim: int) -> tuple[bool, float]:
            ratio = self.shape[dim] / max(shape[dim], 1)
            return bool(source.splits[dim]) or ratio > 1, ratio

        return sorted(range(len(shape)), key=rank)


class Painting:
    """A device's tile of the result, under a sharding."""

    def __init__(self, ctx: Context, row_map: RowMap, result: Sharding, shared: bool = True):
        self.ctx = ctx
        self.map = row_map
        self.splits = result.splits
        self.cut = [d for d in row_map.moving if self.splits[d]]
        self.local = result.local_shape(row_map.shape)
        self.shared = shared  # whether rows may be fetched for other readers too
        self.arrays: list[jax.Array] = []
        self.on_tile: dict[tuple[Split, int], jax.Array] = {}  # whether a device has a tile
        self.fetched: dict[Any, int] = {}  # the numbers of arrays, by what they are fetched for

    def run(self, tiles: Mapping[int, Tile]) -> jax.Array:
        """Fetch the rows of each layer, and paint."""
        self.tiles, layers = dict(tiles), self._ordered()
        self.others = {number: self._others(number) for number in self.map.sources}
        for number, own in self.map.sources.items():
            layers = self._narrowed(number, own, layers)
        found, masks = list[Layer](), list[list[Mask]]()
        for layer in layers:
            part, mask = self._part(layer, layers)
            if found and found[-1] == part:  # other rows of what was fetched at once
                masks[-1].append(mask)
            else:
                found.append(part)
                masks.append([mask])
        return painted(self.local, found, self.arrays, [any_of(m) for m in masks])

    def _ordered(self) -> Sequence[Layer]:
        """The layers; those with the most rows first if none is over another along a split dim."""
        layers = self.map.layers
        if len(self.cut) != 1:
            return layers
        axes = [layer.axes[self.cut[0]] for layer in layers]
        if not all(a.end <= b.at for a, b in itertools.pairwise(axes)):
            return layers
        rows = Counter[Any]()
        for layer, axis in zip(layers, axes, strict=True):
            rows[layer.source] += axis.rows
        return sorted(layers, key=lambda layer: -rows[layer.source])

    def _narrowed(
        self, number: int, own: Sequence[Layer], layers: Sequence[Layer]
    ) -> Sequence[Layer]:
        """The layers, with a source whose rows are sent cut to the rows that they read."""
        tile, splits = self.tiles[number], self.tiles[number].sharding.splits
        sent = [d for d in self.map.moving if splits[d]]
        if not sent or self.map.at_run_time:
            return layers
        rows = [slice(0, n, 1) for n in tile.array.shape]
        for d in self.map.moving:
            if splits[d] is None:
                rows[d] = self.map.read(own, d)
        same = all(r == slice(0, n, 1) for r, n in zip(rows, tile.array.shape, strict=True))
        if same or any(len(self._readers(number, d)) > 1 for d in sent):  # others fetch rows, too
            return layers
        lows, highs, steps = zip(*((r.start, r.stop, r.step) for r in rows), strict=True)
        x = lax.slice(tile.array, lows, highs, steps)
        shape = tuple(n if splits[d] else x.shape[d] for d, n in enumerate(tile.shape))
        self.tiles[number] = Tile(x, tile.sharding, shape)
        cut = []
        for layer in layers:
            for d in set(self.map.moving).difference(sent) if layer.source == number else ():
                axis, r = layer.axes[d], rows[d]
                axis = axis._replace(stride=axis.stride // r.step if axis.rows > 1 else 1)
                layer = layer.along(d, axis, (layer.base[d] - r.start) // r.step)
            cut.append(layer)
        return cut

    def _part(self, layer: Layer, layers: Sequence[Layer]) -> tuple[Layer, Mask]:
        """A layer of local arrays, and which elements of it are painted."""
        key: Any = layer.source
        tile, part, masks = self.tiles[layer.source], layer, list[Mask]()
        dims = range(len(self.splits)) if layer.is_constant else (
            self.map.order(tile.sharding, tile.shape))  # fmt: skip
        hulls = {} if layer.is_constant else self._hulls(layer, layers)
        for d in dims:
            split, axis, rows = self.splits[d], layer.axes[d], self.local[d]
            here = None if layer.is_constant else tile.sharding.splits[d]
            if d not in self.map.moving and d not in hulls:
                part = part.along(d, Axis(0, rows, axis.dim), 0) if split else part
            elif self.map.at_run_time or (here and split is None):
                key, tile = self._rows(key, layer, tile, d)
                local = Axis(0, rows, axis.dim) if split else axis._replace(stride=1)
                part = part.along(d, local, 0)
            elif split:
                first = axis.at % rows
                if here is None and first + axis.end - axis.at <= rows and self.arrays:
                    # In one tile, by a device that has the rows: only those are touched.
                    part = part.along(d, axis._replace(at=first))
                    masks.append(self._on_tile(split, axis.at // rows))
                    continue
                if hull := hulls.get(d):
                    key, tile = (key, d, hull.key), self._widened(tile, d, hull)
                elif not layer.is_constant:
                    key, tile = self._rows(key, layer, tile, d)
                part = part.along(d, Axis(0, rows, axis.dim), 0)
                if axis[:2] != (0, self.map.shape[d]) or axis.step > 1:
                    masks.append(self._within(split, d, axis))
        if key not in self.fetched:
            self.fetched[key] = len(self.arrays)
            array = tile.array
            for d, hull in hulls.items():  # at last: other row maps read the same rows
                array = window(self.ctx.place, array, d, hull.first, self.local[d])
            self.arrays.append(array)
        return Layer(self.fetched[key], part.base, part.axes), all_of(masks)

    def _on_tile(self, split: Split, number: int) -> Mask:
        """A mask of everything on the holders of a tile: a scalar."""
        if (split, number) not in self.on_tile:
            here = jnp.asarray(self.ctx.place.lookup(split.own))
            self.on_tile[split, number] = lax.eq(here, jnp.int32(number))
        return lambda shape: self.on_tile[split, number]

    def _within(self, split: Split, dim: int, axis: Axis) -> Mask:
        """A mask of the rows of an axis, in this device's tile."""

        def mask(shape: Sequence[int]) -> jax.Array:
            offset = self.ctx.place.lookup(split.own * self.local[dim])
            inside = rows_within(shape, dim, offset, axis.at, axis.end)
            if axis.step > 1:
                index = lax.broadcasted_iota(jnp.int32, shape, dim) + offset
                inside &= lax.rem(index - axis.at, jnp.int32(axis.step)) == 0
            return inside

        return mask

    # ------------------------------------------------------------ rows of a source

    def _reason(self, dim: int) -> Reason:
        return Reason("step", self.map.name, f"rows of dim {dim} to their tiles")

    def _rows(self, key: Any, layer: Layer, tile: Tile, dim: int) -> tuple[Any, Tile]:
        """A source with the rows of a layer in their places, or these alone if all have them."""
        split, axis, rows = self.splits[dim], layer.axes[dim], self.map.rows(layer, dim, self.tiles)
        collected = split is None and tile.sharding.splits[dim] is not None
        key = (key, dim, axis[1:] if collected else axis, layer.base[dim])
        if key in self.fetched:
            array = self.arrays[self.fetched[key]]
        elif collected:
            array = rows.collected(self.ctx, tile, dim, self._reason(dim))
        else:
            array = rows.run(self.ctx, tile, dim, split, self._reason(dim))
        size = axis.rows if collected else self.map.shape[dim]
        shape = (*tile.shape[:dim], size, *tile.shape[dim + 1 :])
        return key, Tile(array, tile.sharding.replace(dim, split), shape)

    # ------------------------------------------------------------ rows for several row maps

    def _others(self, number: int) -> list[tuple[RowMap, Sequence[Split | None]]]:
        """The row maps that read a source, and the splits of their results."""
        readers = self.ctx.readers(self.map.operands[number]) if self.shared else ()
        eqns = [eqn for eqn in readers if eqn.primitive in ROW_MAPS]
        return [(RowMap(eqn), self.ctx.sharding(eqn.outvars[0]).splits) for eqn in eqns]

    def _readers(self, number: int, dim: int) -> list[Reader]:
        """What row maps read of a source for tiles that are split like those here."""
        split, var, found = self.splits[dim], self.map.operands[number], list[Reader | None]()
        for row_map, splits in self.others[number]:
            if split and splits[dim] is split:
                layers = [n for n in row_map.layers if row_map.operands[n.source] is var]
                moves, rows = _moves(layers, dim), split.rows(row_map.shape[dim])
                for own in [moves] if moves else [_moves([n], dim) for n in layers]:
                    found.append(_reader(own, rows, var.aval.shape[dim]))
        return [reader for reader in dict.fromkeys(found) if reader]

    def _hulls(self, layer: Layer, layers: Sequence[Layer]) -> dict[int, Hull]:
        """The rows that are fetched at once, by dims: those of all row maps, if that sends less.

        Where one of them moves rows along two dims, all fetch rows along both, with the corners.
        """
        moved, own = [self.cut], [n for n in layers if n.source == layer.source]
        for other, splits in self.others[layer.source]:
            moved.append([d for d in other.moving if splits[d] and splits[d] is self.splits[d]])
        several, found = any(len(dims) > 1 for dims in moved), dict[int, Hull | None]()
        for d in set().union(*moved) if several else self.cut:
            if self.tiles[layer.source].sharding.splits[d]:
                moves = self.map.moves(own, d) or self.map.moves([layer], d)
                found[d] = self._hull(layer.source, d, moves, several)
        return {d: hull for d, hull in found.items() if hull}

    def _hull(self, number: int, dim: int, moves: Moves, several: bool) -> Hull | None:
        split, rows, size = self.splits[dim], self.local[dim], self.tiles[number].shape[dim]
        assert split
        first, readers = np.arange(split.tiles), self._readers(number, dim)
        alone = Hull(moves, first * rows, rows, moves, 0 * split.own) if len(moves) > 1 else None
        copies = _joined_moves([m for reader in readers for m in reader.copies])
        stay = several and moves and not any(move.by for move in moves)
        own = Reader(0, rows, ()) if stay else _reader(moves, rows, size)
        if own not in readers or copies is None or len(readers) + several < 2:
            return alone
        wanted = [(first * r.rows + r.by, r.rows, r.copies) for r in readers]
        low = np.min([start for start, *_ in wanted], axis=0)
        width = int((np.max([start + n for start, n, _ in wanted], axis=0) - low).max())
        *each, together = (
            plan_fetch(split.tiles, size, start, n, _beside(moved, size)).sent
            for start, n, moved in (*wanted, (low, width, copies))
        )
        if together > sum(each) or (together == sum(each) and not several):
            return alone
        begin = (first * rows + own.by - low)[split.own]
        return Hull(own, low, width, _beside(copies, size), begin)

    def _widened(self, tile: Tile, dim: int, hull: Hull) -> Tile:
        """A source with the rows of a hull."""
        place, split, reason = self.ctx.place, self.splits[dim], self._reason(dim)
        if hull.moves:
            held, rows = Runs.of(tile, dim), tile.array.shape[dim]
            windows = Windows.of(held, rows, hull.low, hull.width, hull.moves)
            array = align(place, tile.array, tile.sharding, dim, windows, reason)
        else:
            array = fetch(place, tile, dim, hull.low, hull.width, reason, (), split)
        return Tile(array, tile.sharding, tile.shape)


class Hull(NamedTuple):
    """Rows from `low` on for each tile; for one reader, those from `first` on of each device."""

    key: Any
    low: np.ndarray
    width: int
    moves: Moves
    first: np.ndarray


class Reader(NamedTuple):
    """Tiles of `rows` rows, which are the rows of a source that are `by` further on.

    Beyond its ends they are `copies` of others: as in a roll, or at a border with an edge.
    """

    by: int
    rows: int
    copies: Moves


def _reader(moves: Moves, rows: int, size: int) -> Reader | None:
    """Moves as one shift, and copies; None if no rows are neighbours, or some are rearranged."""
    most = max(moves, key=lambda m: (m.end - m.first, -abs(m.by)), default=Move(0, 1, 0))
    if most.end - most.first < 2:
        return None
    copies = tuple(m._replace(by=m.by - most.by) for m in moves if m is not most)
    outside = all(m.end + m.by <= 0 or m.first + m.by >= size for m in copies)
    return Reader(-most.by, rows, copies) if outside else None


def _moves(layers: Sequence[Layer], dim: int) -> Moves:
    """The rows of all layers of a source, if those can be fetched at once."""
    if not all(layer.axes[dim].is_run for layer in layers):
        return ()
    found = dict.fromkeys(
        Move(n.base[dim], n.base[dim] + n.axes[dim].rows, n.axes[dim].at - n.base[dim])
        for n in layers
    )
    return tuple(found) if are_apart(found) else ()


def _joined_moves(moves: Sequence[Move]) -> Moves | None:
    """Moves without repetitions; None if two rows become one."""
    found: list[Move] = []
    for move in sorted(moves, key=lambda m: (m.by, m.first)):
        if found and found[-1].by == move.by and move.first <= found[-1].end:
            last = found.pop()
            move = last._replace(end=max(last.end, move.end))
        found.append(move)
    return tuple(found) if are_apart(found) else None


def _beside(copies: Moves, size: int) -> Moves:
    """Copies, and all rows in their own places."""
    return (Move(0, size, 0), *copies) if copies else ()
