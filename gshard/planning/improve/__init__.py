"""Passes over a plan that send less or use fewer collectives; values are unchanged."""

from __future__ import annotations

from jax.extend.core import Jaxpr

from gshard._jax import drop_unused
from gshard.graph.history import Pass
from gshard.planning.improve.combine import combine
from gshard.planning.improve.expand import expand, share

# `drop_unused`: a loop gives all values that it carries, needed or not, and the planner reduces or
# moves each of its results as if it were.
PASSES: tuple[Pass[Jaxpr], ...] = (share, drop_unused)
FINAL_PASSES: tuple[Pass[Jaxpr], ...] = (expand, combine)  # make collectives of nodes
