"""Times of several programs that take turns, so that what else the machine does cancels.

In every round each program runs equally often, in an order that is turned round from round to
round. Ratios are taken within rounds; their median is what counts, with the interval in which it
lies 19 times out of 20. Where that is wide, there are more rounds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

Times = dict[str, list[float]]  # seconds of a call, by program and round
SAMPLE = 0.02  # seconds that the slowest program runs in a round, or one call
FEWEST, MOST = 5, 41  # rounds before one looks whether they are enough
NARROW = 0.04  # the width of an interval, of its ratio, with which they are
LOOKS = 6


def plan_rounds(seconds: dict[str, float], budget: float) -> tuple[int, int]:
    """How often the programs run in a round, and how many rounds there are before a look.

    `seconds` are those of one call. Rounds are odd in number, so that one of them is the median.
    """
    calls = max(1, round(SAMPLE / max(*seconds.values(), 1e-6)))
    rounds = min(max(int(budget / (calls * sum(seconds.values()))), FEWEST), MOST)
    return calls, rounds | 1


def timed(
    runs: dict[str, Callable[[], Any]],
    budget: float,
    agreed: Callable[[list[int]], Sequence[int]] = lambda numbers: numbers,
) -> tuple[Times, Times]:
    """The times of a call by the clock and in processor time of this process, round by round.

    Everything has run before. The last program is the one that others are compared with. Processes
    that run this together have to do the same: `agreed` turns the numbers that one of them found
    into those of all.
    """
    first = {name: _seconds(run, 1)[0] for name, run in runs.items()}
    again = {name: min(s, _seconds(runs[name], 1)[0]) for name, s in first.items()}
    calls, rounds = agreed(list(plan_rounds(again, budget)))
    clock: Times = {name: [] for name in runs}
    processor: Times = {name: [] for name in runs}
    for _ in range(LOOKS if budget else 1):
        for number in range(rounds):
            order = list(runs) if number % 2 else list(reversed(runs))
            for name in order:
                took, worked = _seconds(runs[name], calls)
                clock[name].append(took)
                processor[name].append(worked)
        (enough,) = agreed([_are_narrow(clock)])
        if enough:
            break
    return clock, processor


def _are_narrow(times: Times) -> bool:
    """Whether the intervals of all ratios to the last program are narrow."""
    *others, last = times
    intervals = [interval(times, name, last) for name in others]
    return all(high - low <= NARROW * (high + low) / 2 for low, high in intervals)


def median_ratio(times: Times, ours: str, theirs: str) -> float:
    """The median over the rounds of how much longer `ours` took."""
    return statistics.median(_ratios(times, ours, theirs))


def interval(times: Times, ours: str, theirs: str) -> tuple[float, float]:
    """Where that median lies in 95% of cases, whatever its distribution: two of the ratios."""
    ratios = sorted(_ratios(times, ours, theirs))
    first = max(0, math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2))
    return ratios[first], ratios[-1 - first]


def _ratios(times: Times, ours: str, theirs: str) -> list[float]:
    return [a / b for a, b in zip(times[ours], times[theirs], strict=True)]


def _seconds(run: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Seconds of one of so many calls in a row, by the clock and of the processor."""
    begin, worked = time.perf_counter(), time.process_time()
    for _ in range(calls):
        jax.block_until_ready(run())
    return (time.perf_counter() - begin) / calls, (time.process_time() - worked) / calls
