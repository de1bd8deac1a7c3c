"""A problem that can be changed in place, and the way back from what it became.

The presolve steps work on this: strategies are dropped, nodes removed, edges added up. Each node
that is removed leaves a record that says which strategy it takes, given what its former neighbours
take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from gshard.autosharding.memory import Floats, Ints, MemoryModel
from gshard.autosharding.problem import CostEdge, Problem


@dataclasses.dataclass(frozen=True)
class Removed:
    """A removed node: its strategy by those of the nodes that decide it (none, one or two)."""

    node: int
    deciders: tuple[int, ...]
    strategy: Ints


class ProblemGraph:
    """Nodes by number, their strategies that are left, and their edges in both directions."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.constant = problem.constant
        self.costs: list[Floats] = [c.copy() for c in problem.costs]
        self.kept: list[Ints] = [np.arange(len(c)) for c in problem.costs]
        self.edges: list[dict[int, Floats]] = [{} for _ in problem.costs]
        self.alive = [True] * len(problem.costs)
        self.removed: list[Removed] = []
        for edge in problem.edges:
            self.edges[edge.first][edge.second] = edge.costs
            self.edges[edge.second][edge.first] = edge.costs.T

    def nodes(self) -> Iterable[int]:
        """The nodes that are left."""
        return (i for i, alive in enumerate(self.alive) if alive)

    def keep(self, node: int, chosen: Ints) -> None:
        """Keep only these strategies of a node (positions among those that are left)."""
        self.costs[node] = self.costs[node][chosen]
        self.kept[node] = self.kept[node][chosen]
        for other, table in self.edges[node].items():
            self._set(node, other, table[chosen])

    def add_edge(self, first: int, second: int, table: Floats) -> None:
        """Add costs between two nodes."""
        known = self.edges[first].get(second)
        self._set(first, second, table if known is None else known + table)

    def drop_edge(self, first: int, second: int) -> None:
        """Remove the edge between two nodes."""
        del self.edges[first][second]
        del self.edges[second][first]

    def remove(self, node: int, deciders: tuple[int, ...], strategy: Ints) -> None:
        """Remove a node, whose strategy (a position) follows from the positions of `deciders`."""
        shape = tuple(len(self.problem.costs[d]) for d in deciders)
        full = np.zeros(shape, dtype=np.int64)
        full[np.ix_(*(self.kept[d] for d in deciders))] = self.kept[node][strategy]
        self.removed.append(Removed(node, deciders, full))
        for other in self.edges[node]:
            del self.edges[other][node]
        self.edges[node] = {}
        self.alive[node] = False

    def _set(self, first: int, second: int, table: Floats) -> None:
        self.edges[first][second] = table
        self.edges[second][first] = table.T

    def result(self) -> tuple[Problem, Callable[[Ints], Ints]]:
        """The problem that is left, and the function that turns its answers into answers of the
        original problem."""
        left = np.array(list(self.nodes()), dtype=np.int64)
        number = {int(node): position for position, node in enumerate(left)}
        edges = tuple(
            CostEdge(number[i], number[j], np.ascontiguousarray(table))
            for i in number
            for j, table in self.edges[i].items()
            if i < j
        )
        costs = tuple(self.costs[i] for i in left)
        problem = Problem(costs, edges, self._memory(number), self.constant)
        total, kept, removed = len(self.costs), [self.kept[i] for i in left], self.removed

        def back(answer: Ints) -> Ints:
            original = np.zeros(total, dtype=np.int64)
            for node, strategies, strategy in zip(left, kept, answer, strict=True):
                original[node] = strategies[strategy]
            for record in reversed(removed):
                at = tuple(original[d] for d in record.deciders)
                original[record.node] = record.strategy[at]
            return original

        return problem, back

    def _memory(self, number: dict[int, int]) -> MemoryModel:
        """The memory by the nodes that are left. Only nodes that one other decides have any."""
        root, strategies = list(range(len(self.costs))), list(self.kept)
        for record in reversed(self.removed):
            if len(record.deciders) == 1:
                (decider,) = record.deciders
                root[record.node] = root[decider]
                strategies[record.node] = record.strategy[strategies[decider]]
        return self.problem.memory.renamed([number.get(i, -1) for i in root], strategies)
