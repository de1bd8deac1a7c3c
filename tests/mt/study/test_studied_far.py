"""The table of text that is far: its scores are sacreBLEU's, and a sentence is drawn for all."""

import numpy as np

from benchmarks import studied_far
from gshard.mt.batching.tokenizer import Task
from gshard.mt.evaluation.scores import score
from gshard.mt.evaluation.store import HeldOut
from gshard.mt.study.results import statistics

ENGLISH = tuple(f"open the {n} files of folder {n * n}" for n in range(24))


def test_chrf_of_many_draws_is_sacrebleus():
    made = tuple(text.replace("open", "close")[: 5 + n] for n, text in enumerate(ENGLISH))
    counted = statistics("chrf", "en", made, ENGLISH)
    weight_DN = np.stack([np.ones(24), np.eye(24)[3], np.arange(24) % 3 == 1])
    found = studied_far.chrf(weight_DN @ counted)
    for drawn, value in zip(weight_DN, found, strict=True):
        kept = np.flatnonzero(drawn)
        wanted = score([made[i] for i in kept], [ENGLISH[i] for i in kept]).chrf
        np.testing.assert_allclose(value, wanted, rtol=1e-9)
    assert studied_far.chrf(np.zeros((1, counted.shape[1])))[0] == 0


def test_means_are_of_languages_with_enough_sentences_and_say_who_is_worse():
    tests = ("far",) * 20 + ("near",) * 4
    held = [HeldOut(Task(name, "en"), ENGLISH, ENGLISH, 100, tests) for name in ("de", "fr", "it")]
    wrong = tuple("x" for _ in ENGLISH)
    texts = [{"model": ENGLISH, "copier": wrong}] * 2 + [{"model": wrong, "copier": ENGLISH}]
    found = list(zip(held, texts, strict=True))
    assert studied_far.drawn_scores(found, "near") == {}
    drawn = studied_far.drawn_scores(found, "far")
    # Equal sentences of all languages are drawn together: equal outputs have equal scores.
    np.testing.assert_array_equal(drawn["de"]["copier"], drawn["fr"]["copier"])
    means = studied_far._means(drawn)
    assert means["model"]["mean"] > 66
    assert means["model over copier"]["worse"] == 1
    assert means["model over copier"]["low"] < means["model over copier"]["mean"] < 100
    assert "bilingual" not in means
