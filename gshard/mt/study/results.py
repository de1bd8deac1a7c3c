"""The report of a study: the paper's tables as files, and the page of all its runs.

`study.json` has every number that the tables show; `tables.md` is for documents;
`report.html` is the page of `gshard report` over all runs that have begun.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gshard.mt import atomic
from gshard.mt.atomic import known_object
from gshard.mt.errors import UserError
from gshard.mt.evaluation.evaluate import EVALUATION, EvaluateConfig
from gshard.mt.evaluation.scores import by_test
from gshard.mt.evaluation.store import Store, folder_of, held_out, tasks_of
from gshard.mt.report import write_report
from gshard.mt.report.measures import mean
from gshard.mt.run import METRICS as RECORDS
from gshard.mt.run import Run
from gshard.mt.study import figures, tables
from gshard.mt.study.analysis import (
    METRICS,
    PairedTexts,
    paired_bootstrap,
)
from gshard.mt.study.figures import GROUPS, Scored
from gshard.mt.study.plan import TRANSLATED, Study, entry

RESULTS, TABLES = "study.json", "tables.md"
_RESAMPLES = 1000


def write_results(plan: Study, out: Path) -> list[Path]:
    """Write what is known of a study into `out`; the files that were written."""
    found = figures.models(plan)
    if not found:
        raise UserError(f"no run of {plan.path} is scored yet (`gshard study {plan.path}`)")
    zero, before = figures.baselines(plan), known_object(out / RESULTS) or {}
    equal = min(model.seconds for model in found)
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "plan": plan.path.name,
        "runs": [dataclasses.asdict(entry(plan, run)) for run in plan.runs],
        "models": [_summary(model, zero, equal) for model in found],
        "equal_seconds": equal,
        "baselines": _baselines(zero),
        "comparisons": comparisons(plan, found, before),
        "efficiency": [dataclasses.asdict(row) for row in figures.efficiency(found)],
        "languages": _languages(found, zero),
    }
    atomic.write_json(out / RESULTS, results)
    with atomic.new_file(out / TABLES) as part:
        part.write_text(tables.all_tables(results), encoding="utf-8")
    begun = [plan.place(run.name) for run in plan.runs]
    begun = [place for place in begun if (place / RECORDS).is_file()]
    page, _ = write_report(begun, out / "report.html")
    return [out / RESULTS, out / TABLES, page]


def _summary(
    model: Scored, zero: Mapping[str, Mapping[str, Any]], equal_seconds: float
) -> dict[str, Any]:
    """A row of the paper's table."""
    summary: dict[str, Any] = {
        name: getattr(model, name)
        for name in ("name", "label", "layers", "experts", "seed", "weights", "step", "tokens")
    }
    summary |= {"seconds": model.seconds, "tokens_per_second": model.tokens_per_second}
    summary |= {
        "device": model.device,
        "dev_nll": model.dev.smoothed[-1] if model.dev.smoothed else None,
    }
    summary["nll_at_equal_cost"] = figures.at_equal_cost(model.curve, equal_seconds)
    has_spbleu = all("spbleu" in task for task in model.scores.values())
    summary["spbleu"] = model.mean("spbleu") if has_spbleu else None
    for group in GROUPS:
        for metric in figures.METRICS:
            suffix = "" if group == "all" else f"_{group}"
            summary[f"{metric}{suffix}"] = model.mean(metric, group)
            summary[f"delta_{metric}{suffix}"] = figures.mean_delta(model, zero, metric, group)
    summary["tests"] = by_test(model.scores)
    summary["directions"] = [
        {
            "direction": direction,
            **{
                f"{metric}_{group}": model.mean(metric, group, direction)
                for metric in figures.METRICS
                for group in GROUPS
            },
        }
        for direction in model.directions
    ]
    return summary


