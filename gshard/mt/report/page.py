"""One HTML page from the runs: every style, script and number inside it, nothing fetched.

A page that people keep and pass on must open in ten years from a file, and text that it quotes,
which came from the web, must stay text: all of it is escaped, and the page's policy allows the one
script whose checksum it states and no other.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import string
import time
from collections.abc import Sequence
from importlib import resources
from typing import Any

from gshard.mt.report import measures, tables
from gshard.mt.report.cells import run_name
from gshard.mt.report.charts import HEALTH, chart_data
from gshard.mt.report.gathered import Run
from gshard.mt.report.wording import day, duration, fixed, safe, safe_json, short, signed, whole

SCRIPTS = ("chart.js", "heat.js", "page.js")  # one after the other, in this order


def render(runs: Sequence[Run], now: float | None = None) -> str:
    """The whole page."""
    data = chart_data(runs)
    sections = [
        ("models", "Models", tables.models(runs)),
        ("quality", "Quality by language", _quality(runs)),
        ("languages", "Scores", _languages(runs)),
        ("training", "Loss", _loss(runs)),
        ("data", "Training text", _corpora(data["corpora"])),
        ("experts", "Experts", _experts(data["experts"])),
        ("translations", "Translations", _examples(data["examples"])),
        ("health", "Training health", _health(runs, data["health"])),
    ]
    if not _scored(runs):  # "quality" says so, once
        need_scores = ("languages", "experts", "translations")
        sections = [each for each in sections if each[0] not in need_scores]
    empty = [each for each in sections if _is_empty(each[2])]
    if len(sections) > len(empty) > 0:
        sections = [each for each in sections if each not in empty]
        folded = "".join(f"<h3>{title}</h3>{inner}" for _, title, inner in empty)
        titles = ", ".join(title.lower() for _, title, _ in empty)
        summary = f"<summary>Nothing is recorded for: {titles}</summary>"
        inner = f'<details id="empty">{summary}{folded}</details>'
        sections.append(("missing", "Not in this report", inner))
    script = "\n".join(_file(name) for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();'
    checksum = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    names = ", ".join(run.name for run in runs)
    return string.Template(_file("page.html")).substitute(
        policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{checksum}'; "
        "base-uri 'none'; form-action 'none'",
        title=safe(f"{names} · gshard report"),
        style=_file("page.css"),
        head=_head(runs),
        links="\n".join(f'<li><a href="#{key}">{title}</a></li>' for key, title, _ in sections),
        sections="\n".join(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{title}</h2>'
            f"\n{inner}\n</section>"
            for key, title, inner in sections
        ),
        foot=f"<p>Written by <code>gshard report</code> on {day(now or time.time())}, from "  # noqa: TID251  (a date)
        "the files of the runs alone.</p>",
        data=safe_json(data),
        script=script,
    )


def _file(name: str) -> str:
    return resources.files("gshard.mt.report").joinpath(name).read_text(encoding="utf-8")


def _p(html: str, kind: str = "lead") -> str:
    return f'<p class="{kind}">{html}</p>'


def _head(runs: Sequence[Run]) -> str:
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs of multilingual translation"
    parts = ['<p class="kicker">gshard report</p>', f"<h1>{safe(title)}</h1>", _tiles(runs)]
    parts.append('<ul class="runs">' + "".join(_about(run, runs) for run in runs) + "</ul>")
    troubles = [(run.name, problem) for run in runs for problem in run.problems]
    if troubles:
        lines = "".join(f"<li>{safe(name)}: {safe(why)}</li>" for name, why in troubles)
        parts.append(
            '<div class="note" id="problems"><b>Not everything could be read.</b> The report shows '
            f"what could.<ul>{lines}</ul></div>"
        )
    return "\n".join(part for part in parts if part)


def _tiles(runs: Sequence[Run]) -> str:
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
        beside = "" if copied is None else f"copying the source gets {fixed(copied)}"
        detail = "; ".join(filter(None, (beside, note)))
        found.append((fixed(bleu), f"BLEU, mean of {what}", detail))
        delta = measures.mean_gain(best, measures.baselines_of(best, runs)[0])
        if delta is not None:
            found.append((signed(delta), "BLEU over bilingual baselines", ""))
    curve = measures.curve(best.dev, smooth=False)
    if curve.smoothed:
        found.append((fixed(min(curve.smoothed), 2), "lowest dev cross-entropy", ""))
    weights = best.evaluation.about.get("weights") if best.evaluation else None
    for value, written, label in (
        (weights, short, "weights"),
        (best.last.get("tokens"), short, "target tokens trained on"),
        (best.last.get("seconds"), duration, "of training"),
    ):
        if value is not None:
            found.append((written(value), label, ""))
    if found and not found[0][2] and note:
        found[0] = (*found[0][:2], note)
    tiles = "".join(
        f"<div><dt>{safe(label)}{f'<br><small>{safe(detail)}</small>' if detail else ''}</dt>"
        f"<dd>{safe(value)}</dd></div>"
        for value, label, detail in found
    )
    return f'<dl class="tiles">{tiles}</dl>' if tiles else ""


def _about(run: Run, runs: Sequence[Run]) -> str:
    """A line on a run: what it is, how far it came, whether it was evaluated."""
    facts = []
    experts = run.setting("model", "experts")
    if experts is not None:
        facts.append(f"mixture of {whole(experts)} experts" if experts else "dense model")
    step, steps = run.last.get("step"), run.setting("train", "steps")
    if step is None:
        facts.append("no training recorded")
    elif steps is not None and step < steps:
        progress = f"{whole(step)} of {whole(steps)} steps"
        facts.append(f"<b>unfinished</b>: {progress}, {_command('train', run)} goes on")
    else:
        facts.append(f"{whole(step)} steps")
    if run.ended is not None and run.train:
        facts.append(f"last trained {day(run.ended)}")
    if run.evaluation:
        about = run.evaluation.about
        text = f"evaluated at step {whole(about.get('checkpoint'))}"
        text += f" on {safe(run.evaluation.split)}" if run.evaluation.split else ""
        text += f", beam {whole(about['beam'])}" if "beam" in about else ""
        facts.append(text)
    else:
        facts.append(f"<b>not evaluated</b>: {_command('evaluate', run)} does it")
    key = run_name(run, runs).html
    return f"<li><b>{key}</b> <span>· {' · '.join(facts)}</span></li>"


def _command(name: str, run: Run, *options: str) -> str:
    return f"<code>{safe(shlex.join(['gshard', name, str(run.folder), *options]))}</code>"


def _is_empty(inner: str) -> bool:
    """Whether a section only says that there is nothing to show."""
    return (
        inner.startswith('<p class="note">') and inner.count("<") <= inner.count("<code>") * 2 + 2
    )


def _scored(runs: Sequence[Run]) -> list[Run]:
    return [run for run in runs if run.evaluation and run.evaluation.tasks]


def _quality(runs: Sequence[Run]) -> str:
    scored = _scored(runs)
    if not scored:
        return _p(
            f"No run here has been evaluated. {_command('evaluate', runs[0])} gives the scores of "
            "every language, the load of the experts and translations to read.",
            "note",
        )
    lead = (
        "Each point is a language, those with most training text on the left. The baselines, a "
        "bilingual model for each language, lie at zero: above it, one model for all languages "
        "is better than one model for one."
    )
    without = [run for run in scored if measures.baselines_of(run, runs)[0] is None]
    if len(without) == len(scored):
        lead = (
            "Each point is a language, those with most training text on the left; copying the "
            "source is what a model has to beat at the least."
        )
    parts = [_p(lead)]
    if without:
        names = ", ".join(safe(run.name) for run in without)
        command = _command("evaluate", without[0], "--baselines")
        advice = f"{command} trains them, and the gain over them is shown here."
        parts.append(_p(f"No bilingual baselines for {names}: {advice}", "note"))
    borrowers: dict[str, list[str]] = {}
    for run in scored:
        _, other = measures.baselines_of(run, runs)
        if other and other is not run:
            borrowers.setdefault(safe(other.name), []).append(safe(run.name))
    lent = [
        f"{', '.join(names)} {'are' if names[1:] else 'is'} compared with the baselines of {other}"
        for other, names in borrowers.items()
    ]
    caption = "Points: each language by itself."
    if len(measures.resource_order(runs)) >= measures.LEAST:
        caption = (
            f"Lines: mean over a centred window of {measures.WINDOW} languages (the language, "
            "five before and four after; fewer at the ends). Faint points: each by itself."
        )
    caption += f" {'; '.join(lent)}: the training text is the same." if lent else ""
    return "\n".join(parts) + (
        '<div class="controls" id="quality-controls"></div><figure>'
        '<div class="chart" id="quality-chart"></div>'
        f"<figcaption>{caption} The same numbers are in the table below.</figcaption></figure>"
        f"{tables.averages(runs)}"
    )


def _languages(runs: Sequence[Run]) -> str:
    scored = _scored(runs)
    order = measures.resource_order(runs)
    panels: list[tuple[str, str, str]] = []
    if len(scored) > 1:
        panels.append(("panel-all", "all runs", tables.comparison(runs, order)))
    panels += [
        (f"panel-{runs.index(run)}", run.name, tables.languages(run, runs, order)) for run in scored
    ]
    shown = "\n".join(
        f'<div class="panel long" id="{key}" data-title="{safe(title)}">{inner}</div>'
        for key, title, inner in panels
    )
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
    terms = "".join(
        f"<dt>{safe(name)}</dt><dd><code>{safe(text)}</code></dd>"
        for text, name in signatures.items()
    )
    details = (
        "<details><summary>Signatures of the scores</summary>"
        f'<dl class="signatures">{terms}</dl></details>'
    )
    return (
        _p(
            f"Click a head to sort. <abbr>few</abbr> marks fewer than {tables.FEW} test "
            "sentences: such scores say little. <abbr>few*</abbr>: so few that the averages leave "
            "them out."
        )
        + '<div class="controls" id="language-controls"><label>Find '
        '<input type="search" id="language-search" placeholder="German, de …" '
        'autocomplete="off"></label><span class="quiet" id="language-found" role="status"></span>'
        f"</div>{shown}{details if terms else ''}"
    )


def _loss(runs: Sequence[Run]) -> str:
    if not any("nll" in record for run in runs for record in (*run.train, *run.dev)):
        return _p("No losses are recorded yet.", "note")
    windows = {measures.curve(run.train, smooth=True).window for run in runs if run.train} or {1}
    low, high = min(windows), max(windows)
    span = f"the mean of the last {low if low == high else f'{low} to {high}'} records, with the "
    span = f"training, {span}records themselves faint behind" if high > 1 else "training"
    losses = tables.dev_losses(runs)
    table = f'<details class="long"><summary>Dev losses as a table</summary>{losses}</details>'
    return (
        '<div class="controls" id="loss-controls"></div><figure>'
        '<div class="chart" id="loss-chart"></div>'
        "<figcaption>Cross-entropy without the auxiliary losses. Lines: "
        f"{span}; dashed with points: dev. "
        "The first steps may lie above the frame.</figcaption></figure>"
        f"{table if losses else ''}<h3>Tokens to reach a loss</h3>{tables.reached(runs)}"
        + _p("The first record at which the curve, smoothed as above, is at or below the loss.")
    )


def _corpora(corpora: Sequence[dict[str, Any]]) -> str:
    if not corpora:
        return _p("The corpus is not there any more, and no evaluation says what it held.", "note")
    lines = []
    for corpus in corpora:
        counts = [count for _, count in corpus["pairs"]]
        whose = f"{safe(', '.join(corpus['runs']))}: " if len(corpora) > 1 else ""
        half, total = 0, 0.0
        while total < sum(counts) / 2:
            total += counts[half]
            half += 1
        lines.append(
            f"{whose}{whole(sum(counts))} pairs with English in {len(counts)} languages, from "
            f"{whole(counts[0])} to {whole(counts[-1])}; "
            + ("the first has half of all." if half == 1 else f"the first {half} have half of all.")
        )
    return (
        _p("<br>".join(lines)) + '<figure><div class="chart" id="corpora"></div>'
        '</figure><details class="long"><summary>As a table</summary>'
        f"{tables.corpora(corpora)}</details>"
    )


def _experts(experts: Sequence[dict[str, Any]]) -> str:
    if not experts:
        return _p("No evaluated run has experts: these are dense models.", "note")
    grouped = max(each["together"] for each in experts)
    together = f" Experts are shown {grouped} together." if grouped > 1 else ""
    return (
        _p(
            "Which experts the tokens of a language go to. With an even load every cell would have "
            "the colour at “even”; the stronger the colour, the more a language prefers the "
            f"expert.{together}"
        )
        + '<div class="controls" id="heat-controls"></div><figure>'
        '<div class="chart" id="heat-chart"></div><div class="scale" id="heat-scale"></div>'
        "<figcaption>The choices of the tokens of a language, as shares; experts from top to "
        "bottom. One scale for all layers of a model.</figcaption></figure>"
        '<details id="heat-table" class="long"><summary>This layer as a table</summary>'
        '<div class="wide"></div></details>'
    )


def _examples(examples: dict[str, Any]) -> str:
    if not examples["list"]:
        return _p("The evaluation kept no translations.", "note")
    left = examples["all"] - len(examples["list"])
    more = f" {whole(left)} more are in evaluation.json." if left else ""
    return (
        _p(f"Sentences of the test set, chosen without looking at the translations.{more}")
        + '<div class="controls"><label>Language <select id="example-task">'
        '<option value="">all</option></select></label><label>Find '
        '<input type="search" id="example-search" autocomplete="off"></label>'
        '<span class="quiet" id="example-found" role="status"></span></div>'
        '<div id="example-list"></div>'
        '<button type="button" class="more" id="example-more" hidden>Show more</button>'
    )


def _health(runs: Sequence[Run], health: Sequence[dict[str, Any]]) -> str:
    if not health:
        return _p("No measures of training are recorded.", "note")
    meanings = {name: (title, meaning) for name, title, _, meaning in HEALTH}
    figures = "".join(
        f"<figure><h3>{safe(meanings[each['name']][0])}</h3><small class='quiet'>"
        f'{safe(meanings[each["name"]][1])}</small><div class="chart" id="health-{each["name"]}">'
        "</div></figure>"
        for each in health
    )
    return f'{tables.health(runs)}<div class="grid-of-charts">{figures}</div>'
