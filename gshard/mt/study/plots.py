"""The figures of a study: Delta-BLEU and delta chrF++ by language, and what a loss costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard.mt import atomic
from gshard.mt.report.measures import centred_mean
from gshard.mt.study import figures
from gshard.mt.study.figures import Model
from gshard.pages import Axis, Chart, Series, curves

TITLES = {"bleu": "BLEU", "chrf": "chrF++"}
_CLOCKS = (("tokens", 0, 1e6, "million target tokens"), ("time", 1, 60.0, "minutes"))
_HEIGHT = 330


def draw(found: Sequence[Model], zero: Mapping[str, Mapping[str, Any]], out: Path) -> list[Path]:
    """All figures that there are numbers for."""
    charts = {f"{metric}_by_language": _by_language(found, zero, metric) for metric in TITLES}
    for clock, place, scale, unit in _CLOCKS:
        charts[f"loss_by_{clock}"] = _losses(found, place, scale, unit)
    for name, chart in charts.items():
        with atomic.new_file(out / f"{name}.svg") as part:
            chart.save(part)
    return [out / f"{name}.svg" for name in charts]


def _series(model: Model, found: Sequence[Model], points: Sequence[tuple[float, float]]) -> Series:
    """A colour for each number of experts, dashes for the shallower models."""
    kinds = sorted({each.experts for each in found})
    is_shallow = model.layers < max(each.layers for each in found)
    colour = f"var(--s{kinds.index(model.experts) % 12})"
    return Series(points, model.label, colour, dashed=is_shallow)


def _by_language(
    found: Sequence[Model], zero: Mapping[str, Mapping[str, Any]], metric: str
) -> Chart:
    """The paper's figure: over the baselines if there are any, else the scores themselves."""
    tasks = {**zero, **{name: task for model in found for name, task in model.scores.items()}}
    order = figures.by_resource(tasks)
    series = []
    for model in found:
        values = (
            figures.deltas(model, zero, order, metric)
            if zero
            else [model.scores[n][metric] if n in model.scores else None for n in order]
        )
        smooth = enumerate(centred_mean(values))  # over ten languages, as in the paper
        points = [(float(place), value) for place, value in smooth if value is not None]
        series.append(_series(model, found, points))
    title = f"{TITLES[metric]}{' over bilingual baselines' if zero else ''}"
    labels = [name.partition("-")[0] for name in order]
    x = Axis("languages, those with the most training text first", labels=labels)
    y = Axis(f"{title}, mean of 10 languages", zero=bool(zero))
    return curves(f"{title} by language", series, x, y, _HEIGHT)


def _losses(found: Sequence[Model], clock: int, scale: float, unit: str) -> Chart:
    """Training cross-entropy against tokens or against time."""
    series = [
        _series(model, found, [(point[clock] / scale, point[2]) for point in model.curve])
        for model in found
    ]
    ends = [point[2] for model in found for point in model.curve[len(model.curve) // 10 :]]
    y = Axis("cross-entropy", *((min(ends) - 0.05, max(ends)) if ends else ()))
    return curves("Training cross-entropy", series, Axis(unit, low=0.0), y, _HEIGHT)
