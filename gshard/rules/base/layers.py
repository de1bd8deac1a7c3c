"""The windows of its operands that the result of an operator consists of (`graph.row_map`)."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard.graph.row_map import Axis, Layer, constant, entire, visible
from gshard.rules.base.primitives import row_map_p

Layers = tuple[Layer, ...]


def layers_of(eqn: JaxprEqn) -> Layers:
    """The layers of an equation's result; their sources are the numbers of its operands."""
    return ROW_MAPS[eqn.primitive](eqn)


def _of_map(eqn: JaxprEqn) -> Layers:
    return eqn.params["layers"]


def _of_concatenate(eqn: JaxprEqn) -> Layers:
    dim, at, layers = eqn.params["dimension"], 0, []
    for number, a in enumerate(eqn.invars):
        rows = a.aval.shape[dim]
        layers.append(entire(number, a.aval.shape).along(dim, Axis(at, rows, dim)))
        at += rows
    return visible(layers)


def _of_slice(eqn: JaxprEqn) -> Layers:
    starts, shape = eqn.params["start_indices"], eqn.outvars[0].aval.shape
    strides = eqn.params["strides"] or (1,) * len(shape)
    steps = [int(s) if n > 1 else 1 for n, s in zip(shape, strides, strict=True)]
    axes = tuple([Axis(0, n, d, 1, steps[d]) for d, n in enumerate(shape)])
    return (Layer(0, tuple(map(int, starts)), axes),) if 0 not in shape else ()


def _of_pad(eqn: JaxprEqn) -> Layers:
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    base, axes = [], []
    for d, (low, _, interior) in enumerate(eqn.params["padding_config"]):
        step = int(interior) + 1
        first = max(0, -(int(low) // step))
        at = int(low) + first * step
        count = max(0, min(before[d] - first, -(-(after[d] - at) // step)))
        base.append(first)
        axes.append(Axis(at, count, d, step if count > 1 else 1))
    return visible([constant(1, after), Layer(0, tuple(base), tuple(axes))])


def _of_reversal(eqn: JaxprEqn) -> Layers:
    turned, shape = eqn.params["dimensions"], eqn.outvars[0].aval.shape
    axes = tuple(Axis(0, n, d, 1, -1 if d in turned and n > 1 else 1) for d, n in enumerate(shape))
    base = tuple(n - 1 if d in turned else 0 for d, n in enumerate(shape))
    return visible([Layer(0, base, axes)])


ROW_MAPS: dict[Primitive, Callable[[JaxprEqn], Layers]] = {
    row_map_p: _of_map,
    p.concatenate_p: _of_concatenate,
    p.slice_p: _of_slice,
    p.pad_p: _of_pad,
    p.rev_p: _of_reversal,
}
