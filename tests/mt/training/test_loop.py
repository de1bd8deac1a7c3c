"""Training: the same bits after any interruption, on other devices, and under harm."""

import dataclasses
import json
import shutil

import equinox as eqx
import jax
import numpy as np
import pytest

from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.batching.batches import Batches
from gshard.mt.run import Run
from gshard.mt.training import programs
from gshard.mt.training.checkpoint import Checkpoints
from gshard.mt.training.loading import load_model
from gshard.mt.training.loop import Hooks, train
from tests.mt.runs import Notes, copied, losses, weights, with_devices, with_train


def test_the_loss_falls_and_is_written_down(whole):
    curve = losses(whole)
    assert list(curve) == list(range(1, 13))
    assert curve[12] < curve[1] - 0.3
    assert list(losses(whole, "dev")) == [4, 8, 12]
    last = whole.metrics()[-2]
    for name in ("tokens", "tokens_per_second", "share_of_matmul", "balance", "seconds"):
        assert last[name] > 0, name
    assert 0 <= last["overflow"] < 1
    assert last["skipped"] == 0


def test_tokens_are_those_of_the_batches(whole):
    batches = Batches(whole.tokens(), whole.config.batch)
    expected = sum(np.count_nonzero(batches[i]["target_segments"]) for i in range(12))
    assert whole.metrics()[-2]["tokens"] == expected


