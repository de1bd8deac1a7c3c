"""Harm done to a run between and during two stretches of training, found before it is learned."""

import dataclasses
import json
import shutil

import equinox as eqx
import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.batching.tokenizer import Tokenizer
from gshard.mt.data.corpus import Corpus
from gshard.mt.run import Run
from gshard.mt.training import loop
from gshard.mt.training.checkpoint import Checkpoints, SaveError
from gshard.mt.training.loading import differences, identity, load_model
from gshard.mt.training.loop import Hooks, train
from gshard.mt.training.programs import Programs
from tests.mt.runs import Notes, losses, with_train


@pytest.fixture
def half(whole, tmp_path):
    """A copy of the run that has 12 steps, to go on to 14; its corpus is a copy too."""
    shutil.copytree(whole.folder, tmp_path / "run")
    shutil.copytree(whole.corpus.folder, tmp_path / "corpus")
    config = with_train(whole.config, steps=14)
    data = dataclasses.replace(config.data, corpus=str(tmp_path / "corpus"))
    return Run.create(tmp_path / "run", dataclasses.replace(config, data=data))


def again(run):
    return Run.open(run.folder)


def test_nothing_that_can_be_run_is_in_the_folder(whole):
    """Compiled programs are code; a run's folder is data that people hand on."""
    names = {path.name for path in whole.folder.iterdir()}
    assert names >= {"config.json", "metrics.jsonl", "checkpoints", "tokens", "vocabulary"}
    assert "programs" not in names
    assert str(whole.folder) not in str(jax.config.jax_compilation_cache_dir)


def test_compiled_programs_are_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    place = tmp_path / "gshard" / "programs"
    assert hosts._own_cache() == place
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o777)
    assert hosts._own_cache() is None  # others could put programs there
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    assert hosts._own_cache() is None


def test_an_edited_setting_is_found(half):
    path = half.folder / "config.json"
    edited = json.loads(path.read_text())
    edited["optimizer"]["learning_rate"] = 0.25
    path.write_text(json.dumps(edited))
    with pytest.raises(UserError, match=r"optimizer.learning_rate was 0.5 and is now 0.25"):
        train(again(half), Hooks(Notes()))


def test_an_edited_fall_is_found_if_it_had_begun(half):
    def edited(**fall):
        path = half.folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({**config, "optimizer": {**config["optimizer"], **fall}}))
        return again(half)

    note = Checkpoints(half.folder).newest_note()
    assert note["step"] == 12
    assert differences(note["identity"], identity(edited(fall=2, end=14)), 12) == []
    with pytest.raises(UserError, match=r"optimizer.fall was 0 and is now 3"):
        train(edited(fall=3, end=14), Hooks(Notes()))


def test_another_vocabulary_is_found(half, tokenizer):
    shutil.rmtree(half.folder / "vocabulary")
    tokenizer.save(half.folder / "vocabulary")
    with pytest.raises(UserError, match=r"the vocabularies are others|another model"):
        train(again(half), Hooks(Notes()))


def test_weights_are_not_loaded_with_another_vocabulary_or_model(half, tokenizer):
    """Translating would give other sentences without a word."""
    load_model(half, "last")
    path = half.folder / "config.json"
    good = json.loads(path.read_text())
    edited = {**good, "model": {**good["model"], "heads": 1, "key_dim": 16, "value_dim": 16}}
    path.write_text(json.dumps(edited))
    with pytest.raises(UserError, match=r"model.heads was 2 and is now 1|another model"):
        load_model(again(half), "last")
    gating = {**good["model"]["gating"], "top_k": 1}
    path.write_text(json.dumps({**good, "model": {**good["model"], "gating": gating}}))
    with pytest.raises(UserError, match=r"model.gating.top_k was 2 and is now 1"):
        load_model(again(half), "last")
    path.write_text(json.dumps(good))
    swapped = Tokenizer(*half.tokenizer.models[::-1], half.tokenizer.config)
    swapped.save(half.folder / "vocabulary")
    with pytest.raises(UserError, match=r"the vocabularies are others|another model"):
        load_model(again(half), "last")
    text = json.loads(path.read_text())
    path.write_text(json.dumps({**text, "optimizer": {**text["optimizer"], "learning_rate": 9.0}}))
    half.tokenizer.save(half.folder / "vocabulary")
    load_model(again(half), "last")  # a learning rate is nothing to a translation


