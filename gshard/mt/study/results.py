"""The results of a study, from what its runs left: the paper's tables, and a page of all runs.

`study.json` has every number that the tables show; `tables.md` is for documents;
`report.html` is the page of `gshard report` over all runs that have begun.

The paper's figure is Delta-BLEU by language, the languages in order of their text and smoothed over
ten; its table has the cost next to the quality; its efficiency figure says what a training loss
costs. All of it is computed from plain values, by the arithmetic of the page of a run
(`gshard.mt.report.measures`), so that a test can do it again by hand.

Whether one system is better than another is said by a paired bootstrap. A figure over a hundred
languages is a sample twice: of languages, and of English sentences. Both are drawn again, with
replacement, the same for both systems (Koehn 2004, with a level above). An English sentence is
drawn once for all languages that have it: their rows are not independent (a cluster bootstrap).
The statistic is the mean over the languages of the difference of their scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.atomic import known_object
from gshard.mt.evaluation.baselines import BASELINES
from gshard.mt.evaluation.evaluate import EVALUATION, sets_of, translations
from gshard.mt.evaluation.scores import METRICS as METRICS
from gshard.mt.evaluation.scores import MetricName, by_test, metric_of
from gshard.mt.progress import SILENT
from gshard.mt.report import measures, write_report
from gshard.mt.report.gathered import gather
from gshard.mt.report.measures import Curve, mean
from gshard.mt.run import METRICS as RECORDS
from gshard.mt.run import Run
from gshard.mt.study import tables
from gshard.mt.study.plan import TRAINED, TRANSLATED, Study, entry, made_by

RESULTS, TABLES = "study.json", "tables.md"
_RESAMPLES = 1000
_BY_TASK_OR_STEP = ("scores", "curve", "dev")


def write_results(plan: Study, out: Path) -> list[Path]:
    """Write what is known of a study into `out`; the files that were written."""
    found = models(plan)
    if not found:
        raise UserError(f"no run of {plan.path} is scored yet (`gshard study {plan.path}`)")
    zero, before = baselines(plan), known_object(out / RESULTS) or {}
    equal = min(model.seconds for model in found)
    out.mkdir(parents=True, exist_ok=True)
    results = {
        "plan": plan.path.name,
        "runs": [dataclasses.asdict(entry(plan, run)) for run in plan.runs],
        "models": [_summary(model, zero, equal) for model in found],
        "equal_seconds": equal,
        "baselines": _of_baselines(zero),
        "comparisons": comparisons(plan, found, before),
        "efficiency": efficiency(found),
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
    tasks = model.scores.values()
    has_spbleu = all("spbleu" in task for task in tasks)
    gains = _named_means(over(model.scores, zero))
    return {
        **{name: value for name, value in vars(model).items() if name not in _BY_TASK_OR_STEP},
        "tokens_per_second": model.tokens_per_second,
        "dev_nll": model.dev.smoothed[-1] if model.dev.smoothed else None,
        "nll_at_equal_cost": at_equal_cost(model.curve, equal_seconds),
        "spbleu": mean(task["spbleu"] for task in tasks) if has_spbleu else None,
        **_named_means(model.scores),
        **{f"delta_{name}": gain for name, gain in gains.items()},
        "tests": by_test(model.scores),
        "directions": [
            {"direction": direction, **means(mine)}
            for direction, mine in model.by_direction.items()
        ],
    }


def _named_means(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """The means; those of all tasks are called like the score."""
    return {n.removesuffix("_all"): value for n, value in means(tasks.values()).items()}


def _of_baselines(zero: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The means of the bilingual models, and what they were."""
    if not zero:
        return {}
    tasks = list(zero.values())
    return {
        "tasks": len(tasks),
        **_named_means(zero),
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
    return [
        {
            "task": name,
            "pairs": tasks[name]["train_pairs"],
            "group": tasks[name]["group"],
            "sentences": tasks[name]["sentences"],
            "copier_chrf": tasks[name].get("nearest_chrf"),
            **{f"baseline_{metric}": zero.get(name, {}).get(metric) for metric in METRICS},
            **{m: [model.scores.get(name, {}).get(m) for model in found] for m in METRICS},
        }
        for name in by_resource(tasks)
    ]


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
    sets = sets_of(run, config)
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


GROUPS = ("all", "high", "mid", "low")
DIRECTIONS = ("to-english", "from-english")


@dataclass(frozen=True)
class Scored:
    """One scored run: its cost, its scores by language, and its losses on the way."""

    name: str
    label: str
    layers: int
    experts: int
    seed: int
    weights: int
    step: int
    tokens: float
    seconds: float
    device: str
    scores: Mapping[str, Mapping[str, Any]]  # by task, as evaluation.json has them
    curve: Curve  # of the training
    dev: Curve

    @property
    def tokens_per_second(self) -> float:
        """Target tokens per second, over all of the training."""
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def by_direction(self) -> dict[str, list[Mapping[str, Any]]]:
        """The tasks of each direction that it was measured in."""
        into = [task for task in self.scores.values() if task["target"] == "en"]
        others = [task for task in self.scores.values() if task["target"] != "en"]
        return {name: each for name, each in zip(DIRECTIONS, (into, others), strict=True) if each}


def models(plan: Study) -> list[Scored]:
    """The runs that are scored, in the order of the plan."""
    found = []
    for run in plan.runs:
        place = plan.place(run.name)
        scores, trained = (known_object(place / name) for name in (EVALUATION, TRAINED))
        if scores is None or trained is None:
            continue
        shape, (gathered,) = run.config.model, gather([place])
        layers = shape.encoder_layers + shape.decoder_layers
        seed, weights = run.config.train.seed, scores["weights"]
        step, tokens, seconds = (trained[name] for name in ("step", "tokens", "seconds"))
        used = (step, tokens, seconds, trained.get("device", ""))
        train, dev = measures.curve(gathered.train, True), measures.curve(gathered.dev, False)
        about = (run.name, run.label, layers, shape.experts, seed, weights)
        found.append(Scored(*about, *used, scores["tasks"], train, dev))
    return found


def baselines(plan: Study) -> dict[str, Mapping[str, Any]]:
    """The scores of the bilingual models, by task; {} if there are none."""
    if plan.baselines is None:
        return {}
    found = known_object(plan.place(plan.baselines.of) / BASELINES)
    return dict(found["tasks"]) if found else {}


def by_resource(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tasks, the one with the most training pairs first."""
    return sorted(tasks, key=lambda name: (-tasks[name]["train_pairs"], name))


def over(
    scores: Mapping[str, Mapping[str, Any]], zero: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The tasks that have a baseline, with their scores less those of the baseline."""
    return {
        name: {**task, **{metric: task[metric] - zero[name][metric] for metric in METRICS}}
        for name, task in scores.items()
        if name in zero
    }


def means(tasks: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """The mean of each score over all tasks and over each group, as bleu_all and chrf_low."""
    tasks = list(tasks)
    members = {g: [task for task in tasks if g in ("all", task["group"])] for g in GROUPS}
    return {
        f"{metric}_{group}": mean(task[metric] for task in members[group])
        for group in GROUPS
        for metric in METRICS
    }


def at_equal_cost(curve: Curve, seconds: float) -> float | None:
    """The loss of a curve after so many seconds, between its points; None past its end."""
    times, losses = [record["seconds"] for record in curve.records], curve.smoothed
    if not times or seconds > times[-1] * 1.01:
        return None
    return float(np.interp(seconds, times, losses))


def efficiency(found: Sequence[Scored]) -> list[dict[str, Any]]:
    """When each model first had some round training losses: (tokens, seconds), or None."""

    def when(record: dict[str, float] | None) -> tuple[float, float] | None:
        return (record["tokens"], record["seconds"]) if record else None

    losses = measures.thresholds([model.curve for model in found])
    return [{"loss": n, "when": [when(m.curve.reached(n)) for m in found]} for n in losses]


@dataclass(frozen=True)
class PairedTexts:
    """Two systems' translations of one language's sentences, the references and the English."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    references: tuple[str, ...]
    english: tuple[str, ...]
    target: str = "en"


@dataclass(frozen=True)
class ScoreDifference:
    """How much better the first system is, over all languages."""

    mean: float
    low: float  # of the interval that contains 95% of the resamples
    high: float
    p: float  # share of resamples in which the first system is not better
    languages: int
    resamples: int


@functools.lru_cache(maxsize=4096)  # a system is compared with several others
def statistics(
    name: MetricName, target: str, translations: tuple[str, ...], references: tuple[str, ...]
) -> np.ndarray:
    """The counts of every sentence, whose sums a corpus score is computed from."""
    metric = metric_of(name, target)
    found = metric._extract_corpus_statistics(list(translations), [list(references)])
    return np.asarray(found, np.float64)


def paired_bootstrap(
    pairs: Sequence[PairedTexts], name: MetricName, resamples: int = 1000, seed: int = 0
) -> ScoreDifference:
    """The difference of the mean scores over languages, with its interval and p-value."""
    rng = np.random.default_rng(seed)
    chosen_RL = drawn_languages(len(pairs), resamples, rng)
    place_of = {text: n for n, text in enumerate(sorted({t for p in pairs for t in p.english}))}
    weight_RE = drawn_sentences(len(place_of), resamples, rng)
    total_R = np.zeros(resamples)
    differences = []
    for place, pair in enumerate(pairs):
        metric = metric_of(name, pair.target)
        sides = [
            statistics(name, pair.target, translations, pair.references)
            for translations in (pair.first, pair.second)
        ]
        a, b = (metric._compute_score_from_stats(list(side.sum(axis=0))).score for side in sides)
        differences.append(a - b)
        times_R = (chosen_RL == place).sum(axis=1)
        drawn_D = np.flatnonzero(times_R)
        weight_DN = weight_RE[drawn_D][:, [place_of[text] for text in pair.english]]
        sums = [weight_DN @ side for side in sides]
        for resample, first, second in zip(drawn_D, *sums, strict=True):
            a, b = (metric._compute_score_from_stats(list(each)).score for each in (first, second))
            total_R[resample] += times_R[resample] * (a - b)
    means_R = total_R / len(pairs)
    low, high = np.percentile(means_R, [2.5, 97.5])
    return ScoreDifference(
        float(np.mean(differences)),
        float(low),
        float(high),
        float((np.sum(means_R <= 0) + 1) / (resamples + 1)),
        len(pairs),
        resamples,
    )


def drawn_languages(count: int, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """For each resample as many languages as there are, with replacement: [R, L]."""
    return rng.integers(count, size=(resamples, count))


def drawn_sentences(count: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """For each draw how often each of `count` English sentences is in it: [D, E]."""
    return rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
