"""The optimization problem behind automatic sharding, independent of any program.

Each node picks one of its strategies. A strategy has a cost, a pair of strategies at the two ends
of an edge has one too (`FORBIDDEN` where the two cannot be combined), and a strategy holds memory
over intervals of time. At no time may the memory held exceed the limit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True)
class MemoryModel:
    """Holdings as arrays, and the limit at each time.

    Holding h is memory of `node[h]` from time `start[h]` up to, not including, `stop[h]`; with
    strategy s the node holds `usage[first[h] + s]` bytes. A node may have any number of holdings,
    over any intervals; they add up. Times are the positions of `limit`.
    """

    node: Ints
    start: Ints
    stop: Ints
    first: Ints
    usage: Floats
    limit: Floats

    @staticmethod
    def of(
        holdings: Iterable[tuple[int, int, int, Sequence[float] | Floats]], limit: Floats
    ) -> MemoryModel:
        """Memory from tuples (node, start, stop, bytes by strategy)."""
        rows = [h for h in holdings if h[1] < h[2]]
        node, start, stop = (np.array([h[i] for h in rows], dtype=np.int64) for i in range(3))
        sizes = [len(h[3]) for h in rows]
        flat = np.concatenate([np.asarray(h[3], dtype=np.float64) for h in rows] or [np.zeros(0)])
        return MemoryModel(
            node, start, stop, _offsets(np.array(sizes, dtype=np.int64)), flat, limit
        )

    @property
    def sizes(self) -> Ints:
        """The number of strategies of each holding's node."""
        return np.diff(self.first)

    def over_time(self, amounts: Floats) -> Floats:
        """The sum at each time of one amount per holding."""
        length = len(self.limit) + 1
        changes = np.bincount(self.start, amounts, length)
        changes -= np.bincount(self.stop, amounts, length)
        return np.cumsum(changes[:-1])

    def profile(self, answer: Ints) -> Floats:
        """The memory that an answer (a strategy for each node) holds at each time."""
        return self.over_time(self.usage[self.first[:-1] + answer[self.node]])

    def live(self, time: int) -> Ints:
        """The holdings of a time."""
        return np.flatnonzero((self.start <= time) & (time < self.stop))

    def renamed(self, number: Sequence[int] | Ints, strategies: Sequence[Ints]) -> MemoryModel:
        """The memory by other nodes: node i is `number[i]` now, whose strategy s means
        `strategies[i][s]` of node i. Intervals that become equal are added up."""
        if not len(self.node):
            return self
        taken = [strategies[i] for i in self.node]
        sizes = np.array([len(t) for t in taken], dtype=np.int64)
        flat = self.usage[np.repeat(self.first[:-1], sizes) + np.concatenate(taken)]
        node = np.asarray(number, dtype=np.int64)[self.node]
        return _united(node, self.start, self.stop, sizes, flat, self.limit)

    def without_least(self) -> MemoryModel:
        """What every strategy of a node holds is taken off the limit."""
        least = _reduce(np.minimum, self.usage, self.first)
        limit = self.limit - self.over_time(least)
        usage = self.usage - np.repeat(least, self.sizes)
        memory = dataclasses.replace(self, usage=usage, limit=limit)
        return memory._where(memory._most() > 0)

    def tightened(self) -> MemoryModel:
        """Only the times and the holdings that can exceed the limit: not those at which even the
        largest usages fit."""
        memory = self.without_least()
        return memory._at_times(memory.over_time(memory._most()) > memory.limit)

    def _most(self) -> Floats:
        """The most bytes of each holding, over strategies."""
        return _reduce(np.maximum, self.usage, self.first)

    def _where(self, kept: Bools) -> MemoryModel:
        sizes = self.sizes[kept]
        flat = self.usage[entries(self.first[:-1][kept], sizes)]
        return MemoryModel(
            self.node[kept], self.start[kept], self.stop[kept], _offsets(sizes), flat, self.limit
        )

    def _at_times(self, kept: Bools) -> MemoryModel:
        position = np.concatenate([[0], np.cumsum(kept)])
        start, stop = position[self.start], position[self.stop]
        memory = dataclasses.replace(self, start=start, stop=stop, limit=self.limit[kept])
        memory = memory._where(start < stop)
        return _united(
            memory.node, memory.start, memory.stop, memory.sizes, memory.usage, memory.limit
        )


