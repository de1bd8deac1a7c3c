"""Presolve: nodes that a neighbour decides are merged into it.

Where each strategy of one node leaves at most one of its neighbour, the neighbour has no choice of
its own: its costs, edges and memory become those of the node. Strategies that no neighbour can be
combined with are dropped on the way, and edges whose costs are a sum of one term per end become
costs of the ends. All of it is exact, and repeated until nothing changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from gshard.autosharding.memory import Bools, Floats, Ints
from gshard.autosharding.network import ProblemGraph
from gshard.autosharding.problem import NoAnswerError, Problem


def merge(problem: Problem) -> tuple[Problem, Callable[[Ints], Ints]]:
    """The problem without the nodes that a neighbour decides, and the way back."""
    network = ProblemGraph(problem)
    for node, costs in enumerate(network.costs):
        _drop(network, node, np.isfinite(costs))
    queue = deque((edge.first, edge.second) for edge in problem.edges)
    waiting = set(queue)
    while queue:
        pair = queue.popleft()
        waiting.discard(pair)
        first, second = pair
        if second not in network.edges[first]:
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
    """Merge `decided` into `node`: `strategy` is its strategy by those of `node`."""
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
