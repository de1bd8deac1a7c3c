"""The tables of the page, which need no script; the script only sorts and searches them.

They are the tables of the paper's section 4, and every number that a chart shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gshard.mt.report import measures
from gshard.mt.report.cells import (
    MISSING,
    Cell,
    Column,
    Grid,
    change,
    duration,
    figure,
    fixed,
    run_name,
    share,
    short,
    whole,
    words,
)
from gshard.mt.report.charts import HEALTH
from gshard.mt.report.gathered import GROUPS, Baselines, Direction, Gathered, Record

# The scores of a run by the names that an evaluation has for them.
_SCORES = {
    "bleu": Column("BLEU"),
    "chrf": Column("chrF++"),
    "copy_bleu": Column("Copy", "BLEU of the source, copied"),
    "nearest_bleu": Column(
        "Nearest", "BLEU of the translation of the most similar training sentence, copied"
    ),
    "untrained_bleu": Column("Untrained", "BLEU of the same model before training"),
}
_GROUP_NAMES = {"to-english": "into English", "from-english": "from English"}
FEW = 100  # sentences; a BLEU of fewer says little


_MODELS = (
    Column("Model", text=True),
    Column("Experts", "experts in each MoE layer; 0 is a dense model"),
    Column("Layers", "encoder + decoder", text=True),
    Column("Dims", "model dim / hidden dim, heads", text=True),
    Column("Weights"),
    Column("Devices", "that it trained on in the end"),
    Column("Steps"),
    Column("Tokens", "target tokens trained on"),
    Column("Time", "seconds of training, without evaluation"),
    Column("BLEU", "average over all tasks"),
    Column("ΔBLEU", "average gain over the bilingual baselines"),
)


def models(runs: Sequence[Gathered]) -> Grid:
    """The paper's table of models: what each run is, what it took and what it reached."""
    shown = [run for run in runs if run.baselines]
    rows = [_model(run, runs) for run in runs]
    rows += [_baselines(run, several=len(shown) > 1) for run in shown]
    breaks = (len(runs),) if shown else ()
    return Grid("models-table", _MODELS, rows, "Models: cost and quality", breaks=breaks)


def _model(run: Gathered, runs: Sequence[Gathered]) -> list[Cell]:
    layers = [run.setting("model", f"{side}_layers") for side in ("encoder", "decoder")]
    dims = [run.setting("model", name) for name in ("model_dim", "hidden_dim")]
    heads = run.setting("model", "heads")
    depth = MISSING if None in layers else " + ".join(whole(n) for n in layers if n is not None)
    width = MISSING if None in dims else " / ".join(whole(n) for n in dims if n is not None)
    width += f", {whole(heads)} heads" if heads else ""
    baselines, _ = measures.baselines_of(run, runs)
    about = run.evaluation.about if run.evaluation else {}
    return [
        run_name(run, runs),
        figure(run.setting("model", "experts"), whole),
        words(depth),
        words(width),
        figure(about.get("weights"), short),
        figure(run.last.get("devices") or run.setting("devices", "count") or None, whole),
        figure(run.last.get("step"), whole),
        figure(run.last.get("tokens"), short),
        figure(run.last.get("seconds"), duration),
        figure(measures.average(run, "all", "bleu")),
        change(measures.mean_gain(run, baselines)),
    ]


def _baselines(run: Gathered, several: bool) -> list[Cell]:
    assert run.baselines is not None
    tasks = list(run.baselines.tasks.values())
    weights = measures.mean(task.get("weights") for task in tasks)
    name = f"{len(tasks)} bilingual baselines" + (f" of {run.name}" if several else "")
    known = {
        "Model": words(name, "quiet"),
        "Weights": figure(weights, lambda w: f"{len(tasks)} \N{MULTIPLICATION SIGN} {short(w)}"),
        "Steps": figure(measures.mean(task.get("steps") for task in tasks), whole),
        "Time": figure(run.baselines.seconds, duration),
        "BLEU": figure(_mean_baseline(run, run.baselines, "all")),
    }
    return [known.get(column.title, words("")) for column in _MODELS]


def _mean_baseline(run: Gathered, baselines: Baselines | None, group: str) -> float | None:
    """The mean BLEU of the baselines of the tasks in a group; of all if the run has no scores."""
    if baselines is None:
        return None
    names = [task.name for task in measures.members(run, group)] or list(baselines.tasks)
    return measures.mean(baselines.tasks.get(name, {}).get("bleu") for name in names)


