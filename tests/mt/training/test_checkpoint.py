"""Checkpoints: what is kept, what is damaged, what belongs to another model."""

import errno
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.config import RunConfig
from gshard.mt.run import ID, Run
from gshard.mt.training import checkpoint
from gshard.mt.training.checkpoint import Checkpoints, SaveError, id_of
from gshard.mt.training.weights import damage, named
from gshard.tensors.uneven import UnevenArray
from tests.nn import models


def state(value, experts=7):
    return {"w": jnp.full((experts, 4), value), "b": {"c": jnp.arange(3.0) + value}}


def saved(folder, losses, keep=2):
    checkpoints = Checkpoints(folder, keep)
    for step, loss in enumerate(losses, 1):
        checkpoints.save(step, state(step), {"count": jnp.array(step)}, {"step": step}, loss)
        checkpoints.wait()
    return checkpoints


def like(tree):
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)


LIKE = like(jax.eval_shape(lambda: state(0))), like({"count": np.zeros((), np.int32)})


@pytest.mark.parametrize(
    ("losses", "kept", "best"),
    [
        ([5, 4, 3, 2, 1], [4, 5], 5),
        ([5, 1, 3, 2, 4], [2, 4, 5], 2),
        ([1, 2, 3, 4, 5], [1, 4, 5], 1),
        ([2, 2, 3], [2, 3], 2),
        ([2, float("nan"), 3, 4], [1, 3, 4], 1),
    ],
)
def test_the_newest_and_the_best_are_kept(tmp_path, losses, kept, best):
    checkpoints = saved(tmp_path, losses)
    assert set(kept) <= set(checkpoints.steps)
    assert len(checkpoints.steps) == len(kept)
    assert checkpoints.best() == best
    checkpoints.close()


def test_what_is_restored_is_what_was_saved(tmp_path):
    saved(tmp_path, [3, 2]).close()
    model, rest, note, damaged = Checkpoints(tmp_path).restore_newest(*LIKE)
    jax.tree.map(np.testing.assert_array_equal, model, state(2))
    assert (int(rest["count"]), note, damaged) == (2, {"step": 2}, [])


def test_an_array_that_does_not_divide_is_saved_by_its_value(tmp_path):
    uneven = gshard.jit(lambda x: gshard.split(x, 0, 8))(np.arange(28.0).reshape(7, 4))
    assert isinstance(uneven, UnevenArray)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": uneven}, {"count": jnp.array(1)}, {"step": 1}, 1.0)
    checkpoints.wait()
    found = checkpoints.restore_some(1, {"model": {"w": like(jnp.zeros((7, 4)))}})
    assert found["note"] == {"step": 1}
    np.testing.assert_array_equal(found["model"]["w"], np.arange(28.0).reshape(7, 4))
    checkpoints.close()


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path):
    saved(tmp_path, [3, 2]).close()
    cut = [f for f in (tmp_path / "checkpoints" / "2" / "model").rglob("*") if f.is_file()]
    for file in cut:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    _, _, note, damaged = Checkpoints(tmp_path).restore_newest(*LIKE)
    assert note == {"step": 1}
    assert len(damaged) == 1
    assert "checkpoints/2 is damaged" in damaged[0]


def test_only_the_data_cut_is_noticed_too(tmp_path):
    """The metadata are whole, the arrays are not."""
    saved(tmp_path, [3, 2]).close()
    data = [f for f in (tmp_path / "checkpoints" / "2" / "model").rglob("d/*") if f.is_file()]
    assert data
    for file in data:
        file.write_bytes(file.read_bytes()[:-20])
    assert Checkpoints(tmp_path).restore_newest(*LIKE)[2] == {"step": 1}


def test_when_nothing_is_whole_the_error_says_so(tmp_path):
    saved(tmp_path, [3]).close()
    for file in (tmp_path / "checkpoints" / "1" / "optimizer").rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    with pytest.raises(UserError, match="no complete checkpoint is left"):
        Checkpoints(tmp_path).restore_newest(*LIKE)


def test_a_checkpoint_of_another_model_is_an_error_not_a_reshape(tmp_path):
    saved(tmp_path, [3]).close()
    other = like(state(0, experts=9)), LIKE[1]
    with pytest.raises(UserError, match=r"another model: w is \(7, 4\) there and \(9, 4\)"):
        Checkpoints(tmp_path).restore_newest(*other)
    missing = like({"b": state(0)["b"]}), LIKE[1]
    with pytest.raises(UserError, match=r"w is .* there and absent"):
        Checkpoints(tmp_path).restore_newest(*missing)


def test_names_are_paths():
    assert set(named(state(1))) == {"w", "b.c"}


def test_an_empty_folder_and_a_renamed_one_are_damaged(tmp_path):
    """Training took the larger number for its step, and had nothing left to do."""
    saved(tmp_path, [3, 2]).close()
    place = tmp_path / "checkpoints"
    (place / "99").mkdir()
    (place / "77").write_text("a file")
    shutil.copytree(place / "2", place / "9999")
    for strange in ("1²", "²", "٣", "1_0", "-5"):  # digits to Python, or a number
        (place / strange).mkdir()
    with pytest.raises(UserError, match=r"77 is damaged: it is no folder; `gshard train .* aside"):
        Checkpoints(tmp_path, read_only=True)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps == [1, 2]
    assert checkpoints.newest_whole() == 2
    _, _, note, lines = checkpoints.restore_newest(*LIKE)
    assert note == {"step": 2}
    for number, why in (
        ("77", "it is no folder"),
        ("99", "it has no checksums.json"),
        ("9999", "it is the checkpoint of step 2"),
    ):
        assert any(f"checkpoints/{number} is damaged: {why}" in line for line in lines)
    checkpoints.close()
    aside = {path.name.partition("-")[0] for path in (tmp_path / "damaged").iterdir()}
    assert {"77", "99", "9999"} <= aside


