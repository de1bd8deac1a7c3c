"""`gshard train --check STEP`: one step of a run, beside the unpartitioned program."""

from __future__ import annotations

import jax

import gshard
from gshard.mt.batching.batches import Batches
from gshard.mt.errors import UserError
from gshard.mt.progress import TrainingProgress
from gshard.mt.run import Run
from gshard.mt.training.checkpoint import FOLDER, Checkpoints
from gshard.mt.training.prepare import prepare, programs_and_batches
from gshard.mt.training.programs import Programs, RunState, joined, parts


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
