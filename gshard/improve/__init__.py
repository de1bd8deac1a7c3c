"""Passes over a plan that send less, use fewer collectives or hide them; values are unchanged."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr

from gshard.improve.drop_unused import drop_unused
from gshard.improve.overlap import overlap, overlap_all
from gshard.improve.share import share

Pass = Callable[[Jaxpr], Jaxpr]


def passes(overlapping: bool | None) -> tuple[Pass, ...]:
    """The passes in their order; `overlapping` forces or forbids communication in pieces."""
    if overlapping is None:
        return (share, overlap, drop_unused)
    return (share, overlap_all, drop_unused) if overlapping else (share, drop_unused)
