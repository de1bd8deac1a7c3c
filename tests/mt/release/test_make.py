"""A release is the run it was made from, in one file, for any machine."""

import dataclasses
import json
import random
import shutil
import struct

import jax
import ml_dtypes
import numpy as np
import pytest

from gshard import cli
from gshard.errors import UserError
from gshard.mt.config import DataConfig, read
from gshard.mt.decoding.detect import detector_of
from gshard.mt.decoding.engines import EngineConfig, open_translator
from gshard.mt.release import make
from gshard.mt.release.make import anywhere, make_release, verify
from gshard.mt.run import Run
from gshard.mt.training import loop
from gshard.mt.training.loading import load_model
from gshard.mt.training.weights import (
    VERIFIED,
    WEIGHTS,
    WeightsFile,
    named,
    release_problem,
    verified_in,
    write_checksums,
    write_weights,
)
from tests.mt.runs import Notes, make_run
from tests.mt.samples import sentence


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tokenizer):
    return make_run(tmp_path_factory.mktemp("saved") / "run", tokenizer).folder


@pytest.fixture
def run(saved, tmp_path):
    """A run of one's own to damage: a copy, for saving takes longer."""
    return Run.open(shutil.copytree(saved, tmp_path / "run"))


def test_weights_are_what_was_written_and_aligned(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "a.b": rng.normal(size=(3, 5)).astype(np.float32),
        "ü": rng.normal(size=(7,)).astype(ml_dtypes.bfloat16),
        "one": np.float32(2.5).reshape(()),
        "transposed": rng.normal(size=(3, 5)).astype(np.float32).T,
    }
    path = tmp_path / "some.safetensors"
    write_weights(path, arrays, {"step": "3"})
    found = WeightsFile(path)
    assert found.note == {"step": "3"}
    assert found.shapes == {name: array.shape for name, array in arrays.items()}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
        every = tuple(slice(None) for _ in array.shape)
        np.testing.assert_array_equal(found.part(name, every), array)
    np.testing.assert_array_equal(
        found.part("a.b", (slice(1, 3), slice(None, 2))), arrays["a.b"][1:3, :2]
    )
    (size,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert size % 8 == 0


@pytest.mark.parametrize("cut", [4, 40, -1])
def test_damaged_weights_are_told(tmp_path, cut):
    path = tmp_path / "some.safetensors"
    write_weights(path, {"a": np.ones((4, 4), np.float32)}, {})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match="is damaged"):
        WeightsFile(path)


FOUR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("[" * 100_000, "is damaged"),
        ('{"a":' * 100_000, "is damaged"),
        ({"a": FOUR, "b": FOUR}, "is damaged"),  # overlapping
        ({"a": {**FOUR, "shape": [1], "data_offsets": [12, 16]}}, "is damaged"),  # a hole
        ({"a": {**FOUR, "shape": [2**62, 4]}}, "is damaged"),
        ({"a": {**FOUR, "shape": [-4]}}, "is damaged"),
        ({"__metadata__": {"step": 3}, "a": FOUR}, "is damaged"),
        ({"a": {**FOUR, "dtype": "I32"}}, "a holds I32, and not F32 or BF16"),
    ],
)
def test_headers_that_lie(tmp_path, header, said):
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    path = tmp_path / "some.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(UserError, match=said):
        WeightsFile(path)


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
        "alpha": 1.4,
        "split": "test",
        "signatures": {"bleu": "SIGNATURE"},
        "averages": {"all": {"tasks": 1, "bleu": 12.34, "chrf": 45.67}},
        "tests": {"far": {"all": {"tasks": 1, "bleu": 8.0, "chrf": 40.0, "nearest_chrf": 20.0}}},
        "tasks": {"de-en": {"train_pairs": 1234, "bleu": 12.34, "chrf": 45.67}},
    }
    (run.folder / "evaluation.json").write_text(json.dumps(evaluation))
    make_release(run, tmp_path / "ten", "10")
    card = (tmp_path / "ten" / "README.md").read_text()
    for part in (
        "8 experts",
        "step 10",
        "alpha 1.4",
        "| de-en | 1,234 | 12.3 | 45.7 |",
        "| test: far | 1 | 8.0 | 40.0 | 20.0 |",
        "SIGNATURE",
    ):
        assert part in card
    make_release(run, tmp_path / "five", "5")  # other weights than those of the scores
    assert "not evaluated" in (tmp_path / "five" / "README.md").read_text()


