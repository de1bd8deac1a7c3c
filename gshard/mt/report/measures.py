"""The arithmetic of a report: smoothing, what it took to reach a loss, the order of languages.

The paper's two figures of merit are tokens to reach a cross-entropy and BLEU over a bilingual
baseline; both are computed here from plain lists, so that a test can do it again in a loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gshard.mt.report.gathered import Baselines, Direction, Gathered, Record

WINDOW = 10  # languages, as in the paper's figure
LEAST = 2 * WINDOW  # languages from which on a mean over a window says something
_STEPS = (5.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` in all, fewer at the beginning."""
    means, total = [], 0.0
    for place, value in enumerate(values):
        total += value
        if place >= window:
            total -= values[place - window]
        means.append(total / min(place + 1, window))
    return means


def centred_mean(values: Sequence[float | None], window: int = WINDOW) -> list[float | None]:
    """The mean of a window around each value, half of it before; None is left out.

    An even window takes one more before than after, so 10 is five before, the value itself and
    four after. At the ends there are fewer; a value that is None has no mean.
    """
    known = [value for value in values if value is not None]
    before, after = window // 2, (window + 1) // 2
    means = (mean(known[max(0, n - before) : n + after]) for n in range(len(known)))
    return [None if value is None else next(means) for value in values]


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is known, or None."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def thinned(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 ... count - 1, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(n * (count - 1) / (most - 1)) for n in range(most)})


@dataclass(frozen=True)
class Curve:
    """A loss over the course of a run: the records that have it, and the smoothed loss of each."""

    records: tuple[Record, ...]
    smoothed: tuple[float, ...]
    window: int

    def reached(self, loss: float) -> Record | None:
        """The first record whose smoothed loss is at most `loss`."""
        pairs = zip(self.records, self.smoothed, strict=True)
        return next((record for record, value in pairs if value <= loss), None)


def curve(records: Iterable[Record], smooth: bool) -> Curve:
    """The cross-entropy of `records`; if smooth, over the last fiftieth of the run.

    A training loss is that of one batch or a few: without smoothing, a lucky one would decide when
    a loss was reached.
    """
    kept = tuple(record for record in records if "nll" in record)
    window = max(1, min(len(kept) // 50, 200)) if smooth else 1
    values = [record["nll"] for record in kept]
    return Curve(kept, tuple(trailing_mean(values, window)), window)


def thresholds(curves: Sequence[Curve]) -> list[float]:
    """Round losses, highest first, that tell the runs apart: the lowest is one the best reached.

    They go up to where the runs were after a tenth of their way, or to the worst run's end.
    """
    curves = [each for each in curves if each.smoothed]
    if not curves:
        return []
    ends = [min(each.smoothed) for each in curves]
    low, worst = min(ends), max(ends)
    high = max(worst, min(each.smoothed[len(each.smoothed) // 10] for each in curves))
    for step in _STEPS:
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        found = [round(n * step, 6) for n in range(first, last + 1)]
        found = [loss for loss in found if loss >= low]
        if len(found) >= 3:  # and at most 8: each step is at most 2.5 times the next
            return found[::-1]
    return [math.ceil(loss * 1e4) / 1e4 for loss in sorted({high, low}, reverse=True)]


def resource_order(runs: Sequence[Gathered]) -> list[Direction]:
    """Every evaluated task once, the one with the most training pairs first.

    Tasks have the counts and groups of the first run that knows them.
    """
    found: dict[str, Direction] = {}
    for run in runs:
        for task in run.evaluation.tasks.values() if run.evaluation else ():
            found.setdefault(task.name, task)
    return sorted(found.values(), key=lambda task: (-(task.train_pairs or 0), task.name))


def baselines_of(
    run: Gathered, runs: Sequence[Gathered]
) -> tuple[Baselines | None, Gathered | None]:
    """The run's own baselines, or those of another run with the same training text.

    Bilingual models are trained once for a corpus and compared with many multilingual ones; that
    two runs have the same corpus shows in the numbers of pairs of every task they share.
    """
    if run.baselines:
        return run.baselines, run
    mine = run.evaluation.tasks if run.evaluation else {}
    for other in runs:
        if other.baselines is None:
            continue
        shared = [(zero, mine[n]) for n, zero in other.baselines.tasks.items() if n in mine]
        if shared and all(
            zero.get("train_pairs") == task.train_pairs
            and zero.get("sentences") in (None, task.sentences)
            for zero, task in shared
        ):
            return other.baselines, other
    return None, None


def deltas(run: Gathered, baselines: Baselines | None) -> dict[str, float]:
    """BLEU over the baseline's for each task that has both."""
    if run.evaluation is None or baselines is None:
        return {}
    return {
        name: task.bleu - baselines.tasks[name]["bleu"]
        for name, task in run.evaluation.tasks.items()
        if task.bleu is not None and name in baselines.tasks
    }


def members(run: Gathered, group: str) -> list[Direction]:
    """The tasks that an average is over: those with few sentences only if there are no others."""
    tasks = list(run.evaluation.tasks.values()) if run.evaluation else []
    counted = [task for task in tasks if not task.few] or tasks
    directions = {"to-english": True, "from-english": False}
    if group in directions:
        return [task for task in counted if task.into_english == directions[group]]
    return [task for task in counted if group in ("all", task.group)]


def mean_gain(run: Gathered, baselines: Baselines | None, group: str = "all") -> float | None:
    """The mean of BLEU over the baselines', over the tasks that an average is over."""
    gains = deltas(run, baselines)
    return mean(gains.get(task.name) for task in members(run, group))


def average(run: Gathered, group: str, name: str) -> float | None:
    """An average of the evaluation; computed from its tasks where the file does not have it."""
    if run.evaluation is None:
        return None
    stated = run.evaluation.averages.get(group, {}).get(name)
    if stated is not None:
        return stated
    return mean(getattr(task, name) for task in members(run, group))
