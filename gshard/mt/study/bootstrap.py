"""Whether one system is better than another: paired bootstrap over languages and sentences.

A figure over a hundred languages is a sample twice: of languages, and of sentences in each. So both
are drawn again, with replacement: a language, then as many of its sentences as it has, the same
ones for both systems (Koehn 2004, with a level above). The statistic is the mean over the drawn
languages of the difference of their corpus scores.
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
class Pair:
    """Two systems' translations of one language's sentences, and the references."""

    first: tuple[str, ...]
    second: tuple[str, ...]
    references: tuple[str, ...]
    target: str = "en"


@dataclass(frozen=True)
class Difference:
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
    pairs: Sequence[Pair], name: MetricName, resamples: int = 1000, seed: int = 0
) -> Difference:
    """The difference of the mean scores over languages, with its interval and p-value."""
    rng = np.random.default_rng(seed)
    chosen_RL = drawn_languages(len(pairs), resamples, rng)
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
        resample_D = np.repeat(np.arange(resamples), times_R)  # of each time it was drawn
        weight_DN = drawn_sentences(len(pair.references), len(resample_D), rng)
        sums = [weight_DN @ side for side in sides]
        for resample, first, second in zip(resample_D, *sums, strict=True):
            scores = (
                metric._compute_score_from_stats(list(each)).score for each in (first, second)
            )
            total_R[resample] += next(scores) - next(scores)
    means_R = total_R / len(pairs)
    low, high = np.percentile(means_R, [2.5, 97.5])
    return Difference(
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
    """For each draw how often each of `count` sentences is in it: [D, N]."""
    return rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(np.float64)
