"""A release is the run it was made from, in one file, for any machine."""

import dataclasses
import json
import struct

import jax
import ml_dtypes
import numpy as np
import pytest

from gshard import cli
from gshard.mt.config import read
from gshard.mt.errors import UserError
from gshard.mt.release.make import anywhere, make_release
from gshard.mt.run import Run
from gshard.mt.training import loop
from gshard.mt.training.checkpoint import named
from gshard.mt.training.loading import load_model
from gshard.mt.training.weights import WEIGHTS, read_weights, write_weights
from tests.mt.runs import Notes, make_run


@pytest.fixture
def run(tmp_path, tokenizer):
    return make_run(tmp_path / "run", tokenizer)


def test_weights_are_what_was_written_and_aligned(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a.b": rng.normal(size=(3, 5)).astype(np.float32),
        "ü": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "one": np.float32(2.5).reshape(()),
    }
    path = tmp_path / "some.safetensors"
    write_weights(path, arrays, {"step": "3"})
    found, note = read_weights(path)
    assert note == {"step": "3"}
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    (size,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert size % 8 == 0
    header = json.loads(path.read_bytes()[8 : 8 + size])
    assert header["a.b"] == {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}


@pytest.mark.parametrize("cut", [4, 40, -1])
def test_damaged_weights_are_told(tmp_path, cut):
    path = tmp_path / "some.safetensors"
    write_weights(path, {"a": np.ones((4, 4), np.float32)}, {})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match="is damaged"):
        read_weights(path)


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_a_release_has_the_weights_of_its_step(run, tmp_path, precision):
    made = Run.open(make_release(run, tmp_path / "out", "10", precision))
    want, step = load_model(run, "10")
    found, released = load_model(made)
    assert released == step == 10
    for name, leaf in named(want).items():
        rounded = np.asarray(leaf).astype(precision).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(named(found)[name]), rounded)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    assert (made.folder / WEIGHTS).stat().st_size < 1.1 * sum(
        leaf.size * (2 if precision == "bfloat16" else 4) for leaf in jax.tree.leaves(want)
    ) + 20_000
    with pytest.raises(UserError, match="release of step 10"):
        load_model(made, "5")


def test_a_release_names_nothing_of_the_machine_and_runs_anywhere(run, tmp_path):
    tuned = dataclasses.replace(run.config.model.tuned(), dtype="bfloat16")
    config = anywhere(dataclasses.replace(run.config, model=tuned))
    assert (config.model.attention, config.model.dispatch) == ("plain", "index")
    assert config.model.dtype == "float32"
    assert config.model.stacked == tuned.stacked  # names of weights depend on it
    make_release(run, tmp_path / "out")
    released = read(tmp_path / "out" / "config.json")
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    assert released.model == Run.open(run.folder).config.model


def test_the_card_says_what_the_model_is(run, tmp_path):
    evaluation = {
        "version": 1,
        "checkpoint": 10,
        "beam": 4,
        "split": "test",
        "signatures": {"bleu": "SIGNATURE"},
        "averages": {"all": {"tasks": 1, "bleu": 12.34, "chrf": 45.67}},
        "tasks": {"de-en": {"train_pairs": 1234, "bleu": 12.34, "chrf": 45.67}},
    }
    (run.folder / "evaluation.json").write_text(json.dumps(evaluation))
    make_release(run, tmp_path / "ten", "10")
    card = (tmp_path / "ten" / "README.md").read_text()
    for part in ("8 experts", "step 10", "| de-en | 1,234 | 12.3 | 45.7 |", "SIGNATURE"):
        assert part in card
    make_release(run, tmp_path / "five", "5")  # other weights than those of the scores
    assert "not evaluated" in (tmp_path / "five" / "README.md").read_text()


def test_mistakes_are_told(run, tmp_path):
    made = make_release(run, tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        make_release(run, made)
    with pytest.raises(UserError, match="is a release"):
        loop.train(Run.open(made), Notes())
    config = json.loads((made / "config.json").read_text())
    config["model"]["hidden_dim"] += 1
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="another model"):
        load_model(Run.open(made))


@pytest.mark.slow
def test_the_command_and_translating_with_it(run, tmp_path, capsys):
    out = tmp_path / "out"
    text = tmp_path / "text"
    text.write_text("ein Haus\nzwei\n")

    def said(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([*map(str, arguments)])
        assert ended.value.code in (0, None)
        return capsys.readouterr().out

    assert WEIGHTS in said("release", run.folder, "--out", out, "--precision", "float32")
    want = said("translate", run.folder, text, "--devices", 1, "--checkpoint", "best")
    assert said("translate", out, text, "--devices", 1) == want
