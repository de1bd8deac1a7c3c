"""Presolve: exact reductions, one after the other until none of them changes the problem.

Where each strategy of one node leaves at most one of its neighbour, the neighbour has no choice of
its own: its costs, edges and memory become those of the node. Strategies that no neighbour can be
combined with, that another one dominates or that exceed the memory limit are dropped, edges whose
costs are a sum of one term per end become costs of the ends, and a node that holds no memory and
has at most two neighbours becomes a cost between these, where the problem does not grow by it. Each
node that is removed leaves a record of which strategy it takes, given what its former neighbours
take. Where the time runs out, what is left is an equal problem too.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from gshard.autosharding.budget import WORK, Clock
from gshard.autosharding.solver.problem import (
    Bools,
    CostEdge,
    Floats,
    Ints,
    MemoryModel,
    NoAnswerError,
    Problem,
)

# A smaller problem, and the function that turns its answers into answers of the original one.
Reduced = tuple[Problem, Callable[[Ints], Ints]]


@dataclasses.dataclass(frozen=True)
class Removed:
    """A removed node: its strategy by those of the nodes that decide it (none, one or two)."""

    node: int
    deciders: tuple[int, ...]
    strategy: Ints


class ProblemGraph:
    """Nodes by number, their strategies that are left, and their edges in both directions."""

    def __init__(self, problem: Problem, clock: Clock | None = None) -> None:
        self.problem, self.clock = problem, clock
        self.constant = problem.constant
        self.costs: list[Floats] = [c.copy() for c in problem.costs]
        self.kept: list[Ints] = [np.arange(len(c)) for c in problem.costs]
        self.edges = [dict(tables) for tables in problem.tables]
        self.alive = [True] * len(problem.costs)
        self.removed: list[Removed] = []

    def has_time(self, node: int) -> bool:
        """Count the work of looking at a node; whether there is time for it."""
        if self.clock is None:
            return True
        entries = len(self.costs[node]) * sum(table.size for table in self.edges[node].values())
        in_time = self.clock.left > 0
        self.clock.charge(in_time * (WORK.presolve_node + WORK.presolve_entry * entries))
        return in_time

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

    def result(self) -> Reduced:
        """The problem that is left, and the way back."""
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


def merge(problem: Problem, clock: Clock | None = None) -> Reduced:
    """The problem without the nodes that a neighbour decides, and the way back."""
    network = ProblemGraph(problem, clock)
    for node, costs in enumerate(network.costs):
        _drop(network, node, np.isfinite(costs))
    queue = deque((edge.first, edge.second) for edge in problem.edges)
    waiting = set(queue)
    while queue:
        pair = queue.popleft()
        waiting.discard(pair)
        first, second = pair
        if second not in network.edges[first] or not network.has_time(first):
            continue
        for changed in _visit(network, first, second):
            if changed not in waiting:
                waiting.add(changed)
                queue.append(changed)
    return network.result()


def _visit(network: ProblemGraph, first: int, second: int) -> list[tuple[int, int]]:
    """Simplify one edge; returns the edges that have changed."""
    table = network.edges[first][second]
    allowed = table < np.inf
    of_first, of_second = allowed.sum(axis=1), allowed.sum(axis=0)
    if not of_first.all() or not of_second.all():
        changed = _drop(network, first, of_first > 0)
        return changed + _drop(network, second, of_second > 0)
    first_decides, second_decides = of_first.max() == 1, of_second.max() == 1
    if first_decides and second_decides:  # move the edges of the node that has fewer
        first_decides = len(network.edges[first]) >= len(network.edges[second])
    if first_decides:
        return _absorb(network, first, second, allowed.argmax(axis=1))
    if second_decides:
        return _absorb(network, second, first, allowed.argmax(axis=0))
    if allowed.all():
        rows, columns = table[:, 0], table[0] - table[0, 0]
        if (table == rows[:, None] + columns).all():
            network.costs[first] = network.costs[first] + rows
            network.costs[second] = network.costs[second] + columns
            network.drop_edge(first, second)
    return []


def _absorb(
    network: ProblemGraph, node: int, decided: int, strategy: Ints
) -> list[tuple[int, int]]:
    """Merge `decided` into `node`: `strategy` is its strategy by those of `node`; returns the
    edges that have changed."""
    table = network.edges[node][decided]
    own: Floats = table[np.arange(len(strategy)), strategy]
    network.costs[node] = network.costs[node] + own + network.costs[decided][strategy]
    edges = [(k, t) for k, t in network.edges[decided].items() if k != node]
    network.remove(decided, (node,), strategy)
    for other, costs in edges:
        network.add_edge(node, other, costs[strategy])
    return [(min(node, other), max(node, other)) for other, _ in edges]


def _drop(network: ProblemGraph, node: int, allowed: Bools) -> list[tuple[int, int]]:
    """Keep the allowed strategies of a node; returns the edges that have changed."""
    if allowed.all():
        return []
    if not allowed.any():
        raise NoAnswerError("the costs forbid every combination of strategies")
    network.keep(node, np.flatnonzero(allowed))
    return [(min(node, other), max(node, other)) for other in network.edges[node]]


def drop_dominated(problem: Problem, clock: Clock | None = None) -> Reduced:
    """The problem without strategies that another one of the node can always replace.

    A strategy is dominated if another one never holds more memory and, whatever the neighbours
    take, never costs more (each neighbour's worst case taken separately).
    """
    network = ProblemGraph(problem, clock)
    holdings = by_node(problem.memory, len(problem.costs))
    waiting = set(network.nodes())
    while waiting:
        again: set[int] = set()
        for node in filter(network.has_time, sorted(waiting)):
            kept = _undominated(network, node, holdings[node])
            if len(kept) < len(network.costs[node]):
                network.keep(node, kept)
                again.update(network.edges[node])
        waiting = again
    return network.result()


def drop_oversized(problem: Problem, clock: Clock | None = None) -> Reduced:
    """The problem without strategies that exceed the limit even where all other nodes hold the
    least that they can."""
    network, memory = ProblemGraph(problem, clock), problem.memory.without_least()
    limit = np.append(memory.limit, np.inf)
    for node, holdings in enumerate(by_node(memory, len(problem.costs))):
        if holdings:
            times, usage = profile_of(memory, holdings)
            fits = (usage <= np.minimum.reduceat(limit, times)[:, None]).all(axis=0)
            if not fits.any():
                raise NoAnswerError("the memory limit is below what one node needs")
            if not fits.all():
                network.keep(node, np.flatnonzero(fits))
    return network.result()


def by_node(memory: MemoryModel, nodes: int) -> list[list[int]]:
    """The holdings of each node."""
    holdings: list[list[int]] = [[] for _ in range(nodes)]
    for holding, node in enumerate(memory.node):
        holdings[node].append(holding)
    return holdings


def _undominated(network: ProblemGraph, node: int, holdings: list[int]) -> Ints:
    costs = network.costs[node]
    # margin[s, t]: by how much s costs more than t, at least.
    margin = costs[:, None] - costs
    for table in network.edges[node].values():
        if not (margin >= 0).any():
            break
        with np.errstate(invalid="ignore"):  # a margin that is not a number dominates nothing
            difference = table[:, None, :] - table[None, :, :]
            difference[np.isnan(difference)] = np.inf  # neither can be combined with it
            margin += difference.min(axis=2)
    better = margin >= 0
    np.fill_diagonal(better, False)
    if better.any() and holdings:
        profile = profile_of(network.problem.memory, holdings)[1][:, network.kept[node]]
        for s, t in np.argwhere(better):
            better[s, t] = (profile[:, t] <= profile[:, s]).all()
    left = np.ones(len(costs), dtype=bool)
    for s in range(len(costs)):
        left[s] = not (better[s] & left).any()
    return np.flatnonzero(left)


def profile_of(memory: MemoryModel, holdings: list[int]) -> tuple[Ints, Floats]:
    """The times at which any of these holdings changes, and from each the bytes by strategy."""
    start, stop = memory.start[holdings], memory.stop[holdings]
    times = np.unique(np.concatenate([start, stop]))
    usage = memory.usage[memory.first[holdings][:, None] + np.arange(memory.sizes[holdings[0]])]
    changes = np.zeros((len(times), usage.shape[1]))
    np.add.at(changes, np.searchsorted(times, start), usage)
    np.subtract.at(changes, np.searchsorted(times, stop), usage)
    return times, np.cumsum(changes, axis=0)


def eliminate(problem: Problem, clock: Clock | None = None) -> Reduced:
    """The problem without nodes that hold no memory and have at most two neighbours.

    Their best strategy, and what it costs, is a function of what the neighbours take.
    """
    network = ProblemGraph(problem, clock)
    with_memory = {int(node) for node in problem.memory.node}
    waiting = sorted(set(network.nodes()) - with_memory)
    while waiting:
        again: set[int] = set()
        for node in waiting:
            few = network.alive[node] and len(network.edges[node]) <= 2
            if few and network.has_time(node):
                again |= _eliminated(network, node) - with_memory
        waiting = sorted(again)
    return network.result()


def _eliminated(network: ProblemGraph, node: int) -> set[int]:
    """Remove a node of at most two neighbours; returns the neighbours, whose degree fell."""
    costs, edges = network.costs[node], list(network.edges[node].items())
    if not edges:
        network.constant += float(costs.min())
        network.remove(node, (), np.array(costs.argmin()))
        return set()
    if len(edges) == 1:
        ((other, table),) = edges
        _absorb(network, other, node, (costs[:, None] + table).argmin(axis=0))
        return {other}
    (first, one), (second, two) = edges
    shape = one.shape[1], two.shape[1]
    if second not in network.edges[first] and math.prod(shape) > one.size + two.size:
        return set()  # a new edge would be larger than the two that it replaces
    best, choice = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    for strategy, cost in enumerate(costs):
        total = cost + one[strategy][:, None] + two[strategy]
        lower = total < best
        best[lower] = total[lower]
        choice[lower] = strategy
    network.remove(node, (first, second), choice)
    network.add_edge(first, second, best)
    return {first, second}


def presolve(problem: Problem, clock: Clock | None = None) -> Reduced:
    """Merge decided nodes, drop dominated strategies and remove nodes without memory, until the
    problem stays as it is or time runs out: a problem with the same best cost, and the way back."""
    steps: list[Callable[[Ints], Ints]] = []
    size = None
    while size != (len(problem.costs), problem.strategies, len(problem.edges)):
        size = len(problem.costs), problem.strategies, len(problem.edges)
        for step in (merge, drop_oversized, drop_dominated, eliminate):
            problem, back = step(problem, clock)
            if not math.isfinite(problem.constant):
                raise NoAnswerError("the costs forbid every combination of strategies")
            problem = dataclasses.replace(problem, memory=problem.memory.tightened())
            steps.append(back)
    return problem, lambda answer: functools.reduce(lambda a, step: step(a), steps[::-1], answer)
