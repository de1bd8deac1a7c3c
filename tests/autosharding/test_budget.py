"""Work is counted, so that answers do not depend on the machine."""

import time

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.problem import (
    CostEdge,
    MemoryModel,
    Problem,
)
from gshard.autosharding.solver.search import search


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
