"""Partial results that are to be added up over mesh axes, and where the latency of that is paid.

For a bound: small sums of a loop's body can be combined into one collective, but not with those of
another body. So each run of a body in which anything small is summed pays one latency at least.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr

from gshard.autosharding.memory import Floats
from gshard.autosharding.problem import FORBIDDEN
from gshard.autosharding.specs import Spec
from gshard.graph.regions import bodies
from gshard.propagation.flow import Edge


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """What an operator leaves on each device of a tensor, to be added up over some mesh axes."""

    shape: tuple[int, ...]
    itemsize: int
    made: Spec  # how the partial results are sharded
    axes: tuple[int, ...]
    share: float = 1.0  # the part of it that is summed, at least


class Latencies:
    """The small sums of each body: nodes, and what each strategy takes to start its sum."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.body: dict[int, Jaxpr] = {}  # by the id of an equation in it
        self.sums: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)
        self._enter(jaxpr)

    def _enter(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            self.body[id(eqn)] = jaxpr
            for inner in bodies(eqn):
                self._enter(inner)

    def add(self, edge: Edge, node: int, latencies: Floats) -> None:
        """An operator, and for each of its strategies the latency of all its runs."""
        if latencies.any():
            self.sums[id(self.body[id(edge.eqn)]), edge.runs].append((node, latencies))

    def write(self, costs: list[Floats], edges: list[tuple[int, int, Floats]]) -> None:
        """Add a node for each body: its strategies are latencies, and no sum has a longer one."""
        for sums in self.sums.values():
            levels = np.unique(np.concatenate([[0.0], *(found for _, found in sums)]))
            node = len(costs)
            costs.append(levels)
            for operator, found in sums:
                paid = found[:, None] <= levels
                edges.append((operator, node, np.where(paid, 0.0, FORBIDDEN)))
