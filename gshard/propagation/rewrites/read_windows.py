"""Rows of a convolution that nobody reads are not computed.

The gradient of a convolution of `jnp.pad(u, 1)` has two rows more than `u`, in tiles that begin
elsewhere, and all but these are read. A window of the rows of a convolution is a convolution with
less padding: it is computed in the tiles of the tensor that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, at_every_level, replacing
from gshard.graph.row_map import Layer
from gshard.graph.source import source_of
from gshard.rules.base.layers import ROW_MAPS, layers_of
from gshard.rules.base.primitives import row_map_p
from gshard.tensors.sharding import Sharding

Window = tuple[tuple[int, int], ...]  # of each spatial dim, the first row and how many


@at_every_level
def compute_what_is_read(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with convolutions along split dims that compute what is read of them."""
    graph, read = Graph(jaxpr.eqns, jaxpr.outvars), dict[Any, Any]()
    eqns = list[JaxprEqn]()
    for eqn in jaxpr.eqns:
        out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
        if eqn.primitive is p.conv_general_dilated_p:
            window = _read(eqn, graph, shardings)
            if window is not None:
                eqn = _less(eqn, window)
                (read[out],) = eqn.outvars
                shape = eqn.outvars[0].aval.str_short()
                remarks.append(f"at {source_of(eqn)}: {shape} of the rows are computed")
        elif any(a in read for a in eqn.invars if not isinstance(a, Literal)):
            layers = [layer.of(eqn.invars[layer.source]) for layer in layers_of(eqn)]
            layers = [_of_window(n, read) if not n.is_constant else n for n in layers]
            eqns += painting(replacing(eqn, row_map_p, [], out), layers)
            continue
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns) if read else jaxpr


def _read(eqn: JaxprEqn, graph: Graph, shardings: Mapping[Any, Sharding]) -> Window | None:
    """The window of a convolution that all its readers read; None if some need more."""
    (out,), spatial = eqn.outvars, _spatial(eqn)
    users = graph.users(out)
    if out in graph.results or not all(user.primitive in ROW_MAPS for user in users):
        return None
    layers = [n for user in users for n in layers_of(user) if user.invars[n.source] is out]
    if not all(n.is_aligned and all(axis.stride == 1 for axis in n.axes) for n in layers):
        return None
    windows = {tuple((n.base[d], n.axes[d].rows) for d in spatial) for n in layers}
    if len(windows) != 1:
        return None
    (window,) = windows
    splits, sizes = shardings[out].splits, out.aval.shape
    cut = (
        (splits[d], rows) for d, (_, rows) in zip(spatial, window, strict=True) if rows < sizes[d]
    )
    return window if any(split and split.tiles <= rows for split, rows in cut) else None


def _less(eqn: JaxprEqn, window: Window) -> JaxprEqn:
    """A convolution that computes a window alone."""
    (out,), spatial, params = eqn.outvars, _spatial(eqn), eqn.params
    shape, padding = list(out.aval.shape), list(params["padding"])
    for k, (d, (first, rows)) in enumerate(zip(spatial, window, strict=True)):
        (low, high), stride = padding[k], params["window_strides"][k]
        padding[k] = (low - first * stride, high - (shape[d] - first - rows) * stride)
        shape[d] = rows
    result = Var(out.aval.update(shape=tuple(shape)))
    return eqn.replace(outvars=[result], params={**params, "padding": tuple(padding)})


def _of_window(layer: Layer, read: Mapping[Any, Any]) -> Layer:
    """A layer of what is computed of its source."""
    window = read.get(layer.source)
    if window is None:
        return layer
    sizes = zip(layer.base, layer.source.aval.shape, window.aval.shape, strict=True)
    return Layer(window, tuple(0 if n != m else b for b, n, m in sizes), layer.axes)


def _spatial(eqn: JaxprEqn) -> tuple[int, ...]:
    """The dims of a convolution's result that windows move along."""
    return eqn.params["dimension_numbers"].out_spec[2:]
