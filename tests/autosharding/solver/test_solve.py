"""The solver against brute force, its bound and its limits."""

import numpy as np
import pytest
from hypothesis import given, settings

from gshard.autosharding.solver import solve
from gshard.autosharding.solver.problem import (
    NoAnswerError,
)
from tests.autosharding.solver.problems import brute_force, problems


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_solve_is_brute_force(problem):
    wanted = brute_force(problem)
    if wanted == np.inf:
        with pytest.raises(NoAnswerError):
            solve(problem)
        return
    result = solve(problem)
    assert result.answer is not None
    assert problem.excess(result.answer) <= 0
    assert problem.cost(result.answer) == result.cost == wanted
    assert result.bound == pytest.approx(wanted, abs=1e-4)
