"""Def-use chains, liveness, order, known values and regions of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import primitives as p

from gshard.graph import (
    Graph,
    at_every_level,
    bodies,
    in_order,
    inputs_of,
    live,
    map_bodies,
    needed_for,
    upstream,
)
from gshard.graph.history import program_text
from gshard.graph.regions import Loop, walk


def traced(fn, *arguments):
    return jax.make_jaxpr(fn)(*arguments).jaxpr


def test_makers_and_users():
    jaxpr = traced(lambda x: (y := jnp.sin(x)) * y + x, 1.0)
    graph = Graph.of(jaxpr)
    sin, mul, add = jaxpr.eqns
    assert graph.maker(sin.outvars[0]) is sin
    assert graph.maker(jaxpr.invars[0]) is None
    assert graph.users(sin.outvars[0]) == [mul]
    assert [graph.uses(v) for v in (sin.outvars[0], jaxpr.invars[0], add.outvars[0])] == [2, 2, 1]


def test_liveness_and_order():
    def fn(x):
        jnp.cos(x)
        return jnp.tanh(jnp.sin(x))

    jaxpr = traced(fn, 1.0)
    cos, sin, tanh = jaxpr.eqns
    assert live(jaxpr.eqns, jaxpr.outvars) == [sin, tanh]
    assert in_order([tanh, cos, sin]) == [sin, tanh, cos]
    assert in_order([tanh, cos, sin], may_wait=lambda eqn: True) == [cos, sin, tanh]
    with pytest.raises(AssertionError, match="depend on each other"):
        in_order([sin.replace(invars=tanh.outvars), tanh])
    assert needed_for(sin.outvars, jaxpr.eqns) == [sin]
    assert inputs_of([tanh, cos]) == [sin.outvars[0], jaxpr.invars[0]]
    marks = {sin.outvars[0]: 7, tanh.outvars[0]: 8}
    assert upstream(jaxpr.eqns, marks)[tanh.outvars[0]] == {7, 8}


def test_a_pass_changes_bodies_before_what_is_around_them():
    jaxpr = traced(lambda x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.sin(x), jnp.cos(x)), 1.0)
    seen = []

    @at_every_level
    def note(jaxpr, only):
        seen.extend(e.primitive for e in jaxpr.eqns if e.primitive in only)
        return jaxpr

    assert note(jaxpr, (p.sin_p, p.cos_p)) is jaxpr
    assert seen == [p.sin_p, p.cos_p]

    @at_every_level
    def empty(jaxpr):
        return jaxpr.replace(eqns=[e for e in jaxpr.eqns if e.primitive is not p.sin_p])

    assert p.sin_p in {e.primitive for e in walk(jaxpr)}
    assert p.sin_p not in {e.primitive for e in walk(empty(jaxpr))}


def test_what_has_effects_is_live():
    def fn(x):
        jax.debug.print("{x}", x=jnp.sin(x))
        return x

    jaxpr = traced(fn, 1.0)
    assert live(jaxpr.eqns, jaxpr.outvars)[0].primitive is p.sin_p


def test_known_values():
    jaxpr = traced(lambda x: x[jnp.array([1, 2]) + 1] + jnp.full((2,), 3.0), jnp.zeros(8))
    graph = Graph(jaxpr.eqns, jaxpr.outvars, dict.fromkeys(jaxpr.constvars, np.array([1, 2])))
    added = graph.makers[jaxpr.outvars[0]].invars
    assert graph.fill(added[1]) == 3
    assert graph.fill(added[0]) is None


def test_regions():
    def fn(w, xs):
        return jax.lax.scan(lambda c, x: (jnp.cos(c) * w + x, c), 0.0, xs)

    jaxpr = traced(fn, 2.0, jnp.zeros(3))
    (scan,) = [e for e in jaxpr.eqns if e.primitive is p.scan_p]
    (body,) = bodies(scan)
    loop = Loop.of(scan)
    assert (loop.runs, loop.consts, loop.carry) == (3, 1, 1)
    assert loop.invariants == (body.invars[0],)
    assert (jaxpr.invars[0], body.invars[0], 0) in loop.links
    assert (jaxpr.invars[1], body.invars[2], 1) in loop.links
    assert Loop.of(body.eqns[0]) is None
    assert p.cos_p in {e.primitive for e in walk(jaxpr)}
    assert map_bodies(scan, lambda closed: closed) is scan
    without = map_bodies(scan, lambda c: c.replace(jaxpr=c.jaxpr.replace(eqns=[])))
    assert bodies(without)[0].eqns == []


def test_text():
    text = program_text(traced(lambda x: jnp.sin(x) + 1.0, 1.0), "name", lambda e: "here")
    assert text.split("\n") == [
        "name (a:f32[])",
        "  b:f32[] = sin a  # here",
        "  c:f32[] = add b 1.0  # here",
        "  return c",
    ]
