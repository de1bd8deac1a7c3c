"""The solver: presolve, then an exact solve where the rest is small enough, a search where not."""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.ilp import Progress, Result, solve_exactly
from gshard.autosharding.solver.presolve import presolve
from gshard.autosharding.solver.problem import NoAnswerError, Problem
from gshard.autosharding.solver.search import Search

# Pairs of strategies up to which HiGHS gets all of a problem at once, and for which share of the
# time: a search has the rest of it where that proves nothing.
_EXACT = ((100_000, 0.6), (300_000, 0.3))
_PROVED = 1e-6  # the gap below which a search is not worth its time

# Multiples of a memory limit that nothing fits into, which are tried one after the other.
_ABOVE_LIMIT = (1.1, 1.5, 3.0, np.inf)


def solve(
    problem: Problem, clock: Clock | float = 60.0, progress: Progress | None = None
) -> Result:
    """The best answer that is found in the time given, and a proven lower bound of all costs.

    `progress` gets each better answer, in terms of this problem. Costs are best given in units of
    which one is negligible: the solver's tolerances are absolute. Where the time suffices for the
    proof, or `clock` counts work, equal problems have equal answers. Raises `NoAnswerError` where
    nothing fits into memory.
    """
    clock = clock if isinstance(clock, Clock) else Clock(clock)
    smaller = presolve(problem, clock)

    def translated(result: Result) -> Result:
        if result.answer is None:
            return result
        answer = smaller.back(result.answer)
        return Result(answer, problem.cost(answer), result.bound)

    def report(result: Result) -> None:
        if progress is not None:
            progress(translated(result))

    result = translated(_solved(smaller.problem, clock, report))
    if progress is not None:
        progress(result)
    return result


def _solved(problem: Problem, clock: Clock, report: Progress) -> Result:
    """The answer of a presolved problem."""
    exact = Result(None, np.inf, -np.inf)
    share = next((share for pairs, share in _EXACT if problem.pairs <= pairs), 0.0)
    if share > 0:
        exact = solve_exactly(problem, clock.part(share * clock.left), progress=report)
        if exact.gap <= _PROVED:
            return exact

    def bounded(result: Result) -> Result:
        bound = min(max(result.bound, exact.bound), result.cost)
        return dataclasses.replace(result, bound=bound)

    return bounded(Search(problem, clock, lambda r: report(bounded(r)), exact.answer).run())


def solve_near_limit(problem: Problem, clock: Clock) -> Result:
    """An answer that holds little, where none within the limit was found: the limit rises until
    there is one. That proves nothing, so that the gap is infinite."""
    found, memory = None, problem.memory
    for more in _ABOVE_LIMIT:
        relaxed = dataclasses.replace(memory, limit=more * np.maximum(memory.limit, 1.0))
        try:
            part = clock.part(clock.left / 2)
            found = solve(dataclasses.replace(problem, memory=relaxed), part).answer
        except NoAnswerError:
            continue
        if found is not None:
            break
    return Result(found, np.inf if found is None else problem.cost(found), -np.inf)
