"""Passes over a plan that send less or use fewer collectives, and leave values unchanged."""

from __future__ import annotations

from collections.abc import Callable

from jax.extend.core import Jaxpr

from gshard.improve.drop_unused import drop_unused
from gshard.improve.share import share

Pass = Callable[[Jaxpr], Jaxpr]

PASSES: tuple[Pass, ...] = (share, drop_unused)
