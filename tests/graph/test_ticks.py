"""How often branches run, where a schedule chooses: a mark that equations keep."""

import jax
from jax import lax

from gshard.graph.source import Ticks, runs_inside


def test_a_mark_is_read_back_from_the_conditional_alone():
    ticks = Ticks((1, 2), {1: 1, 3: 2})

    def run(x):
        with ticks.scope():
            return lax.cond(x > 0, lambda x: lax.cond(x > 1, lambda: x, lambda: -x), lambda x: x, x)

    (outer,) = (e for e in jax.make_jaxpr(run)(1.0).eqns if e.primitive.name == "cond")
    assert Ticks.of(outer) == ticks
    assert runs_inside(outer, 6) == [2, 4]
    bodies = [branch.jaxpr for branch in outer.params["branches"]]
    inner = [e for body in bodies for e in body.eqns if e.primitive.name == "cond"]
    assert [Ticks.of(eqn) for eqn in inner] == [None]


def test_all_wait_for_the_slowest_branch():
    ticks = Ticks((1, 1, 1), {0b001: 2, 0b011: 3, 0b110: 4})
    assert ticks.runs == 9
    assert ticks.slowest([0.0, 2.0, 1.0]) == [2, 7, 0]
    assert ticks.slowest([0.0, 1.0, 2.0]) == [2, 3, 4]