def test_the_card_names_where_the_text_is_from(run, corpus):
    (origin,) = set(corpus.read("ru")["origin"].to_pylist())
    here = dataclasses.replace(run.config, data=DataConfig(str(corpus.folder)))
    card = make.card(dataclasses.replace(run, config=here), 5, 1, 1, "float32")
    assert f"Sources: ` {origin} ` 100%." in card


def test_the_card_has_examples_that_nobody_chose(run, tmp_path):
    tasks = {f"l{i}-en": {"train_pairs": 100 - i, "bleu": 1.0, "chrf": 2.0} for i in range(9)}
    examples = [
        {"task": task, "source": f"{word} `of` {task}", "reference": "*r*", "translation": ""}
        for word in ("first", "second")
        for task in tasks
    ]
    evaluation = {
        "version": 1,
        "checkpoint": 10,
        "beam": 4,
        "alpha": 1.4,
        "split": "test",
        "signatures": {},
        "averages": {},
        "tasks": dict(reversed(tasks.items())),
        "examples": list(reversed(examples[:9])) + examples[9:],
    }
    (run.folder / "evaluation.json").write_text(json.dumps(evaluation))
    make_release(run, tmp_path / "ten", "10")
    _, _, section = (tmp_path / "ten" / "README.md").read_text().partition("## Examples")
    section, _, _ = section.partition("## ")
    shown = [line for line in section.splitlines() if line.startswith("- source")]
    assert shown == [f"- source: `` first `of` l{i}-en ``" for i in (0, 2, 4, 6, 8)]
    assert section.count("- reference: ` *r* `\n- translation: (nothing)") == 5
    make_release(run, tmp_path / "five", "5")
    assert "## Examples" not in (tmp_path / "five" / "README.md").read_text()


def test_mistakes_are_told(run, tmp_path):
    made = make_release(run, tmp_path / "out")
    with pytest.raises(UserError, match="exists already"):
        make_release(run, made)
    with pytest.raises(UserError, match="is a release"):
        loop.train(Run.open(made), loop.Hooks(Notes()))


def edited(path, change):
    """A JSON file with something changed in its objects."""
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def test_a_setting_that_was_changed_is_told(run, tmp_path):
    """Translations were others, and the exit status 0."""
    made = make_release(run, tmp_path / "out")
    edited(made / "config.json", lambda config: config["model"]["gating"].update(top_k=1))
    with pytest.raises(UserError, match=r"out is damaged: config\.json is not as it was written"):
        load_model(Run.open(made))


def flip(path, byte, bit):
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("name", [*VERIFIED, "checksums.json"])
def test_no_flipped_bit_is_loaded(run, tmp_path, name):
    made = make_release(run, tmp_path / "out")
    path, draw = made / name, random.Random(name)
    whole, before = path.read_bytes(), Run.open(made)
    for _ in range(30):
        flip(path, draw.randrange(len(whole)), draw.randrange(8))
        with pytest.raises(UserError, match=r"out is damaged: "):
            raise_problem(before)
        path.write_bytes(whole)
    assert release_problem(before) == ""
    path.unlink()
    if name != "checksums.json":
        with pytest.raises(UserError, match=rf"{name} is missing"):
            raise_problem(before)


def raise_problem(run):
    if found := release_problem(run):
        raise UserError(found)


