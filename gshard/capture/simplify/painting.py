"""The equations of a row map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph import replacing
from gshard.graph.row_map import Layer, apart
from gshard.rules.base.primitives import row_map_p


def painting(eqn: JaxprEqn, layers: Sequence[Layer]) -> list[JaxprEqn]:
    """The equations that make the result of `eqn` from these layers."""
    (result,) = eqn.outvars
    if len(layers) == 1 and not layers[0].is_constant:
        return _slicing(eqn, layers[0])
    before: list[JaxprEqn] = []
    operands: dict[Any, tuple[int, Any]] = {}  # by variable; literals by identity
    numbered: list[Layer] = []
    for layer in apart(layers, result.aval.shape):
        source = layer.source
        if not layer.is_constant and not layer.is_aligned:
            rows = Var(source.aval.update(shape=tuple(axis.rows for axis in layer.axes)))
            before += _slicing(replacing(eqn, row_map_p, [], rows), layer)
            axes = tuple(axis._replace(dim=d, stride=1) for d, axis in enumerate(layer.axes))
            source, layer = rows, Layer(rows, (0,) * len(axes), axes)
        key = id(source) if isinstance(source, Literal) else source
        number, _ = operands.setdefault(key, (len(operands), source))
        numbered.append(layer.of(number))
    operands_of_map, layers = [source for _, source in operands.values()], tuple(numbered)
    return [*before, replacing(eqn, row_map_p, operands_of_map, result, layers=layers)]


def reshaped(eqn: JaxprEqn, source: Any, result: Any) -> JaxprEqn:
    """The equation of a reshape."""
    params = {"new_sizes": result.aval.shape, "dimensions": None, "sharding": None}
    return replacing(eqn, p.reshape_p, [source], result, **params)


def _slicing(eqn: JaxprEqn, layer: Layer) -> list[JaxprEqn]:
    """The equations of a single window: a slice, reversed and without single rows if need be."""
    (result,), aval = eqn.outvars, layer.source.aval
    turned = [axis.dim for axis in layer.axes if axis.dim is not None and axis.stride < 0]
    rows = [layer.read(d) for d in range(len(aval.shape))]
    firsts, limits, strides = zip(*((r.start, r.stop, r.step) for r in rows), strict=True)
    shape = tuple(-(-(b - a) // s) for a, b, s in zip(firsts, limits, strides, strict=True))
    steps, source, made = None if set(strides) <= {1} else strides, layer.source, []
    params = {"start_indices": firsts, "limit_indices": limits, "strides": steps}
    if shape != aval.shape or shape == result.aval.shape:
        made = [replacing(eqn, p.slice_p, [source], Var(aval.update(shape=shape)), **params)]
        (source,) = made[0].outvars
    if turned:
        after = Var(aval.update(shape=shape))
        made.append(replacing(eqn, p.rev_p, [source], after, dimensions=tuple(turned)))
        source = after
    if shape == result.aval.shape:
        made[-1] = made[-1].replace(outvars=[result])
        return made
    if all(axis.dim is not None or axis.rows == 1 for axis in layer.axes):
        return [*made, reshaped(eqn, source, result)]
    # A dim that the source has not: a lookup at known places, the same for all rows of a batch.
    dims = tuple(d for d, axis in enumerate(layer.axes) if axis.dim is not None)
    window = Var(aval.update(shape=tuple(layer.axes[d].rows for d in dims)))
    made.append(reshaped(eqn, source, window))
    params = {"shape": result.aval.shape, "broadcast_dimensions": dims, "sharding": None}
    return [*made, replacing(eqn, p.broadcast_in_dim_p, [window], result, **params)]
