"""The table of text that is far: its scores are sacreBLEU's, and a sentence is drawn for all."""

import json
import tomllib
from pathlib import Path

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


def test_outputs_that_are_training_sentences_are_counted_and_scored_by_themselves():
    held = [HeldOut(Task(name, "en"), ("x", "y"), ("a b c", "d e f"), 9, ("far", "near"))
            for name in ("de", "fr")]  # fmt: skip
    made = [("a b c", "d e f"), ("known", "d e f")]
    found = studied_far.reciting(
        list(zip(held, made, strict=True)), {"known"}, {"de": "high", "fr": "low"}
    )
    assert found["far"] == {
        "all": 0.5,
        "high": 0.0,
        "low": 1.0,
        "chrf": score(["known"], ["a b c"]).chrf,
        "chrf of others": score(["a b c"], ["a b c"]).chrf,
    }
    assert found["near"]["all"] == 0
    assert "chrf" not in found["near"]


def test_the_page_has_the_figures_of_the_file_and_the_plan_is_the_one_that_was_run():
    results = json.loads(Path("docs/results/figure/far.json").read_text())
    page = Path("docs/results/translation.md").read_text()
    rows = {cells[0].strip(): cells for line in page.splitlines()
            if len(cells := line.strip("|").split("|")) == 9}  # fmt: skip
    for where, label in (
        ("far all", "far"), ("far low", "far, low"),
        ("near all", "near"), ("near low", "near, low"),
        ("udhr all", "udhr"), ("udhr low", "udhr, low"),
        ("wesnoth all", "wesnoth"), ("quran-json all", "quran-json"),
    ):  # fmt: skip
        means, cells = results["means"][where], [cell.strip() for cell in rows[label]]
        test, group = where.split()
        assert int(cells[1]) == means["model"]["languages"]
        for cell, name in ((2, "model"), (3, "copier"), (4, "model over copier")):
            wanted = " ".join(f"{means[name][each]:.1f}" for each in ("mean", "low", "high"))
            assert cells[cell].replace("(", "").replace("to ", "").replace("+", "")[:-1] == wanted
        assert int(cells[5]) == means["model over copier"]["worse"]
        assert cells[8] == f"{results['recited'][test][group]:.1%}"
    scores = {row["task"]: row["tests"]["far"]["model"] for row in results["languages"]
              if row["tests"].get("far", {}).get("sentences", 0) >= 10}  # fmt: skip
    reached = sum(value >= 52 for value in scores.values())
    assert f"{reached} of {len(scores)} languages reach it" in page
    assert (max(scores, key=scores.get), min(scores, key=scores.get)) == ("da-en", "kab-en")
    far = results["means"]["far all"]["model"]["mean"]
    for other in ("README.md", "docs/results/paper.md", "docs/results/data.md"):
        assert f"{far:.1f}" in Path(other).read_text()
    plan = tomllib.loads(Path("studies/far.toml").read_text())
    assert plan["runs"][0]["steps"] == results["trained"]["mixture"]["step"]
