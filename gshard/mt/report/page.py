"""One HTML page from the runs: every style, script and number inside it, nothing fetched.

A page that people keep and pass on must open in ten years from a file, and text that it quotes,
which came from the web, must stay text: templates escape all of it, and the page's policy allows
its own script and no other (`gshard.pages`).
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshard.mt.report import cells as as_text
from gshard.mt.report import charts, measures, tables
from gshard.mt.report.cells import COLOURS, Grid, run_name
from gshard.mt.report.gathered import Gathered
from gshard.pages import checked, style
from gshard.pages import render as fill_in

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Note:
    """A remark with a command in it."""

    text: str
    command: str = ""
    after: str = ""
    strong: str = ""  # the words before it that matter most


Section = dict[str, Any]  # for its part of page.html; one with a `note` has nothing else to show


def render(runs: Sequence[Gathered], now: float | None = None) -> str:
    """The page."""
    data = charts.chart_data(runs)
    known = _sections(runs, data)
    missing = [section for section in known if section["note"]]
    if len(missing) == len(known):
        missing = []
    names = ", ".join(run.name for run in runs)
    return fill_in(
        _HERE,
        "page.html",
        ("chart.js", "page.js", "heat.js"),
        title=f"{names} · gshard report",
        style=style(_HERE.parents[1] / "pages", "tokens.css", "page.css")
        + style(_HERE, "page.css"),
        data=checked(data | {"colours": COLOURS}),
        heading=runs[0].name if len(runs) == 1 else f"{len(runs)} runs of multilingual translation",
        tiles=_tiles(runs),
        runs=[(run_name(run, runs), _about(run)) for run in runs],
        problems=[(run.name, problem) for run in runs for problem in run.problems],
        sections=[section for section in known if section not in missing],
        missing=missing,
        written=as_text.day(now or time.time()),  # noqa: TID251  (a date)
    )


def _sections(runs: Sequence[Gathered], data: dict[str, Any]) -> list[Section]:
    found = [
        {"key": "models", "title": "Models", "table": tables.models(runs)},
        {"key": "quality", "title": "Quality by language", **_quality(runs, data)},
        {"key": "languages", "title": "Scores", **_languages(runs)},
        {"key": "training", "title": "Loss", **_loss(runs, data)},
        {"key": "data", "title": "Training text", **_corpora(data)},
        {"key": "experts", "title": "Experts", **_experts(data["experts"])},
        {"key": "translations", "title": "Translations", **_examples(data["examples"])},
        {"key": "health", "title": "Training health", **_health(runs, data)},
    ]
    found = [{"note": None, **section} for section in found]
    if _scored(runs):
        return found
    need_scores = ("languages", "experts", "translations")  # "quality" says so, once
    return [section for section in found if section["key"] not in need_scores]


def _tiles(runs: Sequence[Gathered]) -> list[tuple[str, str, str]]:
    """The headline figures, of the best run where there are several."""
    scored = [run for run in runs if measures.average(run, "all", "bleu") is not None]
    best = max(scored or runs, key=lambda run: measures.average(run, "all", "bleu") or 0.0)
    note = f"best of {len(scored)}: {best.name}" if len(scored) > 1 else ""
    note = note or (best.name if len(runs) > 1 else "")
    found: list[tuple[str, str, str]] = []
    bleu = measures.average(best, "all", "bleu")
    if bleu is not None and best.evaluation:
        count = len(best.evaluation.tasks)
        into = all(task.into_english for task in best.evaluation.tasks.values())
        what = f"{count} languages into English" if into else f"{count} directions"
        copied = measures.average(best, "all", "copy_bleu")
        beside = "" if copied is None else f"copying the source gets {as_text.fixed(copied)}"
        detail = "; ".join(filter(None, (beside, note)))
        found.append((as_text.fixed(bleu), f"BLEU, mean of {what}", detail))
        delta = measures.mean_gain(best, measures.baselines_of(best, runs)[0])
        if delta is not None:
            found.append((as_text.signed(delta), "BLEU over bilingual baselines", ""))
    curve = measures.curve(best.dev, smooth=False)
    if curve.smoothed:
        found.append((as_text.fixed(min(curve.smoothed), 2), "lowest dev cross-entropy", ""))
    weights = best.evaluation.about.get("weights") if best.evaluation else None
    for value, written, label in (
        (weights, as_text.short, "weights"),
        (best.last.get("tokens"), as_text.short, "target tokens trained on"),
        (best.last.get("seconds"), as_text.duration, "of training"),
    ):
        if value is not None:
            found.append((written(value), label, ""))
    if found and not found[0][2] and note:
        found[0] = (*found[0][:2], note)
    return found


def _about(run: Gathered) -> list[Note]:
    """What a run is, how far it came, whether it was evaluated."""
    facts = []
    experts = run.setting("model", "experts")
    if experts is not None:
        kind = f"mixture of {as_text.whole(experts)} experts" if experts else "dense model"
        facts.append(Note(kind))
    step, steps = run.last.get("step"), run.setting("train", "steps")
    if step is None:
        facts.append(Note("no training recorded"))
    elif steps is not None and step < steps:
        progress = f": {as_text.whole(step)} of {as_text.whole(steps)} steps; continue with "
        facts.append(Note(progress, _command("train", run), strong="unfinished"))
    else:
        facts.append(Note(f"{as_text.whole(step)} steps"))
    if run.ended is not None and run.train:
        facts.append(Note(f"last trained {as_text.day(run.ended)}"))
    if run.evaluation:
        about = run.evaluation.about
        text = f"evaluated at step {as_text.whole(about.get('checkpoint'))}"
        text += f" on {run.evaluation.split}" if run.evaluation.split else ""
        text += f", beam {as_text.whole(about['beam'])}" if "beam" in about else ""
        facts.append(Note(text))
    else:
        facts.append(Note(": run ", _command("evaluate", run), strong="not evaluated"))
    return facts


def _command(name: str, run: Gathered, *options: str) -> str:
    return shlex.join(["gshard", name, str(run.folder), *options])


def _scored(runs: Sequence[Gathered]) -> list[Gathered]:
    return [run for run in runs if run.evaluation and run.evaluation.tasks]


def _quality(runs: Sequence[Gathered], data: dict[str, Any]) -> Section:
    scored = _scored(runs)
    if not scored:
        after = " gives the scores of every language, the load of the experts and translations."
        return {"note": Note("No run was evaluated. ", _command("evaluate", runs[0]), after)}
    without = [run for run in scored if measures.baselines_of(run, runs)[0] is None]
    advice = None
    if without:
        names = ", ".join(run.name for run in without)
        command = _command("evaluate", without[0], "--baselines")
        after = " trains them, and the gain over them is shown here."
        advice = Note(f"No bilingual baselines for {names}: ", command, after)
    borrowers: dict[str, list[str]] = {}
    for run in scored:
        _, other = measures.baselines_of(run, runs)
        if other and other is not run:
            borrowers.setdefault(other.name, []).append(run.name)
    lent = [
        f"{', '.join(names)} {'are' if names[1:] else 'is'} compared with the baselines of {other}"
        for other, names in borrowers.items()
    ]
    return {
        "baselines": len(without) < len(scored),
        "advice": advice,
        "charts": charts.draw_quality(data),
        "smoothed": len(measures.resource_order(runs)) >= measures.LEAST,
        "window": measures.WINDOW,
        "lent": "; ".join(lent),
        "table": tables.averages(runs),
    }


def _languages(runs: Sequence[Gathered]) -> Section:
    scored = _scored(runs)
    order = measures.resource_order(runs)
    panels: list[tuple[str, str, Grid]] = []
    if len(scored) > 1:
        panels.append(("panel-all", "all runs", tables.comparison(runs, order)))
    panels += [
        (f"panel-{runs.index(run)}", run.name, tables.languages(run, runs, order)) for run in scored
    ]
    signatures: dict[str, str] = {}
    for run in scored:
        found = run.evaluation.signatures if run.evaluation else {}
        found = found | {
            f"{name} of the baselines": text
            for name, text in (run.baselines.signatures if run.baselines else {}).items()
            if text != found.get(name)
        }
        for name, text in found.items():
            signatures.setdefault(text, name)
    return {"panels": panels, "signatures": signatures, "few": tables.FEW}


def _loss(runs: Sequence[Gathered], data: dict[str, Any]) -> Section:
    drawn = charts.draw_loss(data)
    if not drawn or not any("nll" in record for run in runs for record in (*run.train, *run.dev)):
        return {"note": Note("No losses are recorded yet.")}
    windows = {measures.curve(run.train, smooth=True).window for run in runs if run.train} or {1}
    low, high = min(windows), max(windows)
    span = "training"
    if high > 1:
        count = low if low == high else f"{low} to {high}"
        span += f", the mean of the last {count} records, with the records themselves faint behind"
    return {
        "charts": drawn,
        "span": span,
        "losses": tables.dev_losses(runs),
        "reached": tables.reached(runs),
    }


def _corpora(data: dict[str, Any]) -> Section:
    corpora = data["corpora"]
    if not corpora:
        text = "The corpus was moved or deleted, and no evaluation recorded its sizes."
        return {"note": Note(text)}
    lines = []
    for corpus in corpora:
        counts = [count for _, count in corpus["pairs"]]
        whose = f"{', '.join(corpus['runs'])}: " if len(corpora) > 1 else ""
        half, total = 0, 0.0
        while total < sum(counts) / 2:
            total += counts[half]
            half += 1
        lines.append(
            f"{whose}{as_text.whole(sum(counts))} pairs with English in {len(counts)} languages, "
            f"from {as_text.whole(counts[0])} to {as_text.whole(counts[-1])}; "
            + ("the first has half of all." if half == 1 else f"the first {half} have half of all.")
        )
    chart = charts.draw_corpora(data)
    return {
        "lines": lines,
        "chart": chart and chart.html("corpora"),
        "tables": tables.corpora(corpora),
    }


def _experts(experts: Sequence[dict[str, Any]]) -> Section:
    if not experts:
        return {"note": Note("No evaluated run has experts: these are dense models.")}
    return {"together": max(each["together"] for each in experts)}


def _examples(examples: dict[str, Any]) -> Section:
    if not examples["list"]:
        return {"note": Note("The evaluation kept no translations.")}
    left = examples["all"] - len(examples["list"])
    return {"more": as_text.whole(left) if left else ""}


def _health(runs: Sequence[Gathered], data: dict[str, Any]) -> Section:
    if not data["health"]:
        return {"note": Note("No measures of training are recorded.")}
    return {"table": tables.health(runs), "charts": charts.draw_health(data)}
