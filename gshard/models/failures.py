"""How much of a run is lost to hosts that fail, and how often to save so that it is least.

A run alternates between steps and saves. Hosts fail at random, each independently of the others;
a failure costs the steps since the last save, and the time to notice it and to start again, in
which the next failure may come. What is expected of such a run is known in closed form (Daly, "A
higher order estimate of the optimum checkpoint interval", 2006, with exponential failures).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gshard.models.family import Deployment
from gshard.pages import lines

DAY = 86400.0


@dataclass(frozen=True)
class FailingRun:
    """A run on hosts that fail; times in seconds."""

    hosts: int
    host_days: float  # mean time between two failures of one host
    save_seconds: float  # during which nothing is trained
    restart_seconds: float  # from the failure to the first new step

    @property
    def mean(self) -> float:
        """The mean time between two failures of the run."""
        return self.host_days * DAY / self.hosts

    def lost(self, interval: float) -> float:
        """The share of time that makes no progress, with a save every `interval` seconds of steps.

        A run that never gets from one save to the next loses all of it.
        """
        tries = (interval + self.save_seconds) / self.mean
        restart = self.restart_seconds / self.mean
        if tries + restart > 500.0:
            return 1.0
        return 1.0 - interval / (self.mean * math.exp(restart) * math.expm1(tries))

    def best_interval(self) -> float:
        """The interval that loses least."""
        from scipy.optimize import minimize_scalar

        # Young's first order is near; where saves take longer than failures leave, it is far above.
        first = math.sqrt(2.0 * max(self.save_seconds, 1e-3) * self.mean)
        found = minimize_scalar(
            lambda log: self.lost(math.exp(log)),
            bounds=(math.log(first) - 8.0, math.log(first) + 3.0),
            method="bounded",
            options={"xatol": 1e-6},
        )
        return math.exp(found.x)


def save_seconds(chosen: Deployment, state_bytes: int, per_host: int, disk_rate: float) -> float:
    """The time to write a host's part of the weights and the optimizer's state."""
    return state_bytes * min(per_host, chosen.devices) / disk_rate


def table(run: FailingRun, hosts: Sequence[int]) -> list[str]:
    """A row for each number of hosts: the best interval and what is lost, then and otherwise."""
    lines = [
        f"{'hosts':>6} {'a failure every':>16} {'best interval':>14} {'lost':>7} "
        f"{'every 10 min':>13} {'every hour':>11}"
    ]
    for row in as_dict(run, hosts)["rows"]:
        lines.append(
            f"{row['hosts']:>6,} {spoken(row['mean']):>16} {spoken(row['best_interval']):>14} "
            f"{row['lost']:>7.2%} {row['lost_10_minutes']:>13.2%} {row['lost_hour']:>11.2%}"
        )
    return lines


def as_dict(run: FailingRun, hosts: Sequence[int]) -> dict[str, Any]:
    """The same for programs; times in seconds."""
    rows = []
    for count in hosts:
        each = replace(run, hosts=count)
        best = each.best_interval()
        row = {"hosts": count, "mean": each.mean, "best_interval": best, "lost": each.lost(best)}
        rows.append({**row, "lost_10_minutes": each.lost(600.0), "lost_hour": each.lost(3600.0)})
    return {"restart_seconds": run.restart_seconds, "host_days": run.host_days, "rows": rows}


def spoken(seconds: float) -> str:
    """A time in the unit that reads best."""
    for unit, size in (("days", DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def plot(run: FailingRun, hosts: Sequence[int], path: Path, title: str) -> Path:
    """Time lost against the interval, a curve for each number of hosts, its best point marked."""
    intervals = [10.0 * 1.15**n for n in range(70)]
    curves, best = {}, []
    for count in hosts:
        each = replace(run, hosts=count)
        name = f"{count:,} hosts"
        lost = [(t / 60, 100 * each.lost(t)) for t in intervals]
        curves[name] = [(minutes, share) for minutes, share in lost if share <= 100]
        chosen = each.best_interval()
        best.append((name, chosen / 60, 100 * each.lost(chosen)))
    chart = lines(
        title, curves, "minutes between two saves", "% of the time lost", log=True, marks=best
    )
    return chart.save(path)
