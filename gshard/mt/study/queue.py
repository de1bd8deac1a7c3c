"""The execution of a study: run by run, stage by stage, without repeating what is done.

Runs are trained and translated with in the order of the plan, then the baselines; scores come last,
since they need no accelerator. Whatever ends this (a signal, the time budget, a crash), the same
call resumes: a training from its newest checkpoint, translations from the last complete chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from gshard.mt import atomic, hosts
from gshard.mt.config import DeviceConfig
from gshard.mt.decoding.translator import Translator
from gshard.mt.evaluation.baselines import evaluate_baselines, translate_baselines
from gshard.mt.evaluation.evaluate import search_of
from gshard.mt.evaluation.store import AnyTranslator
from gshard.mt.progress import Progress, TrainingProgress
from gshard.mt.run import Run
from gshard.mt.study import stages
from gshard.mt.study.compile_ahead import BASELINES, compile_ahead
from gshard.mt.study.ledger import (
    BASELINES_TRANSLATED,
    STAGES,
    Stage,
    baselines_stage,
    entry,
)
from gshard.mt.study.plan import PlannedRun, Study
from gshard.nn.transformer import Transformer


@dataclass(frozen=True)
class Shown:
    """How a study shows its work: lines, the display of a training, and bars."""

    note: Callable[[str], None]
    training: Callable[[], AbstractContextManager[TrainingProgress]]
    bars: Callable[[], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class Wanted:
    """Which part of a study is to be done now."""

    until: Stage = "scored"
    only: tuple[str, ...] = ()  # runs, or "baselines"; all if empty
    seconds: float = float("inf")  # after which nothing more is begun, and a training stops
    processes: int = 0  # that compile the programs of later runs beforehand

    def has(self, name: str) -> bool:
        """Whether the run of that name is wanted."""
        return not self.only or name in self.only

    def needs(self, stage: Stage) -> bool:
        """Whether that stage is wanted."""
        return STAGES.index(stage) <= STAGES.index(self.until)


def work(plan: Study, wanted: Wanted, shown: Shown) -> bool:
    """Do what is wanted and not done; whether all of it is done now."""
    end = time.monotonic() + wanted.seconds
    runs = [run for run in plan.runs if wanted.has(run.name)]
    for name in wanted.only:
        if name != BASELINES:
            plan.run(name)  # an unknown one is an error before anything starts
    if wanted.processes:
        compile_ahead(plan, _to_compile(plan, wanted), wanted.processes, shown.note)
    for run in runs:
        if not _on_accelerator(plan, run, wanted, shown, end):
            shown.note(f"stopped at {run.name}; the same command continues")
            return False
    if plan.baselines and wanted.has(BASELINES):
        if time.monotonic() > end:
            return False
        _baselines(plan, wanted, shown)
    if wanted.needs("scored"):
        _scores(plan, runs, shown)
    return True


def _to_compile(plan: Study, wanted: Wanted) -> list[str]:
    """The runs with programs that no other has, and the groups of baselines, by name."""
    names, known = [], []
    for run in plan.runs:
        config = run.config
        programs = [config.model, config.batch, config.optimizer, config.distill, run.teacher]
        if wanted.has(run.name) and not entry(plan, run).reached("trained"):
            if not run.goes_on_from and programs not in known:
                names.append(stages.prepare(plan, run).name)
            known.append(programs)
    if plan.baselines and wanted.has(BASELINES) and baselines_stage(plan) == "waiting":
        stages.prepare(plan, plan.run(plan.baselines.of))
        names += [f"{BASELINES}:{n}" for n in range(len(plan.baselines.config.sizes))]
    return names


def _on_accelerator(plan: Study, run: PlannedRun, wanted: Wanted, shown: Shown, end: float) -> bool:
    """Train and translate; False if the time is over before that is done."""
    if not entry(plan, run).reached("trained"):
        left = end - time.monotonic()
        if left <= 0:
            return False
        shown.note(f"{run.name}: training, {entry(plan, run).length}")
        with shown.training() as progress:
            if stages.train(plan, run, progress, left) is None:
                return False
        done = entry(plan, run)
        shown.note(
            f"{run.name}: {done.step:,} steps, {done.tokens:,.0f} tokens, {done.seconds:.1f} s, "
            f"dev loss {done.dev_nll or float('nan'):.3f}"
        )
    if wanted.needs("translated") and not entry(plan, run).reached("translated"):
        if time.monotonic() > end:
            return False
        began = time.monotonic()
        with shown.bars() as bars:
            stages.translate(plan, run, bars)
        shown.note(f"{run.name}: translated in {time.monotonic() - began:.1f} s")
    return True


def _baselines(plan: Study, wanted: Wanted, shown: Shown) -> None:
    stage = baselines_stage(plan)
    assert plan.baselines
    assert stage
    wants_scores = wanted.needs("scored")
    if stage == "scored" or (stage == "translated" and not wants_scores):
        return
    run = stages.prepare(plan, plan.run(plan.baselines.of))
    run.make_vocabulary()
    do: Callable[..., Any] = evaluate_baselines if wants_scores else translate_baselines
    began = time.monotonic()
    with shown.bars() as bars:
        config, devices = plan.baselines.config, hosts.chosen(DeviceConfig())
        do(run, plan.evaluate, config, _opener(run, plan), devices, bars)
    took = {"seconds": round(time.monotonic() - began, 1)}
    atomic.write_json(run.folder / BASELINES_TRANSLATED, took)
    shown.note(f"baselines: {took['seconds']} s")


def _opener(run: Run, plan: Study) -> Callable[[Transformer], AnyTranslator]:
    """Translators for baselines, which compile each program once for all models of a shape."""
    strategy, programs = hosts.strategy(DeviceConfig()), dict[Any, Any]()
    search = search_of(run, plan.evaluate)
    return lambda model: Translator(model, run.tokenizer, strategy, search, programs)


def _scores(plan: Study, runs: Sequence[PlannedRun], shown: Shown) -> None:
    for run in runs:
        found = entry(plan, run)
        if found.stage == "translated":
            with shown.bars() as bars:
                means = stages.score(plan, run, bars)["averages"]["all"]
            shown.note(f"{run.name}: BLEU {means['bleu']:.2f}, chrF++ {means['chrf']:.2f}")