def test_a_release_of_an_earlier_version_is_loaded_and_said_to_be_one(run, tmp_path, capsys):
    made = make_release(run, tmp_path / "out")
    (made / "checksums.json").unlink()
    load_model(Run.open(made))
    said = capsys.readouterr().err
    assert "has no checksums.json" in said
    assert said.count("\n") == 1
    with pytest.raises(UserError, match="whether they are those that were released is unknown"):
        verify(Run.open(made))
    edited(made / "config.json", lambda config: config["model"].update(hidden_dim=99))
    with pytest.raises(UserError, match="another model"):
        load_model(Run.open(made))


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite(run, tmp_path, value):
    made = make_release(run, tmp_path / "out", precision="float32")
    weights = WeightsFile(made / WEIGHTS)
    arrays = {name: weights[name] for name in weights.shapes}
    name = list(arrays)[3]
    arrays[name].flat[-1] = value
    write_weights(made / WEIGHTS, arrays, weights.note)
    write_checksums(made, verified_in(made))  # by whoever changed them
    for load in (load_model, lambda run: open_translator(run, engine=EngineConfig("onnx"))):
        with pytest.raises(UserError, match=rf"{name} holds values that are not finite"):
            load(Run.open(made))


@pytest.mark.parametrize("step", ["²", "x", "9" * 5000, "-1", ""])
def test_a_step_that_is_none(run, tmp_path, step):
    made = make_release(run, tmp_path / "out")
    weights = WeightsFile(made / WEIGHTS)
    write_weights(made / WEIGHTS, {n: weights[n] for n in weights.shapes}, {"step": step})
    write_checksums(made, verified_in(made))
    with pytest.raises(UserError, match="is damaged: its step is"):
        load_model(Run.open(made))


def test_verifying_by_the_command(run, tmp_path, capsys):
    made = make_release(run, tmp_path / "out")
    (made / "README.md").write_text("edited")  # which may be
    for arguments, code, said in (
        ((made, "--verify"), None, "every file matches its checksum"),
        ((run.folder, "--verify"), 1, "is not a release"),
        ((run.folder,), 1, "either --out"),
        ((made, "--verify", "--out", tmp_path / "x"), 1, "either --out"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["release", *map(str, arguments)])
        captured = capsys.readouterr()
        assert (ended.value.code or None, captured.err.count("\n")) == (code, int(code or 0))
        assert said in " ".join((captured.out + captured.err).split())
    flip(made / WEIGHTS, -1, 0)
    with pytest.raises(UserError, match=r"weights\.safetensors is not as it was written"):
        verify(Run.open(made))


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


def test_a_release_says_what_it_was_made_from(tokenizer, corpus, tmp_path):
    run = make_run(tmp_path / "run", tokenizer, corpus.folder)
    scores = {"train_pairs": 600, "bleu": 1.5, "chrf": 2.5}
    evaluation = {"version": 1, "checkpoint": 10, "beam": 4, "split": "test", "signatures": {}}
    evaluation |= {"alpha": 0.6, "averages": {}, "tasks": {"de-en": scores}, "examples": []}
    (run.folder / "evaluation.json").write_text(json.dumps(evaluation))
    made = make_release(run, tmp_path / "out", "10", "float32")
    found = json.loads((made / "release.json").read_text())
    assert found["command"] == "gshard release run --out out --checkpoint 10 --precision float32"
    assert found["licences"] == ["the user's own"]
    pairs = corpus.count("de")
    assert found["directions"]["de-en"] == {"pairs": pairs, "bleu": 1.5, "chrf": 2.5}
    assert found["directions"]["en-de"] == {"pairs": pairs, "bleu": None, "chrf": None}
    assert detector_of(Run.open(made)).detect(sentence(1))[0].language == "en"
    verify(Run.open(made))
    for name in ("release.json", "detector.safetensors"):
        whole = (made / name).read_bytes()
        flip(made / name, -1, 0)
        with pytest.raises(UserError, match=f"{name} is not as it was written"):
            verify(Run.open(made))
        (made / name).unlink()
        with pytest.raises(UserError, match=f"{name} is missing"):
            load_model(Run.open(made))
        (made / name).write_bytes(whole)
    again = make_release(Run.open(made), tmp_path / "again")
    assert json.loads((again / "release.json").read_text())["licences"] is None
