"""The solver: presolve, then an exact solve where the rest is small enough, a search where not."""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.ilp import NOTHING, Result, solve_exactly
from gshard.autosharding.solver.presolve import presolve
from gshard.autosharding.solver.problem import NoAnswerError, Problem
from gshard.autosharding.solver.search import Search

# Pairs of strategies up to which HiGHS gets all of a problem at once, and for which share of the
# time: a search has the rest of it where that proves nothing.
_EXACT = ((100_000, 0.6), (300_000, 0.3))
_PROVED = 1e-6  # the gap below which a search is not worth its time

# Multiples of a memory limit, tried one after the other until something fits.
_LIMITS = (1.0, 1.1, 1.5, 3.0, np.inf)


def solve(problem: Problem, clock: Clock | float = 60.0) -> Result:
    """The best answer that is found in the time given, and a proven lower bound of all costs.

    Costs are best given in units of which one is negligible: the solver's tolerances are absolute.
    Where the time suffices for the proof, or `clock` counts work, equal problems have equal
    answers. Raises `NoAnswerError` where nothing fits into memory.
    """
    clock = clock if isinstance(clock, Clock) else Clock(clock)
    smaller, back = presolve(problem, clock)
    result = NOTHING
    if share := next((share for pairs, share in _EXACT if smaller.pairs <= pairs), 0.0):
        result = solve_exactly(smaller, clock.part(share * clock.left))
    if result.gap > _PROVED:
        result = Search(smaller, clock, result).run()
    if result.answer is not None:
        answer = back(result.answer)
        result = Result(answer, problem.cost(answer), result.bound)
    result.log()
    return result


def solve_near_limit(problem: Problem, clock: Clock, needed: bool) -> Result:
    """The answer; where none fits, or none was found and one is `needed`, one that holds little:
    the limit rises until there is one. That proves nothing, so that the gap is infinite."""
    found, memory = NOTHING, problem.memory
    for more in _LIMITS:
        relaxed = dataclasses.replace(memory, limit=more * np.maximum(memory.limit, 1.0))
        try:
            part = clock.part(clock.left / (1 if more == 1 else 2))
            found = solve(dataclasses.replace(problem, memory=relaxed), part)
        except NoAnswerError:
            needed = True
            continue
        if found.answer is not None or not needed:
            return found if more == 1 else dataclasses.replace(found, bound=-np.inf)
    return NOTHING
