"""The paired bootstrap, beside the same draws scored by sacreBLEU list by list."""

import numpy as np
import pytest

from gshard.mt.evaluation.scores import score
from gshard.mt.study.results import (
    METRICS,
    PairedTexts,
    drawn_languages,
    drawn_sentences,
    paired_bootstrap,
)
from tests.mt.samples import sentence

SIZES = (5, 11, 7)


def worsened(text, rng, share):
    """Some words of a sentence replaced."""
    return " ".join("thing" if rng.random() < share else word for word in text.split())


def pairs(better, worse, sizes=SIZES, shared=False):
    """Languages with sentences of their own, or all with the first ones of the same text."""
    rng = np.random.default_rng(3)
    found = []
    for place, size in enumerate(sizes):
        references = tuple(sentence((0 if shared else 100 * place) + n) for n in range(size))
        sides = [tuple(worsened(r, rng, share) for r in references) for share in (better, worse)]
        found.append(PairedTexts(*sides, references, references))
    return found


def reversed_(pair):
    return PairedTexts(pair.second, pair.first, pair.references, pair.english)


def slow_bootstrap(pairs, name, resamples, seed):
    """One resample after another, every corpus scored from its sentences."""
    rng = np.random.default_rng(seed)
    chosen = drawn_languages(len(pairs), resamples, rng)
    english = sorted({text for pair in pairs for text in pair.english})
    drawn = drawn_sentences(len(english), resamples, rng).astype(int)
    means = []
    for languages, counts in zip(chosen, drawn, strict=True):
        assert counts.sum() == len(english)
        times = dict(zip(english, counts, strict=True))
        differences = []
        for pair in (pairs[place] for place in languages):
            which = [n for n, text in enumerate(pair.english) for _ in range(times[text])]
            texts = [[side[n] for n in which] for side in (pair.first, pair.second)]
            references = [pair.references[n] for n in which]
            a, b = (getattr(score(text, references), name) for text in texts)
            differences.append(a - b)
        means.append(float(np.mean(differences)))
    return means


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("shared", [False, True])
def test_the_same_draws_give_the_same_interval_as_scoring_every_list(name, shared):
    given = pairs(0.2, 0.4, shared=shared)
    found = paired_bootstrap(given, name, resamples=40, seed=5)
    slow = slow_bootstrap(given, name, 40, 5)
    low, high = np.percentile(slow, [2.5, 97.5])
    assert found.low == pytest.approx(low)
    assert found.high == pytest.approx(high)
    assert found.p == pytest.approx((sum(mean <= 0 for mean in slow) + 1) / 41)
    whole = [
        getattr(score(p.first, p.references), name) - getattr(score(p.second, p.references), name)
        for p in given
    ]
    assert found.mean == pytest.approx(np.mean(whole))


def test_a_clear_difference_is_significant_and_its_reverse_is_not():
    clear = pairs(0.1, 0.6)
    found = paired_bootstrap(clear, "chrf", 200)
    assert found.low > 0
    assert found.p < 0.05
    reverse = [reversed_(pair) for pair in clear]
    assert paired_bootstrap(reverse, "chrf", 200).p > 0.95


def test_a_system_is_not_better_than_itself():
    same = [PairedTexts(p.first, p.first, p.references, p.english) for p in pairs(0.3, 0.3)]
    found = paired_bootstrap(same, "bleu", 50)
    assert (found.mean, found.low, found.high, found.p) == (0, 0, 0, 1)


def test_one_language_that_gains_alone_does_not_convince():
    """Sentences by themselves would: of many, all better. Languages are the larger unit."""
    gains, *rest = pairs(0.1, 0.6, (30, 4, 4, 4))
    mixed = [gains, *map(reversed_, rest)]
    assert paired_bootstrap([gains], "chrf", 200).p < 0.05
    assert paired_bootstrap(mixed, "chrf", 200).p > 0.05


def test_languages_that_share_their_sentences_are_no_independent_samples():
    """Forty copies of one language are one language: the interval is as wide as its own."""
    (one,) = pairs(0.2, 0.4, (20,))
    alone, copies = (paired_bootstrap([one] * n, "chrf", 200, seed=1) for n in (1, 40))
    width = alone.high - alone.low
    assert copies.high - copies.low == pytest.approx(width, rel=0.25)
    others = paired_bootstrap(pairs(0.2, 0.4, (20,) * 40), "chrf", 200, seed=1)
    assert others.high - others.low < width / 2
