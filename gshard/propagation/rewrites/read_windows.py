"""Rows of a convolution that nobody reads are not computed, and a few at borders by themselves.

The gradient of a convolution of `jnp.pad(u, 1)` has two rows more than `u`, in tiles that begin
elsewhere. A window of the rows of a convolution is a convolution with less padding: it is computed
in the tiles of the tensor that reads it. If the two rows are read, too, as with edges, each of them
is a convolution of the rows under one window, in the tile that has those; others have garbage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, at_every_level, replacing
from gshard.graph.row_map import Axis, Layer, constant, entire, through, visible
from gshard.graph.source import source_of
from gshard.rules.base.layers import ROW_MAPS, layers_of
from gshard.rules.base.primitives import row_map_p
from gshard.tensors.sharding import Sharding, Split

Window = Sequence[tuple[int, int]]  # of each spatial dim, the first row and how many
Row = tuple[int, int, Split]  # the number of a spatial dim, a row, and how the dim is split
_FEW = 4  # rows at borders


@at_every_level
def compute_what_is_read(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with convolutions along split dims that compute what is read of them."""
    graph, read = Graph(jaxpr.eqns, jaxpr.outvars), dict[Any, list[Layer]]()
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        found = eqn.primitive is p.conv_general_dilated_p and _read(eqn, graph, shardings)
        if found:
            made, read[out] = _computed(eqn, *found)
            eqns += made
            shape = made[0].outvars[0].aval.str_short()
            remarks.append(f"at {source_of(eqn)}: {shape} of the rows are computed")
        elif any(a in read for a in eqn.invars if not isinstance(a, Literal)):
            layers = (layer.of(eqn.invars[layer.source]) for layer in layers_of(eqn))
            inner = ((n, None if n.is_constant else read.get(n.source)) for n in layers)
            parts = [m for n, own in inner for m in (through(n, own) if own else [n])]
            eqns += painting(replacing(eqn, row_map_p, [], out), parts)
        else:
            eqns.append(eqn)
    return jaxpr.replace(eqns=eqns) if read else jaxpr


def _read(
    eqn: JaxprEqn, graph: Graph, shardings: Mapping[Any, Sharding]
) -> tuple[Window, list[Row]] | None:
    """The window of a convolution that is read, and a few rows beside it along a split dim.

    None if nearly all of it is read, or by others than row maps.
    """
    (out,), params = eqn.outvars, eqn.params
    users, shape, window = graph.users(out), out.aval.shape, list[tuple[int, int]]()
    if out in graph.results or not all(user.primitive in ROW_MAPS for user in users):
        return None
    layers = [n for user in users for n in layers_of(user) if user.invars[n.source] is out]
    if not all(n.is_aligned and all(axis.stride == 1 for axis in n.axes) for n in layers):
        return None
    less, rows_beside = False, list[Row]()
    for k, (l, d) in enumerate(_spatial(eqn)):
        split, found = shardings[out].splits[d], {(n.base[d], n.axes[d].rows) for n in layers}
        first, rows = max(found, key=lambda w: w[1])
        few = sum(count for _, count in found) - rows <= _FEW
        beside = {r for at, count in found for r in range(at, at + count if few else at)}
        beside -= {*range(first, first + rows)}
        alike = split and shardings[eqn.invars[0]].splits[l] is split
        if not few or (beside and not (alike and params["lhs_dilation"][k] == 1)):
            first, rows, beside = 0, shape[d], set()
        window.append((first, rows))
        less = less or bool(split and split.tiles <= rows < shape[d])
        rows_beside += [(k, r, split) for r in sorted(beside) if split]
    return (window, rows_beside) if less and len({k for k, *_ in rows_beside}) < 2 else None


def _computed(
    eqn: JaxprEqn, window: Window, beside: Sequence[Row]
) -> tuple[list[JaxprEqn], list[Layer]]:
    """The equations of a window and rows beside it, and where in the result they are."""
    made = [_less(eqn, window)]
    (result,), dims = made[0].outvars, [d for _, d in _spatial(eqn)]
    whole = entire(result, result.aval.shape)
    for d, (first, rows) in zip(dims, window, strict=True):
        whole = whole.along(d, Axis(first, rows, d))
    layers = [whole]
    for k, row, split in beside:
        eqns, tile = _row(eqn, made[0], k, row, split)
        made += eqns
        own = whole.of(eqns[-1].outvars[0])
        layers.append(own.along(dims[k], Axis(row, 1, dims[k]), tile))
    return made, layers


def _less(eqn: JaxprEqn, window: Window) -> JaxprEqn:
    """A convolution that computes a window alone."""
    (out,), params = eqn.outvars, eqn.params
    shape, padding = list(out.aval.shape), list(params["padding"])
    for k, ((_, d), (first, rows)) in enumerate(zip(_spatial(eqn), window, strict=True)):
        (low, high), stride = padding[k], params["window_strides"][k]
        padding[k] = (low - first * stride, high - (shape[d] - first - rows) * stride)
        shape[d] = rows
    result = Var(out.aval.update(shape=tuple(shape)))
    return eqn.replace(outvars=[result], params={**params, "padding": tuple(padding)})


def _row(
    eqn: JaxprEqn, less: JaxprEqn, k: int, row: int, split: Split
) -> tuple[list[JaxprEqn], int]:
    """The equations of a single row, as one row of each tile, and the tile that has it."""
    params, (operand, kernel), (l, d) = dict(less.params), eqn.invars, _spatial(eqn)[k]
    taps = kernel.aval.shape[params["dimension_numbers"].rhs_spec[2 + k]]
    extent, size = (taps - 1) * params["rhs_dilation"][k] + 1, operand.aval.shape[l]
    begin = row * params["window_strides"][k] - eqn.params["padding"][k][0]
    first, end = max(begin, 0), min(begin + extent, size)
    tile = min(first, size - 1) // split.rows(size)

    sizes = (operand.aval, l, extent), (less.outvars[0].aval, d, 1)
    under, result = (
        Var(aval.update(shape=(*aval.shape[:e], n * split.tiles, *aval.shape[e + 1 :])))
        for aval, e, n in sizes
    )
    zero = Literal(np.zeros((), under.aval.dtype), under.aval.update(shape=(), weak_type=False))
    rows = Axis(tile * extent + first - begin, max(end - first, 0), l)
    own = entire(operand, operand.aval.shape).along(l, rows, first)
    layers = visible([constant(zero, under.aval.shape), own])
    eqns = painting(replacing(eqn, row_map_p, [], under), layers)
    for name, one in (("padding", (0, 0)), ("window_strides", extent)):
        params[name] = (*params[name][:k], one, *params[name][k + 1 :])
    return [*eqns, less.replace(invars=[under, kernel], outvars=[result], params=params)], tile


def _spatial(eqn: JaxprEqn) -> list[tuple[int, int]]:
    """The dims of a convolution's base and result that windows move along."""
    lhs, _, out = eqn.params["dimension_numbers"]
    return list(zip(lhs[2:], out[2:], strict=True))
