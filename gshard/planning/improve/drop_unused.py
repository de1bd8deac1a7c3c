"""Dead code: what no result needs is neither computed nor sent.

A loop gives all values that it carries, needed or not, and the planner reduces or moves each of its
results as if it were.
"""

from __future__ import annotations

from jax.extend.core import Jaxpr

from gshard._jax import dce_jaxpr


def drop_unused(plan: Jaxpr) -> Jaxpr:
    """The plan without equations, and carried values of loops, that nothing depends on."""
    return dce_jaxpr(plan, [True] * len(plan.outvars), instantiate=True)[0]
