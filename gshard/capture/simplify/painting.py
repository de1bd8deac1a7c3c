"""The equations of a row map."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph import replacing
from gshard.graph.row_map import Axis, Layer, apart, entire
from gshard.rules.base.primitives import row_map_p


def painting(eqn: JaxprEqn, layers: Sequence[Layer]) -> list[JaxprEqn]:
    """The equations that make the result of `eqn` from these layers."""
    (result,) = eqn.outvars
    if len(layers) == 1 and not layers[0].is_constant:
        return _slicing(eqn, layers[0])
    before: list[JaxprEqn] = []
    operands: dict[Any, tuple[int, Any]] = {}  # by variable; literals by identity
    numbered: list[Layer] = []
    visible = [*apart(layers, result.aval.shape)]
    if not all(layer.is_constant or layer.is_aligned for layer in visible):
        visible = [*_aligned(eqn, [*_by_fields(eqn, visible, before)], before)]
    for layer in visible:
        key = id(layer.source) if isinstance(layer.source, Literal) else layer.source
        number, _ = operands.setdefault(key, (len(operands), layer.source))
        numbered.append(layer.of(number))
    operands_of_map, layers = [source for _, source in operands.values()], tuple(numbered)
    return [*before, replacing(eqn, row_map_p, operands_of_map, result, layers=layers)]


def _aligned(eqn: JaxprEqn, layers: Sequence[Layer], before: list[JaxprEqn]) -> Iterator[Layer]:
    """The layers, of sources with the dims of the result.

    A source is transposed and reshaped `before`, once; if that does not do, its rows are sliced.
    """
    transposed: dict[tuple[Any, tuple[int, ...]], Any] = {}
    views: dict[tuple[Any, tuple[int, ...]], Any] = {}
    for own in layers:
        if own.is_constant or own.is_aligned:
            yield own
            continue
        known, layer = len(transposed), turned(own, transposed)
        source = layer.source
        if len(transposed) > known:
            order = [*transposed][-1][1]
            before.append(replacing(eqn, p.transpose_p, [own.source], source, permutation=order))
        if found := viewed(layer):
            shape, layer = found
            if shape != source.aval.shape:
                if (source, shape) not in views:
                    views[source, shape] = view = Var(source.aval.update(shape=shape))
                    before.append(reshaped(eqn, source, view))
                source = views[source, shape]
        else:
            rows = Var(source.aval.update(shape=tuple(axis.rows for axis in layer.axes)))
            before += _slicing(replacing(eqn, row_map_p, [], rows), layer)
            axes = tuple(axis._replace(dim=d, stride=1) for d, axis in enumerate(layer.axes))
            source, layer = rows, Layer(rows, (0,) * len(axes), axes)
        yield layer.of(source)


def _by_fields(eqn: JaxprEqn, layers: Sequence[Layer], before: list[JaxprEqn]) -> Iterator[Layer]:
    """The layers; where most of a field of a stack is read, as layers of that field.

    A field has a single row of each dim that its layers lost. It is sliced `before`, once, so that
    what they read of it is moved together.
    """
    keys, fields = list(map(_field, layers)), dict[Any, Any]()
    used = Counter[Any]()
    for key, layer in zip(keys, layers, strict=True):
        used[key] += layer.size
    for key, layer in zip(keys, layers, strict=True):
        if key and key not in fields:
            source, base, shape = key
            fields[key] = None
            if math.prod(shape) <= 2 * used[key]:
                field = fields[key] = Var(source.aval.update(shape=shape))
                whole = Layer(source, base, entire(source, shape).axes)
                before += _slicing(replacing(eqn, row_map_p, [], field), whole)
        if key and fields[key] is not None:
            base = tuple(a - b for a, b in zip(layer.base, key[1], strict=True))
            layer = Layer(fields[key], base, layer.axes)
        yield layer


def _field(layer: Layer) -> tuple[Any, tuple[int, ...], tuple[int, ...]] | None:
    """The source of a layer that lost dims of it, with the first element and shape of its field."""
    if layer.is_constant or layer.is_aligned:
        return None
    read, shape = {axis.dim for axis in layer.axes}, layer.source.aval.shape
    lost = [d not in read and n > 1 for d, n in enumerate(shape)]
    if not any(lost):
        return None
    base = tuple(n if gone else 0 for n, gone in zip(layer.base, lost, strict=True))
    return layer.source, base, tuple(1 if gone else n for n, gone in zip(shape, lost, strict=True))


def turned(layer: Layer, made: dict[tuple[Any, tuple[int, ...]], Any]) -> Layer:
    """A layer of its source transposed, if it has the dims in another order; of one in `made`."""
    read = [axis.dim for axis in layer.axes if axis.dim is not None]
    if layer.is_constant or read == sorted(read):
        return layer
    shape = layer.source.aval.shape
    order = (*(d for d in range(len(shape)) if d not in read), *read)
    if (layer.source, order) not in made:
        aval = layer.source.aval.update(shape=tuple(shape[d] for d in order))
        made[layer.source, order] = Var(aval)
    axes = (a if a.dim is None else a._replace(dim=order.index(a.dim)) for a in layer.axes)
    base = tuple(layer.base[d] for d in order)
    return Layer(made[layer.source, order], base, tuple(axes))


def viewed(layer: Layer) -> tuple[tuple[int, ...], Layer] | None:
    """The shape of a layer's source with the dims of the result, and the window of that.

    None if the source has other dims of more than one row, or has them in another order. A single
    row of a dim, which the source lost, may be one of the result.
    """
    shape, read = layer.source.aval.shape, {axis.dim for axis in layer.axes}
    left = [d for d, n in enumerate(shape) if n > 1 or d in read]
    sizes, base, axes = list[int](), list[int](), list[Axis]()
    for number, axis in enumerate(layer.axes):
        lost = axis.dim is None and axis.rows == 1 and left and left[0] not in read
        dim = left.pop(0) if left and (lost or axis.dim is not None) else None
        if (axis.dim is None and axis.rows > 1) or (not lost and axis.dim != dim):
            return None
        sizes.append(1 if dim is None else shape[dim])
        base.append(0 if dim is None else layer.base[dim])
        axes.append(axis._replace(dim=number))
    return None if left else (tuple(sizes), Layer(layer.source, tuple(base), tuple(axes)))


def reshaped(eqn: JaxprEqn, source: Any, result: Any) -> JaxprEqn:
    """The equation of a reshape."""
    params = {"new_sizes": result.aval.shape, "dimensions": None, "sharding": None}
    return replacing(eqn, p.reshape_p, [source], result, **params)


def _slicing(eqn: JaxprEqn, layer: Layer) -> list[JaxprEqn]:
    """The equations of a single window: a slice, reversed, transposed, without single rows, or
    with dims that the source has not, as a lookup at known places has for a batch."""
    (result,), aval, axes, made = eqn.outvars, layer.source.aval, layer.axes, list[JaxprEqn]()
    dims = [d for d, axis in enumerate(axes) if axis.dim is not None]
    as_read = sorted(dims, key=lambda d: axes[d].dim or 0)  # in the order of the source's dims
    rows = [layer.read(d) for d in range(len(aval.shape))]
    shape = tuple(-(-(r.stop - r.start) // r.step) for r in rows)
    is_window = shape == result.aval.shape and as_read == dims

    def add(kind: Primitive, shape: Sequence[int], /, **params: Any) -> None:
        operand = made[-1].outvars[0] if made else layer.source
        made.append(replacing(eqn, kind, [operand], Var(aval.update(shape=tuple(shape))), **params))

    if shape != aval.shape or is_window:
        firsts, limits, strides = zip(*((r.start, r.stop, r.step) for r in rows), strict=True)
        steps = None if set(strides) <= {1} else strides
        add(p.slice_p, shape, start_indices=firsts, limit_indices=limits, strides=steps)
    if turned := [axis.dim for axis in axes if axis.dim is not None and axis.stride < 0]:
        add(p.rev_p, shape, dimensions=tuple(turned))
    if not is_window:
        alone = as_read == dims and all(axis.dim is not None or axis.rows == 1 for axis in axes)
        window = result.aval.shape if alone else tuple(axes[d].rows for d in as_read)
        add(p.reshape_p, window, new_sizes=window, dimensions=None, sharding=None)
        if as_read != dims:
            order = tuple(map(as_read.index, dims))
            add(p.transpose_p, [axes[d].rows for d in dims], permutation=order)
        if not alone:
            to = {"shape": result.aval.shape, "broadcast_dimensions": tuple(dims)}
            add(p.broadcast_in_dim_p, result.aval.shape, sharding=None, **to)
    made[-1] = made[-1].replace(outvars=[result])
    return made