def test_tokens_that_were_changed_are_made_again(half):
    path = half.folder / "tokens" / "train" / "de-en" / "source.npy"
    good = path.read_bytes()
    path.write_bytes(good[:-2] + b"\xff\xff")  # no such token
    half.tokens(verify=True)
    assert path.read_bytes() == good
    path.write_bytes(good[:200])  # cut short
    half.tokens(verify=True)
    assert path.read_bytes() == good


def test_a_file_of_the_corpus_that_was_replaced_is_found(half):
    corpus = Corpus.open(half.config.data.corpus)
    path = corpus.path("de")
    pq.write_table(pq.read_table(path).slice(0, 5), path)
    with pytest.raises(UserError, match=r"de.parquet is not the file that was gathered"):
        corpus.read("de")


def test_half_a_language_removed_is_found(half):
    """A corpus that was gathered again, with less: whole, but not the one that was learned."""
    path = Corpus.open(half.config.data.corpus).folder / "manifest.json"
    manifest = json.loads(path.read_text())
    file = half.corpus.path("ru")
    pq.write_table(pq.read_table(file).slice(0, 40), file)
    digest = __import__("hashlib").sha256(file.read_bytes()).hexdigest()
    manifest["languages"]["ru"]["train"] |= {"sha256": digest, "pairs": 40}
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"the corpus has other text of ru"):
        train(again(half), Hooks(Notes()))


def ruined(state):
    scale = state.train.model.decoder_norm.scale
    return eqx.tree_at(lambda s: s.train.model.decoder_norm.scale, state, scale * np.nan)


@pytest.mark.slow
def test_weights_that_are_not_finite_are_never_saved(half, monkeypatch):
    """The checkpoints before stay; the status is an error; --checkpoint goes back."""
    before = Checkpoints(half.folder, read_only=True).steps
    step = Programs.step

    def harm(self, state, arrays):
        return step(self, ruined(state), arrays)

    with monkeypatch.context() as patch:
        patch.setattr(Programs, "step", harm)
        with pytest.raises(UserError, match=r"not finite.*--checkpoint 12"):
            train(half, Hooks(Notes()))
    assert Checkpoints(half.folder, read_only=True).steps == before
    outcome = train(half, Hooks(Notes()), back_to=8)
    assert outcome.step == 14
    assert losses(half)[12] == losses(again(half))[12]
    with pytest.raises(UserError, match="no checkpoint of step 3; there are"):
        train(half, Hooks(Notes()), back_to=3)


@pytest.mark.slow
def test_while_updates_are_left_out_nothing_is_saved(half, monkeypatch):
    step = Programs.step

    def leave_out(self, state, arrays):
        state, figures = step(self, state, arrays)
        return state, figures._replace(in_a_row=np.int32(1))

    monkeypatch.setattr(Programs, "step", leave_out)
    notes = Notes()
    longer = Run.create(half.folder, with_train(half.config, steps=17))
    train(longer, Hooks(notes))
    assert "step 16 is not saved: its update was left out" in notes.notes
    assert 16 not in Checkpoints(half.folder, read_only=True).steps


@pytest.mark.slow
def test_a_save_that_fails_is_told_and_tried_again(half, monkeypatch):
    save, failed = loop.Checkpoints.save, []

    def full_at_first(self, step, *rest):
        if len(failed) < 2:
            failed.append(step)
            raise SaveError(f"step {step} could not be saved: the disk is full")
        save(self, step, *rest)

    monkeypatch.setattr(loop.Checkpoints, "save", full_at_first)
    notes = Notes()
    longer = Run.create(half.folder, with_train(half.config, steps=20))
    assert train(longer, Hooks(notes)).step == 20
    told = [note for note in notes.notes if "could not be saved" in note]
    assert len(told) == 1
    assert failed == [16, 17]
    assert {18, 20} & set(Checkpoints(half.folder, read_only=True).steps)
