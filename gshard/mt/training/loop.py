"""The training loop: batches in, updates out, and nothing lost when it stops.

The host is always one step ahead: while a step runs, the next batch is read, and the figures
looked at are those of the step before. Everything that the next step depends on is in the
checkpoint or follows from (seed, step), so a run that was killed repeats its steps bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gshard.mt import hosts
from gshard.mt.batching.batches import Batches, Host
from gshard.mt.batching.packing import Arrays
from gshard.mt.batching.tokens import TaskTokens
from gshard.mt.errors import UserError
from gshard.mt.launch.status import Reporter
from gshard.mt.progress import TrainingProgress
from gshard.mt.run import Run
from gshard.mt.training import guard
from gshard.mt.training.checkpoint import Checkpoints, SaveError
from gshard.mt.training.identity import differences, identity
from gshard.mt.training.journal import Journal
from gshard.mt.training.programs import Figures, Programs, RunState, joined, parts
from gshard.mt.training.released import is_release
from gshard.mt.training.stopping import Stop
from gshard.mt.training.teacher import teacher_config, teacher_identity, teacher_of
from gshard.nn.flops import step_flops


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    step: int
    signal: int  # that stopped it, or 0
    best: int  # the step of the best checkpoint
    waited: float  # share of the time that was spent waiting for batches
    seconds: float = 0.0  # of training, all stretches together
    tokens: float = 0.0  # target tokens


def train(
    run: Run,
    progress: TrainingProgress,
    back_to: int | None = None,
    reporter: Reporter | None = None,
    intruder: Callable[[], str] = lambda: "",
    *,
    keeps_step: bool = False,
) -> Outcome:
    """Train until the configured step; a run with checkpoints resumes from the newest.

    With `back_to` it resumes from the checkpoint of that step, and later ones are removed.
    `reporter` reports what this process does. `intruder` is called before each save; if it returns
    a message about another process that trains in the same folder, training ends. With `keeps_step`
    a compiled step is found by the run's settings, without tracing it.
    """
    reporter = reporter or Reporter()
    reporter.tell("preparing")
    if is_release(run):
        raise UserError(
            f"{run.folder} is a release, from which training cannot resume; another --out "
            "starts a new run"
        )
    prepare(run, progress)
    checkpoints = Checkpoints(run.folder, run.config.train.keep)
    if back_to is not None and back_to not in checkpoints.steps:
        there = ", ".join(map(str, checkpoints.steps)) or "none"
        raise UserError(f"{run.folder} has no checkpoint of step {back_to}; there are {there}")
    newest = checkpoints.newest_whole() if back_to is None else 0
    if newest >= run.config.train.steps:
        for line in checkpoints.damaged:
            progress.note(line)
        progress.note(f"step {newest:,} is reached already")
        note = checkpoints.newest_note() or {}
        spent = (float(note.get(name, 0.0)) for name in ("seconds", "tokens"))
        return Outcome(newest, 0, checkpoints.best(), 0.0, *spent)
    _refuse_changes(run, checkpoints)
    programs, batches = programs_and_batches(run, keeps_step=keeps_step)
    dev = _dev_batches(run, programs.host)
    try:
        loop = _Loop(run, programs, batches, dev, checkpoints, progress, reporter)
        loop.intruder = intruder
        return loop.train(back_to)
    finally:
        checkpoints.close()


def prepare(run: Run, progress: TrainingProgress) -> None:
    """Vocabularies and encoded text, made by one process while the others wait.

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
    mine = _identity(run)
    texts = {f"the text of {language}": sums for language, sums in mine["text"].items()}
    others = {"the vocabulary": mine["vocabulary"], "the teacher": mine["teacher"]}
    hosts.agree({**mine["settings"], **others, **texts})


def _identity(run: Run) -> dict[str, Any]:
    return identity(run, teacher_identity(run.config.distill))


def programs_and_batches(run: Run, *, keeps_step: bool = False) -> tuple[Programs, Batches]:
    """The compiled functions of a run on its devices, and this host's part of its text."""
    devices = hosts.chosen(run.config.devices)
    strategy = hosts.strategy(run.config.devices)
    teacher = teacher_of(run, strategy)
    programs = Programs(
        run.config, run.model_config, devices, strategy, run.folder, teacher, keeps_step=keeps_step
    )
    batches = Batches(run.tokens(), run.config.batch, programs.host, run.config.data.workers)
    return programs, batches


