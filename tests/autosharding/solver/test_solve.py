"""The solver against brute force, its bound and its limits."""

import time

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver import ilp, solve
from gshard.autosharding.solver.ilp import solve_exactly
from gshard.autosharding.solver.messages import Messages
from gshard.autosharding.solver.presolve import merge
from gshard.autosharding.solver.prices import Prices
from gshard.autosharding.solver.problem import (
    CostEdge,
    MemoryModel,
    NoAnswerError,
    Problem,
)
from gshard.autosharding.solver.search import search
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


@pytest.mark.parametrize("kind", [ilp.HighsBackend, ilp.ScipyBackend])
@settings(max_examples=30, deadline=None)
@given(problem=problems())
def test_the_program_alone_is_brute_force(kind, problem):
    wanted = brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gshard.autosharding.solver.ilp.open_backend", kind)
        try:
            result = solve_exactly(problem, 60.0)
        except NoAnswerError:
            assert wanted == np.inf
            return
    assert result.answer is not None
    assert problem.cost(result.answer) == wanted


def _consistent(problem):
    """Without strategies that no neighbour can be combined with, as message passing needs it."""
    try:
        return merge(problem)[0]
    except NoAnswerError:
        reject()


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000))
def test_messages_and_prices_bound_from_below(problem, seed):
    """Whatever the messages and prices are; and a strategy's margin bounds answers that take it."""
    problem = _consistent(problem)
    wanted = brute_force(problem)
    prices = Prices(problem)
    prices.ascend(60.0, 5)
    assert prices.bound <= wanted + 1e-6
    messages = Messages(problem)
    rng = np.random.default_rng(seed)
    messages.into = rng.normal(size=len(messages.into))
    bound, margins = messages.bound(problem.costs)
    for node, margin in enumerate(margins):
        for strategy, extra in enumerate(margin):
            kept = [np.where(np.arange(len(c)) == strategy, c, np.inf) for c in problem.costs]
            costs = tuple(kept[i] if i == node else c for i, c in enumerate(problem.costs))
            free = type(problem)(costs, problem.edges, problem.memory, problem.constant)
            assert bound + extra <= brute_force(free) + 1e-6


@settings(max_examples=15, deadline=None)
@given(problem=problems())
def test_search_finds_answers_within_the_limit(problem):
    """The search alone, without the presolve that would leave it nothing to do."""
    problem = _consistent(problem)
    wanted = brute_force(problem)
    assume(np.isfinite(wanted))
    result = search(problem, 0.3)
    if result.answer is not None:
        assert problem.excess(result.answer) <= 0
        assert result.bound - 1e-6 <= wanted <= result.cost


def test_three_nodes_that_want_to_differ_and_no_memory():
    """The relaxation is fractional, and there is no time at which a row could be added."""
    differ = np.array([[5.0, 0.0], [0.0, 5.0]])
    edges = tuple(CostEdge(i, j, differ) for i, j in ((0, 1), (1, 2), (0, 2)))
    problem = Problem((np.zeros(2),) * 3, edges, MemoryModel.of([], np.zeros(0)))
    result = solve_exactly(problem, 20.0)
    assert (result.cost, result.bound) == (5.0, 5.0)


def test_counted_work_does_not_depend_on_the_clock(monkeypatch):
    """A machine that is five times as slow gives the same answer, and has done the same work."""
    rng = np.random.default_rng(0)
    pairs = [(i, j) for i in range(40) for j in range(i + 1, min(i + 3, 40))]
    edges = tuple(CostEdge(i, j, rng.integers(0, 1000, (6, 6)).astype(float)) for i, j in pairs)
    costs = tuple(rng.integers(0, 100, 6).astype(float) for _ in range(40))
    holdings = [(i, i, i + 6, rng.integers(0, 50, 6).astype(float)) for i in range(40)]
    problem = Problem(costs, edges, MemoryModel.of(holdings, np.full(46, 120.0)))
    found = []
    real = time.monotonic
    for speed in (1.0, 0.2):
        monkeypatch.setattr("gshard.autosharding.budget.time.monotonic", lambda s=speed: real() / s)
        clock = Clock(1e4, 0.05)
        found.append((search(problem, 0.05, clock=clock), clock.done))
        monkeypatch.undo()
    (one, work), (two, again) = found
    np.testing.assert_array_equal(one.answer, two.answer)
    assert one.bound == two.bound
    assert work == again > 0.05
    assert one.gap > 0  # it was the work that ended it
