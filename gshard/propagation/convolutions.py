"""Convolutions with the rows of a place: with other padding, or with rows at borders alone.

A window of the rows of a convolution is a convolution with less padding. A row at the border is a
convolution of the rows under one window, in the tile that has it; those of others are garbage.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph.row_map import Axis, Layer, entire
from gshard.propagation.spaces import Place, Space
from gshard.tensors.sharding import Split

Paint = Callable[[Any, Sequence[Layer]], Iterator[JaxprEqn]]  # a result, and its layers


def is_convolution(eqn: JaxprEqn) -> bool:
    """Whether windows of the result are convolutions, too."""
    return eqn.primitive is p.conv_general_dilated_p


def can_run(
    eqn: JaxprEqn, places: Sequence[Place], splits: Mapping[Any, Sequence[Split | None]]
) -> bool:
    """Whether a convolution runs in places: once, but for rows at borders."""
    dims, own = {d: (k, l) for k, l, d in _spatial(eqn)}, dict[int, set[Space]]()
    for d, space in (found for place in places for found in place):
        if space.step > 1 or d not in dims:
            return False
        k, l = dims[d]
        if not space.is_border:
            own.setdefault(d, set()).add(space)
        elif eqn.params["lhs_dilation"][k] > 1 or splits[eqn.invars[0]][l] is not space.split:
            return False
    return all(len(spaces) == 1 for spaces in own.values())


def in_place(eqn: JaxprEqn, place: Place, result: Any, paint: Paint) -> Iterator[JaxprEqn]:
    """The equations of a convolution in a place, which is computed as `result`."""
    params, spaces, shape = dict(eqn.params), dict(place), result.aval.shape
    borders, layers = list[tuple[int, int, int]](), list[Layer]()
    for k, l, d in _spatial(eqn):
        if d not in spaces:
            continue
        space, (low, high), stride = spaces[d], params["padding"][k], params["window_strides"][k]
        if space.is_border:
            borders.append((k, l, d))
            shape = _put(shape, d, space.split.tiles)
        else:
            behind = space.size - space.first - eqn.outvars[0].aval.shape[d]
            around = low + space.first * stride, high + behind * stride
            params["padding"] = _put(params["padding"], k, around)
    for rows in itertools.product(*(range(spaces[d].low, spaces[d].high) for *_, d in borders)):
        (base, kernel), own, part = eqn.invars, params, entire(None, shape)
        for (k, l, d), row in zip(borders, rows, strict=True):
            space, taps = spaces[d], kernel.aval.shape[params["dimension_numbers"].rhs_spec[2 + k]]
            tiles, width = space.split.tiles, space.high - space.low
            extent, size = (taps - 1) * params["rhs_dilation"][k] + 1, base.aval.shape[l]
            begin = (row - space.first) * params["window_strides"][k] - params["padding"][k][0]
            first, end, at = max(begin, 0), min(begin + extent, size), space.begin // width
            under = Var(base.aval.update(shape=_put(base.aval.shape, l, extent * tiles)))
            read = Axis(at * extent + first - begin, max(end - first, 0), l)
            yield from paint(under, [entire(base, base.aval.shape).along(l, read, first)])
            one = {"padding": (0, 0), "window_strides": extent}
            own = own | {name: _put(own[name], k, value) for name, value in one.items()}
            part = part.along(d, Axis(space.begin + row - space.low, 1, d), at)
            base = under
        out = result if shape == result.aval.shape else Var(result.aval.update(shape=shape))
        yield eqn.replace(invars=[base, kernel], outvars=[out], params=own)
        layers.append(part.of(out))
    if out is not result:
        yield from paint(result, layers)


def _put(values: Sequence[Any], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _spatial(eqn: JaxprEqn) -> Iterator[tuple[int, int, int]]:
    """The numbers of spatial dims, and those dims of the base and the result."""
    lhs, _, out = eqn.params["dimension_numbers"]
    return zip(itertools.count(), lhs[2:], out[2:], strict=False)