def reached(runs: Sequence[Gathered]) -> list[Grid]:
    """What it took to reach losses, as in the paper's table: tokens, and steps and time below."""
    parts = []
    for kind, smooth in (("training", True), ("dev", False)):
        curves = {
            run.name: measures.curve(run.train if smooth else run.dev, smooth) for run in runs
        }
        if not (losses := measures.thresholds(list(curves.values()))):
            continue
        rows = [
            [run_name(run, runs), *(_taken(curves[run.name].reached(loss)) for loss in losses)]
            for run in runs
            if curves[run.name].records
        ]
        columns = [Column("Model", text=True), *(Column(f"{loss:g}") for loss in losses)]
        caption = f"Target tokens, steps and time to a {kind} cross-entropy of"
        parts.append(Grid(f"reached-{kind}", columns, rows, caption))
    return parts


def _taken(record: Record | None) -> Cell:
    if record is None:
        return figure(None)
    detail = f"{whole(record['step'])} steps"
    if "seconds" in record:
        detail += f" · {duration(record['seconds'])}"
    tokens = record.get("tokens")
    main = short(tokens) if tokens is not None else f"{whole(record['step'])} steps"
    return Cell(main, tokens, detail=detail)


def averages(runs: Sequence[Gathered]) -> Grid:
    """Scores averaged over all tasks, and over those with much, some and little training text."""
    scored = [run for run in runs if run.evaluation]
    columns = [
        Column("Model", text=True),
        Column("Resource", "a quarter of the languages is high, a quarter low", text=True),
        Column("Tasks"),
        *_SCORES.values(),
        Column("Baseline", "BLEU of the bilingual models"),
        Column("ΔBLEU"),
    ]
    rows: list[list[Cell]] = []
    breaks: list[int] = []
    for run in scored:
        assert run.evaluation is not None
        baselines, _ = measures.baselines_of(run, runs)
        breaks.append(len(rows))
        groups = ["all", *GROUPS]
        if len({task.into_english for task in run.evaluation.tasks.values()}) > 1:
            groups += ["to-english", "from-english"]
        for group in groups:
            tasks = measures.members(run, group)
            if not tasks:
                continue
            rows.append(
                [
                    run_name(run, runs) if group == "all" else Cell(""),
                    words(_GROUP_NAMES.get(group, group)),
                    figure(len(tasks), whole),
                    *(figure(measures.average(run, group, name)) for name in _SCORES),
                    figure(_mean_baseline(run, baselines, group)),
                    change(measures.mean_gain(run, baselines, group)),
                ]
            )
        for test, mean in run.evaluation.tests.items():
            cells = [Cell(""), words(f"test: {test}"), figure(mean.get("tasks"), whole)]
            cells += [figure(mean.get(name)) for name in _SCORES]
            rows.append([*cells, figure(None), figure(None)])
    columns, rows = _without_empty(columns, rows, keep=5)
    return Grid("averages", columns, rows, "Averages by resource and by test", breaks=breaks[1:])


def _without_empty(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], keep: int
) -> tuple[list[Column], list[list[Cell]]]:
    """Without the columns after the first `keep` that no row has a value for."""
    kept = [
        n for n in range(len(columns)) if n < keep or any(row[n].value is not None for row in rows)
    ]
    return [columns[n] for n in kept], [[row[n] for n in kept] for row in rows]


def _head(task: Direction, several: bool) -> list[Cell]:
    few = task.sentences is not None and task.sentences < FEW
    hint = f"fewer than {FEW} sentences: the scores say little"
    hint += ", and the averages leave them out" if task.few else ""
    sentences = figure(task.sentences, whole)
    if few:
        sentences = replace(sentences, kind="few", mark="few*" if task.few else "few", hint=hint)
    group = GROUPS.index(task.group) if task.group else None
    return [
        Cell("", task.name, language=task.language, detail=task.name if several else ""),
        Cell(task.group or MISSING, group, "quiet"),
        figure(task.train_pairs, whole),
        sentences,
    ]


_HEAD = (
    Column("Language", text=True),
    Column(
        "Resource", "by the number of training pairs: a quarter is high, a quarter low", text=True
    ),
    Column("Training pairs"),
    Column("Sentences", "of the test set"),
)


