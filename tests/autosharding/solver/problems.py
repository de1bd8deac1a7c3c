"""Small random problems, and the slow oracle: every combination of strategies."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

from gshard.autosharding.solver.presolve import merge
from gshard.autosharding.solver.problem import FORBIDDEN, MemoryModel, NoAnswerError, Problem, unite


@st.composite
def problems(draw) -> Problem:
    """At most 6 nodes of at most 4 strategies, with forbidden pairs, and a limit that may bind."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    # Few values make ties, sums of two and dominated strategies likely.
    values = draw(st.sampled_from([3, 10, 1000]))
    forbidden = draw(st.sampled_from([0.0, 0.3, 0.6]))
    costs = [rng.integers(0, values, size).astype(float) for size in sizes]
    edges = []
    for first, second in itertools.combinations(range(len(sizes)), 2):
        if rng.random() < draw(st.sampled_from([0.3, 0.7])):
            table = rng.integers(0, values, (sizes[first], sizes[second])).astype(float)
            table[rng.random(table.shape) < forbidden] = FORBIDDEN
            if rng.random() < 0.3:  # one end decides the other
                table = np.full(table.shape, FORBIDDEN)
                decided = rng.integers(0, sizes[second], sizes[first])
                table[np.arange(sizes[first]), decided] = rng.integers(0, values, sizes[first])
            edges.append((first, second, table))
    length = int(rng.integers(1, 8))
    holdings = []
    for node in rng.integers(0, len(sizes), rng.integers(0, 8)):
        start, stop = sorted(int(t) for t in rng.integers(0, length + 1, 2))
        usage = [float(u) for u in rng.integers(0, 20, sizes[node])]
        holdings.append((int(node), start, stop, usage))
    limit = np.full(length, float(draw(st.sampled_from([5, 15, 25, 100]))))
    joined = unite(edges, costs)
    return Problem(tuple(costs), tuple(joined), MemoryModel.of(holdings, limit))


def brute_force(problem: Problem) -> float:
    """The least cost of all answers within the limit; infinite where there is none."""
    best = np.inf
    for chosen in itertools.product(*(range(len(c)) for c in problem.costs)):
        answer = np.array(chosen, dtype=np.int64)
        cost = problem.cost(answer)
        if cost < best and problem.excess(answer) <= 0:
            best = cost
    return best


def best_answer(problem: Problem) -> np.ndarray | None:
    """An answer of the least cost, by brute force."""
    best, found = np.inf, None
    for chosen in itertools.product(*(range(len(c)) for c in problem.costs)):
        answer = np.array(chosen, dtype=np.int64)
        cost = problem.cost(answer)
        if cost < best and problem.excess(answer) <= 0:
            best, found = cost, answer
    return found


def consistent(problem):
    """Without strategies that no neighbour can be combined with, as message passing needs it."""
    try:
        return merge(problem)[0]
    except NoAnswerError:
        reject()
