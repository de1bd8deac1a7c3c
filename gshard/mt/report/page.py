"""One HTML page from the runs: every style, script and number inside it, nothing fetched.

A page that people keep and pass on must open in ten years from a file, and text that it quotes,
which came from the web, must stay text: templates escape all of it, and the page's policy allows
its own script and no other (`gshard.pages`).
"""

from __future__ import annotations

import bisect
import itertools
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gshard.mt.report import cells as as_text
from gshard.mt.report import charts, measures, tables
from gshard.mt.report.cells import COLOURS, Grid
from gshard.mt.report.gathered import Gathered
from gshard.pages import checked, style
from gshard.pages import render as fill_in

_HERE = Path(__file__).parent


Section = dict[str, Any]  # for its part of page.html; one with a key and a title alone is missing


def render(runs: Sequence[Gathered], now: float | None = None) -> str:
    """The page."""
    data, (best, why) = charts.chart_data(runs), _best(runs)
    known = _sections(runs, data)
    missing = [section for section in known if len(section) == 2]
    if len(missing) == len(known):
        missing = []
    return fill_in(
        _HERE,
        "page.html",
        ("chart.js", "page.js", "heat.js"),
        style=style(_HERE.parents[1] / "pages", "tokens.css", "page.css")
        + style(_HERE, "page.css"),
        data=checked(data | {"colours": COLOURS}),
        best=best,
        why_best=why,
        measures=measures,
        runs=runs,
        sections=[section for section in known if section not in missing],
        missing=missing,
        text=as_text,
        command=_command,
        written=as_text.day(now or time.time()),  # noqa: TID251  (a date)
    )


def _sections(runs: Sequence[Gathered], data: dict[str, Any]) -> list[Section]:
    found: list[Section] = [
        {"key": "models", "title": "Models", "table": tables.models(runs)},
        {"key": "quality", "title": "Quality by language", **_quality(runs, data)},
    ]
    if _scored(runs):  # else "quality" says so, once
        found.append({"key": "languages", "title": "Scores", **_languages(runs)})
    found.append({"key": "training", "title": "Loss", **_loss(runs, data)})
    found.append({"key": "data", "title": "Training text", **_corpora(data["corpora"])})
    if _scored(runs):
        found.append({"key": "experts", "title": "Experts"})
        if used := data["experts"]:
            found[-1]["together"] = max(each["together"] for each in used)
        found.append({"key": "translations", "title": "Translations"})
        if shown := data["examples"]["list"]:
            found[-1]["more"] = data["examples"]["all"] - len(shown)
    found.append({"key": "health", "title": "Training health"})
    if data["health"]:
        found[-1] |= {"table": tables.health(runs), "charts": charts.draw_health(data)}
    return found


def _best(runs: Sequence[Gathered]) -> tuple[Gathered, str]:
    """The run with the highest BLEU, and its name where there are several."""
    scored = [run for run in runs if measures.average(run, "all", "bleu") is not None]
    best = max(scored or runs, key=lambda run: measures.average(run, "all", "bleu") or 0.0)
    if len(scored) > 1:
        return best, f"best of {len(scored)}: {best.name}"
    return best, best.name if len(runs) > 1 else ""


def _command(name: str, run: Gathered, *options: str) -> str:
    return shlex.join(["gshard", name, str(run.folder), *options])


def _scored(runs: Sequence[Gathered]) -> list[Gathered]:
    return [run for run in runs if run.evaluation and run.evaluation.tasks]


def _quality(runs: Sequence[Gathered], data: dict[str, Any]) -> Section:
    scored = _scored(runs)
    if not scored:
        return {}
    lenders = {run.name: measures.baselines_of(run, runs)[1] for run in scored}
    borrowers: dict[str, list[str]] = {}
    for name, lender in lenders.items():
        if lender and lender.name != name:
            borrowers.setdefault(lender.name, []).append(name)
    return {
        "without": [run for run in scored if lenders[run.name] is None],
        "baselines": any(lenders.values()),
        "charts": charts.draw_quality(data),
        "smoothed": len(measures.resource_order(runs)) >= measures.LEAST,
        "window": measures.WINDOW,
        "borrowers": borrowers,
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
        return {}
    windows = {measures.curve(run.train, smooth=True).window for run in runs if run.train} or {1}
    return {
        "charts": drawn,
        "windows": sorted({min(windows), max(windows)}),
        "losses": tables.dev_losses(runs),
        "reached": tables.reached(runs),
    }


def _corpora(corpora: list[dict[str, Any]]) -> Section:
    if not corpora:
        return {}
    chart = charts.draw_corpora(corpora)
    counts = [[count for _, count in corpus["pairs"]] for corpus in corpora]
    totals = [list(itertools.accumulate(each)) for each in counts]
    halves = [bisect.bisect_left(each, each[-1] / 2) + 1 for each in totals]
    return {
        "corpora": list(zip(corpora, halves, (each[-1] for each in totals), strict=True)),
        "chart": chart.html("corpora"),
        "tables": tables.corpora(corpora),
    }
