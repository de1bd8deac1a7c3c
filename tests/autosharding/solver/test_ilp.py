"""The integer program against brute force, with both interfaces of HiGHS."""

import numpy as np
import pytest
from hypothesis import given, settings

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver import ilp
from gshard.autosharding.solver.ilp import solve_exactly
from gshard.autosharding.solver.problem import (
    CostEdge,
    MemoryModel,
    NoAnswerError,
    Problem,
)
from tests.autosharding.solver.problems import brute_force, problems


@pytest.mark.parametrize("kind", [ilp.HighsBackend, ilp.ScipyBackend])
@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_the_program_alone_is_brute_force(kind, problem):
    wanted = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gshard.autosharding.solver.ilp.open_backend", kind)
        try:
            result = solve_exactly(problem, Clock(60.0))
        except NoAnswerError:
            assert wanted == np.inf
            return
    assert result.answer is not None
    assert problem.cost(result.answer) == wanted


def test_three_nodes_that_want_to_differ_and_no_memory():
    """The relaxation is fractional, and there is no time at which a row could be added."""
    differ = np.array([[5.0, 0.0], [0.0, 5.0]])
    edges = tuple(CostEdge(i, j, differ) for i, j in ((0, 1), (1, 2), (0, 2)))
    problem = Problem((np.zeros(2),) * 3, edges, MemoryModel.of([], np.zeros(0)))
    result = solve_exactly(problem, Clock(20.0))
    assert (result.cost, result.bound) == (5.0, 5.0)
