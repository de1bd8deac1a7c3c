"""The page's charts: their numbers as plain JSON, and the charts drawn from these.

All points, names and orders are computed here. The script in the page only places points and
answers the pointer. It draws at the width of the window, so that labels are as easy to read on a
phone as on paper, which a finished picture is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gshard.mt.report import measures
from gshard.mt.report.cells import colour, cut
from gshard.mt.report.gathered import SIDES, Direction, Gathered, Record
from gshard.pages import Chart, ChartAxis, Series, curves

MOST_POINTS = 500  # of a curve; more cannot be told apart on a screen
MOST_SHARES = 250_000  # of experts, all runs together; about 5 bytes each
MOST_TEXT = 900_000  # characters of examples, all runs together
LONGEST_TEXT = 700  # characters of one sentence

# Name in metrics.jsonl, title, format of its values, what it means.
HEALTH = (
    ("overflow", "Overflow", "share", "first choices that found their expert full"),
    ("balance", "Balance", "fixed", "1 is an even load of the experts, 1/E all on one"),
    ("grad_norm", "Gradient norm", "number", "before clipping; log scale"),
    ("tokens_per_second", "Tokens per second", "short", "target tokens"),
    ("share_of_matmul", "Share of a matmul", "share", "of what a large product reaches"),
    ("padding", "Padding", "share", "positions of a batch without a token"),
    ("data_wait", "Waiting for data", "share", "share of the training time"),
    ("skipped", "Skipped updates", "whole", "steps not learned from: a NaN or a spike"),
)


def chart_data(runs: Sequence[Gathered]) -> dict[str, Any]:
    """Everything that the page's script needs."""
    order = measures.resource_order(runs)
    return {
        "runs": [run.name for run in runs],
        "corpora": corpora(runs),
        "loss": [_loss(run) for run in runs],
        "tasks": [
            {"task": task.name, "language": task.language, "into": task.into_english}
            | {"pairs": task.train_pairs, "group": task.group, "sentences": task.sentences}
            for task in order
        ],
        "quality": quality(runs, order),
        "experts": experts(runs, order),
        "health": health(runs),
        "examples": examples(runs, order),
    }


def corpora(runs: Sequence[Gathered]) -> list[dict[str, Any]]:
    """Training pairs by language, most first: one list for all the runs that have the same."""
    found: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for run in runs:
        pairs = sorted(run.pairs.items(), key=lambda item: (-item[1], item[0]))
        found.setdefault(tuple(pairs), []).append(run.name)
    return [{"runs": names, "pairs": pairs} for pairs, names in found.items() if pairs]


def _loss(run: Gathered) -> dict[str, Any]:
    train, dev = measures.curve(run.train, smooth=True), measures.curve(run.dev, smooth=False)
    places = measures.thinned(len(train.records), MOST_POINTS)
    kept = [train.records[place] for place in places]
    return {
        "window": train.window,
        "train": {**_clocks(kept), "raw": [_rounded(record["nll"]) for record in kept]}
        | {"smooth": [_rounded(train.smoothed[place]) for place in places]},
        "dev": {**_clocks(dev.records), "nll": [_rounded(value) for value in dev.smoothed]},
    }


def _clocks(records: Sequence[Record]) -> dict[str, list[float | None]]:
    return {
        name: [_rounded(record.get(name), 1) for record in records]
        for name in ("step", "tokens", "seconds")
    }


def _rounded(value: float | None, places: int = 4) -> float | None:
    """Short in the page; very small values keep four figures."""
    if value is None or isinstance(value, int):
        return value
    if abs(value) < 10.0 ** (1 - places):
        return float(f"{value:.4g}")
    return round(value, places)


def quality(runs: Sequence[Gathered], order: Sequence[Direction]) -> list[dict[str, Any]]:
    """BLEU, and BLEU over the baselines, raw and smoothed, in the order of `order`.

    Tasks into English and out of it are smoothed apart: they are two figures.
    """
    found = []
    for place, run in enumerate(runs):
        if run.evaluation is None:
            continue
        tasks = [run.evaluation.tasks.get(task.name) for task in order]
        baselines, _ = measures.baselines_of(run, runs)
        delta = measures.deltas(run, baselines)
        values: dict[str, list[float | None]] = {
            "bleu": [task.bleu if task else None for task in tasks],
            "copy": [task.copy_bleu if task else None for task in tasks],
            "baseline": [
                baselines.tasks.get(task.name, {}).get("bleu") if baselines else None
                for task in order
            ],
            "delta": [delta.get(task.name) for task in order],
        }
        found.append(
            {"run": place}
            | {name: [_rounded(each) for each in column] for name, column in values.items()}
            | {f"{name}_smooth": _smooth(column, order) for name, column in values.items()}
        )
    return found


def _smooth(column: Sequence[float | None], order: Sequence[Direction]) -> list[float | None]:
    """The centred mean of each direction by itself; none where a mean of ten would be flat."""
    smooth: list[float | None] = [None] * len(column)
    for direction in (True, False):
        places = [n for n, task in enumerate(order) if task.into_english == direction]
        if len(places) < measures.LEAST:
            continue
        means = measures.centred_mean([column[place] for place in places])
        for place, value in zip(places, means, strict=True):
            smooth[place] = _rounded(value)
    return smooth


