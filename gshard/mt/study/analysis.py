"""Whether one system is better than another: a paired bootstrap.

A figure over a hundred languages is a sample twice: of languages, and of English sentences. Both
are drawn again, with replacement, the same for both systems (Koehn 2004, with a level above). An
English sentence is drawn once for all languages that have it: their rows are not independent (a
cluster bootstrap). The statistic is the mean over the languages of the difference of their scores.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from gshard.mt.evaluation.scores import cut_of

MetricName = Literal["bleu", "chrf"]
METRICS: tuple[MetricName, ...] = ("bleu", "chrf")


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


def metric_of(name: MetricName, target: str = "en") -> Any:
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
