"""The figures of a study: Delta-BLEU and delta chrF++ by language, and what a loss costs."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard.mt import atomic
from gshard.mt.study import figures
from gshard.mt.study.figures import Model

TITLES = {"bleu": "BLEU", "chrf": "chrF++"}
_STYLES = {True: "-", False: "--"}  # the deepest models, and the others


def draw(found: Sequence[Model], zero: Mapping[str, Mapping[str, Any]], out: Path) -> list[Path]:
    """All figures that there are numbers for."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import rcParams

    rcParams["svg.hashsalt"] = "gshard"  # equal numbers, equal files
    drawn = []
    for metric in figures.METRICS:
        drawn.append(_by_language(found, zero, metric, out / f"{metric}_by_language.svg"))
    drawn.append(_losses(found, out / "efficiency.svg"))
    return drawn


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure, figure.subplots(1, columns)


def _style(model: Model, found: Sequence[Model]) -> dict[str, Any]:
    """A colour for each number of experts, dashes for the shallower models."""
    from matplotlib import colormaps

    kinds = sorted({each.experts for each in found})
    colours = colormaps["viridis"]
    place = kinds.index(model.experts) / max(len(kinds) - 1, 1)
    deepest = max(each.layers for each in found)
    return {"color": colours(0.9 * place), "linestyle": _STYLES[model.layers == deepest]}


def _by_language(
    found: Sequence[Model], zero: Mapping[str, Mapping[str, Any]], metric: str, path: Path
) -> Path:
    """The paper's figure: over the baselines if there are any, else the scores themselves."""
    tasks = {**zero, **{name: task for model in found for name, task in model.scores.items()}}
    order = figures.by_resource(tasks)
    figure, axes = _figure(9, 4.5)
    for model in found:
        values = (
            figures.deltas(model, zero, order, metric)
            if zero
            else [model.scores[n][metric] if n in model.scores else None for n in order]
        )
        points = [
            (place, value)
            for place, value in enumerate(figures.smoothed(values))
            if value is not None
        ]
        axes.plot(*zip(*points, strict=True), label=model.label, **_style(model, found))
    if zero:
        axes.axhline(0, color="black", linewidth=0.8)
    shown = range(0, len(order), max(1, len(order) // 26))
    axes.set_xticks(list(shown), [order[n].partition("-")[0] for n in shown], fontsize=7)
    delta = " over bilingual baselines" if zero else ""
    axes.set_ylabel(f"{TITLES[metric]}{delta}, mean of 10 languages")
    axes.set_xlabel("languages, those with the most training text first")
    axes.legend(fontsize=7, ncols=2)
    return _saved(figure, path)


def _losses(found: Sequence[Model], path: Path) -> Path:
    """Training cross-entropy against tokens and against time."""
    figure, both = _figure(9, 4, 2)
    for axes, clock, scale, title in (
        (both[0], 0, 1e6, "million target tokens"),
        (both[1], 1, 60, "minutes"),
    ):
        for model in found:
            x = [point[clock] / scale for point in model.curve]
            y = [point[2] for point in model.curve]
            axes.plot(x, y, label=model.label, linewidth=1, **_style(model, found))
        ends = [point[2] for model in found for point in model.curve[len(model.curve) // 10 :]]
        if ends:
            axes.set_ylim(min(ends) - 0.05, max(ends))
        axes.set_xlabel(title)
        axes.set_ylabel("training cross-entropy")
    both[0].legend(fontsize=7)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    """Write the figure, without the blanks that Matplotlib leaves at the ends of lines."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    with atomic.new_file(path) as part:
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
