"""Where the latencies of small collectives are paid, for a bound.

Small collectives of a loop's body can be combined into one, but not with those of another body. So
each run of a body in which anything small is summed pays one latency at least, and one in which
anything small is gathered another one: an AllReduce does both, for the latencies of both.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from gshard.autosharding.memory import Floats
from gshard.autosharding.problem import FORBIDDEN
from gshard.graph.regions import bodies
from gshard.propagation.flow import Edge

REDUCING, GATHERING = "reducing", "gathering"

# Specs of a tensor up to which its gathers have a node: those over one axis. With more the solver
# does not finish in time.
_MOST_SPECS = 8

# The share of a step that the latencies of a body take, to be counted: they make problems harder.
_COUNTED = 2e-4


class Latencies:
    """The small collectives of each body: nodes, and the latency that each strategy needs."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.body: dict[Any, Jaxpr] = {}  # of its equations, and of variables that are made in it
        self.needs: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)
        self.reads: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)
        self._enter(jaxpr)

    def _enter(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            self.body.update(dict.fromkeys([eqn, *eqn.outvars], jaxpr))
            for inner in bodies(eqn):
                self._enter(inner)

    def is_near(self, var: Any, eqn: JaxprEqn | None) -> bool:
        """Whether a value is made in the body of an equation."""
        return var in self.body and self.body[var] is self.body.get(eqn)

    def add(self, edge: Edge, node: int, kind: str, latencies: Floats) -> None:
        """An operator, and for each of its strategies the latency of all its runs."""
        if latencies.any():
            self.needs[self.body[edge.eqn], edge.runs, kind].append((node, latencies))

    def add_read(self, edge: Edge, var: Any, reader: int, table: Floats) -> None:
        """An operator that reads a value of its body: the latencies by strategies and specs."""
        if table.any() and table.shape[1] <= _MOST_SPECS and self.is_near(var, edge.eqn):
            self.reads[self.body[edge.eqn], edge.runs, var].append((reader, table))

    def write(
        self, nodes: dict[Any, int], costs: list[Floats], edges: list[tuple[int, int, Floats]]
    ) -> None:
        """Add a node for each body and kind: its strategies are latencies, and nothing in it needs
        a longer one. What a tensor needs is a node too: a spec, and the longest of its gathers."""
        least = _COUNTED * sum(float(c.min()) for c in costs)
        for (body, runs, var), readers in self.reads.items():
            levels = np.unique(np.concatenate([[0.0], *(table.ravel() for _, table in readers)]))
            if levels[-1] < least:
                continue
            own, level = np.indices((readers[0][1].shape[1], len(levels))).reshape(2, -1)
            node = len(costs)
            costs.append(np.zeros(len(own)))
            taken = np.arange(len(costs[nodes[var]]))[:, None] == own
            edges.append((nodes[var], node, np.where(taken, 0.0, FORBIDDEN)))
            for reader, table in readers:
                paid = table[:, own] <= levels[level]
                edges.append((reader, node, np.where(paid, 0.0, FORBIDDEN)))
            self.needs[body, runs, GATHERING].append((node, levels[level]))
        for needs in self.needs.values():
            levels = np.unique(np.concatenate([[0.0], *(found for _, found in needs)]))
            if levels[-1] < least:
                continue
            node = len(costs)
            costs.append(levels)
            for other, found in needs:
                paid = found[:, None] <= levels
                edges.append((other, node, np.where(paid, 0.0, FORBIDDEN)))
