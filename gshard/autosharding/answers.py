"""The models of a program on one mesh, solved: an answer to make layouts of, and a bound."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.candidates import ModelAnswer
from gshard.autosharding.cost.model import MeshProblem, build
from gshard.autosharding.cost.specs import MeshShape
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.solver import presolving_work, solve, solve_with_priced_memory
from gshard.autosharding.solver.ilp import Result
from gshard.autosharding.solver.problem import NoAnswerError, Problem
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import Hardware

# Seconds of work for each node of a model, and how often it is built: copies count from the second
# time on.
_PER_NODE, _PAIRINGS = 1e-4, 2

# Share of a bound that sums of floating-point numbers may be off.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Answers:
    """Solves the models of one program."""

    subject: TracedProgram
    machine: Hardware
    clock: Clock
    donated: bool

    def choice(
        self, mesh: MeshShape, limit: float, seconds: float, needed: bool
    ) -> ModelAnswer | None:
        """The answer of the likely model on a mesh; copies count where they break the limit."""
        paired: set[Any] = set()
        best: tuple[MeshProblem, Result] | None = None
        flat, returned, donated = self.subject.flat, self.subject.returned, self.donated
        for number in range(_PAIRINGS):
            model = build(flat, mesh, self.machine, limit, returned, paired=paired, donated=donated)
            self.clock.charge(_PER_NODE * len(model.problem.costs))
            if not needed and presolving_work(model.problem) > seconds:
                break
            result = self._solved(model.problem, seconds / (1 + number), needed and not number)
            if result.answer is None:
                break
            best = model, result
            if not model.uncounted(result.answer):
                break
            paired = set(model.forms)
        if best is None or best[1].answer is None:
            return None
        model, result = best
        peak = float(model.problem.memory.profile(best[1].answer).max(initial=0.0))
        return ModelAnswer(result.cost / PICO, model, best[1].answer, peak, result.gap)

    def _solved(self, problem: Problem, seconds: float, needed: bool) -> Result:
        """The answer of a model; where none fits and one is needed, one that holds little."""
        result, fits = Result(None, np.inf, -np.inf), True
        try:
            result = solve(problem, seconds, clock=self.clock)
        except NoAnswerError:
            fits = False
        if result.answer is None and (needed or not fits):
            result = solve_with_priced_memory(problem, seconds, self.clock)
        return result

    def bound(self, mesh: MeshShape, limit: float, seconds: float) -> float:
        """Seconds that the forecast of no layout over a mesh is below; infinite if none fits."""
        flat, returned = self.subject.flat, self.subject.returned
        problem = build(flat, mesh, self.machine, limit, returned, optimistic=True).problem
        own = _without_edges(problem)
        if seconds > 0:
            try:
                own = max(own, solve(problem, seconds, clock=self.clock).bound)
            except NoAnswerError:  # arguments alone do not fit over this mesh
                return math.inf
        return (1 - _ROUNDING) * own / PICO


def _without_edges(problem: Problem) -> float:
    """A bound at once: every operator at its cheapest, and nothing moves."""
    return problem.constant + sum(float(c.min(initial=math.inf)) for c in problem.costs)
