"""Work is counted, so that answers do not depend on the machine."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.autosharding.budget import PHASES, Budget, Clock
from gshard.autosharding.solver.problem import (
    CostEdge,
    MemoryModel,
    Problem,
)
from gshard.autosharding.solver.search import Search


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
        found.append((Search(problem, 0.05, clock=clock).run(), clock.done))
        monkeypatch.undo()
    (one, work), (two, again) = found
    np.testing.assert_array_equal(one.answer, two.answer)
    assert one.bound == two.bound
    assert work == again > 0.05
    assert one.gap > 0  # it was the work that ended it


def test_phases_add_up_to_all_of_the_time():
    assert sum(PHASES.values()) == pytest.approx(1.0)
    clock = Clock(100.0, 40.0)
    budget = Budget(clock)
    assert sum(map(budget.seconds, PHASES)) == pytest.approx(40.0)
    last = sum(budget.seconds(name) for name in ("bound", "single changes", "removal"))
    assert budget.reserved == pytest.approx(last)
    clock.charge(1.0)
    budget.enter("solving")
    assert budget.seconds("solving") == pytest.approx(40.0 * (0.12 + 0.23) - 1.0)  # what is left
    clock.charge(-1.0)
    budget = Budget(clock)
    for seconds, phase in enumerate(PHASES):
        budget.enter(phase)
        clock.charge(float(seconds))
    report = budget.report()
    assert [took for took, _ in report.values()] == list(range(len(PHASES)))
    assert budget.reserved == 0.0


def test_a_layout_shows_what_each_phase_took():
    """What is counted is in the phases, and no phase that is lowered in takes much more than its
    share: one layout is begun as long as there is time for it."""
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 256), (256, 256))]
    layout = gshard.auto(jnp.dot, *arguments, devices=4, hardware="h100", seconds=20.0)
    assert list(layout.phases) == list(PHASES)
    assert sum(given for _, given in layout.phases.values()) == pytest.approx(15.0)
    assert 0 < sum(took for took, _ in layout.phases.values()) < 15.0
    assert "  single changes: " in layout.explain()
