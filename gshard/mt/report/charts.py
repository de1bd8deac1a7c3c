"""What the page's charts draw, as plain JSON: points, names and orders, all computed here.

The script in the page only places points and answers the pointer. It draws at the width of the
window, so that labels are as easy to read on a phone as on paper, which a finished picture is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gshard.mt.report import measures
from gshard.mt.report.cells import cut
from gshard.mt.report.gathered import SIDES, Direction, Example, Gathered, Record

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
        "tasks": [_task(task) for task in order],
        "quality": quality(runs, order),
        "experts": experts(runs, order),
        "health": health(runs),
        "examples": examples(runs, order),
    }


def corpora(runs: Sequence[Gathered]) -> list[dict[str, Any]]:
    """Training pairs by language, most first: one list for all the runs that have the same."""
    found: list[dict[str, Any]] = []
    for run in runs:
        if not run.pairs:
            continue
        ordered = sorted(run.pairs, key=lambda language: (-run.pairs[language], language))
        pairs = [[language, run.pairs[language]] for language in ordered]
        same = next((each for each in found if each["pairs"] == pairs), None)
        if same:
            same["runs"].append(run.name)
        else:
            found.append({"runs": [run.name], "pairs": pairs})
    return found


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


def _task(task: Direction) -> dict[str, Any]:
    return {
        "task": task.name,
        "language": task.language,
        "into": task.into_english,
        "pairs": task.train_pairs,
        "group": task.group,
        "sentences": task.sentences,
    }


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
    total = sum(
        sum(len(row) for row in layers)
        for _, sides in shown
        for tasks in sides.values()
        for layers in tasks.values()
    )
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
    found = []
    for name, title, form, meaning in HEALTH:
        series = []
        for place, run in enumerate(runs):
            records = [record for record in run.train if name in record]
            kept = [records[each] for each in measures.thinned(len(records), MOST_POINTS // 2)]
            if kept:
                points = [[record["step"], _rounded(record[name])] for record in kept]
                series.append({"run": place, "points": points})
        if series:
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
            entry = found.setdefault((example.task, example.source), _example(example))
            if place in (each[0] for each in entry["translations"]):
                continue  # the same sentence twice in a test set
            text = cut(example.translation, LONGEST_TEXT)
            scores = [_rounded(example.score), _rounded(example.chrf)]
            entry["translations"].append([place, text, *scores])
    by_task: dict[str, list[dict[str, Any]]] = {task.name: [] for task in order}
    for (task, _), entry in found.items():
        by_task.setdefault(task, []).append(entry)
    longest = max(map(len, by_task.values()), default=0)
    kept: list[dict[str, Any]] = []
    size = 0
    for depth in range(longest):  # the first of every task, then the second, ...
        for entries in by_task.values():
            if depth < len(entries) and size <= MOST_TEXT:
                kept.append(entries[depth])
                size += _size(entries[depth])
    return {"all": len(found), "list": kept}


def _example(example: Example) -> dict[str, Any]:
    return {
        "task": example.task,
        "source": cut(example.source, LONGEST_TEXT),
        "reference": cut(example.reference, LONGEST_TEXT),
        "translations": [],
    }


def _size(entry: dict[str, Any]) -> int:
    texts = [entry["source"], entry["reference"], *(each[1] for each in entry["translations"])]
    return 100 + sum(len(text.encode("utf-8", "replace")) for text in texts)