def languages(run: Gathered, runs: Sequence[Gathered], order: Sequence[Direction]) -> Grid:
    """Every score of a run, by language."""
    assert run.evaluation is not None
    baselines, _ = measures.baselines_of(run, runs)
    delta = measures.deltas(run, baselines)
    several = len({task.into_english for task in order}) > 1
    columns = [
        *_HEAD,
        *_SCORES.values(),
        Column("Baseline", "BLEU of the bilingual model"),
        Column("ΔBLEU", "BLEU less that of the baseline"),
    ]
    zero, own = baselines.tasks if baselines else {}, run.evaluation.tasks
    rows = [
        [
            *_head(task, several),
            *(figure(getattr(task, name)) for name in _SCORES),
            figure(zero.get(task.name, {}).get("bleu")),
            change(delta.get(task.name)),
        ]
        for task in (own[each.name] for each in order if each.name in own)
    ]
    columns, rows = _without_empty(columns, rows, keep=6)
    place = runs.index(run)
    return Grid(f"languages-{place}", columns, rows, f"Scores of {run.name}", sortable=True)


def comparison(runs: Sequence[Gathered], order: Sequence[Direction]) -> Grid:
    """BLEU, and its gain over the baselines, of all evaluated runs side by side."""
    scored = [run for run in runs if run.evaluation]
    several = len({task.into_english for task in order}) > 1
    delta = [measures.deltas(run, measures.baselines_of(run, runs)[0]) for run in scored]
    columns = [*_HEAD, *(Column(f"BLEU {run.name}") for run in scored)]
    columns += [Column(f"Δ {run.name}", "BLEU less that of the baseline") for run in scored]
    rows = []
    for task in order:
        found = [run.evaluation.tasks.get(task.name) for run in scored if run.evaluation]
        scores = [figure(each.bleu if each else None) for each in found]
        gains = [change(each.get(task.name)) for each in delta]
        rows.append([*_head(task, several), *scores, *gains])
    columns, rows = _without_empty(columns, rows, keep=4)
    return Grid("languages-all", columns, rows, "BLEU of all runs", sortable=True)


def corpora(found: Sequence[dict[str, Any]]) -> list[Grid]:
    """Training pairs of each language, a table for each corpus."""
    columns = [Column("Language", text=True), Column("Training pairs")]
    return [
        Grid(
            f"corpus-{n}",
            columns,
            [
                [Cell("", language, language=language), figure(pairs, whole)]
                for language, pairs in corpus["pairs"]
            ],
            f"Training pairs of {', '.join(corpus['runs'])}",
            sortable=True,
        )
        for n, corpus in enumerate(found)
    ]


def health(runs: Sequence[Gathered]) -> Grid:
    """The measures of training over its last tenth, where a run has settled."""
    written = {"share": share, "short": short, "whole": whole}
    columns = [Column("Model", text=True)]
    columns += [Column(title, meaning) for _, title, _, meaning in HEALTH]
    rows = []
    for run in runs:
        recent = run.train[-max(1, len(run.train) // 10) :]
        row = [run_name(run, runs)]
        for name, _, form, _ in HEALTH:
            known = [record[name] for record in recent if name in record]
            value = known[-1] if known and name == "skipped" else measures.mean(known)
            row.append(figure(value, written.get(form, lambda each: fixed(each, 2))))
        if recent:
            rows.append(row)
    columns, rows = _without_empty(columns, rows, keep=1)
    return Grid("health-table", columns, rows, "Mean over the last tenth of the training")


def dev_losses(runs: Sequence[Gathered]) -> Grid | None:
    """The dev losses in numbers, for those who do not see the curves."""
    written = {"step": whole, "tokens": short, "seconds": duration, "nll": "{:.3f}".format}
    rows = []
    for run in runs:
        records = measures.curve(run.dev, smooth=False).records
        for record in (records[n] for n in measures.thinned(len(records), 20)):
            figures = (figure(record.get(name), form) for name, form in written.items())
            rows.append([run_name(run, runs), *figures])
    heads = map(Column, ("Step", "Tokens", "Time", "Dev cross-entropy"))
    columns = [Column("Model", text=True), *heads]
    return Grid("dev-losses", columns, rows, "Dev cross-entropy") if rows else None
