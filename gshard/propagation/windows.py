"""Convolutions and pools with the rows of a place: with other padding, or rows at borders alone.

A window of the rows of a convolution is a convolution with less padding. A row at the border is a
convolution of the rows under one window, in the tile that has it; those of others are garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.graph import replacing
from gshard.graph.row_map import Axis, Layer, constant, entire, visible
from gshard.moving.reductions import identity
from gshard.propagation.spaces import Place
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES, Elementwise
from gshard.rules.window_reduce import POOLS, WINDOWED
from gshard.tensors.sharding import Split

Paint = Callable[[Any, Sequence[Layer]], Iterator[JaxprEqn]]  # a result, and its layers


class _Window(NamedTuple):
    """How a window moves along a dim of the base and of the result, `number` in parameters."""

    number: int
    base: int
    result: int
    extent: int
    stride: int
    padding: tuple[int, int]
    has_holes: bool


def has_windows(eqn: JaxprEqn) -> bool:
    """Whether it is a convolution or a pool."""
    return eqn.primitive in WINDOWED


def _windows(eqn: JaxprEqn) -> Iterator[_Window]:
    """The windows of a convolution or a pool."""
    params, strides, padding = eqn.params, eqn.params["window_strides"], eqn.params["padding"]
    if eqn.primitive in POOLS:
        dims: Any = [(d, d) for d in range(len(strides))]
        taps, gaps = params["window_dimensions"], params["window_dilation"]
        holes = params["base_dilation"]
    else:
        lhs, rhs, out = params["dimension_numbers"]
        dims = zip(lhs[2:], out[2:], strict=True)
        taps = [eqn.invars[1].aval.shape[d] for d in rhs[2:]]
        gaps, holes = params["rhs_dilation"], params["lhs_dilation"]
    for k, (l, d) in enumerate(dims):
        yield _Window(k, l, d, (taps[k] - 1) * gaps[k] + 1, strides[k], padding[k], holes[k] > 1)


def can_run(
    eqn: JaxprEqn, places: Sequence[Place], splits: Mapping[Any, Sequence[Split | None]]
) -> bool:
    """Whether an operator with windows runs in places: once, but for rows at borders of a dim."""
    windows, own, borders = {w.result: w for w in _windows(eqn)}, set[Any](), set[Any]()
    for d, space in (found for place in places for found in place):
        if space.step > 1 or d not in windows:
            return False
        here = splits[eqn.invars[0]][windows[d].base]
        if space.is_border and (windows[d].has_holes or here is not space.split):
            return False
        (borders if space.is_border else own).add((d, space))
    return len(own) == len({d for d, _ in own}) and len({d for d, _ in borders}) < 2


def in_place(eqn: JaxprEqn, place: Place, result: Any, paint: Paint) -> Iterator[JaxprEqn]:
    """The equations of an operator with windows in a place, which is computed as `result`."""
    spaces, border, aval = dict(place), list[_Window](), result.aval
    moved = {name: list(eqn.params[name]) for name in ("padding", "window_strides")}
    for w in _windows(eqn):
        space = spaces.get(w.result)
        if space and space.is_border:
            border.append(w)
            moved["padding"][w.number], moved["window_strides"][w.number] = (0, 0), w.extent
        elif space:
            behind = space.size - space.first - eqn.outvars[0].aval.shape[w.result]
            around = w.padding[0] + space.first * w.stride, w.padding[1] + behind * w.stride
            moved["padding"][w.number] = around
    params = eqn.params | {name: tuple(values) for name, values in moved.items()}
    if not border:
        yield eqn.replace(outvars=[result], params=params)
        return
    (w,), base, layers = border, eqn.invars[0], list[Layer]()
    space, sizes, d = spaces[w.result], base.aval.shape, w.result
    tile, tiles = space.begin // (space.high - space.low), space.split.tiles
    under = base.aval.update(shape=_put(sizes, w.base, w.extent * tiles))
    single = aval.update(shape=_put(aval.shape, d, tiles))
    for at, row in enumerate(range(space.low, space.high), space.begin):
        begin = (row - space.first) * w.stride - w.padding[0]
        first, end = max(begin, 0), min(begin + w.extent, sizes[w.base])
        read = Axis(tile * w.extent + first - begin, max(end - first, 0), w.base)
        yield from paint(rows := Var(under), [entire(base, sizes).along(w.base, read, first)])
        yield eqn.replace(
            invars=[rows, *eqn.invars[1:]], outvars=[out := Var(single)], params=params
        )
        layers.append(entire(out, single.shape).along(d, Axis(at, 1, d), tile))
    yield from paint(result, layers)


def _put(values: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def is_by_element(eqn: JaxprEqn) -> bool:
    """Whether each element is made of those in its place, or of numbers."""
    if not isinstance(RULES.get(eqn.primitive), Elementwise) or len(eqn.outvars) != 1:
        return False
    shape = eqn.outvars[0].aval.shape
    return bool(shape) and not eqn.effects


def tensors(eqn: JaxprEqn) -> list[Any]:
    """The operands that have dims."""
    return [a for a in eqn.invars if not isinstance(a, Literal) and a.aval.shape]


def filled(eqn: JaxprEqn, result: Any, layers: Sequence[Layer]) -> Iterator[JaxprEqn]:
    """The equations of windows in numbers that change no result of an operator."""
    kind, aval = POOLS.get(eqn.primitive), result.aval
    number = np.asarray(identity(kind, aval.dtype)) if kind else np.zeros((), aval.dtype)
    nothing = Literal(number, aval.update(shape=(), weak_type=False))
    found = visible([constant(nothing, aval.shape), *layers])
    yield from painting(replacing(eqn, row_map_p, [], result), found)
