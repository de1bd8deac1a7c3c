"""The table of step times: its arithmetic, rows that appear one by one, and going on."""

import argparse
import itertools
import json

import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from benchmarks import paired, step_time
from benchmarks.paired import interval, median_ratio, plan_rounds, timed
from benchmarks.step_table import above, cells, markdown

ONES = np.ones((8, 4), np.float32)


def doubled(x):
    return gshard.split(x, 0, 8) * 2


def summed(x):
    return jnp.sum(gshard.split(x, 0, 8), 0)


def broken(x):
    raise RuntimeError("this one never lowers")


@pytest.fixture
def options(tmp_path, monkeypatch):
    """Of a run with three small programs."""
    small = [(f.__name__, f, (ONES,)) for f in (doubled, broken, summed)]
    monkeypatch.setattr(step_time, "steps", lambda: iter(small))
    return argparse.Namespace(json=tmp_path / "rows.json", hardware="cpu", seconds=0.0)


def test_noise_that_both_feel_cancels():
    """A load that grows tenfold from round to round changes no ratio."""
    load = [1.0, 10.0, 100.0]
    times = {"ours": [0.5 * x for x in load], "theirs": load}
    assert median_ratio(times, "ours", "theirs") == 0.5


def test_rounds_are_few_for_long_programs_and_many_for_short_ones():
    assert plan_rounds({"ours": 0.001, "theirs": 0.004}, 2.0) == (5, 41)
    assert plan_rounds({"ours": 2.0, "theirs": 3.0}, 2.0) == (1, 5)


def test_the_interval_of_a_median_narrows_with_the_rounds():
    def over(rounds):
        ours = np.random.default_rng(0).normal(0.9, 0.1, rounds).tolist()
        return interval({"ours": ours, "theirs": [1.0] * rounds}, "ours", "theirs")

    (low, high), (lower, higher) = over(401), over(41)
    assert lower < low < 0.9 < high < higher
    assert over(5) == (min(x := np.random.default_rng(0).normal(0.9, 0.1, 5)), max(x))


@pytest.mark.parametrize(("spread", "looks"), [(0.0, 1), (0.5, 6)])
def test_there_are_more_rounds_where_ratios_differ(spread, looks, monkeypatch):
    seconds = itertools.cycle([1.0, 1.0 + spread, 1.0 + spread])
    monkeypatch.setattr(paired, "_seconds", lambda run, calls: (next(seconds), 1.0))
    clock, _ = paired.timed({"ours": None, "theirs": None}, 1e-9)
    assert len(clock["ours"]) == looks * 5


def test_programs_take_turns_in_an_order_that_turns():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in "ab"}
    clock, processor = timed(runs, 0.0, lambda numbers: [1, 3][: len(numbers)])
    assert seen[-6:] == ["b", "a", "a", "b", "b", "a"]
    assert all(len(times) == 3 for times in (*clock.values(), *processor.values()))


def test_a_plan_that_is_the_default_has_its_figures():
    times = {"gshard": [2.0, 4.0, 6.0], "xla": [1.0, 1.0, 2.0]}
    row = step_time.row_of("p", times, times, {"gshard": 10, "xla": 40})
    assert row["ratio"] == {"gshard": 3.0, "default": 3.0}
    assert cells(row) == ["p", "1000.00", "4000.00", "3.00 (2.00 to 4.00)", "3.00", "0.25", "3.00"]
    assert above([row]) == ["p"]


def test_rows_appear_one_by_one_and_a_run_goes_on(options, capsys, monkeypatch):
    step_time.run_rows(["doubled", "broken"], options)
    shown = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in shown] == ["doubled", "broken"]
    rows = json.loads(options.json.read_text())
    assert rows[0]["ratio"]["gshard"] > 0
    assert rows[0]["bytes"] == {"gshard": 0, "xla": 0, "default": 0}
    assert "never lowers" in rows[1]["error"]
    # What failed is tried again, what was measured is not.
    done = step_time.measured(options.json)
    assert done == {"doubled"}
    step_time.run_rows([name for name, *_ in step_time.steps() if name not in done], options)
    again = json.loads(options.json.read_text())
    assert [row["name"] for row in again] == ["doubled", "broken", "summed"]
    assert again[0] == rows[0]
    assert markdown(again).count("\n") == 4


@pytest.mark.slow
def test_processes_share_the_devices(tmp_path):
    """Two processes measure a program whose bytes go through sockets."""
    options = argparse.Namespace(json=tmp_path / "rows.json", hardware="cpu", seconds=0.0)
    options.processes = 2
    name = "matmul, contracting dim split, result split"
    step_time.in_processes([name], options)
    (row,) = json.loads(options.json.read_text())
    assert row["name"] == name
    assert row["bytes"]["gshard"] < row["bytes"]["xla"]
    assert row["rounds"] == 5
