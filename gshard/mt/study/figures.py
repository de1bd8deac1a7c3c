"""The arithmetic of a study's tables and figures, from what its runs left behind.

The paper's figure is Delta-BLEU by language, the languages in order of their text and smoothed over
ten; its table has the cost next to the quality; its efficiency figure says what a training loss
costs. All of it is computed here from plain values, by the arithmetic of the page of a run
(`gshard.mt.report.measures`), so that a test can do it again by hand.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gshard.mt.atomic import known_object
from gshard.mt.evaluation.baselines import BASELINES
from gshard.mt.evaluation.evaluate import EVALUATION
from gshard.mt.report import measures
from gshard.mt.report.gathered import gather
from gshard.mt.report.measures import Curve
from gshard.mt.study.plan import TRAINED, Study

METRICS = ("bleu", "chrf")
GROUPS = ("all", "high", "mid", "low")
DIRECTIONS = ("to-english", "from-english")


@dataclass(frozen=True)
class Scored:
    """One scored run: its cost, its scores by language, and its losses on the way."""

    name: str
    label: str
    layers: int
    experts: int
    seed: int
    weights: int
    step: int
    tokens: float
    seconds: float
    device: str
    scores: Mapping[str, Mapping[str, Any]]  # by task, as evaluation.json has them
    curve: Curve  # of the training
    dev: Curve

    @property
    def tokens_per_second(self) -> float:
        """Target tokens per second, over all of the training."""
        return self.tokens / max(self.seconds, 1e-9)

    def mean(self, metric: str, group: str = "all", direction: str = "") -> float | None:
        """The mean score of a group of languages, of both directions unless one is named."""
        members = [
            task
            for task in self.scores.values()
            if group in ("all", task["group"]) and direction in ("", _direction(task))
        ]
        return measures.mean(task[metric] for task in members)

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions that it was measured in: one of `DIRECTIONS`, or both."""
        found = {_direction(task) for task in self.scores.values()}
        return tuple(direction for direction in DIRECTIONS if direction in found)


def _direction(task: Mapping[str, Any]) -> str:
    return DIRECTIONS[0] if task["target"] == "en" else DIRECTIONS[1]


def models(plan: Study) -> list[Scored]:
    """The runs that are scored, in the order of the plan."""
    found = []
    for run in plan.runs:
        place = plan.place(run.name)
        scores, trained = (known_object(place / name) for name in (EVALUATION, TRAINED))
        if scores is None or trained is None:
            continue
        shape, (gathered,) = run.config.model, gather([place])
        layers = shape.encoder_layers + shape.decoder_layers
        seed, weights = run.config.train.seed, scores["weights"]
        step, tokens, seconds = (trained[name] for name in ("step", "tokens", "seconds"))
        used = (step, tokens, seconds, trained.get("device", ""))
        train, dev = measures.curve(gathered.train, True), measures.curve(gathered.dev, False)
        about = (run.name, run.label, layers, shape.experts, seed, weights)
        found.append(Scored(*about, *used, scores["tasks"], train, dev))
    return found


def baselines(plan: Study) -> dict[str, Mapping[str, Any]]:
    """The scores of the bilingual models, by task; {} if there are none."""
    if plan.baselines is None:
        return {}
    found = known_object(plan.place(plan.baselines.of) / BASELINES)
    return dict(found["tasks"]) if found else {}


def by_resource(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tasks, the one with the most training pairs first."""
    return sorted(tasks, key=lambda name: (-tasks[name]["train_pairs"], name))


def deltas(
    model: Scored, zero: Mapping[str, Mapping[str, Any]], order: Sequence[str], metric: str
) -> list[float | None]:
    """The score of each task over its baseline's; None where one of the two is missing."""
    return [
        model.scores[name][metric] - zero[name][metric]
        if name in model.scores and name in zero
        else None
        for name in order
    ]


def mean_delta(
    model: Scored, zero: Mapping[str, Mapping[str, Any]], metric: str, group: str = "all"
) -> float | None:
    """The mean over the languages of a group of what a model is above its baselines."""
    names = [name for name, task in model.scores.items() if group in ("all", task["group"])]
    return measures.mean(deltas(model, zero, names, metric))


def at_equal_cost(curve: Curve, seconds: float) -> float | None:
    """The loss of a curve after so many seconds, between its points; None past its end."""
    times, losses = [record["seconds"] for record in curve.records], curve.smoothed
    if not times or seconds > times[-1] * 1.01:
        return None
    place = min(bisect.bisect_left(times, seconds), len(times) - 1)
    if place == 0 or times[place] <= seconds:
        return losses[place]
    (t0, t1), (a, b) = times[place - 1 : place + 1], losses[place - 1 : place + 1]
    return a + (b - a) * (seconds - t0) / (t1 - t0)


@dataclass(frozen=True)
class Reached:
    """When the models first had a loss: (tokens, seconds) of each, or None."""

    loss: float
    when: tuple[tuple[float, float] | None, ...]


def efficiency(found: Sequence[Scored]) -> list[Reached]:
    """What each of some round training losses cost each model."""
    rows = []
    for loss in measures.thresholds([model.curve for model in found]):
        records = [model.curve.reached(loss) for model in found]
        when = tuple((r["tokens"], r["seconds"]) if r else None for r in records)
        rows.append(Reached(loss, when))
    return rows
