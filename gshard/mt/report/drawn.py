"""The charts of the page, drawn from the numbers of `charts`: one for each choice of a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gshard.mt.report.cells import colour
from gshard.pages import Chart, ChartAxis, Series, curves

_CLOCKS = {"tokens": "target tokens", "step": "steps", "seconds": "time of training"}
_TIMES = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


@dataclass(frozen=True)
class ChartChoice:
    """A chart that readers can choose, by the names of their choices; `scale` divides its x."""

    name: str
    chart: Chart
    title: str = ""
    scale: float = 1.0


def loss(data: dict[str, Any]) -> list[ChartChoice]:
    """The cross-entropies over tokens, steps and time, as far as they are recorded."""
    found = []
    for clock, title in _CLOCKS.items():
        runs = [side for run in data["loss"] for side in (run["train"], run["dev"])]
        known = [value for side in runs for value in side[clock] if value is not None]
        if known:
            found.append(_loss(data, clock, title, max(known)))
    return found


def _loss(data: dict[str, Any], clock: str, title: str, longest: float) -> ChartChoice:
    unit, scale = title, 1.0
    if clock == "seconds":
        unit, scale = next(((n, s) for n, s in _TIMES if longest >= 2 * s), _TIMES[-1])
    series: list[Series] = []
    settled: list[float] = []
    for n, run in enumerate(data["loss"]):
        train, dev, ink = run["train"], run["dev"], colour(n)
        series.append(Series(_points(train, clock, "raw", scale), colour=ink, faint=True))
        smooth = _points(train, clock, "smooth", scale)
        series.append(Series(smooth, data["runs"][n], ink))
        name = "" if smooth else data["runs"][n]
        dots = _points(dev, clock, "nll", scale)
        series.append(Series(dots, name, ink, dots=28, dashed=True))
        settled += [*train["smooth"][len(train["smooth"]) // 12 :], *dev["nll"]]
    low, high = min(settled, default=0.0), max(settled, default=1.0)
    room = (high - low) or 1.0
    label = f"Cross-entropy of {len(data['runs'])} runs over {title}"
    y = ChartAxis("cross-entropy, nats for each token", low - 0.06 * room, high + 0.03 * room)
    x = ChartAxis(unit, low=0.0, form="short")
    return ChartChoice(clock, curves(label, series, x, y, height=300), title, scale)


def _points(
    side: dict[str, Any], clock: str, field: str, scale: float
) -> list[tuple[float, float]]:
    pairs = zip(side[clock], side[field], strict=True)
    return [(x / scale, y) for x, y in pairs if x is not None and y is not None]


def quality(data: dict[str, Any]) -> list[ChartChoice]:
    """BLEU by language, and over the baselines, into English and from it."""
    return [
        ChartChoice(f"{measure} {int(into)}", _quality(data, measure, into), title)
        for measure, title in (("delta", "ΔBLEU over the bilingual baselines"), ("bleu", "BLEU"))
        for into in (True, False)
        if any(task["into"] == into for task in data["tasks"])
        and (measure == "bleu" or _has(data, measure))
    ]


def _has(data: dict[str, Any], measure: str) -> bool:
    return any(value is not None for run in data["quality"] for value in run[measure])


def _quality(data: dict[str, Any], measure: str, into: bool) -> Chart:
    places = [n for n, task in enumerate(data["tasks"]) if task["into"] == into]
    tasks = [data["tasks"][n] for n in places]

    def points(values: Sequence[float | None]) -> list[tuple[float, float]]:
        found = [(float(n), values[place]) for n, place in enumerate(places)]
        return [(x, y) for x, y in found if y is not None]

    series: list[Series] = []
    for run in data["quality"]:
        ink, name = colour(run["run"]), data["runs"][run["run"]]
        single, smooth = points(run[measure]), points(run[f"{measure}_smooth"])
        faint = {"faint": True} if smooth else {"name": name}
        dots = 16.0 if smooth else 50.0
        series.append(Series(single, colour=ink, line=False, dots=dots, **faint))
        series.append(Series(smooth, name, ink))
    if measure == "bleu":
        for field, name, ink in (
            ("baseline", "baselines", "var(--s6)"),
            ("copy", "copy of source", "var(--faint)"),
        ):
            run = next((r for r in data["quality"] if any(v is not None for v in r[field])), None)
            if run:
                shown = points(run[f"{field}_smooth"]) or points(run[field])
                series.append(Series(shown, name, ink, dashed=True))
    title = "BLEU" if measure == "bleu" else "ΔBLEU over the bilingual baselines"
    labels = [task["language"] for task in tasks]
    x = ChartAxis("languages, most training pairs first", -0.5, len(tasks) - 0.5, labels=labels)
    label = f"{title} of {len(tasks)} languages, those with most training text first"
    return curves(label, series, x, ChartAxis(title, zero=True), height=300, bands=_bands(tasks))


def _bands(tasks: Sequence[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Where the groups of resource are among tasks in order; none if they are not in order."""
    found: list[tuple[float, float, str]] = []
    for n, task in enumerate(tasks):
        if found and found[-1][2] == task["group"]:
            found[-1] = (found[-1][0], n + 0.5, task["group"])
        else:
            found.append((n - 0.5, n + 0.5, task["group"]))
    return found if len(found) <= 3 and all(name for *_, name in found) else []


def corpora(data: dict[str, Any]) -> Chart | None:
    """Training pairs of each language, the language with most of them first."""
    found = data["corpora"]
    if not found:
        return None
    several = len(found) > 1
    series = [
        Series(
            [(float(rank), pairs) for rank, (_, pairs) in enumerate(corpus["pairs"], 1)],
            ", ".join(corpus["runs"]) if several else "",
            colour(n),
            dots=18,
        )
        for n, corpus in enumerate(found)
    ]
    labels = [language for language, _ in found[0]["pairs"]]
    x = ChartAxis("languages, by number of training pairs", labels=labels, first=1)
    y = ChartAxis("training pairs (log scale)", log=True)
    (first, most), (last, least) = found[0]["pairs"][0], found[0]["pairs"][-1]
    label = f"Training pairs of {len(labels)} languages: {first} {most:,.0f}, {last} {least:,.0f}"
    return curves(label, series, x, y)


def health(data: dict[str, Any]) -> list[dict[str, Any]]:
    """A small chart of each measure of training."""
    forms = {"share": "~%", "short": "short", "whole": "d"}
    found = []
    for each in data["health"]:
        log = each["name"] == "grad_norm"
        series = [
            Series([(x, y) for x, y in run["points"]], colour=colour(run["run"]))
            for run in each["series"]
        ]
        y = ChartAxis(log=log, zero=not log, form=forms.get(each["form"], ""))
        x = ChartAxis(low=0.0, form="short")
        label = f"{each['title']} over steps: {each['meaning']}"
        chart = curves(label, series, x, y, height=120, widths=("small",))
        found.append({**each, "chart": chart.html(f"health-{each['name']}")})
    return found
