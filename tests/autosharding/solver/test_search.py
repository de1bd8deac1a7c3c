"""Answers within the memory limit: passes over blocks of nodes, memory that is granted, and the
search with both on chains, stars and dense cores."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.contest import from_contest
from gshard.autosharding.budget import Clock
from gshard.autosharding.solver import solve
from gshard.autosharding.solver.ilp import Result
from gshard.autosharding.solver.search import MemorySlack, Search, improve
from tests.autosharding.solver.problems import brute_force, consistent, problems
from tests.autosharding.solver.shapes import SHAPES, instance


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000))
def test_a_pass_costs_no_more_and_changes_only_its_nodes(problem, seed):
    rng = np.random.default_rng(seed)
    allowed = [np.flatnonzero(rng.random(len(c)) < 0.7) for c in problem.costs]
    allowed = [a if len(a) else np.zeros(1, dtype=np.int64) for a in allowed]
    start = np.array([rng.choice(a) for a in allowed])
    free = np.flatnonzero(rng.random(len(start)) < 0.7).tolist()
    tables = Search(problem, Clock(1.0)).tables
    answer = improve(tables, problem.costs, start, free, allowed, rng)
    assert problem.cost(answer) <= problem.cost(start)
    for node, strategy in enumerate(answer):
        assert strategy in allowed[node]
        assert node in free or strategy == start[node]


@pytest.mark.parametrize("shape", ["chain", "star"])
@pytest.mark.parametrize("seed", range(4))
def test_a_pass_over_a_tree_finds_the_best_answer(shape, seed):
    data = instance(shape, 6, 4, 1e6, seed)  # as if there were no limit
    problem, rng = from_contest(data), np.random.default_rng(seed)
    start = np.array([rng.integers(len(c)) for c in problem.costs])
    every, tables = MemorySlack(problem).every, Search(problem, Clock(1.0)).tables
    answer = improve(tables, problem.costs, start, range(len(start)), every, rng)
    assert problem.cost(answer) == brute_force(problem)


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000), wishes=st.booleans())
def test_any_combination_of_what_is_granted_fits(problem, seed, wishes):
    rng = np.random.default_rng(seed)
    base = np.array([rng.integers(len(c)) for c in problem.costs])
    wanted = np.array([rng.integers(len(c)) for c in problem.costs]) if wishes else None
    order = rng.permutation(len(base))[: rng.integers(1, len(base) + 1)]
    allowed = MemorySlack(problem).granted(order, base, wanted)
    if allowed is None:
        assert problem.excess(base) > 0
        return
    sets = [allowed[n] if n in order else [base[n]] for n in range(len(base))]
    assert all(problem.excess(np.array(answer)) <= 0 for answer in itertools.product(*sets))


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_are_within_a_tight_limit(shape):
    """Even before there are prices; and the nodes that are not free keep what they have."""
    problem = from_contest(instance(shape, 60, 8, 1.0, 1))
    drawing = Search(problem, Clock(60.0, counted=True))
    first = drawing.draw(range(60))
    assert first is not None
    assert problem.excess(first) <= 0
    drawing = Search(
        problem, Clock(60.0, counted=True), Result(first, problem.cost(first), -np.inf)
    )
    answer = drawing.draw(range(10, 30))
    assert answer is not None
    assert problem.excess(answer) <= 0
    np.testing.assert_array_equal(np.delete(answer, range(10, 30)), np.delete(first, range(10, 30)))


@pytest.mark.parametrize("shape", SHAPES)
def test_solve_and_search_are_brute_force(shape):
    """The search alone, without the presolve and the program, which would leave it nothing."""
    problem = from_contest(instance(shape, 7, 4, 1.3, 5))
    wanted = brute_force(problem)
    assert solve(problem).cost == wanted
    result = Search(problem, Clock(0.2, counted=True)).run()  # the machine may be busy
    assert result.answer is not None
    assert problem.excess(result.answer) <= 0
    assert result.cost == problem.cost(result.answer) == wanted
    assert result.bound <= wanted + 1e-6


@settings(max_examples=15, deadline=None)
@given(problem=problems())
def test_search_finds_answers_within_the_limit(problem):
    """The search alone, without the presolve that would leave it nothing to do."""
    problem = consistent(problem)
    wanted = brute_force(problem)
    assume(np.isfinite(wanted))
    result = Search(problem, Clock(0.3)).run()
    if result.answer is not None:
        assert problem.excess(result.answer) <= 0
        assert result.bound - 1e-6 <= wanted <= result.cost
