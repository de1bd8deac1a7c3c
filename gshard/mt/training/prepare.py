"""What a training needs before its first step, and one step of it beside the unpartitioned program.

Before the first step there are tokens, one identity, programs and a teacher. `gshard train --check
STEP` prepares the same, and runs that step twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import gshard
from gshard.mt import atomic, hosts
from gshard.mt.batching.batches import Batches, Host
from gshard.mt.batching.packing import Arrays
from gshard.mt.batching.tokens import TaskTokens
from gshard.mt.config import DistillConfig
from gshard.mt.errors import UserError
from gshard.mt.progress import TrainingProgress
from gshard.mt.run import Run
from gshard.mt.training import checksums, released
from gshard.mt.training.checkpoint import FOLDER, Checkpoints
from gshard.mt.training.loading import chosen_step, identity, model_like, trained_model
from gshard.mt.training.programs import Programs, RunState, Setup, joined, parts
from gshard.nn.config import TransformerConfig
from gshard.nn.strategy import Strategy
from gshard.nn.transformer import Transformer


def prepare(run: Run, progress: TrainingProgress) -> dict[str, Any]:
    """Vocabularies and encoded text, made by one process while the others wait; their identity.

    Then all compare: hosts need not share a file system, nor have equal files under one name.
    """
    if hosts.is_first():
        if not (run.folder / "vocabulary").is_dir():
            made = progress.stage("vocabulary", 1)
            run.make_vocabulary()
            made(f"{run.tokenizer.source_size:,} and {run.tokenizer.target_size:,} pieces")
        encoded = progress.stage("encode", len(run.tokenizer.tasks))
        run.tokens(step=encoded, verify=True)
        _dev_tokens(run, verify=True)
    hosts.wait_for_all("vocabulary and tokens")
    mine = identity(run, teacher_identity(run.config.distill))
    texts = {f"the text of {language}": sums for language, sums in mine["text"].items()}
    others = {"the vocabulary": mine["vocabulary"], "the teacher": mine["teacher"]}
    hosts.agree({**mine["settings"], **others, **texts})
    return mine


def setup_of(run: Run, *, shapes: bool = False, keeps_step: bool = False) -> Setup:
    """What the programs of a run are made from; with `shapes`, only to be compiled."""
    devices, strategy = hosts.chosen(run.config.devices), hosts.strategy(run.config.devices)
    teacher = teacher_of(run, strategy, shapes=shapes)
    how = (devices, strategy, run.folder, teacher, keeps_step)
    return Setup(run.config, run.model_config, *how)


def programs_and_batches(run: Run, *, keeps_step: bool = False) -> tuple[Programs, Batches]:
    """The compiled functions of a run on its devices, and this host's part of its text."""
    programs = Programs(setup_of(run, keeps_step=keeps_step))
    return programs, Batches(run.tokens(), run.config.batch, programs.host, run.config.data.workers)


def dev_batches(run: Run, host: Host) -> list[Arrays]:
    """A few batches of the dev text, the same each time."""
    tokens = _dev_tokens(run)
    if not tokens:
        return []
    config = replace(run.config.batch, seed=0, languages=False)
    batches = Batches(tokens, config, host)
    return [batches[i] for i in range(run.config.train.dev_batches)]


def _dev_tokens(run: Run, verify: bool = False) -> list[TaskTokens]:
    try:
        return run.tokens("dev", verify=verify)
    except UserError:  # no dev text: the training loss has to do
        return []


def teacher_config(run: Run) -> TransformerConfig | None:
    """The teacher's model, whose vocabularies are those of `run`; None: there is no teacher."""
    found = _opened(run)
    return found.model_config if found else None


def teacher_of(run: Run, strategy: Strategy, *, shapes: bool = False) -> Transformer | None:
    """The teacher's weights, or only their shapes, in the shards that the strategy asks for."""
    found = _opened(run)
    if found is None:
        return None
    like = model_like(found.model_config, strategy)
    return like if shapes else trained_model(found, run.config.distill.checkpoint, like)[0]


def teacher_identity(config: DistillConfig) -> str:
    """The checksum of a teacher's files: another teacher would give other losses."""
    if not config.teacher:
        return ""
    teacher = Run.open(config.teacher)
    if released.is_release(teacher):
        return atomic.checksum(teacher.folder / checksums.FILE)
    step = chosen_step(teacher, config.checkpoint)
    return atomic.checksum(teacher.folder / FOLDER / str(step) / checksums.FILE)


def _opened(run: Run) -> Run | None:
    folder = run.config.distill.teacher
    if not folder:
        return None
    if Path(folder).resolve() == run.folder.resolve():
        raise UserError(f"distill.teacher is {folder}, the run itself; it is another run")
    teacher = Run.open(folder)
    if teacher.tokenizer.digest != run.tokenizer.digest:
        raise UserError(
            f"the teacher {folder} has other vocabularies than {run.folder}: a student learns the "
            f"teacher's probabilities of every piece. With data.vocabulary={folder}/vocabulary it "
            "gets the teacher's"
        )
    return teacher


def check_step(run: Run, step: int, progress: TrainingProgress) -> gshard.Report:
    """Check the update that makes step `step`, on its batch, from the state before it.

    That state is trained from the newest checkpoint before it, or from the start; nothing of the
    run is changed.
    """
    if step > run.config.train.steps:
        raise UserError(f"--check {step}: the run has {run.config.train.steps} steps")
    if jax.process_count() > 1:
        raise UserError("--check replays all devices in one process; start it without others")
    prepare(run, progress)
    programs, batches = programs_and_batches(run)
    state, start, data = _state_before(run, step, programs, batches)
    iterator = batches.iterate(start)
    try:
        if data:
            iterator.set_state({**data, "step": start})
        for _ in range(start, step - 1):
            state, _ = programs.step(state, next(iterator))
        progress.note(f"checking step {step:,}, from the checkpoint of step {start:,}")
        return programs.check(state, next(iterator))
    finally:
        iterator.close()


def prove_step(run: Run, progress: TrainingProgress) -> gshard.Report:
    """Prove that an update of the run is that of the unpartitioned program."""
    prepare(run, progress)
    programs, batches = programs_and_batches(run)
    return programs.prove(programs.first_state(), batches[0])


def _state_before(
    run: Run, step: int, programs: Programs, batches: Batches
) -> tuple[RunState, int, dict[str, int]]:
    """The newest checkpoint before a step, its own step and the state of its data."""
    if not (run.folder / FOLDER).is_dir():
        return programs.first_state(), 0, {}
    checkpoints = Checkpoints(run.folder, run.config.train.keep, read_only=True)
    try:
        before = [found for found in checkpoints.steps if found < step]
        if not before:
            return programs.first_state(), 0, {}
        like = programs.compile(batches[0])
        model, rest, note = checkpoints.restore(max(before), *parts(like))
        return joined(model, rest), max(before), note["data"]
    finally:
        checkpoints.close()
