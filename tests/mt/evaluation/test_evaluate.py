"""Evaluation of made-up systems whose scores are known, resuming, and the command."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import sacrebleu

from gshard import cli
from gshard.commands.evaluate import average_table, comparable, notes, task_table
from gshard.errors import UserError
from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import Task
from gshard.mt.batching.tokens import in_memory
from gshard.mt.config import DataConfig, RunConfig
from gshard.mt.evaluation.evaluate import EvaluateConfig, System, evaluate, examples, from_training
from gshard.mt.evaluation.store import Store, Translation, held_out, tasks_of
from gshard.mt.evaluation.systems import batches_of, expert_loads
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import Checkpoints
from gshard.nn import Batch, GatingConfig, Strategy
from gshard.nn.step import eval_step
from tests.nn import models

TEXTS = ["The river saw the bridge.", "A doctor, at noon!", "Silver 3,000 harbours", "je ne sais"]


@dataclass(frozen=True)
class Hypothesis:
    text: str
    score: float = -1.0


class Fake:
    """A translator that returns what a function returns, and remembers what it was asked."""

    def __init__(self, says, stop_after=None):
        self.says, self.asked, self.stop_after = says, [], stop_after

    def translate(self, texts, target="en"):
        if self.stop_after is not None and len(self.asked) >= self.stop_after:
            raise KeyboardInterrupt
        self.asked += [(text, target) for text in texts]
        return [[Hypothesis(self.says(text, target)), Hypothesis("second")] for text in texts]


def system(translator, digest="a", step=7):
    return System(step, digest, 1000, lambda: translator)


@pytest.fixture
def run(corpus, tokenizer, tmp_path):
    return SimpleNamespace(folder=tmp_path, name="small", corpus=corpus, tokenizer=tokenizer)


@pytest.fixture
def references(corpus):
    """(source, target) -> reference, for both directions."""
    known = {}
    for language in corpus.languages:
        if corpus.count(language, "test"):
            for foreign, english in corpus.pairs(language, "test"):
                known[foreign, "en"] = english
                known[english, language] = foreign
    return known


def test_a_perfect_system_and_a_copying_one(run, references):
    perfect = Fake(lambda text, target: references[text, target])
    found = evaluate(run, EvaluateConfig(), lambda which: system(perfect))
    assert found == json.loads((run.folder / "evaluation.json").read_text())
    assert set(found["tasks"]) == {"de-en", "ru-en", "fr-en", "en-de", "en-ru", "en-fr"} & set(
        found["tasks"]
    )
    assert found["checkpoint"] == 7
    assert found["weights"] == 1000
    for task in found["tasks"].values():
        assert task["bleu"] == pytest.approx(100)
        assert task["chrf"] == pytest.approx(100)
        assert task.get("few", False) == (task["sentences"] < 10)
    assert found["averages"]["all"]["bleu"] == pytest.approx(100)
    copying = Fake(lambda text, target: text)
    found = evaluate(run, EvaluateConfig(), lambda which: system(copying, "b"))
    for task in found["tasks"].values():
        assert task["bleu"] == task["copy_bleu"] < 100
        assert task["chrf"] == task["copy_chrf"]


def test_the_scores_in_the_file_are_those_of_the_sentences(run, corpus):
    config = EvaluateConfig(languages=("ru",), untrained=True)
    systems = {
        "best": system(Fake(lambda text, target: text[::2])),
        "untrained": system(Fake(lambda text, target: "the"), "c", 0),
    }
    found = evaluate(run, config, systems.__getitem__)["tasks"]["ru-en"]
    foreign, english = zip(*corpus.pairs("ru", "test"), strict=True)
    said = [text[::2] for text in foreign]
    assert found["bleu"] == sacrebleu.corpus_bleu(said, [english]).score
    assert found["copy_bleu"] == sacrebleu.corpus_bleu(foreign, [english]).score
    nearest = from_training(corpus, Task("ru", "en"), foreign)
    assert found["nearest_bleu"] == sacrebleu.corpus_bleu(nearest, [english]).score
    the = ["the"] * len(english)
    assert found["untrained_bleu"] == sacrebleu.corpus_bleu(the, [english]).score
    assert found["train_pairs"] == corpus.count("ru")
    assert found["sentences"] == corpus.count("ru", "test")


def test_rounded_weights_are_measured_beside_the_usual(run, references):
    """On the same sentences, kept by themselves, and with the difference in a sentence."""
    perfect = Fake(lambda text, target: references[text, target])
    worse = Fake(lambda text, target: references[text, target][1:])

    def rounded(usual):
        assert usual.digest == "a"
        return replace(usual, digest="a-int8", translator=lambda: worse, numbers="int8")

    found = evaluate(run, EvaluateConfig(), lambda which: system(perfect), open_rounded=rounded)
    mean = found["averages"]["all"]
    assert mean["chrf"] == pytest.approx(100)
    assert mean["chrf"] - mean["rounded_chrf"] > 1
    assert found["rounded"] == "int8"
    assert any(
        line.startswith("weights in int8: BLEU ") and f"({mean['rounded_chrf'] - 100:+.2f})" in line
        for line in notes(found, None, {})
    )
    folders = sorted(path.name for path in (run.folder / "translations").iterdir())
    assert folders == ["step-7-int8-test-beam-4-alpha-0.6", "step-7-test-beam-4-alpha-0.6"]
    again = evaluate(run, EvaluateConfig(), lambda which: system(Fake(None)))
    assert "rounded" not in again
    assert again["averages"]["all"]["chrf"] == mean["chrf"]


def test_all_tasks_into_one_language_go_together(run):
    class Calls(Fake):
        calls = 0

        def translate(self, texts, target="en"):
            self.calls += 1
            assert sorted(texts, key=len, reverse=True) == texts
            return super().translate(texts, target)

    calls = Calls(lambda text, target: text)
    found = evaluate(run, EvaluateConfig(), lambda which: system(calls))
    assert calls.calls == len({task["target"] for task in found["tasks"].values()})


def test_resuming_translates_nothing_twice(run, monkeypatch):
    monkeypatch.setattr("gshard.mt.evaluation.store.CHUNK", 16)

    def says(text, target):
        return text.upper()

    whole = Fake(says)
    config = EvaluateConfig()
    expected = evaluate(run, config, lambda which: system(whole))
    assert len(whole.asked) == len(set(whole.asked)) > 40
    other = SimpleNamespace(**{**vars(run), "folder": run.folder / "other"})
    stopped = Fake(says, stop_after=32)
    with pytest.raises(KeyboardInterrupt):
        evaluate(other, config, lambda which: system(stopped))
    assert len(stopped.asked) == 32
    # A crash may also cut a line off in the middle.
    (lines,) = other.folder.glob("translations/*/translations.jsonl")
    with lines.open("ab") as file:
        file.write(b'["de-en", "ein an')
    resumed = Fake(says)
    found = evaluate(other, config, lambda which: system(resumed))
    assert not set(resumed.asked) & set(stopped.asked)
    assert set(resumed.asked) | set(stopped.asked) == set(whole.asked)
    assert {**found, "seconds": 0} == {**expected, "seconds": 0}
    evaluate(other, config, lambda which: system(Fake(None)))  # nothing is left to say


def test_only_what_changed_is_translated_again(run):
    def asked(config, digest="a", step=7):
        fake = Fake(lambda text, target: text)
        evaluate(run, config, lambda which: system(fake, digest, step))
        return len(fake.asked)

    few = EvaluateConfig(languages=("de",), sentences=5)
    first = asked(few)
    assert first > 0
    assert asked(few) == 0
    assert asked(replace(few, examples=1)) == 0
    more = replace(few, sentences=9)
    assert asked(more) == (first // 5) * 4  # the five are among the nine
    assert asked(replace(few, beam=1)) == first
    assert asked(replace(few, alpha=1.0)) == first
    assert asked(replace(few, split="dev")) > 0
    assert asked(few, step=8) == first
    assert asked(few, digest="b") == first  # the run was trained anew


def test_the_store_keeps_line_breaks_and_odd_characters(tmp_path):
    odd = "a\nb\u2028c\t\U0001f600"
    Store(tmp_path / "s", {}).add([("en", odd, Translation(odd, float("-inf")))])
    assert Store(tmp_path / "s", {}).get("en", odd) == Translation(odd, float("-inf"))
    assert Store(tmp_path / "s", {"other": 1}).get("en", odd) is None


def test_examples_are_always_the_same_ones(corpus, tokenizer):
    (task, *_) = tasks_of(tokenizer, ["de"])
    (held,) = held_out(corpus, [task])
    said = {str(task): [Translation(s.upper(), -1.0) for s in held.sources]}
    three, five = (examples(held, said, n) for n in (3, 5))
    assert five[:3] == three
    for example in five:
        assert example["translation"] == example["source"].upper()
        assert example["reference"] == dict(corpus.pairs("de", "test"))[example["source"]]


@pytest.mark.slow
def test_expert_loads_beside_one_sentence_at_a_time(corpus, tokenizer):
    config = models.config(
        source_vocab=tokenizer.source_size,
        target_vocab=tokenizer.target_size,
        groups=8,
        gating=GatingConfig(eval_capacity_factor=0.5),
    )
    model = models.model(config)
    tasks = tasks_of(tokenizer, ["fr"])
    sets = held_out(corpus, tasks, "train", 6)
    found = expert_loads(model, tokenizer, sets, (64, 64))
    # Unpacked, one row each, capacity to spare: the counts of a model that drops nothing.
    roomy = models.model(replace(config, groups=None, gating=GatingConfig(eval_capacity_factor=4)))
    step = jax.jit(lambda batch: eval_step(roomy, batch))
    for held in sets:
        name, sums = str(held.task), [0, 0]
        for source, target in zip(held.sources, held.references, strict=True):
            tokens = in_memory(tokenizer, held.task, [source], [target])
            (arrays,) = batches_of(tokens, 1, 64, 64)
            metrics = step(Batch(*(arrays[n] for n in Batch._fields)))
            sums[0] += len(tokens.source[0]) * np.asarray(metrics.encoder.load)
            sums[1] += len(tokens.target[0]) * np.asarray(metrics.decoder.load)
        for side, total in zip(("encoder", "decoder"), sums, strict=True):
            expected = total / total.sum(axis=1, keepdims=True)
            np.testing.assert_allclose(found[side][name], expected, atol=2e-5)
            assert np.ptp(expected) > 0.05
    assert expert_loads(models.model(replace(config, experts=0)), tokenizer, sets, (64, 64)) == {}


@pytest.mark.slow
def test_expert_loads_on_many_devices(corpus, tokenizer):
    config = models.config(
        source_vocab=tokenizer.source_size, target_vocab=tokenizer.target_size, experts=8
    )
    model = models.model(config)
    sets = held_out(corpus, tasks_of(tokenizer, ["ru"])[:1], "test", 6)
    one, many = (
        expert_loads(model, tokenizer, sets, (64, 64), s) for s in (Strategy(), Strategy(8))
    )
    for side in one:
        np.testing.assert_allclose(one[side]["ru-en"], many[side]["ru-en"], atol=1e-5)


def test_what_a_user_can_mend(run):
    def fails(match, **settings):
        with pytest.raises(UserError, match=match):
            evaluate(run, EvaluateConfig(**settings), lambda which: system(Fake(None)))

    fails(
        "no language 'du'.*did you mean 'de'|no language 'du'.*did you mean 'ru'", languages=("du",)
    )
    fails("no split 'tset'; did you mean 'test'", split="tset")
    fails("-1 sentences", sentences=-1)
    fails("beam of 0", beam=0)
    fails("alpha is -1", alpha=-1)
    fails(r"alpha is 1e\+308", alpha=1e308)
    fails("a beam of 100,000,000,000,000,000,000 .* is the most", beam=10**20)
    fails("alpha is nan", alpha=float("nan"))


def test_no_held_out_text_says_what_there_is(corpus, tokenizer):
    manifest = json.loads(json.dumps(corpus.manifest))
    for splits in manifest["languages"].values():
        splits.pop("test", None)
    with pytest.raises(UserError, match=r"no test sentences of de.* there are train and dev ones"):
        held_out(replace(corpus, manifest=manifest), tasks_of(tokenizer, ["de"]))


def cells(table):
    columns = [list(column.cells) for column in table.columns]
    return [
        dict(zip([c.header for c in table.columns], r, strict=True))
        for r in zip(*columns, strict=True)
    ]


def test_the_tables_say_what_the_files_say(run):
    config = EvaluateConfig(languages=("de", "ru"))
    result = evaluate(run, config, lambda which: system(Fake(lambda text, target: text)))
    same = {key: result[key] for key in ("split", "beam", "alpha")}
    zero = {name: {**task, "bleu": task["bleu"] - 2.5} for name, task in result["tasks"].items()}
    baselines = {**same, "tasks": zero}
    compared = comparable(result, baselines)
    assert set(compared) == set(result["tasks"])
    rows = cells(task_table(result, compared))
    pairs = [int(row["pairs"].replace(",", "")) for row in rows]
    assert pairs == sorted(pairs, reverse=True)
    for row in rows:
        task = result["tasks"][row["task"]]
        assert row["BLEU"] == f"{task['bleu']:.1f}"
        assert row["delta"] == "+2.5"
        assert "untrained" not in row
    means = cells(average_table(result, compared))
    assert {row["delta"] for row in means} == {"+2.5"}
    assert means[0]["BLEU"] == f"{result['averages']['all']['bleu']:.1f}"
    # Scores of other sentences or another search are not subtracted.
    assert comparable(result, {**baselines, "beam": 1}) == {}
    zero["de-en"]["sentences"] += 1
    assert "de-en" not in comparable(result, baselines)
    said = notes(result, baselines, comparable(result, baselines))
    assert result["signatures"]["bleu"] in said[0]
    assert any("1 tasks have no baseline" in line for line in said)
    assert comparable(result, None) == {}


@pytest.fixture
def real(corpus, tokenizer, tmp_path):
    """A run with a checkpoint."""
    dims = models.config(experts=8)
    data, batch = DataConfig(str(corpus.folder)), BatchConfig(8, 24, 24)
    made = Run.create(tmp_path / "real", RunConfig(dims, "real", data, tokenizer.config, batch))
    tokenizer.save(made.folder / "vocabulary")
    return made


def command(*arguments):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(argument) for argument in arguments])
    return stop.value.code


@pytest.mark.slow
def test_the_command_from_a_checkpoint_to_the_file(real, capsys):
    checkpoints = Checkpoints(real.folder)
    checkpoints.save(3, models.model(real.model_config), {"count": np.zeros(3)}, {}, dev_nll=3.0)
    checkpoints.close()
    asked = ("evaluate", real.folder, "--languages", "ru", "--sentences", "2", "--beam", "1")
    assert command(*asked) == 0
    shown = capsys.readouterr().out
    found = json.loads((real.folder / "evaluation.json").read_text())
    assert (found["checkpoint"], found["run"], found["beam"]) == (3, "real", 1)
    assert set(found["tasks"]) == {"ru-en", "en-ru"}
    assert found["tasks"]["ru-en"]["sentences"] == 2
    assert "tok:13a" in shown
    assert "ru-en" in shown
    for side in ("encoder", "decoder"):
        shares = np.array(found["experts"][side]["ru-en"])
        assert shares.shape == (1, 8)
        np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--languages", "rru"), "no language 'rru'; did you mean 'ru'?"),
        (("--split", "tset"), "did you mean 'test'?"),
        (("--beam", "70000"), "a beam of 70,000"),
        (("--alpha", "-2"), "alpha is -2"),
        (("--checkpoint", "bset"), "no checkpoints yet"),
    ],
)
def test_the_command_with_bad_input(real, capsys, arguments, said):
    assert command("evaluate", real.folder, *arguments) == 1
    assert said in capsys.readouterr().err


def test_the_command_without_a_run(tmp_path, capsys):
    assert command("evaluate", tmp_path / "none") == 1
    assert "no run in" in capsys.readouterr().err
