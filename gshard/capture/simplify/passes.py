"""What a pass is: a rewrite of equations, carried out in a program and in the bodies of its loops.

A rewrite takes the graph of a program, or of a loop's body, and returns new equations. It is
independent of shardings and costs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard.capture.simplify.known_windows import known_numbers
from gshard.graph import LOOPS, Graph, live, map_bodies
from gshard.graph.regions import counts_of

Rewrite = Callable[[Graph], list[JaxprEqn]]


def in_every_body(rewrite: Rewrite) -> Callable[[ClosedJaxpr], ClosedJaxpr]:
    """The pass that rewrites a program: the bodies of its loops first, the innermost before all."""

    @functools.wraps(rewrite)
    def change(program: ClosedJaxpr) -> ClosedJaxpr:
        return _rewritten(program, rewrite, {})

    return change


def _rewritten(closed: ClosedJaxpr, rewrite: Rewrite, known: Mapping[Any, Any]) -> ClosedJaxpr:
    """A program and its bodies after one rewrite; `known` has the values of some arguments."""
    jaxpr = closed.jaxpr
    values = {**dict(zip(jaxpr.constvars, closed.consts, strict=True)), **known}
    before = Graph(jaxpr.eqns, jaxpr.outvars, values)

    def inside(loop: JaxprEqn) -> JaxprEqn:
        return map_bodies(
            loop, lambda body: _rewritten(body, rewrite, _known_inside(loop, body, before))
        )

    eqns = [inside(eqn) if eqn.primitive in LOOPS else eqn for eqn in jaxpr.eqns]
    graph = Graph(eqns, jaxpr.outvars, values)
    eqns = rewrite(graph)
    rewritten = live(eqns, jaxpr.outvars) if eqns != graph.eqns else eqns
    return closed.replace(jaxpr=jaxpr.replace(eqns=rewritten))


def _known_inside(eqn: JaxprEqn, body: ClosedJaxpr, graph: Graph) -> dict[Any, Any]:
    """Indices that are constant outside a scan and loop-invariant in it.

    JAX hoists the indices of a loop's gradient out of its body.
    """
    if eqn.primitive is not p.scan_p:
        return {}
    same = counts_of(eqn)[0]
    pairs = zip(body.jaxpr.invars[:same], eqn.invars[:same], strict=True)
    indices = (
        (inner, known_numbers(outer, graph))
        for inner, outer in pairs
        if isinstance(outer.aval, ShapedArray)
        if jnp.issubdtype(outer.aval.dtype, jnp.integer)
    )
    return {inner: value for inner, value in indices if value is not None}
