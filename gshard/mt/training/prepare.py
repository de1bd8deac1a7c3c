"""What a training needs before its first step, and one step of it beside the unpartitioned program.

Before the first step there are tokens, one identity, programs and a teacher. `gshard train --check
STEP` prepares the same, and runs that step twice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

import gshard
from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.batching.batches import Batches, Host
from gshard.mt.batching.packing import Arrays
from gshard.mt.progress import TrainingProgress
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import FOLDER, Checkpoints
from gshard.mt.training.loading import identity, refuse_changes, teacher_of
from gshard.mt.training.programs import Programs, RunState, Setup, joined, parts


def prepare(
    run: Run, progress: TrainingProgress, note: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Vocabularies and encoded text, made by one process while the others wait; their identity.

    Then all compare: hosts need not share a file system, nor have equal files under one name. An
    error if `note`, the last checkpoint's, has another identity.
    """
    if hosts.is_first():
        if not (run.folder / "vocabulary").is_dir():
            made = progress.stage("vocabulary", 1)
            run.make_vocabulary()
            made(f"{run.tokenizer.source_size:,} and {run.tokenizer.target_size:,} pieces")
        encoded = progress.stage("encode", len(run.tokenizer.tasks))
        run.tokens(step=encoded, verify=True)
        run.dev_tokens(verify=True)
    hosts.wait_for_all("vocabulary and tokens")
    mine = identity(run)
    texts = {f"the text of {language}": sums for language, sums in mine["text"].items()}
    others = {"the vocabulary": mine["vocabulary"], "the teacher": mine["teacher"]}
    hosts.agree({**mine["settings"], **others, **texts})
    refuse_changes(run, mine, note)
    return mine


def setup_of(run: Run, *, shapes: bool = False, keeps_step: bool = False) -> Setup:
    """What the programs of a run are made from; with `shapes`, only to be compiled."""
    devices, strategy = hosts.chosen(run.config.devices), hosts.strategy(run.config.devices)
    pairs = min(run.config.model.encoder_layers, run.config.model.decoder_layers) // 2
    if strategy.stages > pairs:
        raise UserError(f"devices.stages={strategy.stages}; pairs of layers in a stack: {pairs}")
    teacher = teacher_of(run, strategy, shapes=shapes)
    return Setup(run.config, run.model_config, devices, strategy, run.folder, teacher, keeps_step)


def programs_and_batches(run: Run, *, keeps_step: bool = False) -> tuple[Programs, Batches]:
    """The compiled functions of a run on its devices, and this host's part of its text."""
    programs = Programs(setup_of(run, keeps_step=keeps_step))
    return programs, Batches(run.tokens(), run.config.batch, programs.host, run.config.data.workers)


def dev_batches(run: Run, host: Host) -> list[Arrays]:
    """A few batches of the dev text, the same each time."""
    tokens = run.dev_tokens()
    if not tokens:
        return []
    batches = Batches(tokens, replace(run.config.batch, seed=0, languages=False), host)
    return [batches[i] for i in range(run.config.train.dev_batches)]


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
