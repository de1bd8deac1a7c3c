"""The partitioner's own choices follow the hardware that they are made for."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.forecast import hardware


def product(a, b):
    """A contraction over a split dim whose result is wanted split by rows."""
    return gshard.split(gshard.split(a, 1, 8) @ gshard.split(b, 0, 8), 0, 8)


def lowered(machine):
    a = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    b = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    return gshard.jit(product, devices=8, hardware=machine).lower(a, b)


def test_a_plan_differs_between_machines():
    """Where a collective takes long to get going, one of more bytes beats two of fewer."""
    assert [c.kind for c in lowered("h200").collectives] == ["reduce_scatter"]
    for machine in ("cpu", "tpu-v5e"):
        assert [c.kind for c in lowered(machine).collectives] == ["all_to_all", "all_gather"]


def test_each_plan_is_the_faster_one_where_it_is_made():
    for machine, other in (("h200", "tpu-v5e"), ("tpu-v5e", "h200")):
        own, foreign = (lowered(m).forecast(hardware=machine) for m in (machine, other))
        assert own.step_seconds < foreign.step_seconds


def test_speeds_are_ratios_to_the_links():
    machine = hardware("h100").machine
    assert machine.flops_per_byte == pytest.approx(989e12 / 450e9, rel=0.5)
    assert machine.memory_per_byte == pytest.approx(3.35e12 / 450e9, rel=0.5)


def test_unknown_hardware_is_refused_when_it_is_named():
    with pytest.raises(ValueError, match="hardware is 'h300'; known are"):
        gshard.jit(lambda x: x, hardware="h300")
