"""The optimization problem behind automatic sharding, independent of any program.

Each node picks one of its strategies. A strategy has a cost, a pair of strategies at the two ends
of an edge has one too (`FORBIDDEN` where the two cannot be combined), and a strategy holds memory
over intervals of time. At no time may the memory held exceed the limit.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from gshard.autosharding.memory import Floats, Ints, MemoryModel

FORBIDDEN = np.inf


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


def read_contest(path: str | Path) -> Problem:
    """A problem in the format of the ASPLOS/EuroSys 2025 contest (`.json` or `.json.gz`)."""
    path = Path(path)
    raw = path.read_bytes()
    if path.suffix == ".gz":
        raw = gzip.decompress(raw)
    return from_contest(json.loads(raw)["problem"])


def from_contest(data: dict[str, Any]) -> Problem:
    """The contest's problem from its parsed JSON. Costs of 1e18 and above are forbidden."""
    costs = [_costs(c) for c in data["nodes"]["costs"]]
    pairs = []
    for (first, second), flat in zip(data["edges"]["nodes"], data["edges"]["costs"], strict=True):
        shape = len(costs[first]), len(costs[second])
        pairs.append((first, second, _costs(flat).reshape(shape)))
    edges = unite(pairs, costs)
    usages, intervals = data["nodes"]["usages"], data["nodes"]["intervals"]
    holdings = [
        (node, start, stop, usage)
        for node, ((start, stop), usage) in enumerate(zip(intervals, usages, strict=True))
    ]
    length = max((stop for _, stop in intervals), default=0)
    limit = np.full(length, float(data["usage_limit"]))
    return Problem(tuple(costs), tuple(edges), MemoryModel.of(holdings, limit))


def _costs(values: list[int]) -> Floats:
    array = np.array(values, dtype=np.float64)
    array[array >= 1e18] = FORBIDDEN
    return array
