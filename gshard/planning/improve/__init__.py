"""Passes over a plan that send less, use fewer collectives or hide them; values are unchanged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from jax.extend.core import Jaxpr

from gshard.graph.history import History
from gshard.moving.seen import Seen, replaced
from gshard.planning.improve.drop_unused import drop_unused
from gshard.planning.improve.overlap import overlap, overlap_all
from gshard.planning.improve.share import share
from gshard.planning.plan import Plan, plan_note

Pass = Callable[[Jaxpr], Jaxpr]
Overlap = bool | Literal["auto"]  # everywhere, nowhere, or where costs say that it is faster


def passes(overlapping: Overlap) -> tuple[Pass, ...]:
    """The passes in their order; `overlapping`: communication in pieces everywhere or nowhere."""
    if overlapping == "auto":
        return (share, overlap, drop_unused)
    return (share, overlap_all, drop_unused) if overlapping else (share, drop_unused)


def improve(plan: Plan, improvements: Sequence[Pass], seen: Seen, history: History) -> Plan:
    """The plan after these passes, one after the other; `seen` follows its variables."""
    jaxpr = plan.jaxpr
    for improvement in improvements:
        before, jaxpr = jaxpr, improvement(jaxpr)
        seen.same |= replaced(before, jaxpr)
        history.add(improvement.__name__, jaxpr, plan_note)
    return Plan(jaxpr, plan.num_devices)