@pytest.mark.slow
def test_tensorboard_reads_the_same_figures(whole):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = accumulator.EventAccumulator(str(whole.folder / "tensorboard"))
    board.Reload()
    events = board.Scalars("train/nll")
    assert {e.step: np.float32(e.value) for e in events} == {
        step: np.float32(nll) for step, nll in losses(whole).items()
    }


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_bit_for_bit(whole, tmp_path):
    """With all that a crash leaves: a damaged checkpoint, and a journal that knows too much."""
    first = copied(whole, tmp_path / "run", steps=6)
    train(first, Hooks(Notes()))
    for file in (first.folder / "checkpoints" / "6").rglob("d/*"):
        file.write_bytes(b"")
    with (first.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 7, "nll": 99.0}) + '\n{"kind": "tr')
    notes = Notes()
    second = Run.create(tmp_path / "run", with_train(first.config, steps=12))
    train(second, Hooks(notes))
    assert "checkpoints/6 is damaged" in notes.notes[0]
    assert notes.notes[1:] == ["resuming at step 4"]
    assert losses(second) == losses(whole)
    for a, b in zip(weights(second), weights(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_fall_that_is_decided_late_is_as_one_that_was_planned(whole, tmp_path):
    def falling(config):
        return dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, fall=4, end=12)
        )

    first = copied(whole, tmp_path / "late", steps=8)
    planned = Run.create(tmp_path / "planned", falling(with_train(first.config, steps=12)))
    train(planned, Hooks(Notes()))
    train(first, Hooks(Notes()))
    late = Run.create(first.folder, planned.config)
    train(late, Hooks(Notes()))
    assert losses(late) == losses(planned)
    assert losses(late) != losses(whole)
    for a, b in zip(weights(late), weights(planned), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(UserError, match=r"optimizer.fall was 4 and is now 0"):
        Run.create(late.folder, first.config)


def slowly(**devices):
    return pytest.param(devices, marks=pytest.mark.slow, id=str(devices))


@pytest.mark.parametrize(
    "devices",
    [
        slowly(count=6),
        slowly(count=4),
        slowly(count=1),
        slowly(count=8, tensor=2),
        slowly(split_update=True),
    ],
)
def test_a_checkpoint_of_8_devices_goes_on_anywhere(whole, tmp_path, devices):
    """Also where 8 experts do not divide, and under other annotations."""
    moved = tmp_path / "run"
    shutil.copytree(whole.folder, moved)
    saved = weights(whole, "12")
    longer = with_devices(with_train(whole.config, steps=14), **devices)
    train(Run.create(moved, longer), Hooks(Notes()))
    for a, b in zip(weights(Run.open(moved), "12"), saved, strict=True):
        np.testing.assert_array_equal(a, b)
    found, expected = losses(Run.open(moved)), losses(longer_whole(whole, tmp_path))
    assert list(found) == list(range(1, 15))
    for step in (13, 14):
        assert found[step] == pytest.approx(expected[step], abs=2e-4)


def longer_whole(whole, tmp_path):
    """The same two steps more on the 8 devices that the checkpoint came from."""
    folder = tmp_path / "longer"
    shutil.copytree(whole.folder, folder)
    run = Run.create(folder, with_train(whole.config, steps=14))
    train(run, Hooks(Notes()))
    return run


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_not_learned_from(whole):
    """The step's guard leaves every weight as it was, and counts."""
    strategy = hosts.strategy(whole.config.devices)
    setup = programs.Setup(whole.config, whole.model_config, jax.devices(), strategy)
    made = programs.Programs(setup)
    batches = Batches(whole.tokens(), whole.config.batch)
    state = made.first_state()
    ruined = eqx.tree_at(
        lambda s: s.train.model.decoder_norm.scale,
        state,
        state.train.model.decoder_norm.scale * np.nan,
    )
    before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(ruined.train.model)]
    moments = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(ruined.train.opt_state)]
    after, figures = made.step(ruined, batches[1])
    assert (int(figures.skipped), int(figures.in_a_row), int(after.train.step)) == (1, 1, 1)
    for a, b in zip(jax.tree.leaves(after.train.model), before, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(after.train.opt_state), moments, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_training_gives_up_with_advice(whole, tmp_path):
    """A rate that destroys the weights: the guard stops it and says what to do."""
    config = dataclasses.replace(
        with_train(whole.config, patience=3, steps=40),
        optimizer=dataclasses.replace(whole.config.optimizer, learning_rate=1e6, rise=0),
    )
    wild = Run.create(tmp_path / "run", config)
    with pytest.raises(UserError, match=r"optimizer.learning_rate \(it is 1e\+06\)"):
        train(wild, Hooks(Notes()))
    skipped = [r["skipped"] for r in wild.metrics() if r["kind"] == "train"]
    assert skipped[-1] == 3


def test_other_settings_are_refused_for_a_run_that_is_there(whole):
    other = dataclasses.replace(whole.config, name="x")
    Run.create(whole.folder, other)  # a name changes nothing
    harmful = dataclasses.replace(
        whole.config, batch=dataclasses.replace(whole.config.batch, seed=3)
    )
    with pytest.raises(UserError, match=r"batch.seed was 0 and is now 3"):
        Run.create(whole.folder, harmful)


def test_a_folder_with_other_things_is_not_overwritten(whole, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="is not empty and not a run"):
        Run.create(tmp_path, whole.config)


def test_data_is_ready_before_the_device(whole):
    """Waiting for batches takes a small part of the time even of this smallest of models."""
    assert whole.metrics()[-2]["data_wait"] < 0.2


def test_checkpoints_say_which_there_are(whole):
    assert Checkpoints(whole.folder, read_only=True).steps[-1] == 12
    for which in ("7", "²", "٣", "9" * 5000, "012", ""):
        with pytest.raises(UserError, match=r"no checkpoint '.*best, last, untrained"):
            load_model(whole, which)


def test_a_number_of_a_folder_is_not_a_step_that_was_reached(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    (folder / "checkpoints" / "99").mkdir()
    notes = Notes()
    assert train(Run.open(folder), Hooks(notes)).step == 12
    assert "checkpoints/99 is damaged: it has no checksums.json" in notes.notes[0]
    assert notes.notes[1:] == ["step 12 is reached already"]


@pytest.mark.slow
def test_the_last_checkpoint_damaged_is_trained_again(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole.folder, folder)
    for file in (folder / "checkpoints" / "12").rglob("d/*"):
        file.write_bytes(b"")
    notes = Notes()
    assert train(Run.open(folder), Hooks(notes)).step == 12
    assert "checkpoints/12 is damaged" in notes.notes[0]
    for a, b in zip(weights(Run.open(folder)), weights(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_training_ends_when_another_process_has_entered(whole, tmp_path):
    run = copied(whole, tmp_path / "run", steps=6)
    with pytest.raises(UserError, match="somebody came"):
        train(run, Hooks(Notes(), intruder=lambda: "somebody came"))
    assert Checkpoints(run.folder).steps == []
