"""Common subexpression elimination for communication.

Nodes that do the same to the same value, whoever asked for them, are one.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.graph import Names, renamed, renaming
from gshard.moving.nodes import node_of


@renaming
def share(plan: Jaxpr, names: Names) -> Jaxpr:
    """The plan with equal nodes merged."""
    eqns: list[JaxprEqn] = []
    made: dict[Any, Any] = {}
    for eqn in plan.eqns:
        eqn = renamed(eqn, names) if names else eqn
        node = node_of(eqn)
        if node is not None and not node.reason.is_asked:
            (out,) = eqn.outvars
            first = made.setdefault((node.unexplained(), eqn.invars[0]), out)
            if first is not out:
                names[out] = first
                continue
        eqns.append(eqn)
    if len(eqns) == len(plan.eqns):
        return plan
    outvars = [a if isinstance(a, Literal) else names.get(a, a) for a in plan.outvars]
    return plan.replace(eqns=eqns, outvars=outvars)
