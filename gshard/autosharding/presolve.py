"""The exact presolve steps, one after the other until none of them changes the problem."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from gshard.autosharding.memory import Ints
from gshard.autosharding.merging import merge
from gshard.autosharding.problem import NoAnswerError, Problem
from gshard.autosharding.reducing import drop_dominated, drop_oversized, eliminate


@dataclasses.dataclass(frozen=True)
class Presolved:
    """A smaller problem with the same best cost, and the way back to the original one."""

    problem: Problem
    steps: tuple[Callable[[Ints], Ints], ...]

    def back(self, answer: Ints) -> Ints:
        """The answer of the original problem that an answer of the smaller one stands for."""
        for step in reversed(self.steps):
            answer = step(answer)
        return answer


def presolve(problem: Problem) -> Presolved:
    """Merge decided nodes, drop dominated strategies and remove nodes without memory, until the
    problem stays as it is."""
    steps: list[Callable[[Ints], Ints]] = []
    size = None
    while size != (len(problem.costs), problem.strategies, len(problem.edges)):
        size = len(problem.costs), problem.strategies, len(problem.edges)
        for step in (merge, drop_oversized, drop_dominated, eliminate):
            problem, back = step(problem)
            if not math.isfinite(problem.constant):
                raise NoAnswerError("the costs forbid every combination of strategies")
            problem = dataclasses.replace(problem, memory=problem.memory.tightened())
            steps.append(back)
    return Presolved(problem, tuple(steps))
