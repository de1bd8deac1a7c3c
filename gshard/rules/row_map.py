"""Row maps: concatenations, and the compositions of them with slices, pads and updates.

The result is painted with windows of the operands (`graph.row_map`). Along a split dim, every tile
of the result fetches the rows that it needs; operands that are unsplit there send nothing. Along
unsplit dims windows are painted on every device.
"""

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
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import stack_p, unstack_p
from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer, entire
from gshard.moving.halo import align, window
from gshard.moving.plan import plan_reshard, reshard_cost, whole_along
from gshard.moving.recompute import fetch
from gshard.moving.row_windows import Move, Runs, Windows, plan_fetch
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import (
    RULES,
    Context,
    Doc,
    Rule,
    Way,
    cheapest,
    linear_in_all,
    no_order,
    register,
)
from gshard.rules.base.unreduced import made_alike, stacked
from gshard.rules.base.ways import least
from gshard.rules.changes import AffineMap
from gshard.rules.slicing import filled
from gshard.tensors.factors import Factors
from gshard.tensors.painting import Mask, painted
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, row_bytes


def stack_factors(eqn: JaxprEqn) -> Factors:
    """The dim along which tensors are stacked, or unstacked, is unsplit; the others are free."""
    rank = max(len(a.aval.shape) for a in (*eqn.invars, *eqn.outvars))
    stack = [None if d == eqn.params["axis"] else f"d{d}" for d in range(rank)]
    parts = [name for name in stack if name]
    operands, results = (
        [stack if len(a.aval.shape) == rank else parts for a in atoms]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Factors.of(eqn, operands, results)


def row_map_factors(eqn: JaxprEqn) -> Factors:
    """Every dim passes its splits on; operands with fewer rows than tiles stay unsplit."""
    shape, moving = eqn.outvars[0].aval.shape, _moving(eqn, _layers(eqn))
    names = [f"d{i}" for i in range(len(shape))]
    tensors = [a.aval.shape for a in eqn.invars if a.aval.shape]
    operands = [names if a.aval.shape else [] for a in eqn.invars]
    resized = [
        f for d, f in enumerate(names) if d in moving or any(s[d] != shape[d] for s in tensors)
    ]
    return Factors.of(eqn, operands, [names], resized=resized)


def _layers(eqn: JaxprEqn) -> Sequence[Layer]:
    if eqn.primitive is row_map_p:
        return eqn.params["layers"]
    dim, at, layers = eqn.params["dimension"], 0, []
    for number, a in enumerate(eqn.invars):
        rows = a.aval.shape[dim]
        if rows:
            layers.append(entire(number, a.aval.shape).along(dim, Axis(at, rows, dim)))
        at += rows
    return layers


def _moving(eqn: JaxprEqn, layers: Sequence[Layer]) -> list[int]:
    """The dims along which some layer is not all rows of its source, in their places."""
    shapes = [a.aval.shape for a in eqn.invars]
    return [
        d
        for d, n in enumerate(eqn.outvars[0].aval.shape)
        if not all(layer.keeps(d, n, shapes[layer.source]) for layer in layers)
    ]


def _affine(axis: Axis, base: int, rows: int) -> AffineMap:
    """How rows of a source become rows of the result, of which there are `rows`."""
    common = math.gcd(axis.step, axis.stride)  # rows between are not painted
    step, stride = axis.step // common, axis.stride // common
    return AffineMap(rows, low=axis.at * stride - base * step, step=step, stride=stride)


# ---------------------------------------------------------------- how it runs


def _row_map(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    shape, layers = tuple(eqn.outvars[0].aval.shape), _layers(eqn)
    if 0 in shape:
        empty = jnp.zeros(targets[0].local_shape(shape), tiles[0].array.dtype)
        return [Tile(empty, targets[0], shape)]
    way = cheapest(ctx, eqn, RULES[eqn.primitive], tiles, targets)
    (result,), reason = way.results, Reason("operand", _name(eqn))
    ready = {
        n: ctx.reshard(tiles[n], way.operands[n], reason)
        for n in dict.fromkeys(layer.source for layer in layers)
    }
    painting = _Painting(ctx, result, shape, _moving(eqn, layers), _name(eqn), eqn.invars)
    return [Tile(painting.run(layers, ready), result, shape)]


def _name(eqn: JaxprEqn) -> str:
    return "concatenate" if eqn.primitive is p.concatenate_p else "row_map"


class _Painting:
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
        moves = self._moves_together(layer, tile, dim, layers)
        key = (key, dim, tuple(moves) or (axis, base))
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
            array = _affine(axis, base, self.shape[dim]).run(self.ctx, tile, dim, split, reason)
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
    ) -> list[Move]:
        """The rows of all layers of the same source that are fetched at once with these."""
        if len(self.cut) > 1 or tile.sharding.splits[dim] is None:
            return []
        alike = [other for other in layers if other.source == layer.source]
        if not all(other.axes[dim].is_run for other in alike):
            return []
        moves = []
        for other in alike:
            axis, first = other.axes[dim], other.base[dim]
            moves.append(Move(first, first + axis.rows, axis.at - first))
        return moves if _are_apart(moves) else []


def _are_apart(moves: Sequence[Move]) -> bool:
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


# ---------------------------------------------------------------- ways


def _towards(here: Sharding, target: Sharding) -> Sharding:
    for dim in range(here.rank):
        here = filled(here, dim, target)
    return here


def row_map_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Sequence[Way]:
    """Fetch rows of split dims, or first gather these or move their splits to another dim.

    The last takes an AllToAll for each operand and one for the result. It is the only way if it
    sends fewer bytes in no more steps.
    """
    (target,), layers = targets, _layers(eqn)
    moving = _moving(eqn, layers)
    used = dict.fromkeys(layer.source for layer in layers if not layer.is_constant)
    options = dict.fromkeys([target, *(_towards(shardings[i], target) for i in used)])
    whole = [s.unsplit(moving) for s in options]

    def way(result: Sharding) -> Way:
        return _way(eqn, shardings, layers, moving, result)

    usual = [way(s) for s in dict.fromkeys([*options, *whole])]
    moved = dict.fromkeys(m for s in options for d in moving for m in whole_along(s, d)[1:])
    if not moved or len(moving) > 1:
        return usual
    best = least(usual, eqn, shardings, targets)
    sent, steps = _totals(best, eqn, shardings, targets)
    for other in map(way, moved):
        total = _totals(other, eqn, shardings, targets)
        if total[0] < sent and total[1] <= steps:
            best, sent = other, total[0]
    return [best] if best.results[0] in moved else usual


def _way(
    eqn: JaxprEqn,
    shardings: Sequence[Sharding],
    layers: Sequence[Layer],
    moving: list[int],
    result: Sharding,
) -> Way:
    """With a result that is split like that; `Way.how` is the number of collectives inside."""
    aval = eqn.outvars[0].aval
    sources, sent, steps = list(shardings), 0.0, 0
    for i in dict.fromkeys(layer.source for layer in layers if not layer.is_constant):
        shape, here = eqn.invars[i].aval.shape, shardings[i]
        sources[i] = result.unsplit(moving)
        if any(result.splits[d] for d in moving):
            own = [layer for layer in layers if layer.source == i]
            inside, number = _fetched(own, moving, shape, aval, result)
            gathered, aligned = (
                reshard_cost(here, there, shape, aval.dtype) for there in (sources[i], result)
            )
            if aligned + inside < gathered:
                sources[i], sent, steps = result, sent + inside, steps + number
    return Way(tuple(sources), (result,), steps, sent=sent)


def _fetched(
    layers: Sequence[Layer], moving: list[int], shape: Sequence[int], aval: Any, result: Sharding
) -> tuple[float, int]:
    """The bytes that a device sends for the layers of a source, and in how many collectives."""
    sent, steps, now = 0.0, 0, list(result.local_shape(shape))
    after = result.local_shape(aval.shape)
    cut = [d for d in moving if result.splits[d]]
    for dim in cut:
        split, row = result.splits[dim], row_bytes(now, dim, aval.dtype)
        assert split
        starts = np.arange(split.tiles) * after[dim]
        moves = [
            Move(f := layer.base[dim], f + layer.axes[dim].rows, layer.axes[dim].at - f)
            for layer in layers
        ]
        runs = all(layer.axes[dim].is_run for layer in layers)
        if runs and len(cut) == 1 and _are_apart(moves):
            plan = plan_fetch(split.tiles, shape[dim], starts, after[dim], moves)
            sent, steps = sent + plan.sent * row, steps + plan.steps
        else:
            for axis, base in dict.fromkeys((n.axes[dim], n.base[dim]) for n in layers):
                if axis.is_run:
                    move = Move(base, base + axis.rows, axis.at - base)
                    rows = plan_fetch(split.tiles, shape[dim], starts, after[dim], [move]).sent
                else:
                    rows = _affine(axis, base, aval.shape[dim]).sent(shape[dim], split.tiles)
                sent, steps = sent + rows * row, steps + 1
        now[dim] = after[dim]
    return sent, steps


def _totals(
    way: Way, eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding]
) -> tuple[float, int]:
    """The bytes that a way sends, and in how many collectives."""
    sent, steps = way.sent, way.how
    atoms, before = (*eqn.invars, *eqn.outvars), (*shardings, *way.results)
    for atom, here, there in zip(atoms, before, (*way.operands, *targets), strict=True):
        if here is not there:
            hops = plan_reshard(here, there, atom.aval.shape, atom.aval.dtype)
            moved = [hop.bytes for hop in hops if hop.kind != "slice"]
            sent, steps = sent + sum(moved), steps + len(moved)
    return sent, steps