def _refuse_changes(run: Run, checkpoints: Checkpoints) -> None:
    """An error if something that the losses depend on is not as it was at the last checkpoint."""
    note = checkpoints.newest_note()
    if note and (changed := differences(note["identity"], _identity(run), note["step"])):
        lines = "\n  ".join(changed)
        raise UserError(
            f"{run.folder} is not as it was at step {note['step']}:\n  {lines}\n"
            "its losses would differ; restore what changed, or start a new run"
        )


def _dev_tokens(run: Run, verify: bool = False) -> list[TaskTokens]:
    try:
        return run.tokens("dev", verify=verify)
    except UserError:  # no dev text: the training loss has to do
        return []


def _dev_batches(run: Run, host: Host) -> list[Arrays]:
    """The same few batches each time."""
    tokens = _dev_tokens(run)
    if not tokens:
        return []
    config = replace(run.config.batch, seed=0, languages=False)
    batches = Batches(tokens, config, host)
    return [batches[i] for i in range(run.config.train.dev_batches)]


class _Loop:
    """One stretch of training, from the newest checkpoint to the end or a stop."""

    def __init__(
        self,
        run: Run,
        programs: Programs,
        batches: Batches,
        dev: list[Arrays],
        checkpoints: Checkpoints,
        progress: TrainingProgress,
        reporter: Reporter,
    ):
        self.run, self.programs, self.batches, self.dev = run, programs, batches, dev
        self.checkpoints, self.progress, self.reporter = checkpoints, progress, reporter
        self.config = run.config.train
        self.matmul = hosts.matmul_flops(len(programs.devices), run.config.model.dtype)
        self.tokens = self.seconds = self.waited = self.pace = 0.0
        self.identity = _identity(run)
        self.in_a_row, self.last_loss = 0, 0.0  # updates left out lately; the newest loss
        self.unsaved = False  # a save failed and is to be tried again
        self.intruder: Callable[[], str] = lambda: ""

    def train(self, back_to: int | None = None) -> Outcome:
        """Train; the state is saved however this ends, unless the process is killed."""
        state, step, data = self._begin(back_to)
        note = self.progress.note
        self.journal = Journal(self.run, step, note) if hosts.is_first() else None
        iterator = self.batches.iterate(step)
        if data:
            iterator.set_state({**data, "step": step})
        saved, pending = step, None
        try:
            with Stop(self.config.minutes) as stop:
                mark = time.perf_counter()
                while step < self.config.steps:
                    begin = time.perf_counter()
                    self.reporter.tell("reading a batch", step)
                    arrays = next(iterator)
                    self.reporter.tell("training", step)
                    self.waited += time.perf_counter() - begin
                    state, figures = self.programs.step(state, arrays)
                    step += 1
                    if pending:
                        mark = self._look(*pending, mark, iterator.padding)
                    pending = (step, figures, arrays)
                    again = self._failed_save() and step % self.config.log_every == 0
                    wishes = stop(step, again)
                    if wishes.stop:
                        break
                    if step % self.config.save_every == 0 or wishes.save:
                        mark = self._look(*pending, mark, iterator.padding)
                        pending = None
                        if self._save(step, state, iterator.get_state()):
                            saved = step
                        mark = time.perf_counter()
                if pending:
                    self._look(*pending, mark, iterator.padding)
                self._finish(step, saved, state, iterator.get_state())
        finally:
            iterator.close()
            if self.journal:
                self.journal.close()
        waited = self.waited / self.seconds if self.seconds else 0.0
        best = self.checkpoints.best()
        return Outcome(step, stop.signal, best, waited, self.seconds, self.tokens)

    def _finish(self, step: int, saved: int, state: RunState, data: dict[str, int]) -> None:
        """Save the last state, which must be worth it, and wait until it is on disk."""
        if not math.isfinite(self.last_loss):
            raise UserError(
                f"training ended at step {step:,} with a loss that is not finite, and was not "
                f"saved; `gshard train {self.run.folder} --checkpoint {saved}` goes back to the "
                "checkpoint before"
            )
        if saved != step or self._failed_save():
            self._save(step, state, data, last=True)
        self.reporter.tell("writing", step)
        self.checkpoints.wait()

    def _failed_save(self) -> bool:
        """Whether a save has failed, here or in the background, and is to be tried again."""
        try:
            self.checkpoints.check()
        except SaveError as error:
            self._tell_unsaved(error)
        return self.unsaved

    def _tell_unsaved(self, error: SaveError) -> None:
        if not self.unsaved:
            self.progress.note(f"{error}; training continues, and saving is retried")
        self.unsaved = True

    def _begin(self, back_to: int | None) -> tuple[RunState, int, dict[str, int]]:
        """The newest complete checkpoint, or the one to go back to, or fresh weights."""
        self.reporter.tell("compiling")
        compiled = self.progress.stage("compile", 1)
        like = self.programs.compile(self.batches[0])
        compiled(f"{len(self.programs.devices)} devices")
        self.reporter.tell("restoring")
        model, rest = parts(like)
        if back_to is not None:
            model, rest, note = self.checkpoints.restore(back_to, model, rest)
            damaged: list[str] = []
        elif found := self.checkpoints.restore_newest(model, rest):
            model, rest, note, damaged = found
        else:
            return self.programs.first_state(), 0, {}
        if back_to is not None:
            self.checkpoints.forget_after(back_to)
        for line in damaged:
            self.progress.note(f"{line}; resuming at step {note['step']}")
        self.tokens, self.seconds, self.waited = (
            note[name] for name in ("tokens", "seconds", "waited")
        )
        self.progress.note(f"resuming at step {note['step']:,}")
        return joined(model, rest), int(note["step"]), note["data"]

    def _look(
        self,
        step: int,
        figures: Figures,
        arrays: Arrays,
        mark: float,
        padding: float,
    ) -> float:
        """Wait for a step's figures, log and show them; returns when that was."""
        tokens, in_a_row = float(figures.metrics.tokens), int(figures.in_a_row)
        self.reporter.tell("training", step)
        self.in_a_row, self.last_loss = in_a_row, float(figures.metrics.loss)
        now = time.perf_counter()
        took, self.seconds = now - mark, self.seconds + now - mark
        self.tokens += tokens
        self.pace = 0.9 * self.pace + 0.1 * took if self.pace else took  # late steps count most
        if step % self.config.log_every == 0 or step == self.config.steps or in_a_row:
            source = int(np.count_nonzero(arrays["source_segments"])) * self.programs.host.count
            flops = step_flops(self.run.model_config, source, tokens)
            if taught_by := teacher_config(self.run):
                flops += step_flops(taught_by, source, tokens) / 3  # without a backward pass
            self._log(step, figures, tokens, flops, padding)
        if in_a_row >= self.config.patience:
            rate = self.run.config.optimizer.learning_rate
            raise UserError(guard.advice(in_a_row, float(figures.metrics.loss), rate))
        return now

    def _log(
        self,
        step: int,
        figures: Figures,
        tokens: float,
        flops: float,
        padding: float,
    ) -> None:
        metrics = figures.metrics
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
            "tokens": int(self.tokens),
            "devices": len(self.programs.devices),
            "tokens_per_second": tokens / self.pace,
            "share_of_matmul": flops / self.pace / self.matmul,
            "overflow": float(np.concatenate(overflow).mean()) if routers else None,
            "balance": float((1 / (experts * np.concatenate(fullest))).mean()) if routers else None,
            "skipped": int(figures.skipped),
            "padding": padding,
            "data_wait": self.waited / max(self.seconds, 1e-9),
            "seconds": self.seconds,
        }
        if self.journal:
            shown = self.journal.write("train", step, **record)
            left = (self.config.steps - step) * self.pace
            self.progress.update(shown, self.config.steps, left)

    def _save(self, step: int, state: RunState, data: dict[str, int], last: bool = False) -> bool:
        """The loss on dev text, and a checkpoint with it; False if it could not be written.

        While updates are left out nothing is saved: older checkpoints would be removed for it.
        """
        if self.in_a_row and not last:
            self.progress.note(f"step {step:,} is not saved: its update was left out")
            return False
        if why := hosts.told_by_any(self.intruder()):
            raise UserError(why)
        self._wait_for_the_last(step)
        self.reporter.tell("saving", step)
        if not self.programs.finite(state):
            raise UserError(
                f"weights are not finite at step {step:,}, and were not saved; `gshard train "
                f"{self.run.folder} --checkpoint STEP` goes back to a checkpoint before it"
            )
        nll = self._dev_nll(state)
        if self.journal:
            record = self.journal.write(
                "dev", step, nll=nll, tokens=int(self.tokens), seconds=self.seconds
            )
            self.progress.update(record, self.config.steps, 0.0)
        model, rest = parts(state)
        note = {
            "step": step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "waited": self.waited,
            "data": data,
            "identity": self.identity,
        }
        try:
            self.checkpoints.save(step, model, rest, note, nll)
        except SaveError as error:
            if last:
                raise
            self._tell_unsaved(error)
            return False
        self.unsaved = False
        return True

    def _wait_for_the_last(self, step: int) -> None:
        """Until the save before is on disk; if it has failed, the next one is what counts."""
        if not self.checkpoints.saving:
            return
        self.reporter.tell("writing", step)
        try:
            self.checkpoints.wait()
            self.reporter.took("writing", self.checkpoints.took)
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
