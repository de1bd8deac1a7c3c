"""The code of nodes: plan in, plan of collectives out."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

import gshard
from gshard.graph.history import program_text
from gshard.graph.reason import Reason
from gshard.moving.nodes import UNEXPLAINED, code_of, node_of
from gshard.planning.improve.expand import _reason
from tests.capture.simplify.texts import dedent
from tests.planning.emission.test_emit import programs


def test_a_node_becomes_local_work_and_collectives():
    def fn(x):
        return gshard.replicate(gshard.split(x, 0, 4))

    found = programs(fn, jnp.ones((6, 2)))
    (node,) = [node for eqn in found["drop_unused"].eqns if (node := node_of(eqn))]
    assert (node.name, str(node)) == ("reshard", "split dim 0 by 4 -> replicated")
    assert program_text(found["expand"]) == dedent("""
        program (a:f32[2,2])
          b:f32[8,2] = all-gather[dim 0 over 4] a
          c:f32[6,2] = slice[start_indices=(0, 0) limit_indices=(6, 2) strides=(1, 1)] b
          return c
    """)


def test_a_step_of_a_node_says_what_it_is_for():
    """Its operator is that of the node; a step without words of its own has the node's reason."""
    node = SimpleNamespace(reason=Reason("operand", "slice"))
    step = _reason(node, Reason("result", "dot_general", "3 rows"))
    assert step == Reason("result", "slice", "3 rows")
    assert _reason(node, UNEXPLAINED) is node.reason


def test_nodes_that_do_the_same_are_traced_once():
    def fn(x):
        for _ in range(5):
            x = jnp.cumsum(gshard.replicate(jnp.sort(gshard.split(x, 0, 4), 1)), 0)
        return x

    code_of.cache_clear()
    found = programs(fn, jnp.ones((6, 2)))
    nodes = [node for eqn in found["share"].eqns if (node := node_of(eqn))]
    assert len(nodes) == 9  # gathered five times, and cut four times
    assert len({node.unexplained() for node in nodes}) == 2
    assert code_of.cache_info().misses == 2 + 1  # and the AllGather in one of them


def test_a_row_of_a_table_is_looked_up_once():
    def fn(x):
        x = gshard.split(x, 0, 4)
        return jnp.roll(x, 1, axis=0) + jnp.roll(2 * x, 1, axis=0)

    names = [eqn.primitive.name for eqn in programs(fn, np.ones((7, 2)))["expand"].eqns]
    tables = [
        eqn.params["table"]
        for eqn in programs(fn, np.ones((7, 2)))["expand"].eqns
        if eqn.primitive.name == "lookup"
    ]
    assert len(tables) == len(set(tables)) > 0
    assert names.count("axis_index") == 1


def test_the_same_move_of_floats_and_of_integers():
    def fn(x, i):
        return [gshard.replicate(gshard.split(a, 0, 4)) * 2 for a in (x, i)]

    emitted = programs(fn, jnp.ones((6, 2)), jnp.ones((6, 2), jnp.int32))["expand"]
    for eqn in emitted.eqns:
        assert len({v.aval.dtype for v in [*eqn.invars, *eqn.outvars]}) == 1, eqn
