"""The solver: presolve, then an exact solve where the rest is small enough, a search where not."""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.autosharding.budget import WORK, Clock
from gshard.autosharding.solver.ilp import Progress, Result, solve_exactly
from gshard.autosharding.solver.presolve import presolve
from gshard.autosharding.solver.problem import Problem
from gshard.autosharding.solver.search import Search

# Pairs of strategies up to which HiGHS gets all of a problem at once, and for which share of the
# time: a search has the rest of it where that proves nothing.
_EXACT = ((100_000, 0.6), (300_000, 0.3))
_PROVED = 1e-6  # the gap below which a search is not worth its time

# Prices of the memory at the peak, each as the share of the cost that all of it costs together.
_PRICES = (0.03, 0.1, 0.3, 1.0, 3.0)


def solve(
    problem: Problem,
    seconds: float = 60.0,
    progress: Progress | None = None,
    clock: Clock | None = None,
) -> Result:
    """The best answer that is found in the time given, and a proven lower bound of all costs.

    `progress` gets each better answer, in terms of this problem. Costs are best given in units of
    which one is negligible: the solver's tolerances are absolute. Where the time suffices for the
    proof, or `clock` counts work, equal problems have equal answers. Raises `NoAnswerError` where
    nothing fits into memory.
    """
    clock = Clock(seconds) if clock is None else clock
    until = clock.now() + seconds
    smaller = presolve(problem)
    clock.charge(presolving_work(problem))

    def translated(result: Result) -> Result:
        if result.answer is None:
            return result
        answer = smaller.back(result.answer)
        return Result(answer, problem.cost(answer), result.bound)

    def report(result: Result) -> None:
        if progress is not None:
            progress(translated(result))

    result = translated(_solved(smaller.problem, max(until - clock.now(), 0.1), report, clock))
    if progress is not None:
        progress(result)
    return result


def presolving_work(problem: Problem) -> float:
    """Seconds of work to presolve a problem, before anything is known of its answer."""
    return WORK.presolve_node * len(problem.costs) + WORK.presolve_pair * problem.pairs


def _solved(problem: Problem, seconds: float, report: Progress, clock: Clock) -> Result:
    """The answer of a presolved problem."""
    until = clock.now() + seconds
    exact = Result(None, np.inf, -np.inf)
    share = next((share for pairs, share in _EXACT if problem.pairs <= pairs), 0.0)
    if share > 0:
        exact = solve_exactly(problem, share * seconds, progress=report, clock=clock)
        if exact.gap <= _PROVED:
            return exact

    def bounded(result: Result) -> Result:
        bound = min(max(result.bound, exact.bound), result.cost)
        return dataclasses.replace(result, bound=bound)

    left = max(until - clock.now(), 0.1)
    found = Search(problem, left, lambda r: report(bounded(r)), clock, exact.answer).run()
    return bounded(found)


def solve_with_priced_memory(problem: Problem, seconds: float, clock: Clock) -> Result:
    """An answer that holds little at the peak, where none within the limit was found.

    A price for each byte that is held at the peak takes the place of the limit; it rises until the
    answer fits, or nearly nothing is held. That proves nothing, so that the gap is infinite.
    """
    memory = problem.memory
    free = dataclasses.replace(memory, limit=np.full_like(memory.limit, np.inf))
    priced = dataclasses.replace(problem, memory=free)
    best = solve(priced, seconds / (len(_PRICES) + 1), clock=clock).answer
    for price in _PRICES if best is not None else ():
        assert best is not None
        profile = memory.profile(best)
        at = int(np.argmax(profile))
        per_byte = price * problem.cost(best) / max(float(profile[at]), 1.0)
        costs = list(problem.costs)
        for holding in np.flatnonzero((memory.start <= at) & (at < memory.stop)):
            node, first = int(memory.node[holding]), memory.first[holding]
            usage = memory.usage[first : memory.first[holding + 1]]
            costs[node] = costs[node] + np.rint(per_byte * usage)
        priced = dataclasses.replace(priced, costs=tuple(costs))
        best = solve(priced, seconds / (len(_PRICES) + 1), clock=clock).answer
        if best is None or problem.excess(best) <= 0:
            break
    cost = np.inf if best is None else problem.cost(best)
    return Result(best, cost, -np.inf)
