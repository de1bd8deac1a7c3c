"""Whether a step fits: every figure is that of a lowered program, the largest batch by search."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.comparing.fits import _largest, batch_arguments, fits
from gshard.comparing.step import Step
from gshard.forecast import hardware

STRUCT = jax.ShapeDtypeStruct


@jax.jit
def step(ws, x, y):
    def loss(ws):
        return jnp.mean((jnp.tanh(x @ ws["up"]) @ ws["down"] - y) ** 2)

    return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))


def arguments(rows):
    weights = {"up": STRUCT((256, 1024), "float32"), "down": STRUCT((1024, 256), "float32")}
    return weights, STRUCT((rows, 256), "float32"), STRUCT((rows, 256), "float32")


def needed(rows, machine, **how):
    lowered = gshard.jit(step.__wrapped__, hardware=machine, **how).lower(*arguments(rows))
    return lowered.forecast().memory_bytes


def test_a_step_that_does_not_fit_and_what_would_make_it():
    machine = replace(hardware("h100"), memory=16_000_000)
    found = fits(Step(step, arguments(4096)), machine)
    assert not found.fits
    assert found.needed == needed(4096, machine) > machine.memory
    assert found.batch == 4096
    assert needed(found.largest, machine) <= machine.memory < needed(found.too_large, machine)
    assert found.too_large - found.largest <= max(8, 0.02 * found.too_large)
    names, sizes = zip(*found.changes, strict=True)
    assert names[0] == "gshard.split(batch, 0, 8)"
    assert "and gshard.fsdp of the other arguments" in names
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] <= machine.memory  # an eighth of the rows on each device
    assert "largest batch: " in str(found)
    assert " does not fit on 8 x h100: " in str(found)
    lines = str(found).partition("(candidates for jax.checkpoint):\n")[2]
    assert lines.startswith("  tests/comparing/test_fits.py:")


def test_more_devices_are_tried_where_these_are_too_few():
    machine = replace(hardware("h100"), memory=2_000_000)
    found = fits(Step(step, arguments(4096)), machine)
    change, size = found.changes[-1]
    count = int(change.split()[-2])
    assert change == f"and on {count} devices"
    assert count > 8
    assert size <= machine.memory or count == 64
    assert size < found.changes[-2][1]


def test_a_step_that_fits():
    machine = replace(hardware("h100"), memory=16_000_000)
    found = fits(Step(step, arguments(64)), machine)
    assert found.fits
    assert found.changes == ()
    assert needed(found.largest, machine) <= machine.memory < needed(found.too_large, machine)


def test_which_arguments_begin_with_the_batch():
    assert batch_arguments(arguments(64)) == (1, 2)
    assert batch_arguments((STRUCT((64, 3), "float32"), {"x": STRUCT((8,), "int32")})) == (1,)
    assert batch_arguments((STRUCT((), "float32"),)) == ()


@settings(max_examples=100)
@given(
    st.integers(1, 300), st.integers(0, 10_000), st.integers(1, 1000), st.floats(0.0, 0.3),
    st.integers(100, 10**9), st.sampled_from([1, 8]), st.sampled_from([0, 10**4, 10**6]),
)  # fmt: skip
def test_the_search_brackets_the_largest_batch(now, base, slope, bend, limit, unit, plateau):
    def needed(rows):  # weights alone, until there is more of the batch than of them
        return int(max(plateau, base + slope * rows * (1 + bend * (rows > 50))))

    probes = []
    now *= unit
    low, high = _largest(lambda n: probes.append(n) or needed(n), now, needed(now), limit, unit)
    assert len(probes) <= 8
    assert low == 0 or needed(low) <= limit
    assert high == 0 or needed(high) > limit
    assert all(n % unit == 0 for n in (low, high))
    assert high
    if needed(unit) > limit:
        assert low == 0
    else:
        assert high - low <= max(unit, 0.02 * high)
