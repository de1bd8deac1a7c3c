"""Layouts for communication beside work: the time of the windows, its bound, and brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.autosharding.budget import Clock
from gshard.autosharding.cost.model import build
from gshard.autosharding.cost.windows import OverlapWindows, solve_windows
from gshard.autosharding.traced import TracedProgram
from tests.autosharding.test_bound import (
    MACHINE,
    MORE_STEPS,
    STEPS,
    _check,
    _check_layouts,
    bound_of,
    programs,
    struct,
)

OVERLAPS = st.sampled_from([True, "auto"])


def layers(x, ws):
    """Products in a loop, and one before it."""
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sum(x)), x @ ws[0], ws)


def windows_of(fn, args, devices, optimistic):
    subject = TracedProgram.of(fn, args, devices)
    model = build(
        subject.flat,
        (devices,),
        MACHINE,
        MACHINE.memory,
        optimistic=optimistic,
        overlapped=optimistic,
    )
    return OverlapWindows(model, subject.flat.jaxpr, optimistic)


def every_answer(windows):
    """The answers that are allowed: of tensors all, and for each the best of the other nodes."""
    problem, tensors = windows.model.problem, list(windows.model.nodes.values())
    others = [n for n in range(len(problem.costs)) if n not in tensors]
    for chosen in itertools.product(*(range(len(problem.costs[n])) for n in tensors)):
        for rest in itertools.product(*(range(len(problem.costs[n])) for n in others)):
            answer = np.zeros(len(problem.costs), dtype=np.int64)
            answer[tensors], answer[others] = chosen, rest
            if np.isfinite(problem.cost(answer)):
                yield answer


@pytest.mark.parametrize("optimistic", [False, True])
@pytest.mark.parametrize("rows", [64, 512, 65_536])
def test_the_bound_of_windows_is_below_every_answer(rows, optimistic):
    """And the answer that is found is the best, or within the gap that it comes with."""
    windows = windows_of(
        lambda x, w: jnp.sum(x @ w, 1), (struct(rows, 512), struct(512, 512)), 4, optimistic
    )
    result, _ = solve_windows(windows, 20.0, Clock(60.0))
    best = min(map(windows.cost, every_answer(windows)))
    assert result.bound <= best * (1 + 1e-9)
    assert best <= result.cost * (1 + 1e-9)
    assert result.cost <= best / (1 - result.gap) * (1 + 1e-9)


@pytest.mark.parametrize("optimistic", [False, True])
def test_each_loop_is_a_window(optimistic):
    windows = windows_of(layers, (struct(4096, 256), struct(6, 256, 256)), 4, optimistic)
    assert windows.windows == 2
    answer = np.array([int(np.argmin(c)) for c in windows.model.problem.costs])
    work, _, _ = windows.totals(answer)
    assert work[1] >= 6 * work[0] > 0  # the product of the loop, and what else is in it
    assert work[-1] == 0  # all work is of a window


def test_a_window_takes_as_long_as_its_work_or_as_what_it_sends():
    windows = windows_of(layers, (struct(4096, 256), struct(6, 256, 256)), 4, False)
    answer = np.zeros(len(windows.model.problem.costs), dtype=np.int64)
    work, sent, exposed = windows.totals(answer)
    assert windows.cost(answer) == exposed + np.maximum(work, sent).sum()
    assert windows.cost(answer) <= windows.model.problem.cost(answer)


@pytest.mark.slow
def test_gradients_are_summed_beside_the_backward_pass():
    """Serially, few rows are worth splitting the features; with overlap, the time of the forecast
    counts, in which sums are hidden."""

    def step(ws, x):
        def loss(ws):
            y = x
            for w in ws:
                y = jnp.tanh(y @ w)
            return jnp.sum(y)

        return jax.tree.map(lambda w, g: w - g, ws, jax.grad(loss)(ws))

    args = [struct(2048, 2048)] * 6, struct(16_384, 2048)
    serial = gshard.auto(step, *args, devices=8, hardware="h100", seconds=20)
    layout = gshard.auto(step, *args, devices=8, hardware="h100", overlap="auto", seconds=20)
    found = layout.lowered.forecast("h100")
    assert layout.seconds == found.step_seconds < found.serial_seconds
    assert layout.bound <= layout.seconds <= serial.lowered.forecast("h100").step_seconds
    assert layout.seconds < serial.seconds
    assert min(c.seconds for c in layout.considered) == pytest.approx(layout.seconds, rel=0.01)


def test_hardware_that_does_not_overlap_counts_everything():
    args = struct(512, 256), struct(256, 256)
    layout = gshard.auto(STEPS["relu"], *args, devices=2, hardware="tpu-v4", overlap=True)
    assert layout.seconds == layout.lowered.forecast("tpu-v4").serial_seconds


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(programs(), st.sampled_from([2, 3]), OVERLAPS)
def test_the_best_of_all_layouts_of_many_programs(program, devices, overlap):
    _check(program, devices, overlap)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(programs(MORE_STEPS), st.sampled_from([2, 3, 4, 6, 8]), OVERLAPS, st.data())
def test_no_layout_is_below_the_bound(program, devices, overlap, data):
    _check_layouts(program, "h100", devices, data, 6, overlap=overlap)


@settings(max_examples=2, deadline=None)
@given(programs(MORE_STEPS), st.sampled_from([2, 3]), OVERLAPS, st.data())
def test_no_layout_of_a_few_programs_is_below_the_bound(program, devices, overlap, data):
    _check_layouts(program, "h100", devices, data, 1, overlap=overlap)


def test_the_bound_with_overlap_is_below_the_serial_one():
    args = struct(16_384, 1024), struct(1024, 1024)
    fn = STEPS["residual"]
    assert 0 < bound_of(fn, args, overlap=True) <= bound_of(fn, args)
