"""Passes over a plan that send less, use fewer collectives or hide them; values are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jax.extend.core import Jaxpr

from gshard._jax import dce_jaxpr
from gshard.moving.costs import cost_model
from gshard.planning.improve.combine import combine
from gshard.planning.improve.expand import expand
from gshard.planning.improve.hide import hide
from gshard.planning.improve.overlap import overlap, overlap_all
from gshard.planning.improve.share import share

Pass = Callable[[Jaxpr], Jaxpr]
Overlap = bool | Literal["auto"]  # everywhere, nowhere, or where costs say that it is faster


def drop_unused(plan: Jaxpr) -> Jaxpr:
    """Dead code elimination: the plan without what no result needs.

    A loop gives all values that it carries, needed or not, and the planner reduces or moves each of
    its results as if it were.
    """
    return dce_jaxpr(plan, [True] * len(plan.outvars), instantiate=True)[0]


def passes(overlapping: Overlap) -> tuple[Pass, ...]:
    """The passes in their order; `overlapping`: communication in pieces everywhere or nowhere."""
    if overlapping == "auto":
        return (share, overlap, drop_unused)
    return (share, overlap_all, drop_unused) if overlapping else (share, drop_unused)


def final_passes(overlapping: Overlap) -> tuple[Pass, ...]:
    """The passes that make collectives of nodes: the plan that is emitted."""
    hides = cost_model().overlaps if overlapping == "auto" else overlapping
    return (expand, combine, hide) if hides else (expand, combine)
