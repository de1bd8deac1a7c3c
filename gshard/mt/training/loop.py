"""The training loop: batches in, updates out, and nothing lost when it stops.

The host is always one step ahead: while a step runs, the next batch is read, and the figures
looked at are those of the step before. Everything that the next step depends on is in the
checkpoint or follows from (seed, step), so a run that was killed repeats its steps bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gshard.errors import UserError
from gshard.mt import hosts
from gshard.mt.batching.batches import Batches, BatchIterator
from gshard.mt.batching.packing import Arrays
from gshard.mt.launch.status import Reporter
from gshard.mt.progress import TrainingProgress
from gshard.mt.run import Run
from gshard.mt.training.agreement import Stop
from gshard.mt.training.checkpoint import Checkpoints, SaveError
from gshard.mt.training.journal import Journal
from gshard.mt.training.prepare import dev_batches, prepare, programs_and_batches
from gshard.mt.training.programs import Programs, RunState, StepFigures, advice, joined, parts
from gshard.mt.training.weights import is_release
from gshard.nn.config import step_flops


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    step: int
    signal: int  # that stopped it, or 0
    best: int  # the step of the best checkpoint
    waited: float  # share of the time that was spent waiting for batches
    seconds: float = 0.0  # of training, all stretches together
    tokens: float = 0.0  # target tokens


@dataclass(frozen=True)
class Hooks:
    """What a training tells of itself, and what it asks.

    `reporter` reports what this process does. `intruder` is called before each save; if it returns
    a message about another process that trains in the same folder, training ends.
    """

    progress: TrainingProgress
    reporter: Reporter = field(default_factory=Reporter)
    intruder: Callable[[], str] = lambda: ""


@dataclass
class Spent:
    """What a training has used, which checkpoints note, and what is known of its newest steps."""

    tokens: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0  # seconds in which there was no batch
    pace: float = 0.0  # seconds of a step, late ones counting most
    until: float = math.inf  # when this stretch ends at the latest, by time.monotonic
    in_a_row: int = 0  # updates left out lately
    loss: float = 0.0
    unsaved: bool = False  # a save failed and is to be tried again

    def left(self, steps: int) -> float:
        """Seconds until so many steps are done, or train.minutes are over."""
        return min(steps * self.pace, max(0.0, self.until - time.monotonic()))

    def noted(self) -> dict[str, float]:
        """For the note of a checkpoint."""
        return {name: getattr(self, name) for name in ("tokens", "seconds", "waited")}

    def add(self, figures: StepFigures, took: float) -> None:
        """Count a step that is done."""
        self.in_a_row, self.loss = int(figures.in_a_row), float(figures.metrics.loss)
        self.tokens += float(figures.metrics.tokens)
        self.seconds += took
        self.pace = 0.9 * self.pace + 0.1 * took if self.pace else took


class _Pending(NamedTuple):
    """A step whose figures are not looked at yet."""

    step: int
    figures: StepFigures
    arrays: Arrays


def train(
    run: Run, hooks: Hooks, back_to: int | None = None, *, keeps_step: bool = False
) -> Outcome:
    """Train until the configured step; a run with checkpoints resumes from the newest.

    With `back_to` it resumes from the checkpoint of that step, and later ones are removed. With
    `keeps_step` a compiled step is found by the run's settings, without tracing it.
    """
    hooks.reporter.tell("preparing")
    if is_release(run):
        raise UserError(
            f"{run.folder} is a release, from which training cannot resume; another --out "
            "starts a new run"
        )
    checkpoints = Checkpoints(run.folder, run.config.train.keep)
    try:
        if back_to is None:
            if done := _reached(checkpoints, run.config.train.steps, hooks.progress):
                return done
        elif back_to not in checkpoints.steps:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            raise UserError(f"{run.folder} has no checkpoint of step {back_to}; there are {there}")
        identity = prepare(run, hooks.progress, checkpoints.newest_note())
        programs, batches = programs_and_batches(run, keeps_step=keeps_step)
        return _Stretch(run, programs, batches, checkpoints, identity, hooks).train(back_to)
    finally:
        checkpoints.close()


def _reached(checkpoints: Checkpoints, steps: int, progress: TrainingProgress) -> Outcome | None:
    """How a training ended that has all its steps; None if it has not."""
    newest = checkpoints.newest_whole()
    if newest < steps:
        return None
    for line in (*checkpoints.damaged, f"step {newest:,} is reached already"):
        progress.note(line)
    note = checkpoints.newest_note() or {}
    spent = (float(note.get(name, 0.0)) for name in ("seconds", "tokens"))
    return Outcome(newest, 0, checkpoints.best(), 0.0, *spent)


@dataclass
class _Stretch:
    """One stretch of training, from the newest checkpoint to the end or a stop."""

    run: Run
    programs: Programs
    batches: Batches
    checkpoints: Checkpoints
    identity: dict[str, Any]
    hooks: Hooks
    spent: Spent = field(default_factory=Spent)
    journal: Journal | None = None  # of the first process

    def __post_init__(self) -> None:
        self.dev = dev_batches(self.run, self.programs.host)
        dtype = self.run.config.model.dtype
        self.matmul = hosts.matmul_flops(len(self.programs.devices), dtype)

    def train(self, back_to: int | None = None) -> Outcome:
        """Train; the state is saved however this ends, unless the process is killed."""
        state, step, data = self._begin(back_to)
        if hosts.is_first():
            self.journal = Journal(self.run, step, self.hooks.progress.note)
        iterator = self.batches.iterate(step)
        if data:
            iterator.set_state({**data, "step": step})
        try:
            with Stop(self.run.config.train.minutes) as stop:
                self.spent.until = stop.until
                step = self._steps(state, step, iterator, stop)
        finally:
            iterator.close()
            if self.journal:
                self.journal.close()
        spent = self.spent
        waited = spent.waited / spent.seconds if spent.seconds else 0.0
        best = self.checkpoints.best()
        return Outcome(step, stop.signal, best, waited, spent.seconds, spent.tokens)

    def _steps(self, state: RunState, step: int, iterator: BatchIterator, stop: Stop) -> int:
        """All steps, up to the end or to a stop; the last one, which is saved."""
        config, saved = self.run.config.train, step
        pending: _Pending | None = None
        mark = time.perf_counter()
        while step < config.steps:
            begin = time.perf_counter()
            self.hooks.reporter.tell("reading a batch", step)
            arrays = next(iterator)
            self.hooks.reporter.tell("training", step)
            self.spent.waited += time.perf_counter() - begin
            state, figures = self.programs.step(state, arrays)
            step += 1
            if pending:
                mark = self._look(pending, mark, iterator.padding)
            pending = _Pending(step, figures, arrays)
            again = self._failed_save() and step % config.log_every == 0
            wishes = stop(step, again)
            if wishes.stop:
                break
            if step % config.save_every == 0 or wishes.save:
                self._look(pending, mark, iterator.padding)
                pending = None
                if self._save(step, state, iterator.get_state()):
                    saved = step
                mark = time.perf_counter()
        if pending:
            self._look(pending, mark, iterator.padding)
        self._finish(step, saved, state, iterator.get_state())
        return step

    def _finish(self, step: int, saved: int, state: RunState, data: dict[str, int]) -> None:
        """Save the last state, which must be worth it, and wait until it is on disk."""
        if not math.isfinite(self.spent.loss):
            raise UserError(
                f"training ended at step {step:,} with a loss that is not finite, and was not "
                f"saved; `gshard train {self.run.folder} --checkpoint {saved}` goes back to the "
                "checkpoint before"
            )
        if saved != step or self._failed_save():
            self._save(step, state, data, last=True)
        self.hooks.reporter.tell("writing", step)
        self.checkpoints.wait()

    def _failed_save(self) -> bool:
        """Whether a save has failed, here or in the background, and is to be tried again."""
        try:
            self.checkpoints.check()
        except SaveError as error:
            self._tell_unsaved(error)
        return self.spent.unsaved

    def _tell_unsaved(self, error: SaveError) -> None:
        if not self.spent.unsaved:
            self.hooks.progress.note(f"{error}; training continues, and saving is retried")
        self.spent.unsaved = True

    def _begin(self, back_to: int | None) -> tuple[RunState, int, dict[str, int]]:
        """The newest complete checkpoint, or the one to go back to, or fresh weights."""
        progress, reporter = self.hooks.progress, self.hooks.reporter
        reporter.tell("compiling")
        compiled = progress.stage("compile", 1)
        like = self.programs.compile(self.batches[0])
        compiled(f"{len(self.programs.devices)} devices")
        reporter.tell("restoring")
        model, rest = parts(like)
        if back_to is not None:
            model, rest, note = self.checkpoints.restore(back_to, model, rest)
            self.checkpoints.forget_after(back_to)
            damaged: list[str] = []
        elif found := self.checkpoints.restore_newest(model, rest):
            model, rest, note, damaged = found
        else:
            return self.programs.first_state(), 0, {}
        for line in damaged:
            progress.note(f"{line}; resuming at step {note['step']}")
        self.spent = Spent(**{name: note[name] for name in self.spent.noted()})
        progress.note(f"resuming at step {note['step']:,}")
        return joined(model, rest), int(note["step"]), note["data"]

    def _look(self, pending: _Pending, mark: float, padding: float) -> float:
        """Wait for a step's figures, log and show them; returns when that was."""
        (step, figures, _), config = pending, self.run.config.train
        in_a_row = int(figures.in_a_row)  # waits
        self.hooks.reporter.tell("training", step)
        now = time.perf_counter()
        self.spent.add(figures, now - mark)
        if step % config.log_every == 0 or step == config.steps or in_a_row:
            self._log(pending, padding)
        if in_a_row >= config.patience:
            rate = self.run.config.optimizer.learning_rate
            raise UserError(advice(in_a_row, self.spent.loss, rate))
        return now

    def _flops(self, arrays: Arrays, tokens: float) -> float:
        """What a step computes, the teacher's forward pass included."""
        source = int(np.count_nonzero(arrays["source_segments"])) * self.programs.host.count
        flops = step_flops(self.run.model_config, source, tokens)
        if taught_by := self.programs.teacher:
            flops += step_flops(taught_by.config, source, tokens) / 3  # without a backward pass
        return flops

    def _log(self, pending: _Pending, padding: float) -> None:
        (step, figures, arrays), spent = pending, self.spent
        metrics, tokens = figures.metrics, float(figures.metrics.tokens)
        routers = [side for side in (metrics.encoder, metrics.decoder) if side is not None]
        overflow = [np.asarray(side.overflow_first) for side in routers]
        fullest = [np.asarray(side.load).max(axis=-1) for side in routers]
        experts = self.run.config.model.experts
        record = {
            "loss": float(metrics.loss),
            "nll": float(metrics.nll),
            "aux_loss": float(metrics.aux_loss) if routers else None,
            "z_loss": float(metrics.z_loss) if routers else None,
            "grad_norm": float(metrics.grad_norm),
            "tokens": int(spent.tokens),
            "devices": len(self.programs.devices),
            "tokens_per_second": tokens / spent.pace,
            "share_of_matmul": self._flops(arrays, tokens) / spent.pace / self.matmul,
            "overflow": float(np.concatenate(overflow).mean()) if routers else None,
            "balance": float((1 / (experts * np.concatenate(fullest))).mean()) if routers else None,
            "skipped": int(figures.skipped),
            "padding": padding,
            "data_wait": spent.waited / max(spent.seconds, 1e-9),
            "seconds": spent.seconds,
        }
        left = spent.left(self.run.config.train.steps - step)
        self._tell_figures("train", step, left, **record)

    def _tell_figures(self, kind: str, step: int, left: float, **record: Any) -> None:
        if self.journal:
            shown = self.journal.write(kind, step, **record)
            self.hooks.progress.update(shown, self.run.config.train.steps, left)

    def _save(self, step: int, state: RunState, data: dict[str, int], last: bool = False) -> bool:
        """The loss on dev text, and a checkpoint with it; False if it could not be written.

        While updates are left out nothing is saved: older checkpoints would be removed for it.
        """
        if self.spent.in_a_row and not last:
            self.hooks.progress.note(f"step {step:,} is not saved: its update was left out")
            return False
        if why := hosts.told_by_any(self.hooks.intruder()):
            raise UserError(why)
        self._wait_for_the_last(step)
        self.hooks.reporter.tell("saving", step)
        if not self.programs.finite(state):
            raise UserError(
                f"weights are not finite at step {step:,}, and were not saved; `gshard train "
                f"{self.run.folder} --checkpoint STEP` goes back to a checkpoint before it"
            )
        nll, spent = self._dev_nll(state), self.spent
        used = {"tokens": int(spent.tokens), "seconds": spent.seconds}
        self._tell_figures("dev", step, 0.0, nll=nll, **used)
        note = {"step": step, **spent.noted(), "data": data, "identity": self.identity}
        try:
            self.checkpoints.save(step, *parts(state), note, nll)
        except SaveError as error:
            if last:
                raise
            self._tell_unsaved(error)
            return False
        spent.unsaved = False
        return True

    def _wait_for_the_last(self, step: int) -> None:
        """Until the save before is on disk; if it has failed, the next one is what counts."""
        if not self.checkpoints.saving:
            return
        self.hooks.reporter.tell("writing", step)
        try:
            self.checkpoints.wait()
            self.hooks.reporter.took("writing", self.checkpoints.took)
        except SaveError as error:
            self._tell_unsaved(error)

    def _dev_nll(self, state: RunState) -> float:
        """Per target token, over the dev batches; the training loss where there is no dev text."""
        if not self.dev:
            return float(state.guard.mean)
        found = [self.programs.dev(state.train.model, arrays) for arrays in self.dev]
        tokens = np.array([float(metrics.tokens) for metrics in found])
        nlls = np.array([float(metrics.nll) for metrics in found])
        return float((tokens * nlls).sum() / max(tokens.sum(), 1.0))