def _linear(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear in all tensors jointly, if there is nothing else but zeros."""
    tensors = [n for n, a in enumerate(eqn.invars) if a.aval.shape]
    others = [a for a in eqn.invars if not a.aval.shape]
    zeros = all(isinstance(a, Literal) and a.val == 0 for a in others)
    return (tensors,) if zeros else ()


def _on_unreduced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """Along unsplit dims, every device paints with what it has."""
    layers, shape = _layers(eqn), tuple(eqn.outvars[0].aval.shape)
    tensors = [t for t in tiles if t.shape]
    parts = made_alike(ctx, tensors) if all(t.is_unreduced for t in tensors) else None
    moving = _moving(eqn, layers)
    if parts is None or 0 in shape or any(parts[0].sharding.splits[d] for d in moving):
        return None
    ready = dict(zip([n for n, t in enumerate(tiles) if t.shape], parts, strict=True))
    every = {n: ready.get(n, t) for n, t in enumerate(tiles)}
    array = _Painting(ctx, parts[0].sharding, shape, moving, _name(eqn)).run(layers, every)
    return Tile(array, parts[0].sharding, shape, tensors[0].origin)


_JOINED = Doc(free="other dims", halo="the dim itself: the rows that change tiles")
register(
    Rule(
        row_map_factors,
        partition=_row_map,
        ways=row_map_ways,
        ordered=no_order,
        linear=_linear,
        on_unreduced=_on_unreduced,
        doc=_JOINED,
    ),
    p.concatenate_p,
    row_map_p,
)
register(
    Rule(
        stack_factors,
        linear=linear_in_all,
        on_unreduced=stacked,
        doc=Doc(free="the operands' dims"),
    ),
    stack_p,
)
register(
    Rule(
        stack_factors,
        doc=Doc(
            free="the results' dims", gather="the other: AllGather, every device needs all rows"
        ),
    ),
    unstack_p,
)
