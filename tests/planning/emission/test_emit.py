"""Emission: plan in, program out."""

import jax
import jax.numpy as jnp
import numpy as np

import gshard
from gshard.graph.history import program_text
from tests.capture.simplify.texts import dedent


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


def test_what_is_sent_in_a_loop_stays_in_it():
    def fn(x):
        def step(carry, _):
            return jnp.roll(carry, 1, axis=0), carry.sum()

        return jax.lax.scan(step, gshard.split(x, 0, 4), None, length=3)

    (scan,) = [e for e in programs(fn, jnp.ones((8, 2)))["emit"].eqns if e.primitive.name == "scan"]
    assert "ppermute" in str(scan.params["jaxpr"])


def test_a_step_of_a_node_says_what_it_is():
    """Before an uneven sum is scattered, its tiles are evened out: that moves a result."""
    mesh = np.arange(8).reshape(2, 4)

    def fn(x, w):
        return gshard.split(gshard.shard(x, mesh) @ gshard.shard(w, mesh[:1].T), 0, 8)

    low = gshard.jit(fn, devices=8).lower(jnp.ones((13, 16)), jnp.ones((16, 29)))
    assert [c.reason for c in low.collectives] == [
        "result of dot_general: even out tiles of dim 0",
        "dot_general: partial sums over 4 devices, result split",
    ]


def test_nothing_is_emitted_to_find_out():
    lowered = gshard.jit(lambda x: gshard.replicate(gshard.split(x, 0, 8) * 2)).lower(jnp.ones(16))
    assert lowered.collectives
    assert lowered.forecast("h100").sent_bytes == lowered.plan.bytes
    assert "split" in str(lowered.explain("h100"))
    assert "traced" not in vars(lowered._program)
    assert "all_gather" in lowered.as_text()
    assert "traced" in vars(lowered._program)


def test_emission_has_the_types_that_were_planned():
    wide = jax.ShapeDtypeStruct((16,), jnp.dtype("float64"))
    with jax.enable_x64(True):
        lowered = gshard.jit(lambda x: gshard.replicate(gshard.split(x, 0, 8) * 2)).lower(wide)
    assert lowered.jaxpr.outvars[0].aval.dtype == jnp.dtype("float64")