def _baselines(zero: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The means of the bilingual models, and what they were."""
    if not zero:
        return {}
    tasks = list(zero.values())
    means: dict[str, Any] = {"tasks": len(tasks)}
    for group in GROUPS:
        members = [task for task in tasks if group in ("all", task["group"])]
        for metric in figures.METRICS:
            suffix = "" if group == "all" else f"_{group}"
            means[f"{metric}{suffix}"] = mean(task[metric] for task in members)
    means["tests"] = by_test(zero)
    means["weights"] = sum(task["weights"] for task in tasks)
    means["seconds"] = sum(task["train_seconds"] for task in tasks)
    means["stopped_early"] = sum(task["steps"] < 0.9 * task["limit"] for task in tasks)
    return means


def _languages(
    found: Sequence[Scored], zero: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every score by language, the one with the most text first."""
    tasks = {**zero, **{name: task for model in found for name, task in model.scores.items()}}
    rows = []
    for name in figures.by_resource(tasks):
        task = tasks[name]
        row: dict[str, Any] = {
            "task": name,
            "pairs": task["train_pairs"],
            "group": task["group"],
            "sentences": task["sentences"],
            "copier_chrf": task.get("nearest_chrf"),
        }
        for metric in figures.METRICS:
            row[f"baseline_{metric}"] = zero[name][metric] if name in zero else None
            row[metric] = [
                model.scores[name][metric] if name in model.scores else None for model in found
            ]
        rows.append(row)
    return rows


def comparisons(
    plan: Study, found: Sequence[Scored], before: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The bootstraps that the plan asks for; those made before of the same weights are kept."""
    names = {model.name for model in found}
    known = {each["key"]: each for each in before.get("comparisons", [])}
    made = []
    for first, second in plan.compare:
        if not {first, second} <= names:
            continue
        notes = [known_object(plan.place(name) / TRANSLATED) or {} for name in (first, second)]
        # What is drawn is part of the key: a study made before that has narrower intervals.
        key = " ".join(["english", first, second, *(note.get("digest", "") for note in notes)])
        made.append(known.get(key) or _compared(plan, first, second, key))
    return made


def _compared(plan: Study, first: str, second: str, key: str) -> dict[str, Any]:
    pairs = paired_translations(plan, first, second)
    compared: dict[str, Any] = {"key": key, "first": first, "second": second, "groups": {}}
    scores = known_object(plan.place(first) / EVALUATION) or {"tasks": {}}
    for group in ("all", "low"):
        members = [
            pair for name, pair in pairs.items() if group in ("all", scores["tasks"][name]["group"])
        ]
        compared["groups"][group] = {
            metric: dataclasses.asdict(paired_bootstrap(members, metric, _RESAMPLES))
            for metric in METRICS
        }
    return compared


def paired_translations(plan: Study, first: str, second: str) -> dict[str, PairedTexts]:
    """What two runs made of the same sentences, by task."""
    config = plan.evaluate
    run = Run.open(plan.place(first))
    sets = held_out(
        run.corpus, tasks_of(run.tokenizer, config.languages), config.split, config.sentences
    )
    stores = [_store(plan.place(name), config) for name in (first, second)]
    pairs = {}
    for held in sets:
        texts = []
        for store in stores:
            found = [store.get(held.task.target, source) for source in held.sources]
            if None in found:
                raise UserError(f"{store.folder} lacks translations of {held.task}")
            texts.append(tuple(each.text for each in found if each is not None))
        target = held.task.target
        english = held.references if target == "en" else held.sources
        pairs[str(held.task)] = PairedTexts(texts[0], texts[1], held.references, english, target)
    return pairs


def _store(place: Path, config: EvaluateConfig) -> Store:
    note = known_object(place / TRANSLATED)
    if note is None:
        raise UserError(f"{place} has not been translated with yet")
    folder = folder_of(place, f"step-{note['step']}", config.split, config.beam, config.alpha)
    return Store(folder, {"weights": note["digest"]})
