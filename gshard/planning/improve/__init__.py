"""Passes over a plan that send less, use fewer collectives or hide them; values are unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jax.extend.core import Jaxpr

from gshard.moving.costs import machine
from gshard.planning.improve.combine import combine
from gshard.planning.improve.drop_unused import drop_unused
from gshard.planning.improve.expand import expand
from gshard.planning.improve.hide import hide
from gshard.planning.improve.overlap import overlap, overlap_all
from gshard.planning.improve.share import share

Pass = Callable[[Jaxpr], Jaxpr]
Overlap = bool | Literal["auto"]  # everywhere, nowhere, or where costs say that it is faster


def passes(overlapping: Overlap) -> tuple[Pass, ...]:
    """The passes in their order; `overlapping`: communication in pieces everywhere or nowhere."""
    if overlapping == "auto":
        return (share, overlap, drop_unused)
    return (share, overlap_all, drop_unused) if overlapping else (share, drop_unused)


def final_passes(overlapping: Overlap) -> tuple[Pass, ...]:
    """The passes that make collectives of nodes: the plan that is emitted."""
    hides = machine().overlaps if overlapping == "auto" else overlapping
    return (expand, combine, hide) if hides else (expand, combine)
