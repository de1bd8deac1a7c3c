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
from gshard.mt.evaluation.evaluate import EVALUATION, translations
from gshard.mt.evaluation.scores import by_test
from gshard.mt.evaluation.store import held_out, tasks_of
from gshard.mt.progress import SILENT
from gshard.mt.report import write_report
from gshard.mt.report.measures import mean
from gshard.mt.run import METRICS as RECORDS
from gshard.mt.run import Run
from gshard.mt.study import figures, tables
from gshard.mt.study.figures import METRICS, PairedTexts, Scored, paired_bootstrap
from gshard.mt.study.plan import TRANSLATED, Study, entry, made_by

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
        "efficiency": figures.efficiency(found),
        "languages": _languages(found, zero),
    }
    atomic.write_json(out / RESULTS, results)
    with atomic.new_file(out / TABLES) as part:
        part.write_text(tables.all_tables(results), encoding="utf-8")
    begun = [plan.place(run.name) for run in plan.runs]
    begun = [place for place in begun if (place / RECORDS).is_file()]
    page, _ = write_report(begun, out / "report.html")
    return [out / RESULTS, out / TABLES, page]


_OF_A_MODEL = (
    "name", "label", "layers", "experts", "seed", "weights", "step", "tokens", "seconds",
    "tokens_per_second", "device",
)  # fmt: skip


def _summary(
    model: Scored, zero: Mapping[str, Mapping[str, Any]], equal_seconds: float
) -> dict[str, Any]:
    """A row of the paper's table."""
    tasks = model.scores.values()
    has_spbleu = all("spbleu" in task for task in tasks)
    gains = _means(figures.over(model.scores, zero))
    return {
        **{name: getattr(model, name) for name in _OF_A_MODEL},
        "dev_nll": model.dev.smoothed[-1] if model.dev.smoothed else None,
        "nll_at_equal_cost": figures.at_equal_cost(model.curve, equal_seconds),
        "spbleu": mean(task["spbleu"] for task in tasks) if has_spbleu else None,
        **_means(model.scores),
        **{f"delta_{name}": gain for name, gain in gains.items()},
        "tests": by_test(model.scores),
        "directions": [
            {"direction": direction, **figures.means(mine)}
            for direction, mine in model.by_direction.items()
        ],
    }


def _means(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The means; those of all tasks are called like the score."""
    return {n.removesuffix("_all"): value for n, value in figures.means(tasks.values()).items()}


def _baselines(zero: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The means of the bilingual models, and what they were."""
    if not zero:
        return {}
    tasks = list(zero.values())
    return {
        "tasks": len(tasks),
        **_means(zero),
        "tests": by_test(zero),
        "weights": sum(task["weights"] for task in tasks),
        "seconds": sum(task["train_seconds"] for task in tasks),
        "stopped_early": sum(task["steps"] < 0.9 * task["limit"] for task in tasks),
    }


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
    found = [
        translations(plan.place(name), made_by(plan, name), config, sets, SILENT)[1]
        for name in (first, second)
    ]
    pairs = {}
    for held in sets:
        target, name = held.task.target, str(held.task)
        mine, theirs = (tuple(each.text for each in texts[name]) for texts in found)
        english = held.references if target == "en" else held.sources
        pairs[name] = PairedTexts(mine, theirs, held.references, english, target)
    return pairs