def experts(runs: Sequence[Gathered], order: Sequence[Direction]) -> list[dict[str, Any]]:
    """The share of each expert by side, layer and task, in ten-thousandths.

    Where there are more than a page can hold, neighbouring experts are added up: `together` of
    them.
    """
    shown = [
        (place, run.evaluation.experts)
        for place, run in enumerate(runs)
        if run.evaluation and run.evaluation.experts
    ]
    loads = [layers for _, sides in shown for side in sides.values() for layers in side.values()]
    total = sum(len(row) for layers in loads for row in layers)
    together = 1
    while total / together > MOST_SHARES:
        together *= 2
    found = []
    for place, sides in shown:
        known = {
            side: {
                str(n): [_shares(row, together) for row in sides[side][task.name]]
                for n, task in enumerate(order)
                if task.name in sides[side]
            }
            for side in SIDES
            if side in sides
        }
        count = len(next(iter(next(iter(sides.values())).values()))[0])
        found.append({"run": place, "experts": count, "together": together, "sides": known})
    return found


def _shares(row: Sequence[float], together: int) -> list[int]:
    return [
        round(10_000 * sum(row[first : first + together])) for first in range(0, len(row), together)
    ]


def health(runs: Sequence[Gathered]) -> list[dict[str, Any]]:
    """The measures of HEALTH that any run has, over its steps."""

    def points(run: Gathered, name: str) -> list[list[float | None]]:
        records = [record for record in run.train if name in record]
        kept = measures.thinned(len(records), MOST_POINTS // 2)
        return [[records[n]["step"], _rounded(records[n][name])] for n in kept]

    found = []
    for name, title, form, meaning in HEALTH:
        known = enumerate(points(run, name) for run in runs)
        if series := [{"run": place, "points": each} for place, each in known if each]:
            about = {"name": name, "title": title, "form": form, "meaning": meaning}
            found.append({**about, "series": series})
    return found


def examples(runs: Sequence[Gathered], order: Sequence[Direction]) -> dict[str, Any]:
    """Translations to read: a sentence once, with what each run made of it.

    If there are more than a page should hold, every task keeps its first ones.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for place, run in enumerate(runs):
        for example in run.evaluation.examples if run.evaluation else ():
            texts = {
                name: cut(getattr(example, name), LONGEST_TEXT) for name in ("source", "reference")
            }
            new: dict[str, Any] = {"task": example.task, **texts, "translations": []}
            entry = found.setdefault((example.task, example.source), new)
            if place in (each[0] for each in entry["translations"]):
                continue  # the same sentence twice in a test set
            text = cut(example.translation, LONGEST_TEXT)
            scores = [_rounded(example.score), _rounded(example.chrf)]
            entry["translations"].append([place, text, *scores])
    by_task: dict[str, list[dict[str, Any]]] = {task.name: [] for task in order}
    for (task, _), entry in found.items():
        by_task.setdefault(task, []).append(entry)
    # The first of every task, then the second, ...
    ordered = [e for some in itertools.zip_longest(*by_task.values()) for e in some if e]
    before = itertools.accumulate(map(_size, ordered), initial=0)
    kept = [entry for entry, size in zip(ordered, before, strict=False) if size <= MOST_TEXT]
    return {"all": len(found), "list": kept}


def _size(entry: dict[str, Any]) -> int:
    texts = [entry["source"], entry["reference"], *(each[1] for each in entry["translations"])]
    return 100 + sum(len(text.encode("utf-8", "replace")) for text in texts)


_CLOCKS = {"tokens": "target tokens", "step": "steps", "seconds": "time of training"}
_TIMES = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))


@dataclass(frozen=True)
class ChartChoice:
    """A chart that readers can choose, by the names of their choices; `scale` divides its x."""

    name: str
    chart: Chart
    title: str = ""
    scale: float = 1.0


def draw_loss(data: dict[str, Any]) -> list[ChartChoice]:
    """The cross-entropies over tokens, steps and time, as far as they are recorded."""
    found = []
    for clock, title in _CLOCKS.items():
        runs = [side for run in data["loss"] for side in (run["train"], run["dev"])]
        known = [value for side in runs for value in side[clock] if value is not None]
        if known:
            found.append(_draw_loss(data, clock, title, max(known)))
    return found


def _draw_loss(data: dict[str, Any], clock: str, title: str, longest: float) -> ChartChoice:
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


def draw_quality(data: dict[str, Any]) -> list[ChartChoice]:
    """BLEU by language, and over the baselines, into English and from it."""
    return [
        ChartChoice(f"{measure} {int(into)}", _draw_quality(data, measure, into), title)
        for measure, title in (("delta", "ΔBLEU over the bilingual baselines"), ("bleu", "BLEU"))
        for into in (True, False)
        if any(task["into"] == into for task in data["tasks"])
        and (measure == "bleu" or any(v is not None for r in data["quality"] for v in r[measure]))
    ]


def _draw_quality(data: dict[str, Any], measure: str, into: bool) -> Chart:
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
    groups = itertools.groupby(range(len(tasks)), lambda n: tasks[n]["group"])
    found = [(name, list(places)) for name, places in groups]
    if len(found) > 3 or not all(name for name, _ in found):
        return []
    return [(places[0] - 0.5, places[-1] + 0.5, name) for name, places in found]


def draw_corpora(found: Sequence[dict[str, Any]]) -> Chart:
    """Training pairs of each language, the language with most of them first."""
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


def draw_health(data: dict[str, Any]) -> list[dict[str, Any]]:
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
