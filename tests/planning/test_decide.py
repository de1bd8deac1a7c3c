"""Ways and moves are decided before the trace: as they would be on the tiles that are traced."""

from dataclasses import replace

import jax
import pytest
from jax.extend.core import primitives as p

import gshard
from benchmarks.census import random_program
from gshard.moving.available import Mover
from gshard.moving.partial import combine
from gshard.planning import planner
from gshard.planning.choose import Choice
from gshard.planning.decide import Decider
from gshard.rules.base.rule import RULES
from tests.oracle import check, random_array
from tests.planning.test_foresee import in_two_loops, recursion, through_layers


def assert_decided_as_chosen(monkeypatch, lower):
    """Ways and moves are those that choices on traced operands come to."""
    cheapest, recomputed, seen = planner.Planner.cheapest, Mover._recomputed, []

    def both(self, eqn, rule, tiles, targets):
        way = cheapest(self, eqn, rule, tiles, targets)
        if not isinstance(way.how, gshard.Sharding):  # of a slice, gathered for others
            choice = Choice(self.found, self.uses, self.unreduced, self.mover, self.memory_limit)
            choice.now, choice.tiles = self.uses.numbers[eqn], self.tiles
            chosen = choice.cheapest(eqn, rule, tiles, targets)
            # One in place is known from another program, which may have had other costs.
            assert way._replace(work=chosen.work) == chosen
            seen.append(eqn)
        return way

    def move(self, tile, target, reason):
        if tile.value and not tile.is_blank and tile.sharding != target:  # not tiles of other sizes
            key = (tile.value.var, tile.sharding, target)
            assert self.decided[key] == self.cheapest(tile, target, {})[1]
        return recomputed(self, tile, target, reason)

    monkeypatch.setattr(planner.Planner, "cheapest", both)
    monkeypatch.setattr(Mover, "_recomputed", move)
    lower()
    assert seen


@pytest.mark.parametrize("seed", [3, 11, 29, *(pytest.param(n, marks=pytest.mark.slow)
                                               for n in range(40, 60))])  # fmt: skip
def test_random_programs_are_decided_as_their_trace_would(monkeypatch, seed):
    _, fn, arguments, devices = random_program(seed)
    chosen = jax.devices()[:devices]
    assert_decided_as_chosen(monkeypatch, lambda: gshard.jit(fn, devices=chosen).lower(*arguments))


@pytest.mark.parametrize("fn", [in_two_loops, through_layers, recursion])
def test_loops_are_decided_as_their_trace_would(monkeypatch, fn):
    w, x = random_array((4, 4)) / 4, random_array((24, 4))
    assert_decided_as_chosen(monkeypatch, lambda: gshard.jit(fn, devices=8).lower(w, x))


def test_nothing_is_traced_while_ways_are_decided(monkeypatch):
    """Decisions are complete before the first operator is traced."""
    order, run, results = [], Decider.run, planner.Planner.results

    def decided(self, *args):
        order.append("decide")
        return run(self, *args)

    def traced(self, *args):
        order.append("trace")
        return results(self, *args)

    monkeypatch.setattr(Decider, "run", decided)
    monkeypatch.setattr(planner.Planner, "results", traced)
    w, x = random_array((4, 4)) / 4, random_array((24, 4))
    gshard.jit(through_layers, devices=8).lower(w, x)
    first = order.index("trace")
    assert "decide" in order[:first]
    assert "decide" not in order[first:]


def test_results_that_only_the_trace_knows(monkeypatch):
    """A rule that reduces a sum which waits, as decided: it is made unreduced for its readers."""
    rule, made = RULES[p.dot_general_p], []

    def run(ctx, eqn, way, tiles, targets):
        done = way.how.run(ctx, eqn, rule.local, tiles, targets)
        made.extend(done)
        return [combine(ctx.place, tile, way.kind, targets[0]) for tile in done]

    monkeypatch.setitem(RULES, p.dot_general_p, replace(rule, run=run))

    def fn(x, y):
        x, y = (gshard.split(v, 1, 8) for v in (x, y))
        return gshard.replicate(x @ y.T + 2.0 * (y @ x.T))

    check(fn, random_array((4, 16)), random_array((4, 16)), rtol=1e-5, atol=1e-5)
    assert any(tile.is_unreduced for tile in made)
