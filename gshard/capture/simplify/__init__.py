"""Canonicalisation: groups of equations are rewritten into normal forms.

Each pass takes the graph of a program, or of a loop's body, and returns new equations. Passes are
independent of shardings and costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard.capture.simplify.permutations import fold_permutation_checks
from gshard.capture.simplify.products import transpose_products
from gshard.capture.simplify.row_maps import compose_row_maps
from gshard.graph import LOOPS, Graph, live, map_bodies
from gshard.graph.graph import MAX_INDICES
from gshard.graph.regions import counts_of

Pass = Callable[[Graph], list[JaxprEqn]]

PASSES: tuple[Pass, ...] = (fold_permutation_checks, compose_row_maps, transpose_products)


def simplify(
    closed: ClosedJaxpr, simplified_by: Pass, known: Mapping[Any, Any] | None = None
) -> ClosedJaxpr:
    """A program and its bodies after one pass; `known` has the values of some arguments."""
    jaxpr = closed.jaxpr
    values = dict(zip(jaxpr.constvars, closed.consts, strict=True)) | dict(known or {})
    graph = Graph(jaxpr.eqns, jaxpr.outvars, values)

    def inside(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive not in LOOPS:
            return eqn
        return map_bodies(
            eqn, lambda body: simplify(body, simplified_by, _known_inside(eqn, body, graph))
        )

    eqns = simplified_by(graph)
    rewritten = live(eqns, jaxpr.outvars) if eqns != graph.eqns else eqns
    return closed.replace(jaxpr=jaxpr.replace(eqns=[inside(eqn) for eqn in rewritten]))


def _known_inside(eqn: JaxprEqn, body: ClosedJaxpr, graph: Graph) -> dict[Any, Any]:
    """Indices that are constant outside a scan and loop-invariant in it.

    JAX hoists the indices of a loop's gradient out of its body.
    """
    if eqn.primitive is not p.scan_p:
        return {}
    same = counts_of(eqn)[0]
    pairs = zip(body.jaxpr.invars[:same], eqn.invars[:same], strict=True)
    found = {inner: graph.constant(outer) for inner, outer in pairs if _is_index(outer.aval)}
    return {inner: value for inner, value in found.items() if value is not None}


def _is_index(aval: Any) -> bool:
    few = isinstance(aval, ShapedArray) and aval.size <= MAX_INDICES
    return few and jnp.issubdtype(aval.dtype, jnp.integer)
