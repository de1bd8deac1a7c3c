"""Presolve: strategies that are dominated or exceed the memory limit, nodes without memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gshard.autosharding.memory import Floats, Ints, MemoryModel
from gshard.autosharding.network import ProblemGraph
from gshard.autosharding.problem import NoAnswerError, Problem

# The table of a new edge, between the two neighbours of a removed node, has at most this many
# entries.
_LARGEST_TABLE = 1 << 18


def drop_dominated(problem: Problem) -> tuple[Problem, Callable[[Ints], Ints]]:
    """The problem without strategies that another one of the node can always replace.

    A strategy is dominated if another one never holds more memory and, whatever the neighbours
    take, never costs more (each neighbour's worst case taken separately).
    """
    network = ProblemGraph(problem)
    holdings = by_node(problem.memory, len(problem.costs))
    waiting = set(network.nodes())
    while waiting:
        again: set[int] = set()
        for node in sorted(waiting):
            kept = _undominated(network, node, holdings[node])
            if len(kept) < len(network.costs[node]):
                network.keep(node, kept)
                again.update(network.edges[node])
        waiting = again
    return network.result()


def drop_oversized(problem: Problem) -> tuple[Problem, Callable[[Ints], Ints]]:
    """The problem without strategies that exceed the limit even where all other nodes hold the
    least that they can."""
    network, memory = ProblemGraph(problem), problem.memory.tightened_limit()
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


def eliminate(problem: Problem) -> tuple[Problem, Callable[[Ints], Ints]]:
    """The problem without nodes that hold no memory and have at most two neighbours.

    Their best strategy, and what it costs, is a function of what the neighbours take.
    """
    network = ProblemGraph(problem)
    with_memory = {int(node) for node in problem.memory.node}
    waiting = sorted(set(network.nodes()) - with_memory)
    while waiting:
        again: set[int] = set()
        for node in waiting:
            if network.alive[node] and len(network.edges[node]) <= 2:
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
        total = costs[:, None] + table
        network.costs[other] = network.costs[other] + total.min(axis=0)
        network.remove(node, (other,), total.argmin(axis=0))
        return {other}
    (first, one), (second, two) = edges
    entries = one.shape[1] * two.shape[1]
    if entries > _LARGEST_TABLE:
        return set()
    best, choice = np.full((one.shape[1], two.shape[1]), np.inf), np.zeros(entries, dtype=np.int64)
    choice = choice.reshape(best.shape)
    for strategy, cost in enumerate(costs):
        total = cost + one[strategy][:, None] + two[strategy]
        lower = total < best
        best[lower] = total[lower]
        choice[lower] = strategy
    network.remove(node, (first, second), choice)
    network.add_edge(first, second, best)
    return {first, second}
