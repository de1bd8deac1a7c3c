"""Emission: every node of a plan is replaced by the lax code that carries it out.

Nodes that do the same to operands of the same type are traced once, however many layers they stand
in. What a device looks up by its number, it looks up once in a program or body.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard._jax import Var, dce_jaxpr
from gshard.devices import Place, lookup_p
from gshard.graph import LOOPS, map_bodies, renamed
from gshard.moving.nodes import Node, node_of


def emit(plan: Jaxpr, sizes: Mapping[str, int]) -> Jaxpr:
    """What each device runs, on a mesh with axes of these sizes; the same if there is no node."""
    emitter = _Emitter(sizes)
    emitted = emitter.program(plan)
    if not emitter.expanded:
        return plan
    # Most nodes do not need to know the device, whose number has been at hand for them.
    return dce_jaxpr(emitted, [True] * len(emitted.outvars), instantiate=True)[0]


@dataclass(frozen=True)
class _Expansion:
    """The code of a node, as equations from operands to a result."""

    inputs: tuple[Any, Any]  # the local array, and the number of the device
    eqns: tuple[JaxprEqn, ...]
    result: Any


class _Emitter:
    """Rewrites programs; what is expanded once serves all of them."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)
        self.expanded: dict[Any, _Expansion] = {}  # by nodes and the types of their operands

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """A program, or a body in it."""
        eqns: list[JaxprEqn] = []
        names: dict[Any, Any] = {}  # variables that are equal to others
        rows: dict[Any, Any] = {}  # what has been looked up
        for eqn in jaxpr.eqns:
            eqn = renamed(eqn, names) if names else eqn
            node = node_of(eqn)
            if node is None and eqn.primitive in LOOPS:
                eqn = map_bodies(eqn, self.body)
            for new in self.inlined(eqn, node, names) if node else [eqn]:
                new = renamed(new, names) if names else new
                if new.primitive is lookup_p:
                    first = rows.setdefault((new.invars[0], new.params["table"]), new.outvars[0])
                    if first is not new.outvars[0]:
                        names[new.outvars[0]] = first
                        continue
                eqns.append(new)
        outvars = [a if isinstance(a, Literal) else names.get(a, a) for a in jaxpr.outvars]
        return jaxpr.replace(eqns=eqns, outvars=outvars)

    def body(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        """The body of a loop or branch."""
        return closed.replace(jaxpr=self.program(closed.jaxpr))

    def inlined(self, eqn: JaxprEqn, node: Node, names: dict[Any, Any]) -> list[JaxprEqn]:
        """The equations in the place of a node; `names` where its result is its operand."""
        found = self.expansion(node, *(a.aval for a in eqn.invars))
        local = dict(zip(found.inputs, eqn.invars, strict=True))
        for inner in found.eqns:
            local |= {v: Var(v.aval) for v in inner.outvars}
        made = {v for inner in found.eqns for v in inner.outvars}
        (out,) = eqn.outvars
        if found.result in made:
            local[found.result] = out
        else:  # the operand itself
            names[out] = local[found.result]
        around = eqn.source_info.name_stack
        return [
            renamed(
                inner,
                local,
                ctx=eqn.ctx,
                source_info=eqn.source_info.replace(
                    name_stack=around + inner.source_info.name_stack
                ),
            )
            for inner in found.eqns
        ]

    def expansion(self, node: Node, array: Any, device: Any) -> _Expansion:
        """The code of a node for an operand of this type."""
        key = (node, array.shape, array.dtype)
        if key not in self.expanded:
            axes = tuple(self.sizes)

            def run(x: jax.Array, number: jax.Array) -> jax.Array:
                place = Place(axes, int(np.prod([*self.sizes.values()])), {"id": number})
                return node.run(place, x)

            types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (array, device)]
            traced = jax.make_jaxpr(run, axis_env=list(self.sizes.items()))(*types)
            self.expanded[key] = _as_expansion(traced)
        return self.expanded[key]


def _as_expansion(traced: ClosedJaxpr) -> _Expansion:
    jaxpr = traced.jaxpr
    consts = {
        v: Literal(np.asarray(c), v.aval)
        for v, c in zip(jaxpr.constvars, traced.consts, strict=True)
    }
    (result,) = jaxpr.outvars
    array, device = jaxpr.invars
    return _Expansion((array, device), tuple(renamed(e, consts) for e in jaxpr.eqns), result)
