"""Passes over a plan that send less or use fewer collectives; values are unchanged."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr

from gshard._jax import dce_jaxpr
from gshard.planning.improve.combine import combine
from gshard.planning.improve.expand import expand
from gshard.planning.improve.share import share

Pass = Callable[[Jaxpr], Jaxpr]


def drop_unused(plan: Jaxpr) -> Jaxpr:
    """Dead code elimination: the plan without what no result needs.

    A loop gives all values that it carries, needed or not, and the planner reduces or moves each of
    its results as if it were.
    """
    return dce_jaxpr(plan, [True] * len(plan.outvars), instantiate=True)[0]


PASSES: tuple[Pass, ...] = (share, drop_unused)
FINAL_PASSES: tuple[Pass, ...] = (expand, combine)  # make collectives of nodes: what is emitted
