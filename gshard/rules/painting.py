"""A device's tile of a row map: rows are fetched to where they belong, then painted."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from gshard._jax import Var
from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer
from gshard.moving.fetch import Along, fetch
from gshard.rules.axis_rows import AxisRows, Reader, Together, moves_of, reader
from gshard.rules.base.layers import ROW_MAPS, layers_of
from gshard.rules.base.rule import Context
from gshard.rules.window_reduce import WINDOWED
from gshard.tensors.painting import Mask, all_of, any_of, painted
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, rows_within

Window = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]  # dims, and from where to where


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

    def rows(self, layer: Layer, dim: int, tiles: Mapping[int, Tile]) -> Any:
        """The rows of a layer along a dim: `AxisRows`, or such that are known at run time."""
        return AxisRows(layer.axes[dim], layer.base[dim], self.shape[dim])

    def read(self, layers: Sequence[Layer], dim: int) -> list[slice]:
        """The rows of an unsplit dim that layers of a source read, in runs that are apart."""
        if self.at_run_time:
            return [slice(0, layers[0].axes[dim].rows, 1)]
        own = sorted({(r.start, r.stop, r.step) for r in (n.read(dim) for n in layers)})
        starts, ends, steps = zip(*own, strict=True)
        if set(steps) == {1} and all(a <= b for a, b in zip(ends, starts[1:], strict=False)):
            borders = [b for b in sorted({*starts, *ends}) if (b in starts) != (b in ends)]
            return [slice(a, b, 1) for a, b in zip(borders[::2], borders[1::2], strict=True)]
        strides = [step for start, stop, step in own if stop - start > 1]
        step = math.gcd(*strides, *(start - starts[0] for start in starts))
        return [slice(starts[0], max(ends), step or 1)]

    def needs(self, layers: Sequence[Layer], source: Sharding) -> list[list[Layer]]:
        """The layers of a source by the rows of split dims that they need of it.

        Layers of one window of the unsplit dims are together: the channels of a stack are apart,
        and the two parts of a roll are not.
        """
        there, here = (
            [d for d in self.moving if bool(source.splits[d]) is split] for split in (False, True)
        )
        windows, found = dict[Any, list[Layer]](), dict[Any, list[Layer]]()
        if not there or not here:
            return [[*layers]]
        for n in layers:
            read = (n.read(d) for d in there)
            windows.setdefault(tuple((r.start, r.stop, r.step) for r in read), []).append(n)
        for own in windows.values():
            rows = frozenset((d, n.axes[d], n.base[d]) for n in own for d in here)
            found.setdefault(rows, []).extend(own)
        return [*found.values()]

    def extent(self, var: Any, dims: Sequence[int]) -> list[tuple[int, int]]:
        """From where to where, along some dims, layers of an operand read it."""
        own = [n for n in self.layers if n.base and self.operands[n.source] is var]
        read = [[n.read(d) for n in own] for d in dims]
        return [(min(r.start for r in of), max(r.stop for r in of)) for of in read if of]

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
        self.windows: dict[Any, Window] = {}  # of sources
        self.hulls: dict[Any, Any] = {}  # by sources and dims; empty if layers have their own

    def run(self, tiles: Mapping[int, Tile], apart: Collection[int] = ()) -> jax.Array:
        """Fetch the rows of each layer, and paint; by what layers need, of operands `apart`."""
        self.tiles, layers = dict(tiles), self._ordered()
        self.variables = dict(enumerate(self.map.operands))
        for number, own in self.map.sources.items():
            if number in apart and not self._shares(number):
                for alike in self.map.needs(own, tiles[number].sharding):
                    layers = self._as_operand(len(self.variables), alike, layers)
            else:
                layers = self._narrowed(number, own, layers)
        self.layers = layers
        found, masks = list[Layer](), list[list[Mask]]()
        for layer in layers:
            part, mask = self._part(layer)
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

    def _shares(self, number: int) -> bool:
        """Whether other row maps fetch rows of an operand, too."""
        var, splits = self.variables[number], self.tiles[number].sharding.splits
        sent = [d for d in self.map.moving if splits[d]]
        several = any(self._together(var, d).are_several for d in sent)
        return several and len(self._others(var)) > 1

    def _as_operand(
        self, number: int, part: Sequence[Layer], layers: Sequence[Layer]
    ) -> Sequence[Layer]:
        """The layers, with a part of those of a source as layers of an operand of their own."""
        source, chosen = part[0].source, set(part)
        self.tiles[number] = self.tiles[source]
        self.variables[number] = Var(self.map.operands[source].aval)
        layers = [n.of(number) if n in chosen else n for n in layers]
        return self._narrowed(number, [n.of(number) for n in part], layers)

    def _narrowed(
        self, number: int, own: Sequence[Layer], layers: Sequence[Layer]
    ) -> Sequence[Layer]:
        """The layers, with a source whose rows are sent cut to the rows that are read.

        The layers of all row maps that fetch rows together: they read what is cut in the same way.
        """
        tile, splits = self.tiles[number], self.tiles[number].sharding.splits
        sent = [d for d in self.map.moving if splits[d]]
        if not sent or self.map.at_run_time:
            return layers
        var, x = self.variables[number], tile.array
        if self._shares(number):
            maps = [other for other, _ in self._others(var)]
            theirs = [n for m in maps for n in m.layers if m.operands[n.source] is var]
            own = [*own, *theirs]  # a map whose tiles nobody reads is none of these
        read = {d: self.map.read(own, d) for d in self.map.moving if splits[d] is None}
        for d, runs in read.items():
            if runs != [slice(0, x.shape[d], 1)]:
                cut = [lax.slice_in_dim(x, r.start, r.stop, r.step, d) for r in runs]
                x = lax.concatenate(cut, d) if len(cut) > 1 else cut[0]
        if x is tile.array:
            return layers
        shape = tuple(n if splits[d] else x.shape[d] for d, n in enumerate(tile.shape))
        self.tiles[number] = Tile(x, tile.sharding, shape)
        return [_within_runs(n, read) if n.source == number else n for n in layers]

    def _part(self, layer: Layer) -> tuple[Layer, Mask]:
        """A layer of local arrays, and which elements of it are painted."""
        key: Any = layer.source
        tile, part, masks = self.tiles[layer.source], layer, list[Mask]()
        hulls = self._hulls(layer)
        dims = [*range(len(self.splits))]
        if not layer.is_constant:
            dims = self.map.order(tile.sharding, tile.shape)
        if len(hulls) > 1:  # in the order in which all row maps of the source fetch them
            dims = [*hulls, *(d for d in dims if d not in hulls)]
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
                    key, rest = (key, d, hull[0]), hull[1]
                    along = Along(d, rest.low, rest.widths, rest.moves, split)
                    array = fetch(self.ctx.place, tile, self._reason(d), along)
                    tile = Tile(array, tile.sharding, tile.shape)
                elif not layer.is_constant:
                    key, tile = self._rows(key, layer, tile, d)
                part = part.along(d, Axis(0, rows, axis.dim), 0)
                if axis[:2] != (0, self.map.shape[d]) or axis.step > 1:
                    masks.append(self._within(split, d, axis))
        if key not in self.fetched:
            self.fetched[key] = len(self.arrays)
            array = tile.array
            for d, hull in hulls.items():  # at last: other row maps read the same rows
                split = self.splits[d]
                assert split
                own, together = hull
                array = own.rows.placed(self.ctx.place, array, d, split, together.low)
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

    def _others(self, var: Any) -> list[tuple[RowMap, Sequence[Split | None]]]:
        """The row maps that read a source where this one does, and the splits of their results.

        Rows of other windows of its unsplit dims, as of other fields of a stack, are others.
        """
        known = self.ctx.rows
        if var not in known:
            readers = (eqn for eqn in self.ctx.readers(var) if eqn.primitive in ROW_MAPS)
            eqns = [eqn for eqn in readers if self._is_read(eqn)]
            maps = [known.setdefault(eqn, known.get(eqn) or RowMap(eqn)) for eqn in eqns]
            splits = [self.ctx.sharding(eqn.outvars[0]).splits for eqn in eqns]
            known[var] = list(zip(maps, splits, strict=True))
        window = self._window(var)
        if (var, window) not in known:
            free, own = window
            meeting = [(m, s) for m, s in known[var] if _meet(m.extent(var, free), own)]
            known[var, window] = meeting
        return known[var, window]

    def _window(self, var: Any) -> Window:
        """The dims that are unsplit, and what is read of a source along them, from end to end."""
        if var not in self.windows:
            (number,) = (n for n, v in self.variables.items() if v is var)
            both = zip(self.splits, self.tiles[number].sharding.splits, strict=True)
            free = tuple([d for d, splits in enumerate(both) if not any(splits)])
            self.windows[var] = free, tuple(self.map.extent(var, free))
        return self.windows[var]

    def _is_read(self, eqn: JaxprEqn) -> bool:
        """Whether tiles of a row map are read: operators with windows fetch what they need."""
        users = self.ctx.readers(eqn.outvars[0])
        return not users or any(user.primitive not in WINDOWED for user in users)

    def _together(self, var: Any, dim: int) -> Together:
        """What row maps read of a source for tiles that are split like those here."""
        split, found = self.splits[dim], list[Reader | None]()
        key = (var, dim, split, self._window(var))
        if key not in self.ctx.rows:
            size = var.aval.shape[dim]
            for row_map, splits in self._others(var):
                if split and splits[dim] is split:
                    own = [n for n in row_map.layers if row_map.operands[n.source] is var]
                    each = [own] if moves_of(own, dim) else [[n] for n in own]
                    found += [reader(n, dim, size, row_map.shape[dim], split.tiles) for n in each]
            self.ctx.rows[key] = Together([r for r in found if r], size)
        return cast(Together, self.ctx.rows[key])

    def _moving(self, var: Any) -> Sequence[int]:
        """The dims to fetch rows along: all that move rows, if one row map has several."""
        key = (var, self.splits, self._window(var))
        if key not in self.ctx.rows:
            moved = [
                {d for d in other.moving if splits[d] and splits[d] is self.splits[d]}
                for other, splits in self._others(var)
            ]
            corners = any(len(dims) > 1 for dims in moved)
            self.ctx.rows[key] = sorted(set().union(*moved)) if corners else ()
        return cast(Sequence[int], self.ctx.rows[key])

    def _hulls(self, layer: Layer) -> dict[int, tuple[Reader, Together]]:
        """The rows that are fetched at once, by dims: those of all row maps, if that sends less.

        Where one of them moves rows along two dims, all fetch rows along both, with the corners.
        """
        number, found = layer.source, dict[int, Any]()
        if layer.is_constant or self.map.at_run_time or not self.shared:
            return {}
        there = self.tiles[number].sharding.splits
        several = self._moving(self.variables[number]) if any(there) else ()
        for d in several or self.cut:
            if there[d]:
                if (number, d) not in self.hulls:
                    own = [n for n in self.layers if n.source == number]
                    self.hulls[number, d] = moves_of(own, d) and self._hull(own, d, bool(several))
                hull = self.hulls[number, d]
                found[d] = self._hull([layer], d, bool(several)) if hull == () else hull
        return {d: hull for d, hull in found.items() if hull}

    def _hull(self, layers: Sequence[Layer], dim: int, several: bool) -> Any:
        """Who reads these layers, and what they have in common with others, if that sends less."""
        (number, *_), split = [n.source for n in layers], self.splits[dim]
        assert split
        var, size, rows = self.variables[number], self.tiles[number].shape[dim], self.map.shape[dim]
        own, together = reader(layers, dim, size, rows, split.tiles), self._together(var, dim)
        if own in together.readers and together.is_less(several):
            return own, together
        alone = own and Together([own], size)  # without readers where rows are too far apart
        return (own, alone) if own and alone and alone.readers and own.copies[1:] else None


def _meet(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    """Whether windows have something in common; all dims may be split."""
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=False))


def _within_runs(layer: Layer, read: Mapping[int, Sequence[slice]]) -> Layer:
    """A layer of a source of which runs of some dims are left, one behind the other."""
    for d, runs in read.items():
        at, axis, rows = 0, layer.axes[d], layer.read(d)
        for r in runs:
            if r.start <= rows.start < r.stop:
                break
            at += -(-(r.stop - r.start) // r.step)
        axis = axis._replace(stride=axis.stride // r.step if axis.rows > 1 else 1)
        layer = layer.along(d, axis, at + (layer.base[d] - r.start) // r.step)
    return layer
