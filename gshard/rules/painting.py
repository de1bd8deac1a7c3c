"""A device's tile of a row map: rows are fetched to where they belong, then painted."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer
from gshard.moving.halo import align, window
from gshard.moving.recompute import fetch
from gshard.moving.row_windows import Move, Runs, Windows, plan_fetch
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import Context
from gshard.rules.changes import AffineMap
from gshard.tensors.painting import Mask, painted
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile


def affine(axis: Axis, base: int, rows: int) -> AffineMap:
    """How rows of a source become rows of the result, of which there are `rows`."""
    common = math.gcd(axis.step, axis.stride)  # rows between are not painted
    step, stride = axis.step // common, axis.stride // common
    return AffineMap(rows, low=axis.at * stride - base * step, step=step, stride=stride)


class Painting:
    """A device's tile of the result, under a sharding."""

    def __init__(
        self,
        ctx: Context,
        result: Sharding,
        shape: Sequence[int],
        moving: list[int],
        name: str,
        sources: Sequence[Any] = (),
    ):
        self.ctx = ctx
        self.sources = sources
        self.splits = result.splits
        self.shape = shape
        self.local = result.local_shape(shape)
        self.cut = [d for d in moving if self.splits[d]]  # dims whose rows change tiles
        self.name = name
        self.arrays: list[jax.Array] = []
        self.moves: dict[tuple[int, int], tuple[Move, ...]] = {}
        self.fetched: dict[Any, int] = {}  # the numbers of arrays, by what they are fetched for

    def run(self, layers: Sequence[Layer], ready: Mapping[int, Tile]) -> jax.Array:
        """Fetch the rows of each layer, and paint."""
        if len(self.cut) == 1:  # what has most rows first: the others are painted over it
            layers = self._ordered(layers)
        found, masks = list[Layer](), list[list[Mask]]()
        for layer in layers:
            part, mask = self._part(layer, ready[layer.source], layers)
            if found and found[-1] == part:  # other rows of what was fetched at once
                masks[-1].append(mask)
            else:
                found.append(part)
                masks.append([mask])
        return painted(self.local, found, self.arrays, [_any_of(m) for m in masks])

    def _ordered(self, layers: Sequence[Layer]) -> Sequence[Layer]:
        """Layers that do not overlap in the order of their sources' rows."""
        (dim,) = self.cut
        axes = [layer.axes[dim] for layer in layers]
        if not all(a.end <= b.at for a, b in itertools.pairwise(axes)):
            return layers
        rows: dict[int, int] = {}
        for layer in layers:
            rows[layer.source] = rows.get(layer.source, 0) + layer.axes[dim].rows
        return sorted(layers, key=lambda layer: -rows[layer.source])

    def _part(self, layer: Layer, tile: Tile, layers: Sequence[Layer]) -> tuple[Layer, Mask]:
        """A layer of local arrays, and which elements of it are painted."""
        key: Any = layer.source
        parts, masks = layer, list[Mask]()
        for d, split in enumerate(self.splits):
            axis, rows = layer.axes[d], self.local[d]
            if split is None or (layer.is_constant and d not in self.cut):
                if split:
                    parts = parts.along(d, Axis(0, rows, axis.dim))
                continue
            number, first = divmod(axis.at, rows)
            unsplit = layer.is_constant or tile.sharding.splits[d] is None
            if d not in self.cut:
                parts = parts.along(d, Axis(0, rows, d), 0)
            elif unsplit and first + axis.end - axis.at <= rows and self.arrays:
                # In one tile, by a device that has the rows: only those are touched.
                parts = parts.along(d, axis._replace(at=first))
                masks.append(self._on_tile(split, number))
            else:
                if not layer.is_constant:
                    key, tile = self._rows(key, layer, tile, d, split, layers)
                parts = parts.along(d, Axis(0, rows, axis.dim), 0)
                if axis[:2] != (0, self.shape[d]) or axis.step > 1:
                    masks.append(self._within(split, d, axis))
        if key not in self.fetched:
            self.fetched[key] = len(self.arrays)
            self.arrays.append(tile.array)
        mask = _all_of(masks)
        return Layer(self.fetched[key], parts.base, parts.axes), mask

    def _on_tile(self, split: Split, number: int) -> Mask:
        def mask(shape: Sequence[int]) -> jax.Array:
            return jnp.broadcast_to(self.ctx.place.lookup(split.own) == number, shape)

        return mask

    def _within(self, split: Split, dim: int, axis: Axis) -> Mask:
        """A mask of the rows of an axis, in this device's tile."""

        def mask(shape: Sequence[int]) -> jax.Array:
            offset = self.ctx.place.lookup(split.own * self.local[dim])
            index = lax.broadcasted_iota(jnp.int32, shape, dim) + offset
            inside = (index >= axis.at) & (index < axis.end)
            if axis.step > 1:
                inside &= lax.rem(index - axis.at, jnp.int32(axis.step)) == 0
            return inside

        return mask

    def _rows(
        self, key: Any, layer: Layer, tile: Tile, dim: int, split: Split, layers: Sequence[Layer]
    ) -> tuple[Any, Tile]:
        """A source whose rows along `dim` are at the places of the result's rows, and its key."""
        rows = self.local[dim]
        starts, axis, base = np.arange(split.tiles) * rows, layer.axes[dim], layer.base[dim]
        after = (*tile.shape[:dim], self.shape[dim], *tile.shape[dim + 1 :])
        reason = Reason("step", self.name, f"rows of dim {dim} to their tiles")
        sharding = tile.sharding.replace(dim, split)
        if (layer.source, dim) not in self.moves:
            self.moves[layer.source, dim] = self._moves_together(layer, tile, dim, layers)
        moves = self.moves[layer.source, dim]
        key = (key, dim, moves or (axis, base))
        if key in self.fetched:
            array = self.arrays[self.fetched[key]]
        elif len(moves) > 1:
            windows = Windows.of(Runs.of(tile, dim), tile.array.shape[dim], starts, rows, moves)
            array = align(self.ctx.place, tile.array, tile.sharding, dim, windows, reason)
        elif axis.is_run:
            only, first = (base, base + axis.rows), starts + base - axis.at
            hull = self._hull(layer.source, tile, dim, split) if tile.sharding.splits[dim] else None
            if hull:  # the rows for all readers at once
                low, width = hull
                array = fetch(self.ctx.place, tile, dim, low, width, reason, None, split)
                array = window(self.ctx.place, array, dim, (first - low)[split.own], rows)
            else:
                array = fetch(self.ctx.place, tile, dim, first, rows, reason, only, split)
        else:
            array = affine(axis, base, self.shape[dim]).run(self.ctx, tile, dim, split, reason)
        return key, Tile(array, sharding, after)

    def _hull(
        self, source: int, tile: Tile, dim: int, split: Split
    ) -> tuple[np.ndarray, int] | None:
        """The rows that all row maps of a source read, if that sends less than one by one."""
        found: dict[tuple[int, int], int] = {}
        for eqn in self.ctx.readers(self.sources[source]) if self.sources else ():
            if eqn.primitive is not row_map_p:
                continue
            aval, var = eqn.outvars[0].aval, self.sources[source]
            if self.ctx.sharding(eqn.outvars[0]).splits[dim] is not split:
                continue
            rows = split.rows(aval.shape[dim])
            for layer in eqn.params["layers"]:
                axis = layer.axes[dim]
                if eqn.invars[layer.source] is var and axis.is_run and axis.rows > 1:
                    found[layer.base[dim] - axis.at, rows] = 0
        if len(found) < 2:
            return None
        number = np.arange(split.tiles)
        starts = [number * rows + by for by, rows in found]
        low = np.min(starts, axis=0)
        ends = [s + rows for s, (_, rows) in zip(starts, found, strict=True)]
        width = int((np.max(ends, axis=0) - low).max())
        size = tile.shape[dim]
        each = [
            plan_fetch(split.tiles, size, s, rows).sent
            for s, (_, rows) in zip(starts, found, strict=True)
        ]
        together = plan_fetch(split.tiles, size, low, width).sent
        return (low, width) if together < sum(each) else None

    def _moves_together(
        self, layer: Layer, tile: Tile, dim: int, layers: Sequence[Layer]
    ) -> tuple[Move, ...]:
        """The rows of all layers of the same source that are fetched at once with these."""
        if len(self.cut) > 1 or tile.sharding.splits[dim] is None:
            return ()
        alike = [other for other in layers if other.source == layer.source]
        if not all(other.axes[dim].is_run for other in alike):
            return ()
        moves = []
        for other in alike:
            axis, first = other.axes[dim], other.base[dim]
            moves.append(Move(first, first + axis.rows, axis.at - first))
        return tuple(moves) if are_apart(moves) else ()


def are_apart(moves: Sequence[Move]) -> bool:
    """Whether moves have no row of the result in common."""
    ends = sorted((m.first + m.by, m.end + m.by) for m in moves)
    return all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


def _all_of(masks: Sequence[Mask]) -> Mask:
    if not masks:
        return None
    return lambda shape: functools.reduce(lax.bitwise_and, [m(shape) for m in masks if m])


def _any_of(masks: Sequence[Mask]) -> Mask:
    if None in masks:
        return None
    return lambda shape: functools.reduce(lax.bitwise_or, [m(shape) for m in masks if m])
