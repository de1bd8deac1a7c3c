"""Forecasts of training steps beside what one H200 measured (benchmarks/forecast_gpu.py)."""

import functools
import json
from pathlib import Path

import pytest

import gshard
from benchmarks.forecast_gpu import lower

MEASURED = json.loads(Path("benchmarks/results/forecast_h200.json").read_text(encoding="utf-8"))
STEPS = {name: row for name, row in MEASURED["steps"].items() if "step_seconds" in row}


@functools.lru_cache
def forecast(name):
    row = STEPS[name]
    on_one = functools.partial(gshard.jit, devices=1)
    lowered, *_ = lower(row["model"], row["changes"], row["tokens"], on_one)
    return lowered.forecast("h200")


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_memory_within_a_tenth_of_the_allocators_peak(name):
    assert forecast(name).memory_bytes == pytest.approx(STEPS[name]["peak_bytes"], rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n, row in STEPS.items() if row["for"] == "check"])
def test_time_of_steps_that_nothing_was_fitted_to(name):
    assert forecast(name).step_seconds == pytest.approx(STEPS[name]["step_seconds"], rel=0.15)
