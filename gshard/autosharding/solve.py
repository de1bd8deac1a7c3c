"""The solver: presolve, then an exact solve where the rest is small enough, a search where not."""

from __future__ import annotations

import time

from gshard.autosharding.presolve import presolve
from gshard.autosharding.problem import Problem
from gshard.autosharding.program import Progress, Result, solve_exactly
from gshard.autosharding.search import search

# Pairs of strategies up to which HiGHS gets the whole problem at once.
LARGEST_EXACT = 100_000


def solve(problem: Problem, seconds: float = 60.0, progress: Progress | None = None) -> Result:
    """The best answer that is found in the time given, and a proven lower bound of all costs.

    `progress` gets each better answer, in terms of this problem. Costs are best given in units of
    which one is negligible: the solver's tolerances are absolute. Where the time suffices for the
    proof, equal problems have equal answers. Raises `NoAnswerError` where nothing fits into memory.
    """
    until = time.monotonic() + seconds
    smaller = presolve(problem)

    def translated(result: Result) -> Result:
        if result.answer is None:
            return result
        answer = smaller.back(result.answer)
        return Result(answer, problem.cost(answer), result.bound)

    def report(result: Result) -> None:
        if progress is not None:
            progress(translated(result))

    left = max(until - time.monotonic(), 0.1)
    method = solve_exactly if smaller.problem.pairs <= LARGEST_EXACT else search
    result = translated(method(smaller.problem, left, progress=report))
    if progress is not None:
        progress(result)
    return result
