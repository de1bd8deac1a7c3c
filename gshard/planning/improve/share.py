"""Common subexpression elimination for communication.

Nodes that do the same to the same value, whoever asked for them, are one.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.graph import at_every_level, renamed
from gshard.moving.nodes import node_of


@at_every_level
def share(plan: Jaxpr) -> Jaxpr:
    """The plan with equal nodes merged."""
    eqns: list[JaxprEqn] = []
    names: dict[Any, Any] = {}
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
    if not names:
        return plan
    outvars = [a if isinstance(a, Literal) else names.get(a, a) for a in plan.outvars]
    return plan.replace(eqns=eqns, outvars=outvars)
