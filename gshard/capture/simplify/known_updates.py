"""Updates of known windows that are combined with what is there, as elementwise operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var, scatter_sub_p
from gshard.capture.simplify.known_windows import scattered
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, replacing
from gshard.graph.row_map import Layer, constant
from gshard.moving.reductions import identity
from gshard.rules.base.primitives import row_map_p

COMBINING = {
    p.scatter_add_p: (p.add_p, "sum"),
    scatter_sub_p: (p.sub_p, "sum"),
    p.scatter_mul_p: (p.mul_p, "prod"),
    p.scatter_min_p: (p.min_p, "min"),
    p.scatter_max_p: (p.max_p, "max"),
}


def without_updates(graph: Graph) -> list[JaxprEqn]:
    """The equations with updates of known windows as elementwise operators on row maps.

    `x.at[1:-1].add(y)` adds a tensor that is `y` inside and nothing outside. Updates of windows
    that do not overlap, one after the other, are one. A single window that is small stays.
    """
    found = {
        eqn: layer
        for eqn in graph.eqns
        if eqn.primitive in COMBINING and (layer := _combined(eqn, graph)) is not None
    }
    if not found:
        return graph.eqns
    eqns: list[JaxprEqn] = []
    joined: dict[Any, tuple[Any, list[Layer]]] = {}  # the operand and the windows of updates
    for eqn in graph.eqns:
        layer = found.get(eqn)
        if layer is None:
            eqns.append(eqn)
            continue
        (out,), operand = eqn.outvars, eqn.invars[0]
        start, windows = joined.pop(operand, (operand, []))
        windows.append(layer)
        user = graph.users(out)[0] if graph.users(out) and graph.uses(out) == 1 else eqn
        follows = user.primitive is eqn.primitive and user.invars[0] is out and user in found
        if follows and all(found[user].is_apart_from(w) for w in windows):
            joined[out] = (start, windows)
            continue
        many = len(windows) > 1 or _FEW * layer.size >= out.aval.size
        eqns += _by_element(eqn, start, windows) if many else [eqn]
    return eqns


_FEW = 8  # a window of less than one element in so many is updated by itself


def _combined(eqn: JaxprEqn, graph: Graph) -> Layer | None:
    dtype = eqn.outvars[0].aval.dtype
    if not jnp.issubdtype(dtype, np.number) or dtype.itemsize < 2:  # some have no negative zero
        return None
    if COMBINING[eqn.primitive][1] in ("min", "max") and dtype.kind == "c":
        return None
    return scattered(eqn, graph)


def _by_element(eqn: JaxprEqn, start: Any, windows: Sequence[Layer]) -> list[JaxprEqn]:
    """An update of windows of `start`, as an operator on all its elements."""
    operator, kind = COMBINING[eqn.primitive]
    aval = eqn.outvars[0].aval
    number = identity(kind, aval.dtype)
    # Zeros whose sign is such that they change no number, not even a zero's.
    number = -number if operator is p.add_p else number
    nothing = Literal(np.asarray(number, aval.dtype), aval.update(shape=(), weak_type=False))
    update = Var(aval)
    layers = [constant(nothing, aval.shape), *windows]
    made = painting(replacing(eqn, row_map_p, [], update), layers)
    return [*made, replacing(eqn, operator, [start, update], eqn.outvars[0])]
