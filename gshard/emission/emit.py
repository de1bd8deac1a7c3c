"""Emission: every node of a plan is replaced by the lax code that implements it.

Equal nodes on operands of the same type are traced once, however many layers there are. A table
lookup by the device's number happens once in a program or body.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard._jax import Var, dce_jaxpr
from gshard.graph import LOOPS, map_bodies, renamed
from gshard.graph.reason import NO_REASON
from gshard.graph.source import reason_of
from gshard.moving.nodes import UNEXPLAINED, Node, node_of
from gshard.tensors.devices import Place, lookup_p

Sizes = tuple[tuple[str, int], ...]  # of the axes of the mesh


def emit(plan: Jaxpr, sizes: Mapping[str, int], same: dict[Any, Any] | None = None) -> Jaxpr:
    """The per-device program on a mesh with axes of these sizes; unchanged without nodes.

    Variables that others replace are added to `same`.
    """
    emitted = _program(plan, tuple(sizes.items()), {} if same is None else same)
    if emitted is plan:
        return plan
    # Most nodes do not use the device's number, which they have as an operand.
    return dce_jaxpr(emitted, [True] * len(emitted.outvars), instantiate=True)[0]


def _program(jaxpr: Jaxpr, sizes: Sizes, same: dict[Any, Any]) -> Jaxpr:
    """A program or body with its nodes emitted; the same one if it has none."""
    eqns: list[JaxprEqn] = []
    names: dict[Any, Any] = {}  # variables that equal others
    rows: dict[Any, Any] = {}  # table lookups so far
    changed = False
    for eqn in jaxpr.eqns:
        given, eqn = eqn, renamed(eqn, names) if names else eqn
        node = node_of(eqn)
        if node is None and eqn.primitive in LOOPS:
            eqn = map_bodies(
                eqn, lambda body: body.replace(jaxpr=_program(body.jaxpr, sizes, same))
            )
        changed = changed or node is not None or eqn is not given
        for new in _inlined(eqn, node, names, sizes) if node else [eqn]:
            new = renamed(new, names) if names else new
            if new.primitive is lookup_p:
                first = rows.setdefault((new.invars[0], new.params["table"]), new.outvars[0])
                if first is not new.outvars[0]:
                    names[new.outvars[0]] = first
                    continue
            eqns.append(new)
    if not changed:
        return jaxpr
    same |= names
    outvars = [a if isinstance(a, Literal) else names.get(a, a) for a in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _inlined(eqn: JaxprEqn, node: Node, names: dict[Any, Any], sizes: Sizes) -> list[JaxprEqn]:
    """The equations that replace a node; `names` if its result is its operand."""
    array, device = (a.aval for a in eqn.invars)
    found = _expansion(node.unexplained(), array.shape, array.dtype, device.dtype, sizes)
    local = dict(zip(found.inputs, eqn.invars, strict=True))
    for inner in found.eqns:
        local |= {v: Var(v.aval) for v in inner.outvars}
    (out,) = eqn.outvars
    if found.result in found.inputs:
        names[out] = local[found.result]
    else:
        local[found.result] = out
    return [
        renamed(inner, local, ctx=eqn.ctx, source_info=_explained(eqn, node, inner))
        for inner in found.eqns
    ]


def _explained(eqn: JaxprEqn, node: Node, inner: JaxprEqn) -> Any:
    """An equation of a node's code, with the node's source line and reason."""
    info, step = eqn.source_info, reason_of(inner)
    if step == NO_REASON:
        return info
    why = node.reason if step.kind == UNEXPLAINED.kind else replace(node.reason, kind=step.kind)
    why = why.then(step.detail) if step.detail else why
    return info.replace(name_stack=info.name_stack.extend(why.encoded()))


@dataclass(frozen=True)
class _Expansion:
    """The code of a node, as equations from operands to a result."""

    inputs: tuple[Any, Any]  # the local array, and the number of the device
    eqns: tuple[JaxprEqn, ...]
    result: Any


@functools.lru_cache(maxsize=1024)  # by value: it serves all layers, and later programs
def _expansion(
    node: Node, shape: tuple[int, ...], dtype: Any, number_dtype: Any, sizes: Sizes
) -> _Expansion:
    """The code of a node for an operand of this type."""
    axes, count = tuple(name for name, _ in sizes), math.prod(size for _, size in sizes)

    def run(x: jax.Array, number: jax.Array) -> jax.Array:
        return node.run(Place(axes, count, {"id": number}), x)

    types = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((), number_dtype))
    traced = jax.make_jaxpr(run, axis_env=list(sizes))(*types)
    jaxpr = traced.jaxpr
    consts = {
        v: Literal(np.asarray(c), v.aval)
        for v, c in zip(jaxpr.constvars, traced.consts, strict=True)
    }
    (result,) = jaxpr.outvars
    array, device = jaxpr.invars
    return _Expansion((array, device), tuple(renamed(e, consts) for e in jaxpr.eqns), result)
