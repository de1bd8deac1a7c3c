"""Runs that learn from a teacher: resumed bit for bit, and refused with another teacher."""

import dataclasses
import shutil

import pytest

from gshard.errors import UserError
from gshard.mt.config import DistillConfig
from gshard.mt.run import Run
from gshard.mt.training.loading import teacher_of
from gshard.mt.training.loop import Hooks, train
from gshard.nn.strategy import ONE_DEVICE
from tests.mt.runs import Notes, copied, losses, make_run, with_train


def student(teacher, folder, *, steps=4, **distill):
    """A dense run with the teacher's vocabularies."""
    like = copied(teacher, folder.parent / f"{folder.name}-like", steps=steps, save_every=2).config
    return Run.create(
        folder,
        dataclasses.replace(
            like,
            model=dataclasses.replace(like.model, experts=0, groups=None),
            distill=DistillConfig(teacher=str(teacher.folder), **distill),
        ),
    )


@pytest.mark.slow
def test_a_student_resumes_bit_for_bit_with_its_teacher_elsewhere(whole, tmp_path):
    once = student(whole, tmp_path / "once")
    train(once, Hooks(Notes()))
    plain = student(whole, tmp_path / "plain", share=0.0)
    train(plain, Hooks(Notes()))
    assert losses(once)[4] != losses(plain)[4]
    first = student(whole, tmp_path / "twice", steps=2)
    train(first, Hooks(Notes()))
    shutil.copytree(whole.folder, tmp_path / "moved")
    elsewhere = DistillConfig(teacher=str(tmp_path / "moved"))
    longer = dataclasses.replace(with_train(first.config, steps=4), distill=elsewhere)
    train(Run.create(first.folder, longer), Hooks(Notes()))
    assert losses(first) == losses(once)
    other = dataclasses.replace(elsewhere, checkpoint="8")
    changed = dataclasses.replace(with_train(longer, steps=6), distill=other)
    with pytest.raises(UserError, match="the teacher is another one"):
        train(Run.create(first.folder, changed), Hooks(Notes()))


def test_a_teacher_with_other_vocabularies_is_refused(whole, tokenizer, tmp_path):
    run = student(whole, tmp_path / "run")
    run.make_vocabulary()
    other = make_run(tmp_path / "other", tokenizer)
    taught = dataclasses.replace(run.config, distill=DistillConfig(teacher=str(other.folder)))
    with pytest.raises(UserError, match="other vocabularies than"):
        teacher_of(Run(run.folder, taught), ONE_DEVICE)


def test_a_run_is_not_its_own_teacher(whole, tmp_path):
    run = student(whole, tmp_path / "run")
    own = dataclasses.replace(run.config, distill=DistillConfig(teacher=str(run.folder)))
    with pytest.raises(UserError, match="the run itself"):
        teacher_of(Run(run.folder, own), ONE_DEVICE)
