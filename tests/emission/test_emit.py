"""Emission: plan in, program out."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard.emission.emit import _expansion
from gshard.graph.text import program_text
from gshard.moving.nodes import node_of
from tests.simplify.texts import dedent


def programs(fn, *arguments, devices=4):
    return gshard.jit(fn, devices=devices).lower(*arguments)._program.history.programs


def test_a_node_becomes_its_collectives():
    def fn(x):
        return gshard.replicate(gshard.split(x, 0, 4))

    found = programs(fn, jnp.ones((6, 2)))
    assert program_text(found["emit"]) == dedent("""
        program (a:f32[2,2])
          b:f32[8,2] = all_gather[axis_index_groups=None] a
          c:f32[6,2] = slice[start_indices=(0, 0) limit_indices=(6, 2) strides=(1, 1)] b
          return c
    """).replace("[axis_index_groups=None]", "")


def test_nodes_that_do_the_same_are_traced_once():
    def fn(x):
        for _ in range(5):
            x = jnp.cumsum(gshard.replicate(gshard.split(x, 0, 4)), 1)
        return x

    _expansion.cache_clear()
    found = programs(fn, jnp.ones((6, 2)))
    nodes = [node for eqn in found["share"].eqns if (node := node_of(eqn))]
    assert len(nodes) == 9  # gathered five times, and cut four times
    assert _expansion.cache_info().misses == len({node.unexplained() for node in nodes}) == 2


def test_a_row_of_a_table_is_looked_up_once():
    def fn(x):
        x = gshard.split(x, 0, 4)
        return jnp.roll(x, 1, axis=0) + jnp.roll(2 * x, 1, axis=0)

    names = [eqn.primitive.name for eqn in programs(fn, np.ones((7, 2)))["emit"].eqns]
    tables = [
        eqn.params["table"]
        for eqn in programs(fn, np.ones((7, 2)))["emit"].eqns
        if eqn.primitive.name == "lookup"
    ]
    assert len(tables) == len(set(tables)) > 0
    assert names.count("axis_index") == 1


def test_what_is_sent_in_a_loop_stays_in_it():
    def fn(x):
        def step(carry, _):
            return jnp.roll(carry, 1, axis=0), carry.sum()

        return jax.lax.scan(step, gshard.split(x, 0, 4), None, length=3)

    (scan,) = [e for e in programs(fn, jnp.ones((8, 2)))["emit"].eqns if e.primitive.name == "scan"]
    assert "ppermute" in str(scan.params["jaxpr"])


def test_the_same_move_of_floats_and_of_integers():
    def fn(x, i):
        return [gshard.replicate(gshard.split(a, 0, 4)) * 2 for a in (x, i)]

    emitted = programs(fn, jnp.ones((6, 2)), jnp.ones((6, 2), jnp.int32))["emit"]
    for eqn in emitted.eqns:
        assert len({v.aval.dtype for v in [*eqn.invars, *eqn.outvars]}) == 1, eqn
