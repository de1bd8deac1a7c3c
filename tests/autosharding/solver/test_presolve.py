"""Each presolve step keeps the best cost, and its way back leads to an answer that has it."""

import numpy as np
import pytest
from hypothesis import given, settings

from gshard.autosharding.solver.presolve import (
    drop_dominated,
    drop_oversized,
    eliminate,
    merge,
    presolve,
)
from gshard.autosharding.solver.problem import (
    FORBIDDEN,
    CostEdge,
    MemoryModel,
    NoAnswerError,
    Problem,
)
from tests.autosharding.solver.problems import best_answer, brute_force, problems


@pytest.mark.parametrize("step", [merge, drop_oversized, drop_dominated, eliminate])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_steps_are_exact(step, problem):
    wanted = brute_force(problem)
    try:
        smaller, back = step(problem)
    except NoAnswerError:
        assert wanted == np.inf
        return
    assert smaller.strategies <= problem.strategies
    found = best_answer(smaller)
    if found is None:
        assert wanted == np.inf
        return
    answer = back(found)
    assert problem.cost(answer) == smaller.cost(found) == wanted
    assert problem.excess(answer) <= 0


@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_all_steps_together(problem):
    wanted = brute_force(problem)
    try:
        smaller, back = presolve(problem)
    except NoAnswerError:
        assert wanted == np.inf
        return
    found = best_answer(smaller)
    assert (np.inf if found is None else problem.cost(back(found))) == wanted


def _memory(*holdings, limit=(100.0,)):
    return MemoryModel.of(holdings, np.array(limit))


def test_a_chain_of_decided_nodes_becomes_one_node():
    same = np.where(np.eye(3, dtype=bool), 0.0, FORBIDDEN)
    costs = tuple(np.array([float(i), 5.0, 1.0]) for i in range(10))
    edges = tuple(CostEdge(i, i + 1, same) for i in range(9))
    smaller, back = merge(Problem(costs, edges, _memory()))
    assert [len(c) for c in smaller.costs] == [3]
    np.testing.assert_array_equal(smaller.costs[0], [45.0, 50.0, 10.0])
    np.testing.assert_array_equal(back(np.array([2])), [2] * 10)


def test_merged_nodes_keep_their_memory_at_its_time():
    swapped = np.array([[FORBIDDEN, 0.0], [0.0, FORBIDDEN]])
    memory = _memory((0, 0, 1, [1.0, 2.0]), (1, 1, 2, [10.0, 20.0]), limit=(50.0, 50.0))
    problem = Problem((np.zeros(2), np.zeros(2)), (CostEdge(0, 1, swapped),), memory)
    smaller, back = merge(problem)
    for strategy in range(2):
        answer = np.array([strategy])
        np.testing.assert_array_equal(smaller.memory.profile(answer), memory.profile(back(answer)))


def test_a_strategy_with_less_memory_is_not_dominated():
    cheap, small = [1.0, 2.0], [9.0, 3.0]
    problem = Problem((np.array(cheap),), (), _memory((0, 0, 1, small)))
    assert drop_dominated(problem)[0].strategies == 2
    problem = Problem((np.array(cheap),), (), _memory((0, 0, 1, [3.0, 3.0])))
    assert drop_dominated(problem)[0].strategies == 1


def test_a_node_without_memory_between_two_others_becomes_their_edge():
    rng = np.random.default_rng(0)
    tables = [rng.random((2, 3)), rng.random((3, 2))]
    costs = (np.zeros(2), rng.random(3), np.zeros(2))
    memory = _memory((0, 0, 1, [1.0, 2.0]), (2, 0, 1, [1.0, 2.0]))
    problem = Problem(costs, (CostEdge(0, 1, tables[0]), CostEdge(1, 2, tables[1])), memory)
    smaller, _ = eliminate(problem)
    assert len(smaller.costs) == 2
    wanted = (tables[0][:, :, None] + costs[1][:, None] + tables[1]).min(axis=1)
    np.testing.assert_allclose(smaller.edges[0].costs, wanted)
