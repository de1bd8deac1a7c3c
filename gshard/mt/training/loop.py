"""The training loop: batches in, updates out, and nothing lost when it stops.

The host is always one step ahead: while a step runs, the next batch is read, and the figures
looked at are those of the step before. Everything that the next step depends on is in the
checkpoint or follows from (seed, step), so a run that was killed repeats its steps bit for bit.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from gshard.mt import hosts
from gshard.mt.batching.batches import Batches, Host
from gshard.mt.batching.packing import Arrays
from gshard.mt.batching.tokens import TaskTokens
from gshard.mt.errors import UserError
from gshard.mt.progress import TrainingProgress
from gshard.mt.run import Run
from gshard.mt.training import guard
from gshard.mt.training.checkpoint import Checkpoints
from gshard.mt.training.journal import Journal
from gshard.mt.training.programs import Figures, Programs, RunState
from gshard.nn.flops import step_flops
from gshard.nn.step import TrainState


@dataclass(frozen=True)
class Outcome:
    """How a training ended."""

    step: int
    interrupted: bool
    best: int  # the step of the best checkpoint
    waited: float  # share of the time that was spent waiting for batches


def train(run: Run, progress: TrainingProgress) -> Outcome:
    """Train until the configured step; a run with checkpoints goes on from the newest."""
    _prepare(run, progress)
    checkpoints = Checkpoints(run.folder, run.config.train.keep)
    if checkpoints.steps and checkpoints.steps[-1] >= run.config.train.steps:
        progress.note(f"step {checkpoints.steps[-1]:,} is reached already")
        return Outcome(checkpoints.steps[-1], False, checkpoints.best(), 0.0)
    devices = hosts.chosen(run.config.devices)
    programs = Programs(run.config, run.model_config, devices, hosts.strategy(run.config.devices))
    host = Host(jax.process_index(), jax.process_count())
    batches = Batches(run.tokens(), run.config.batch, host, run.config.data.workers)
    dev = _dev_batches(run, host)
    try:
        return _Loop(run, programs, batches, dev, checkpoints, progress).train()
    finally:
        checkpoints.close()


def _prepare(run: Run, progress: TrainingProgress) -> None:
    """Vocabularies and encoded text, made by one process while the others wait."""
    if hosts.is_first():
        if not (run.folder / "vocabulary").is_dir():
            made = progress.stage("vocabulary", 1)
            run.make_vocabulary()
            made(f"{run.tokenizer.source_size:,} and {run.tokenizer.target_size:,} pieces")
        encoded = progress.stage("encode", len(run.tokenizer.tasks))
        run.tokens(step=encoded)
        _dev_tokens(run)
    hosts.wait_for_all("vocabulary and tokens")


def _dev_tokens(run: Run) -> list[TaskTokens]:
    try:
        return run.tokens("dev")
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


class _Stop:
    """Ctrl-C and SIGTERM end the training after the step that runs; a second one ends it at once.

    All hosts have to stop at the same step, so they ask each other from time to time.
    """

    def __init__(self, minutes: float, every: int):
        self._until = time.monotonic() + 60 * minutes if minutes else float("inf")
        self._every = every if jax.process_count() > 1 else 1
        self.interrupted = False
        self._before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def __enter__(self) -> _Stop:
        for each in self._before:
            signal.signal(each, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def __call__(self, step: int) -> bool:
        """Whether to stop after this step."""
        if step % self._every:
            return False
        wishes = np.array([self.interrupted, time.monotonic() > self._until])
        if jax.process_count() > 1:
            wishes = np.asarray(multihost_utils.process_allgather(wishes))
        self.interrupted = bool(wishes.reshape(-1, 2)[:, 0].any())
        return bool(wishes.any())


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
    ):
        self.run, self.programs, self.batches, self.dev = run, programs, batches, dev
        self.checkpoints, self.progress = checkpoints, progress
        self.config = run.config.train
        self.peak = hosts.peak_flops(len(programs.devices), run.config.model.dtype)
        self.tokens = self.seconds = self.waited = self.pace = 0.0

    def train(self) -> Outcome:
        """Train; the state is saved however this ends, unless the process is killed."""
        state, step, data = self._begin()
        self.journal = Journal(self.run, step) if hosts.is_first() else None
        iterator = self.batches.iterate(step)
        if data:
            iterator.set_state({**data, "step": step})
        saved, pending = step, None
        try:
            with _Stop(self.config.minutes, self.config.log_every) as stop:
                mark = time.perf_counter()
                while step < self.config.steps:
                    begin = time.perf_counter()
                    arrays = next(iterator)
                    self.waited += time.perf_counter() - begin
                    state, figures = self.programs.step(state, arrays)
                    step += 1
                    if pending:
                        mark = self._look(*pending, mark, iterator.padding)
                    pending = (step, figures, arrays)
                    if stop(step):
                        break
                    if step % self.config.save_every == 0:
                        mark = self._look(*pending, mark, iterator.padding)
                        pending = None
                        self._save(step, state, iterator.get_state())
                        saved, mark = step, time.perf_counter()
                if pending:
                    self._look(*pending, mark, iterator.padding)
                if saved != step:
                    self._save(step, state, iterator.get_state())
            self.checkpoints.wait()
        finally:
            iterator.close()
            if self.journal:
                self.journal.close()
        waited = self.waited / self.seconds if self.seconds else 0.0
        return Outcome(step, stop.interrupted, self.checkpoints.best(), waited)

    def _begin(self) -> tuple[RunState, int, dict[str, int]]:
        """The newest whole checkpoint, or fresh weights."""
        compiled = self.progress.stage("compile", 1)
        like = self.programs.compile(self.batches[0])
        compiled(f"{len(self.programs.devices)} devices")
        model, rest = _parts(like)
        found = self.checkpoints.restore_newest(model, rest)
        if found is None:
            return self.programs.first_state(), 0, {}
        model, rest, note, damaged = found
        for line in damaged:
            self.progress.note(f"{line}; going on from step {note['step']}")
        self.tokens, self.seconds, self.waited = (
            note[name] for name in ("tokens", "seconds", "waited")
        )
        self.progress.note(f"going on from step {note['step']:,}")
        return _whole(model, rest), int(note["step"]), note["data"]

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
        now = time.perf_counter()
        took, self.seconds = now - mark, self.seconds + now - mark
        self.tokens += tokens
        self.pace = 0.9 * self.pace + 0.1 * took if self.pace else took  # late steps count most
        if step % self.config.log_every == 0 or step == self.config.steps or in_a_row:
            source = np.count_nonzero(arrays["source_segments"]) * jax.process_count()
            flops = step_flops(self.run.model_config, source, tokens)
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
            "tokens_per_second": tokens / self.pace,
            "share_of_peak": flops / self.pace / self.peak,
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

    def _save(self, step: int, state: RunState, data: dict[str, int]) -> None:
        """The loss on dev text, and a checkpoint with it."""
        nll = self._dev_nll(state)
        if self.journal:
            record = self.journal.write(
                "dev", step, nll=nll, tokens=int(self.tokens), seconds=self.seconds
            )
            self.progress.update(record, self.config.steps, 0.0)
        model, rest = _parts(state)
        note = {
            "step": step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "waited": self.waited,
            "data": data,
        }
        self.checkpoints.save(step, model, rest, note, nll)

    def _dev_nll(self, state: RunState) -> float:
        """Per target token, over the dev batches; the training loss where there is no dev text."""
        if not self.dev:
            return float(state.guard.mean)
        found = [self.programs.dev(state.train.model, arrays) for arrays in self.dev]
        tokens = np.array([float(metrics.tokens) for metrics in found])
        nlls = np.array([float(metrics.nll) for metrics in found])
        return float((tokens * nlls).sum() / max(tokens.sum(), 1.0))


def _parts(state: RunState) -> tuple[Any, Any]:
    """The weights, and everything else that a checkpoint holds."""
    rest = {"opt_state": state.train.opt_state, "step": state.train.step, "guard": state.guard}
    return state.train.model, rest


def _whole(model: Any, rest: dict[str, Any]) -> RunState:
    return RunState(TrainState(model, rest["opt_state"], rest["step"]), rest["guard"])
