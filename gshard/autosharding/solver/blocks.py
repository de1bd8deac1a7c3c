"""The best strategies of many nodes at once, around what the other nodes have taken.

A node of at most two neighbours can be eliminated: its best strategy is a function of theirs, and
what it costs becomes a cost between them. Where no such node is left, one is kept at the strategy
that it has, which takes its edges away. On graphs as sparse as those of programs most nodes are
eliminated and few are kept, so that one pass finds the best of exponentially many answers.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from gshard.autosharding.solver.problem import Floats, Ints, Problem

# Entries of the largest table that an elimination looks at.
_LARGEST_TABLE = 1 << 16

# Seconds of work of a pass over the nodes, for each of their edges.
PER_EDGE = 2e-5


@dataclasses.dataclass(frozen=True)
class Part:
    """Nodes that may change, what their strategies cost beside the other nodes, which do not, and
    the edges between them."""

    nodes: Sequence[int]
    outside: dict[int, Floats]
    edges: dict[int, list[int]]

    @property
    def work(self) -> float:
        """Seconds of work of a pass."""
        return PER_EDGE * sum(1 + len(others) for others in self.edges.values())


class NodeEdges:
    """The edges of a problem by node, for passes over any of its nodes."""

    def __init__(self, problem: Problem, random: np.random.Generator) -> None:
        self.random = random
        self.tables: list[dict[int, Floats]] = [{} for _ in problem.costs]
        for edge in problem.edges:
            self.tables[edge.first][edge.second] = edge.costs
            self.tables[edge.second][edge.first] = np.ascontiguousarray(edge.costs.T)

    def part(self, free: Sequence[int], answer: Ints) -> Part:
        """These nodes, while the others take what they have in an answer."""
        inside, outside, edges = set(free), {}, {}
        for node in free:
            edges[node] = [other for other in self.tables[node] if other in inside]
            fixed = (other for other in self.tables[node] if other not in inside)
            rows = [self.tables[other][node][answer[other]] for other in fixed]
            if rows:
                outside[node] = np.sum(rows, axis=0)
        return Part(free, outside, edges)

    def around(self, node: int, costs: Floats, allowed: Ints, answer: Ints) -> Floats:
        """What the allowed strategies of a node cost beside what all its neighbours take."""
        total: Floats = costs[allowed]
        for other in self.tables[node]:
            total = total + self.tables[other][node][answer[other]][allowed]
        return total

    def improve(
        self, costs: Sequence[Floats], answer: Ints, part: Part, allowed: Sequence[Ints]
    ) -> Ints:
        """An answer that costs no more, in which the nodes of a part take allowed strategies
        (sorted), as they do in the answer given."""
        block = _Block(self.tables, costs, answer, part, allowed)
        weights = self.random.random(len(part.nodes))
        ranks = {n: -len(part.edges[n]) * w for n, w in zip(part.nodes, weights, strict=True)}
        order = iter(sorted(part.nodes, key=lambda n: (ranks[n], n)))
        while block.costs:
            node = block.next_small()
            if node is not None:
                block.eliminate(node)
            else:
                block.keep(next(node for node in order if node in block.costs))
        return block.answer()


class _Block:
    """A pass: the costs and edges of the nodes that are left."""

    def __init__(
        self,
        tables: Sequence[dict[int, Floats]],
        costs: Sequence[Floats],
        answer: Ints,
        part: Part,
        allowed: Sequence[Ints],
    ) -> None:
        self.given, self.allowed = answer, allowed
        self.costs: dict[int, Floats] = {}
        self.edges: dict[int, dict[int, Floats]] = {}
        self.removed: list[tuple[int, Floats, dict[int, Floats]]] = []
        for node in part.nodes:
            own, edges = allowed[node], {}
            outside = part.outside.get(node)
            self.costs[node] = costs[node][own] if outside is None else (costs[node] + outside)[own]
            for other in part.edges[node]:
                if other in self.edges:
                    edges[other] = self.edges[other][node].T
                else:
                    edges[other] = tables[node][other][own][:, allowed[other]]
            self.edges[node] = edges
        self.small = [(len(edges), node) for node, edges in self.edges.items() if len(edges) <= 2]
        heapq.heapify(self.small)

    def next_small(self) -> int | None:
        """A node that can be eliminated."""
        while self.small:
            degree, node = heapq.heappop(self.small)
            if node not in self.costs or degree != len(self.edges[node]):
                continue
            entries = len(self.costs[node])
            for other in self.edges[node]:
                entries *= len(self.costs[other])
            if degree < 2 or entries <= _LARGEST_TABLE:
                return node
        return None

    def keep(self, node: int) -> None:
        """Let a node have the strategy that it has."""
        at = int(np.searchsorted(self.allowed[node], self.given[node]))
        del self.costs[node]
        for other in self.edges.pop(node):
            self.costs[other] = self.costs[other] + self.edges[other].pop(node)[:, at]
            self._changed(other)

    def eliminate(self, node: int) -> None:
        """Remove a node of at most two neighbours; what it costs at least becomes theirs."""
        costs, edges = self.costs.pop(node), self.edges.pop(node)
        self.removed.append((node, costs, edges))
        for other in edges:
            del self.edges[other][node]
        if len(edges) == 1:
            ((other, table),) = edges.items()
            self.costs[other] = self.costs[other] + (costs[:, None] + table).min(axis=0)
        elif len(edges) == 2:
            (first, one), (second, two) = edges.items()
            total = ((costs[:, None] + one)[:, :, None] + two[:, None, :]).min(axis=0)
            known = self.edges[first].get(second)
            if known is not None:
                total = total + known
            self.edges[first][second], self.edges[second][first] = total, total.T
        for other in edges:
            self._changed(other)

    def _changed(self, node: int) -> None:
        if len(self.edges[node]) <= 2:
            heapq.heappush(self.small, (len(self.edges[node]), node))

    def answer(self) -> Ints:
        """What the nodes take, those removed last first."""
        answer = self.given.copy()
        for node, costs, edges in reversed(self.removed):
            total = costs
            for other, table in edges.items():
                at = int(np.searchsorted(self.allowed[other], answer[other]))
                total = total + table[:, at]
            answer[node] = self.allowed[node][int(total.argmin())]
        return answer