@pytest.mark.parametrize("mine", ["a1", ""])
@pytest.mark.parametrize("place", ["newest", "between"])
def test_a_checkpoint_of_another_run_is_refused(mine, place, tmp_path):
    """Equal in every setting, with other weights: nothing else tells it from this run's own."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, run, losses in ((ours, mine, [3, 2]), (theirs, "b2", [3, 2, 1])):
        folder.mkdir()
        if run:
            atomic.write_json(folder / ID, {"id": run})
        saved(folder, losses).close()
    step = "3" if place == "newest" else "2"
    shutil.rmtree(ours / "checkpoints" / step, ignore_errors=True)
    shutil.copytree(theirs / "checkpoints" / step, ours / "checkpoints" / step)
    for read_only in (True, False):
        with pytest.raises(
            UserError,
            match=rf"checkpoints/{step} is a checkpoint of another run: its id is b2, and this "
            rf"run's is {mine or 'none'}; move it out of",
        ):
            Checkpoints(ours, read_only=read_only)
    shutil.rmtree(ours / "checkpoints" / step)
    newest = 2 if place == "newest" else 1
    assert Checkpoints(ours).restore_newest(*LIKE)[2]["step"] == newest


def test_a_run_has_an_id_of_its_own_for_good(tmp_path):
    config = RunConfig(models.TINY)
    runs = [Run.create(tmp_path / name, config).folder for name in ("one", "other")]
    first, second = map(id_of, runs)
    assert first != second
    Run.create(runs[0], config)
    assert id_of(runs[0]) == first
    (runs[0] / ID).write_text("[]")
    with pytest.raises(UserError, match=r"id\.json is damaged"):
        Checkpoints(runs[0])


def test_half_written_folders_are_not_checkpoints(tmp_path):
    """What a killed process leaves: a folder under Orbax's temporary name."""
    saved(tmp_path, [3]).close()
    half = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    (half / "model").mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps == [1]
    assert checkpoints.restore_newest(*LIKE)[2] == {"step": 1}


def flips(folder, count, seed):
    """`count` places in the files of a checkpoint: (file, byte, bit), every file at least once."""
    files = [f for f in sorted(folder.rglob("*")) if f.is_file() and f.name != "commit_success.txt"]
    draw = random.Random(seed)
    chosen = files + draw.choices(files, k=max(0, count - len(files)))
    return [(f, draw.randrange(f.stat().st_size), draw.randrange(8)) for f in chosen]


@pytest.mark.slow
def test_no_flipped_bit_is_restored(tmp_path):
    """Every file once and more, also those that TensorStore does not check."""
    saved(tmp_path, [3, 2]).close()
    for file, byte, bit in flips(tmp_path / "checkpoints" / "2", 40, 0):
        if b"timestamp_nsecs" in file.read_bytes()[max(0, byte - 60) : byte]:
            continue  # when it was saved is not what it holds
        folder = tmp_path / f"{file.name}-{byte}-{bit}"
        shutil.copytree(tmp_path / "checkpoints", folder / "checkpoints")
        damaged = bytearray(file.read_bytes())
        damaged[byte] ^= 1 << bit
        (folder / file.relative_to(tmp_path)).write_bytes(damaged)
        checkpoints = Checkpoints(folder)
        _, _, note, lines = checkpoints.restore_newest(*LIKE)
        assert note == {"step": 1}, (file, byte, bit)
        assert "checkpoints/2 is damaged" in lines[0]
        checkpoints.close()
    assert Checkpoints(tmp_path).restore_newest(*LIKE)[2] == {"step": 2}


def test_a_file_too_many_or_too_few_is_damage(tmp_path):
    saved(tmp_path, [3]).close()
    folder = tmp_path / "checkpoints" / "1"
    (folder / "model" / "d" / "more").write_text("x")
    assert damage(folder) == "model/d/more does not belong to it"
    assert damage(folder, ["optimizer"]) == ""
    (folder / "model" / "d" / "more").unlink()
    assert damage(folder) == ""
    (folder / "optimizer" / "_METADATA").unlink()
    assert damage(folder) == "optimizer/_METADATA is missing"
    (folder / "checksums.json").write_text("[")
    assert "cannot be read" in damage(folder)
    (folder / "checksums.json").unlink()
    assert "has no checksums" in damage(folder)


def test_a_full_disk_is_told_and_saving_goes_on_when_there_is_room(tmp_path, monkeypatch):
    """Both where the save begins and in its background thread."""
    checkpoints = saved(tmp_path, [3])

    def full(*arguments, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_checksums", full)
        checkpoints.save(2, state(2), {"count": jnp.array(2)}, {"step": 2}, 2.0)
        with pytest.raises(SaveError, match=r"step 2 could not be saved.*the disk is full"):
            checkpoints.wait()
        checkpoints.wait()  # told once
        patch.setattr(checkpoints._manager, "save", full)
        with pytest.raises(SaveError, match="step 3 could not be saved"):
            checkpoints.save(3, state(3), {"count": jnp.array(3)}, {"step": 3}, 2.0)
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["1"]
    checkpoints.save(3, state(3), {"count": jnp.array(3)}, {"step": 3}, 2.0)
    checkpoints.wait()
    assert checkpoints.steps == [1, 3]
    assert checkpoints.restore_newest(*LIKE)[2] == {"step": 3}
    checkpoints.close()
