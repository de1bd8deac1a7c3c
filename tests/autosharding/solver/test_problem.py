"""Memory over time."""

import dataclasses

from hypothesis import given, settings

from tests.autosharding.solver.problems import brute_force, problems


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_tightened_memory_allows_the_same_answers(problem):
    tight = dataclasses.replace(problem, memory=problem.memory.tightened())
    assert len(tight.memory.limit) <= len(problem.memory.limit)
    assert brute_force(tight) == brute_force(problem) or (problem.memory.limit < 0).any()
