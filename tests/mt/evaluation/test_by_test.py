"""Far, near and other domains: each test has its own scores, and those of the copier."""

import numpy as np
import pytest
import sacrebleu

from gshard.commands import show
from gshard.commands.evaluate import table_by_test
from gshard.mt.batching.tokenizer import Task
from gshard.mt.evaluation.evaluate import EvaluateConfig, evaluate, from_training
from gshard.mt.evaluation.store import held_out, tasks_of
from tests.mt.evaluation.test_evaluate import Fake, run, system

__all__ = ["run"]  # a fixture


def test_each_test_has_its_own_scores_and_the_copiers(run, corpus):
    labels = {}

    def labelled(language, split):
        for number, (foreign, english) in enumerate(corpus.pairs(language, split)):
            label = labels[foreign] = ("near", "far", "near", "verses")[number % 4]
            yield foreign, english, label

    class Labelled:
        def __getattr__(self, name):
            return labelled if name == "labelled" else getattr(corpus, name)

    run.corpus = Labelled()
    said = Fake(lambda text, target: text[::2])
    found = evaluate(run, EvaluateConfig(languages=("ru",)), lambda which: system(said))
    task = found["tasks"]["ru-en"]
    pairs = list(corpus.pairs("ru", "test"))
    nearest = from_training(corpus, Task("ru", "en"), [foreign for foreign, _ in pairs])
    assert set(task["tests"]) == {"near", "far", "verses"}
    for test, scores in task["tests"].items():
        mine = [n for n, (foreign, _) in enumerate(pairs) if labels[foreign] == test]
        english = [[pairs[n][1] for n in mine]]
        assert scores["sentences"] == len(mine)
        assert scores.get("few", False) == (len(mine) < 10)
        own = [pairs[n][0][::2] for n in mine]
        assert scores["bleu"] == sacrebleu.corpus_bleu(own, english).score
        assert scores["chrf"] == sacrebleu.corpus_chrf(own, english, word_order=2).score
        copied = [nearest[n] for n in mine]
        assert scores["nearest_bleu"] == sacrebleu.corpus_bleu(copied, english).score
    assert list(found["tests"]) == ["far", "near", "verses"]
    into = [each["tests"]["far"]["chrf"] for each in found["tasks"].values()]
    assert found["tests"]["far"]["all"]["chrf"] == pytest.approx(np.mean(into))
    with show.console.capture() as captured:
        show.console.print(table_by_test(found, found["tasks"]))
    lines = [line.split() for line in captured.get().splitlines() if line.strip()]
    assert [line[0] for line in lines[-3:]] == ["far", "near", "verses"]
    mean = found["tests"]["far"]["all"]
    keys = ("bleu", "chrf", "nearest_bleu", "nearest_chrf", "chrf")
    assert lines[-3][3:] == [f"{mean[key]:.1f}" for key in keys]
    # So many of each test, and of fewer the same ones.
    tasks = tasks_of(run.tokenizer, ["ru"])[:1]
    some, more = (held_out(run.corpus, tasks, "test", most)[0] for most in (2, 4))
    assert sorted(some.tests) == ["far", "far", "near", "near", "verses", "verses"]
    assert set(some.sources) < set(more.sources)
