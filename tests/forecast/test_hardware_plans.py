"""The partitioner's own choices follow the hardware that they are made for."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.forecast import hardware
from gshard.forecast.hardware import accelerator
from gshard.moving.costs import GENERIC_COSTS

SHAPES = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 64), (64, 512))]


def product(a, b):
    """A contraction over a split dim whose result is wanted split by rows."""
    return gshard.split(gshard.split(a, 1, 8) @ gshard.split(b, 0, 8), 0, 8)


def lowered(machine):
    return gshard.jit(product, devices=8, hardware=machine).lower(*SHAPES)


def test_a_plan_differs_between_machines():
    """Where a collective takes long to get going, one of more bytes beats two of fewer."""
    assert [c.kind for c in lowered("h200").collectives] == ["reduce_scatter"]
    for machine in ("cpu", "tpu-v5e"):
        assert [c.kind for c in lowered(machine).collectives] == ["all_to_all", "all_gather"]


def test_which_of_two_splits_goes_first_differs_too():
    """On a CPU, work counts for more than what is sent; each is the faster where it is made."""

    def fn(x, w):
        return jnp.tanh(gshard.split(x, 0, 8) @ gshard.split(w, 1, 3)) @ w.T

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 4096), (4096, 4096))]
    names = ("cpu", "h200")
    first, second = (gshard.jit(fn, devices=8, hardware=name).lower(*args) for name in names)
    assert first.out_shardings.tiles == (8, 1)
    assert second.out_shardings.is_replicated
    assert first.forecast("cpu").step_seconds < second.forecast("cpu").step_seconds
    assert second.forecast("h200").step_seconds < first.forecast("h200").step_seconds


def test_by_default_plans_are_for_what_jax_reports():
    """For these devices and not the first ones there are; CPUs count as generic accelerators."""
    kinds = {"NVIDIA H200": hardware("h200"), "cpu": None, "something new": None}
    for kind, expected in kinds.items():
        assert accelerator(type("Device", (), {"device_kind": kind})()) == expected
    assert accelerator() is None
    assert hardware("cpu").cost_model != GENERIC_COSTS


def test_a_forecast_is_for_the_hardware_planned_for_or_says_so():
    planned = lowered("h200")
    assert planned.forecast().hardware == hardware("h200")
    assert planned.forecast().planned_for == planned.forecast("h200").planned_for == ""
    assert "plan " not in str(planned.forecast())
    assert planned.forecast("tpu-v5e").planned_for == "h200"
    assert "plan    for h200; " in str(planned.forecast("tpu-v5e"))
    generic = gshard.jit(product, devices=8).lower(*SHAPES)
    assert generic.forecast("h200").planned_for == "generic accelerators"


def test_each_plan_is_the_faster_one_where_it_is_made():
    for machine, other in (("h200", "tpu-v5e"), ("tpu-v5e", "h200")):
        own, foreign = (lowered(m).forecast(hardware=machine) for m in (machine, other))
        assert own.step_seconds < foreign.step_seconds


def test_speeds_are_ratios_to_the_links():
    """The shares of the peaks that docs/results/forecast.md says are reached."""
    machine = hardware("h100").cost_model
    assert machine.flops_per_byte == pytest.approx(0.80 * 989e12 / 450e9)
    assert machine.memory_per_byte == pytest.approx(0.735 * 3.35e12 / 450e9)


def test_unknown_hardware_is_refused_when_it_is_named():
    with pytest.raises(ValueError, match="hardware is 'h300'; known are"):
        gshard.jit(lambda x: x, hardware="h300")
