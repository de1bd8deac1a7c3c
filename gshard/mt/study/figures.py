"""The arithmetic of a study's tables and figures, from what its runs left behind.

The paper's figure is Delta-BLEU by language, the languages in order of their text and smoothed over
ten; its table has the cost next to the quality; its efficiency figure says what a training loss
costs. All of it is computed here from plain values, by the arithmetic of the page of a run
(`gshard.mt.report.measures`), so that a test can do it again by hand.

Whether one system is better than another is said by a paired bootstrap. A figure over a hundred
languages is a sample twice: of languages, and of English sentences. Both are drawn again, with
replacement, the same for both systems (Koehn 2004, with a level above). An English sentence is
drawn once for all languages that have it: their rows are not independent (a cluster bootstrap).
The statistic is the mean over the languages of the difference of their scores.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from gshard.mt.atomic import known_object
from gshard.mt.evaluation.baselines import BASELINES
from gshard.mt.evaluation.evaluate import EVALUATION
from gshard.mt.evaluation.scores import cut_of
from gshard.mt.report import measures
from gshard.mt.report.gathered import gather
from gshard.mt.report.measures import Curve
from gshard.mt.study.plan import TRAINED, Study

MetricName = Literal["bleu", "chrf"]
METRICS: tuple[MetricName, ...] = ("bleu", "chrf")
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
        found: dict[str, list[Mapping[str, Any]]] = {direction: [] for direction in DIRECTIONS}
        for task in self.scores.values():
            found[DIRECTIONS[task["target"] != "en"]].append(task)
        return {direction: tasks for direction, tasks in found.items() if tasks}


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
        f"{metric}_{group}": measures.mean(task[metric] for task in members[group])
        for group in GROUPS
        for metric in METRICS
    }


def at_equal_cost(curve: Curve, seconds: float) -> float | None:
    """The loss of a curve after so many seconds, between its points; None past its end."""
    times, losses = [record["seconds"] for record in curve.records], curve.smoothed
    if not times or seconds > times[-1] * 1.01:
        return None
    place = min(bisect.bisect_left(times, seconds), len(times) - 1)
    if place == 0 or times[place] <= seconds:
        return losses[place]
    (t0, t1), (a, b) = times[place - 1 : place + 1], losses[place - 1 : place + 1]
    return a + (b - a) * (seconds - t0) / (t1 - t0)


def efficiency(found: Sequence[Scored]) -> list[dict[str, Any]]:
    """When each model first had some round training losses: (tokens, seconds), or None."""
    rows = []
    for loss in measures.thresholds([model.curve for model in found]):
        records = [model.curve.reached(loss) for model in found]
        when = [(r["tokens"], r["seconds"]) if r else None for r in records]
        rows.append({"loss": loss, "when": when})
    return rows


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


def metric_of(name: MetricName, target: str) -> Any:
    """sacreBLEU's metric, as `scores` has it."""
    return BLEU(tokenize=cut_of(target)) if name == "bleu" else CHRF(word_order=2)


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
