"""Messages and prices bound from below."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.dual import Messages, Prices
from tests.autosharding.solver.problems import brute_force, consistent, problems


@settings(max_examples=60, deadline=None)
@given(problem=problems(), seed=st.integers(0, 1000))
def test_messages_and_prices_bound_from_below(problem, seed):
    """Whatever the messages and prices are; and a strategy's margin bounds answers that take it."""
    problem = consistent(problem)
    wanted = brute_force(problem)
    prices = Prices(problem)
    prices.ascend(Clock(60.0), 5)
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
