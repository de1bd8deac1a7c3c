"""Times of several programs that take turns, so that what else the machine does cancels.

In every round each program runs as often as makes up some milliseconds, in an order that is turned
round from round to round. Ratios are taken within rounds, and their median is what counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Times = dict[str, list[float]]  # seconds of a call, by program and round
SAMPLE = 0.02  # seconds that a program runs in a round, or one call
FEWEST, MOST = 5, 41  # rounds


def plan_rounds(seconds: dict[str, float], budget: float) -> tuple[dict[str, int], int]:
    """How often each program runs in a round, and how many rounds there are.

    `seconds` are those of one call. Rounds are odd in number, so that one of them is the median.
    """
    calls = {name: max(1, round(SAMPLE / max(s, 1e-6))) for name, s in seconds.items()}
    one_round = sum(calls[name] * s for name, s in seconds.items())
    rounds = min(max(int(budget / one_round), FEWEST), MOST)
    return calls, rounds | 1


def timed(
    runs: dict[str, Callable[[], Any]],
    budget: float,
    agreed: Callable[[list[int]], Sequence[int]] = lambda numbers: numbers,
) -> tuple[Times, Times]:
    """The times of a call by the clock and in processor time of this process, round by round.

    Everything has run before. Processes that run this together have to do the same: `agreed` turns
    the numbers that one of them found into those of all.
    """
    first = {name: _seconds(run, 1)[0] for name, run in runs.items()}
    calls, rounds = plan_rounds(
        {n: min(s, _seconds(runs[n], 1)[0]) for n, s in first.items()}, budget
    )
    *counts, rounds = agreed([*calls.values(), rounds])
    calls = dict(zip(runs, map(int, counts), strict=True))
    clock: Times = {name: [] for name in runs}
    processor: Times = {name: [] for name in runs}
    for number in range(int(rounds)):
        order = list(runs) if number % 2 else list(reversed(runs))
        for name in order:
            took, worked = _seconds(runs[name], calls[name])
            clock[name].append(took)
            processor[name].append(worked)
    return clock, processor


def median_ratio(times: Times, ours: str, theirs: str) -> float:
    """The median over the rounds of how much longer `ours` took."""
    return statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))


def _seconds(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Seconds of one of so many calls in a row, by the clock and of the processor."""
    begin, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        jax.block_until_ready(run())
    return (time.perf_counter() - begin) / calls, (time.process_time() - worked) / calls
