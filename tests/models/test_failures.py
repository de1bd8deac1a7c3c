"""Time lost to failures: the closed form against a run that is played through."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gshard.models.failures import DAY, FailingRun, plot, spoken, table

RUN = FailingRun(hosts=64, host_days=2.0, save_seconds=20.0, restart_seconds=90.0)


def played(run: FailingRun, interval: float, segments: int, seed: int) -> float:
    """The share of time lost in a run of so many intervals, failure by failure."""
    draw = np.random.default_rng(seed)
    clock, failure = 0.0, draw.exponential(run.mean)
    done, restarting = 0, False
    while done < segments:
        work = run.restart_seconds if restarting else interval + run.save_seconds
        if clock + work > failure:
            clock = failure
            failure = clock + draw.exponential(run.mean)
            restarting = True
        else:
            clock += work
            done, restarting = done + (not restarting), False
    return 1.0 - segments * interval / clock


@pytest.mark.parametrize("interval", [60.0, 600.0, 3000.0])
def test_the_closed_form_is_what_a_run_meets(interval):
    assert RUN.lost(interval) == pytest.approx(played(RUN, interval, 40_000, seed=3), rel=0.03)


@pytest.mark.parametrize("hosts", [1, 64, 4096])
def test_no_other_interval_loses_less(hosts):
    run = replace(RUN, hosts=hosts)
    best = run.best_interval()
    near = [run.lost(best * 1.05**n) for n in range(-40, 41)]
    assert run.lost(best) <= min(near) + 1e-9
    if hosts == 1:  # rare failures: the square root of Young's rule
        assert best == pytest.approx(math.sqrt(2 * run.save_seconds * run.mean), rel=0.02)


def test_more_hosts_and_slower_saves_lose_more():
    losses = [replace(RUN, hosts=n).lost(600.0) for n in (1, 10, 100, 1000)]
    assert losses == sorted(losses)
    assert replace(RUN, save_seconds=60.0).lost(600.0) > RUN.lost(600.0)
    assert replace(RUN, hosts=10**7).lost(600.0) == 1.0


def test_table_and_plot(tmp_path):
    rows = table(RUN, [1, 64])
    assert len(rows) == 3
    assert f"{RUN.lost(600.0):.2%}" in rows[2]
    plot(RUN, [1, 64], tmp_path / "lost.svg", "made up")
    assert (tmp_path / "lost.svg").stat().st_size > 5000
    assert [spoken(x) for x in (5.0, 600.0, 3 * DAY)] == ["5.0 s", "10.0 min", "3.0 days"]
