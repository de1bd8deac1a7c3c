"""Rows of a tensor as rows of another one, in whose tiles it is computed.

A `Place` says so, dim by dim. Windows of tensors can be written in terms of tensors in other
places, and priced: only rows that cross from tile to tile are sent.

A loop holds fields with as many rows as the largest of them: 257 points of a staggered grid, and
256 fluxes between them. Rows of the fluxes move once before the loop and once after it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph import at_every_level, replacing
from gshard.graph.regions import counts_of, loop_bodies
from gshard.graph.row_map import Axis, Layer, entire, through
from gshard.graph.source import source_of
from gshard.tensors.factors import Shape
from gshard.tensors.sharding import Sharding, Split

_FEW = 4  # rows at a border


class Space(NamedTuple):
    """Rows of a tensor are the rows from `first` on, `step` apart, of `size` rows in tiles.

    If only the rows `low` to `high` are wanted, which one tile has, tiles are as small as that.
    """

    size: int
    first: int
    step: int
    split: Split
    low: int
    high: int

    @property
    def is_border(self) -> bool:
        """Whether only a few rows are wanted."""
        return self.high - self.low < self.size

    @property
    def gap(self) -> int:
        """How far apart rows are held: next to each other where tiles begin alike then."""
        return self.step if self.split.rows(self.size) % self.step else 1

    @property
    def held(self) -> int:
        """The rows of all tiles."""
        if self.is_border:
            return (self.high - self.low) * self.split.tiles
        return -(-self.size * self.gap // self.step)

    @property
    def begin(self) -> int:
        """The row of the tiles that the first wanted row is."""
        tile = self.low // self.split.rows(self.size)
        return tile * (self.high - self.low) if self.is_border else 0

    def has_at_border(self, axis: Axis, at: int) -> bool:
        """Whether rows, which are those from `at` on in it, are few, and in one tile."""
        local, last = self.split.rows(self.size), at + axis.rows - 1
        return axis.is_run and axis.rows <= _FEW < local and at // local == last // local

    def shared(self, rows: int) -> tuple[int, int, int]:
        """The first of a tensor's rows that is there, how many are, and where the first is."""
        first = max(0, -((self.first - self.low) // self.step))
        last = min(rows, -((self.first - self.high) // self.step))
        at = self.first + self.step * first - self.low + self.begin
        return first, max(last - first, 0), at * self.gap // self.step


Place = tuple[tuple[int, Space], ...]  # the dims of a tensor whose rows are in another space


def fits(var: Any, place: Place) -> bool:
    """Whether a space has all rows of a tensor."""
    return all(
        space.low <= space.first and space.first + space.step * (var.aval.shape[d] - 1) < space.high
        for d, space in place
    )


def shifts(place: Place) -> list[int]:
    """By how many rows a tensor is shifted in a place, along its dims."""
    return [abs(space.first) for _, space in place]


def of_operand(a: Any, out: Any, place: Place) -> Place:
    """The place of an operand, which may have one row for all of the result's."""
    return tuple((d, space) for d, space in place if a.aval.shape[d] == out.aval.shape[d])


def distance(layer: Layer) -> int:
    """How far rows are from where they are read."""
    read = [(a, layer.base[a.dim]) for a in layer.axes if a.dim is not None]
    return sum(abs(first - a.at * a.stride // a.step) for a, first in read)


def rank(layer: Layer) -> tuple[int, int]:
    """The most rows first, and then the nearest."""
    return layer.size, -distance(layer)


def window_of(source: Any, place: Place, var: Any) -> Layer:
    """The rows of a tensor that `source` has, which is that tensor in a place."""
    window = entire(source, var.aval.shape)
    for d, space in place:
        first, rows, at = space.shared(var.aval.shape[d])
        window = window.along(d, Axis(first, rows, d, 1, space.gap), at)
    return window


def extended(layer: Layer, place: Place, shape: Sequence[int]) -> Iterator[tuple[int, Layer]]:
    """A layer of a tensor of this shape in a place, with as many rows as there are, and its size
    without them: beyond the rows that the tensor has they are garbage."""
    window = entire(layer.source, shape)
    for d, space in place:
        first, rows, at = space.shared(shape[d])
        window = window.along(d, Axis(at, rows, d, space.gap), first)
    for found in through(window, [layer]):
        size = found.size
        for d, space in place:
            axis, own = found.axes[d], layer.axes[d]
            if own.step > 1:  # between its rows are those of other layers
                continue
            low = space.begin if own.at == 0 else axis.at
            end = space.begin + (space.high - space.low if space.is_border else space.held)
            high = end if own.end == shape[d] else axis.end
            every, rest = divmod(axis.stride, axis.step)
            if axis.dim is None:
                found = found.along(d, Axis(low, high - low))
            elif every > 0 and not rest:
                start = found.base[axis.dim] - every * axis.at  # the source's row for row 0
                low = max(low, -(start // every))
                high = min(high, -((start - layer.source.aval.shape[axis.dim]) // every))
                axis = Axis(low, high - low, axis.dim, 1, every)
                found = found.along(d, axis, start + every * low)
        yield size, found


def bytes_sent(
    source: Any,
    before: Sequence[Split | None],
    layers: Sequence[Layer],
    shape: Sequence[int],
    after: Sequence[Split | None],
) -> float:
    """The bytes that a device sends for windows of a source in tensors of a shape."""
    sent, size = 0.0, max(layer.size for layer in layers) * source.aval.dtype.itemsize
    for d, split in enumerate(before):
        axes = [(axis, n.base[d]) for n in layers for axis in n.axes if axis.dim == d]
        if split is None or not axes:
            continue
        to = next((e for e, axis in enumerate(layers[0].axes) if axis.dim == d), None)
        if to is None or after[to] is not split:
            sent += 2 * size
            continue
        ends = [_crossing(*own, split, source.aval.shape[d], shape[to]) for own in axes]
        sent += np.max(ends, axis=0).sum() * size / max(axis.rows for axis, _ in axes)
    return sent


def _crossing(axis: Axis, base: int, split: Split, size: int, rows: int) -> list[float]:
    """The most rows that a tile needs of those before it and behind it."""
    tiles = np.arange(split.tiles)
    local, width = split.rows(rows), split.rows(size)
    low = np.maximum(-(-(tiles * local - axis.at) // axis.step), 0)
    high = np.minimum(-(-((tiles + 1) * local - axis.at) // axis.step), axis.rows)
    some = low < high
    if not some.any():
        return [0.0, 0.0]
    one, other = base + axis.stride * low, base + axis.stride * (high - 1)
    first, last = np.minimum(one, other), np.maximum(one, other)
    every = abs(axis.stride)
    needed = (tiles * width - first, last - (tiles + 1) * width + 1)
    return [float(np.clip(-(-n // every), 0, high - low)[some].max()) for n in needed]


# ---------------------------------------------------------------- what loops hold

_MORE = 4  # rows


@at_every_level
def hold_alike(
    jaxpr: Jaxpr, shardings: dict[Any, Sharding], sent: Callable[[Jaxpr], float], remarks: list[str]
) -> Jaxpr:
    """The program with loops that hold fields in tiles that begin alike, where less is sent then.

    `shardings` gets those of new variables, and `sent` is what a body sends.
    """
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        held = _held(eqn, shardings) if eqn.primitive in (p.scan_p, p.while_p) else [eqn]
        loops = (e for e in (*held, eqn) if e.primitive is eqn.primitive)
        if len(held) > 1 and operator.lt(*(sent(loop_bodies(e)[-1].jaxpr) for e in loops)):
            remarks.append(f"at {source_of(eqn)}: fields are held with as many rows")
            eqns += held
        else:
            eqns.append(eqn)
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def _held(loop: JaxprEqn, shardings: dict[Any, Sharding]) -> list[JaxprEqn]:
    """The equations of a loop that holds fields with more rows."""
    params, (*conds, closed) = dict(loop.params), loop_bodies(loop)
    body, first = closed.jaxpr, params.get("cond_nconsts", 0)
    consts, carry = (params["body_nconsts"], len(body.outvars)) if conds else counts_of(loop)
    fields = body.invars[: consts + carry]
    shapes = [_shape(v, fields, shardings) for v in fields]

    def held(atoms: Sequence[Any], number: int) -> list[Any]:
        """Variables of fields from this number on, some of them with more rows."""
        found = dict(enumerate(atoms, number))
        for k, v in enumerate(fields):
            if k in found and shapes[k] != v.aval.shape:
                found[k] = Var(v.aval.update(shape=shapes[k]))
                shardings[found[k]] = shardings[v]
        return [*found.values()]

    def moved(sources: Sequence[Any], results: Sequence[Any]) -> list[JaxprEqn]:
        return [_resized(loop, a, b) for a, b in zip(sources, results, strict=True) if a is not b]

    def changed(program: ClosedJaxpr, inside: list[Any], outs: list[Any]) -> ClosedJaxpr:
        own = program.jaxpr
        eqns = [*moved(inside, own.invars), *own.eqns, *moved(own.outvars, outs)]
        return program.replace(jaxpr=own.replace(invars=inside, outvars=outs, eqns=eqns))

    whole = changed(closed, held(body.invars, 0), held(body.outvars, consts))
    params["body_jaxpr" if conds else "jaxpr"] = whole
    for cond in conds:
        own = cond.jaxpr.invars
        inside = [*own[:first], *held(own[first:], consts)]
        params["cond_jaxpr"] = changed(cond, inside, cond.jaxpr.outvars)
    operands, results = held(loop.invars, -first), held(loop.outvars, consts)
    made = loop.replace(invars=operands, outvars=results, params=params)
    return [*moved(loop.invars, operands), made, *moved(results, loop.outvars)]


def _shape(v: Any, fields: Sequence[Any], shardings: Mapping[Any, Sharding]) -> Shape:
    """The shape that a field is held with: that of a few rows more, where tiles begin alike."""
    shape = [*v.aval.shape]
    for d, split in enumerate(shardings[v].splits):
        if split and not split.ragged and jnp.issubdtype(v.aval.dtype, np.number):
            alike = (w.aval.shape[d] for w in fields if split in shardings[w].splits[d : d + 1])
            most = max(n for n in alike if n <= shape[d] + _MORE)
            shape[d] = most if split.rows(most) > split.rows(shape[d]) else shape[d]
    return tuple(shape)


def _resized(eqn: JaxprEqn, source: Any, result: Any) -> JaxprEqn:
    """The equation that gives a tensor more rows, or fewer."""
    zero = Literal(np.zeros((), result.aval.dtype), result.aval.update(shape=(), weak_type=False))
    sizes = zip(source.aval.shape, result.aval.shape, strict=True)
    widths = tuple((0, after - before, 0) for before, after in sizes)
    return replacing(eqn, p.pad_p, [source, zero], result, padding_config=widths)