def entries(first: Ints, sizes: Ints) -> Ints:
    """The positions first[h], first[h] + 1, ..., first[h] + sizes[h] - 1 of all h in a row."""
    if not len(sizes):
        return np.zeros(0, dtype=np.int64)
    own = _offsets(sizes)
    return np.arange(own[-1]) + np.repeat(first - own[:-1], sizes)


def _united(
    node: Ints, start: Ints, stop: Ints, sizes: Ints, usage: Floats, limit: Floats
) -> MemoryModel:
    """Memory in which no node has two holdings over the same interval."""
    if not len(node):
        return MemoryModel(node, start, stop, _offsets(sizes), usage, limit)
    keys, one, group = np.unique(
        np.stack([node, start, stop]), axis=1, return_index=True, return_inverse=True
    )
    first = _offsets(sizes[one])
    at = entries(first[:-1][group.ravel()], sizes)
    total = np.bincount(at, usage, int(first[-1])).astype(np.float64)
    return MemoryModel(keys[0], keys[1], keys[2], first, total, limit)


def _offsets(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _reduce(operation: np.ufunc, flat: Floats, first: Ints) -> Floats:
    return operation.reduceat(flat, first[:-1]) if len(first) > 1 else np.zeros(0)


FORBIDDEN = np.inf

# Share of a sum of floating-point numbers that it may be off: a memory limit is exceeded, and a
# bound holds, beyond this.
ROUNDING = 1e-9


class NoAnswerError(ValueError):
    """No combination of strategies is allowed and fits into memory."""


@dataclasses.dataclass(frozen=True)
class CostEdge:
    """Costs between two different nodes: one row per strategy of the first, one column of the
    second."""

    first: int
    second: int
    costs: Floats


@dataclasses.dataclass(frozen=True)
class Problem:
    """Nodes with the costs of their strategies, edges, memory over time, and a cost that does not
    depend on the answer.

    Between two nodes there is at most one edge.
    """

    costs: tuple[Floats, ...]
    edges: tuple[CostEdge, ...]
    memory: MemoryModel
    constant: float = 0.0

    def cost(self, answer: Ints) -> float:
        """What an answer (a strategy for each node) costs."""
        total = self.constant
        for costs, strategy in zip(self.costs, answer, strict=True):
            total += float(costs[strategy])
        for edge in self.edges:
            total += float(edge.costs[answer[edge.first], answer[edge.second]])
        return total

    def excess(self, answer: Ints) -> float:
        """By how much an answer exceeds the limit where it exceeds it most; 0 where it fits."""
        return float(np.max(self.memory.profile(answer) - self.memory.limit, initial=0.0))

    @functools.cached_property
    def first(self) -> Ints:
        """The position of each node's first strategy among those of all nodes, and their number."""
        return _offsets(np.array([len(c) for c in self.costs], dtype=np.int64))

    @functools.cached_property
    def column(self) -> Ints:
        """For each entry of the memory's `usage` the position of its strategy."""
        memory = self.memory
        within = np.arange(len(memory.usage)) - np.repeat(memory.first[:-1], memory.sizes)
        return np.repeat(self.first[memory.node], memory.sizes) + within

    @functools.cached_property
    def tables(self) -> list[dict[int, Floats]]:
        """The costs of each node's edges by the node at the other end, its own strategies first."""
        found: list[dict[int, Floats]] = [{} for _ in self.costs]
        for edge in self.edges:
            found[edge.first][edge.second] = edge.costs
            found[edge.second][edge.first] = np.ascontiguousarray(edge.costs.T)
        return found

    @property
    def strategies(self) -> int:
        """The number of strategies of all nodes."""
        return sum(len(c) for c in self.costs)

    @property
    def pairs(self) -> int:
        """The number of pairs of strategies that the edges allow."""
        return sum(int(np.isfinite(e.costs).sum()) for e in self.edges)


def unite(edges: list[tuple[int, int, Floats]], costs: list[Floats]) -> list[CostEdge]:
    """Edges with at most one between two nodes: parallel ones are added up, and an edge from a
    node to itself is a cost of that node (`costs` is changed)."""
    joined: dict[tuple[int, int], Floats] = {}
    for first, second, table in edges:
        if first == second:
            costs[first] = costs[first] + np.diagonal(table)
            continue
        if first > second:
            first, second, table = second, first, table.T
        known = joined.get((first, second))
        joined[first, second] = table if known is None else known + table
    return [CostEdge(first, second, table) for (first, second), table in joined.items()]
