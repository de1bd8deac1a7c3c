"""Work is counted, so that answers do not depend on the machine."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from examples.recipes import transformer
from examples.recipes.transformer import Size
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
        clock = Clock(0.05, counted=True)
        found.append((Search(problem, clock).run(), clock.done))
        monkeypatch.undo()
    (one, work), (two, again) = found
    np.testing.assert_array_equal(one.answer, two.answer)
    assert one.bound == two.bound
    assert work == again > 0.05
    assert one.gap > 0  # it was the work that ended it


def test_a_part_of_a_clock_has_some_of_its_time(monkeypatch):
    clock = Clock(10.0, counted=True)
    part = clock.part(4.0)
    part.charge(3.0)
    assert (part.left, clock.left) == (1.0, 7.0)
    assert clock.part(20.0).left == clock.left
    processor = time.process_time()
    monkeypatch.setattr("gshard.autosharding.budget.time.process_time", lambda: processor + 13.0)
    assert part.left == clock.left == 0.0  # a fifth more than was given
    assert part.part(1.0).left == 0.0
    monkeypatch.undo()
    clock.charge(9.0)
    assert clock.left == clock.part(1.0).left == -2.0


def test_a_search_is_extended_up_to_its_budget_or_ten_seconds():
    for seconds, most in ((2.0, 10.0), (20.0, 20.0)):
        clock = Clock(seconds, counted=True)
        clock.charge(seconds - 1.0)
        clock.extend(5.0)
        assert clock.left == min(5.0, most - seconds + 1.0)
        clock.charge(20.0)
        clock.extend(5.0)
        assert clock.left < 0  # at the end of its time it has no more


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["100 MB", "450 MB", "500 MB"])
def test_a_search_where_nothing_fits_costs_no_more_than_its_budget(memory, monkeypatch):
    clocks = []
    monkeypatch.setattr(
        "gshard.autosharding.auto.Clock",
        lambda *a, **k: clocks.append(Clock(*a, **k)) or clocks[-1],
    )
    size = Size(L=2, B=16, S=512, M=1024, N=16, F=4096, V=32_000)
    given = transformer.shapes(size), transformer.tokens(size)
    with pytest.raises(ValueError, match="no layout was found"):
        gshard.auto(transformer.sgd, *given, devices=8, hardware="h100", memory=memory, seconds=12)
    assert clocks[0].done <= 1.2 * 12


def test_phases_add_up_to_all_of_the_time():
    assert sum(PHASES.values()) == pytest.approx(1.0)
    clock = Clock(40.0, counted=True)
    budget = Budget(clock)
    assert budget.enter("first layouts").left == pytest.approx(40.0 * 0.12)
    clock.charge(1.0)
    assert budget.enter("solving").left == pytest.approx(40.0 * (0.12 + 0.25) - 1.0)  # what is left
    assert budget.enter("removal").left == pytest.approx(39.0)
    clock = Clock(40.0, counted=True)
    budget = Budget(clock)
    for seconds, phase in enumerate(PHASES):
        budget.enter(phase)
        clock.charge(float(seconds))
    assert [took for took, _ in budget.report().values()] == list(range(len(PHASES)))
    clock.extend(25.0)
    budget.restart()
    assert budget.enter("solving").left == pytest.approx(25.0 * (0.12 + 0.25))


def test_a_layout_shows_what_each_phase_took():
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 256), (256, 256))]
    layout = gshard.auto(jnp.dot, *arguments, devices=4, hardware="h100", seconds=20.0)
    assert list(layout.phases) == list(PHASES)
    assert sum(given for _, given in layout.phases.values()) == pytest.approx(20.0, rel=0.01)
    assert 0 < sum(took for took, _ in layout.phases.values()) < 20.0
    assert "  removal: " in layout.explain()


def test_no_phase_takes_more_than_its_share_and_what_is_left():
    """Of a program with more to look at than there is time: the step of a Transformer. Work is
    counted, so that the machine's load changes nothing but how early it ends."""
    seconds = 8.0
    size = Size(L=2, B=16, S=512, M=1024, N=16, F=4096, V=32_000)
    given = transformer.shapes(size), transformer.tokens(size)
    layout = gshard.auto(transformer.sgd, *given, devices=8, hardware="h100", seconds=seconds)
    took, allowed = (np.cumsum(each) for each in zip(*layout.phases.values(), strict=True))
    assert (took <= allowed + 0.2 * seconds).all()
    assert took[-1] > 0.5 * seconds  # there was more to do
