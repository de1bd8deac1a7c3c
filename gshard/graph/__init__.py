"""A program under transformation: equations with def-use chains, liveness, regions and text."""

from gshard.graph.graph import (
    Graph,
    filling,
    in_order,
    inputs_of,
    live,
    needed_for,
    renamed,
    replacing,
    upstream,
)
from gshard.graph.regions import CALLS, LOOPS, Names, at_every_level, bodies, map_bodies, renaming

__all__ = [
    "CALLS", "LOOPS", "Graph", "Names", "at_every_level", "bodies", "filling", "in_order",
    "inputs_of", "live", "map_bodies", "needed_for", "renamed", "renaming", "replacing", "upstream",
]  # fmt: skip
