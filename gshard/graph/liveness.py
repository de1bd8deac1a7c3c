"""Liveness and topological order of equations, and equations made in the place of others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard.graph.graph import Graph


def live(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations that `results` or effects depend on, in the order given."""
    graph = Graph(eqns)
    kept = {eqn for eqn in eqns if eqn.effects}
    queue = [*results, *(a for eqn in kept for a in eqn.invars)]
    while queue:
        eqn = graph.maker(queue.pop())
        if eqn is not None and eqn not in kept:
            kept.add(eqn)
            queue += eqn.invars
    return [eqn for eqn in eqns if eqn in kept]


def needed_for(wanted: Sequence[Any], eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations without effects that the `wanted` variables depend on."""
    return live([eqn for eqn in eqns if not eqn.effects], wanted)


def in_order(
    eqns: Sequence[JaxprEqn], may_wait: Callable[[JaxprEqn], bool] = lambda eqn: False
) -> list[JaxprEqn]:
    """The equations, each after those that it depends on, otherwise in the order given.

    One that `may_wait`, and depends on a later one, comes where it is needed instead.
    """
    graph = Graph(eqns)
    done: dict[JaxprEqn, None] = {}

    def missing(eqn: JaxprEqn) -> list[JaxprEqn]:
        return [m for a in eqn.invars if (m := graph.maker(a)) and m not in done]

    at_their_places = (e for e in eqns if not (may_wait(e) and missing(e)))
    for goal in itertools.chain(at_their_places, eqns):
        stack = [goal]
        while stack:
            if makers := missing(stack[-1]):
                stack += reversed(makers)
            else:
                done[stack.pop()] = None
    return list(done)


def inputs_of(eqns: Sequence[JaxprEqn]) -> list[Any]:
    """The variables that equations read and do not make."""
    made = {v for eqn in eqns for v in eqn.outvars}
    atoms = [a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)]
    return list(dict.fromkeys(a for a in atoms if a not in made))


def upstream(eqns: Sequence[JaxprEqn], marks: Mapping[Any, int]) -> dict[Any, frozenset[int]]:
    """For every variable the marks of all variables that it depends on, its own included."""
    found: dict[Any, frozenset[int]] = {}
    for eqn in eqns:
        before = frozenset().union(
            *(found.get(a, frozenset()) for a in eqn.invars if not isinstance(a, Literal))
        )
        for var in eqn.outvars:
            found[var] = before | {marks[var]} if var in marks else before
    return found


def renamed(eqn: JaxprEqn, names: Mapping[Any, Any], **changes: Any) -> JaxprEqn:
    """The equation with some of its operands and results renamed."""
    invars = [a if isinstance(a, Literal) else names.get(a, a) for a in eqn.invars]
    outvars = [names.get(v, v) for v in eqn.outvars]
    return eqn.replace(invars=invars, outvars=outvars, **changes)


def replacing(
    eqn: JaxprEqn, primitive: Primitive, operands: Sequence[Any], result: Any, **params: Any
) -> JaxprEqn:
    """An operator without effects, with the source line and the name scope of `eqn`."""
    return eqn.replace(
        primitive=primitive,
        invars=list(operands),
        outvars=[result],
        params=params,
        effects=set(),
    )


def filling(eqn: JaxprEqn, number: Any, result: Any) -> JaxprEqn:
    """A tensor whose elements are all `number`, a literal or a scalar, in the place of `eqn`."""
    params = {"shape": result.aval.shape, "broadcast_dimensions": (), "sharding": None}
    return replacing(eqn, p.broadcast_in_dim_p, [number], result, **params)
