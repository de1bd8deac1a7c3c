"""The execution of a study: run by run, stage by stage, without repeating what is done.

Runs are trained and translated with in the order of the plan, then the baselines; scores come last,
since they need no accelerator. Whatever ends this (a signal, the time budget, a crash), the same
call resumes: a training from its newest checkpoint, translations from the last complete chunk.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gshard.errors import UserError
from gshard.mt import atomic, hosts
from gshard.mt.atomic import known_object, locked
from gshard.mt.batching.batches import Batches
from gshard.mt.config import DeviceConfig, RunConfig
from gshard.mt.evaluation.baselines import BaselineModels
from gshard.mt.evaluation.evaluate import evaluate, loads_of, sets_of, translations
from gshard.mt.evaluation.systems import Systems
from gshard.mt.progress import Progress, TrainingProgress
from gshard.mt.run import ID, METRICS, Run, make_vocabulary
from gshard.mt.study.compile_ahead import BASELINES, compile_ahead
from gshard.mt.study.plan import (
    BASELINES_TRANSLATED,
    STAGES,
    TRAINED,
    TRANSLATED,
    PlannedRun,
    Stage,
    Study,
    baselines_stage,
    entry,
    made_by,
)
from gshard.mt.training import loop
from gshard.mt.training.checkpoint import FOLDER

_SAMPLE = 8  # batches whose tokens are counted


def prepare(plan: Study, planned: PlannedRun) -> Run:
    """The folder of a run: its configuration, and the vocabularies and tokens of the study."""
    place = plan.place(planned.name)
    run = Run.create(place, configured(plan, planned))
    if planned.goes_on_from and not (place / FOLDER).exists():
        _copy_training(plan.place(planned.goes_on_from), place)
    if not (place / "tokens").is_symlink():
        (plan.folder / "tokens").mkdir(exist_ok=True)
        (place / "tokens").symlink_to(Path("..") / "tokens", target_is_directory=True)
    return run


def configured(plan: Study, planned: PlannedRun) -> RunConfig:
    """The configuration of a run, with the vocabularies that all runs of the study share."""
    config = planned.config
    if config.vocabulary != plan.runs[0].config.vocabulary:
        raise UserError(
            f"{plan.path}: {planned.name!r} has other vocabulary settings than "
            f"{plan.runs[0].name!r}; the runs of a study share one vocabulary"
        )
    place = plan.folder / "vocabulary"
    if not place.is_dir():
        make_vocabulary(config, place)
    data = dataclasses.replace(config.data, vocabulary=str(place))
    distill = config.distill
    if planned.teacher:
        teacher = str(plan.place(planned.teacher))
        distill = dataclasses.replace(distill, teacher=teacher, checkpoint="last")
    return dataclasses.replace(config, data=data, distill=distill)


def _copy_training(old: Path, new: Path) -> None:
    """Begin where another run ended: its checkpoints, which are never changed, are linked."""
    if not (old / TRAINED).is_file():
        raise UserError(f"{old} is not trained yet, and {new.name} continues it")
    shutil.copy2(old / METRICS, new / METRICS)
    part = new / f".{FOLDER}"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(old / FOLDER, part, copy_function=os.link)
    (new / ID).unlink(missing_ok=True)
    if (old / ID).is_file():  # it is the same run from here on
        shutil.copy2(old / ID, new / ID)
    part.rename(new / FOLDER)


def train(
    plan: Study, planned: PlannedRun, progress: TrainingProgress, seconds_left: float
) -> loop.Outcome | None:
    """Train a run, for `seconds_left` at most; None if its length is not reached yet."""
    place = plan.place(planned.name)
    run = prepare(plan, planned)
    seconds = _seconds(plan, planned)
    spent = float((run.metrics() or [{}])[-1].get("seconds", 0.0))
    steps = planned.steps or (_steps(run, planned.tokens) if planned.tokens else 0)
    limit = min(seconds_left, seconds - spent if seconds else seconds_left)
    config = _with_length(run.config, steps, max(limit, 0.001) / 60)
    with locked(place) as held:
        run = Run.create(place, config)
        outcome = loop.train(run, loop.Hooks(progress, intruder=held.intruder))
        # A clock is looked at between steps: a run may end a little before its last second.
        done = outcome.seconds >= 0.97 * seconds if seconds else outcome.step >= steps
        if not done or outcome.signal:
            return None
        Run.create(place, _with_length(config, outcome.step, 0.0))
        atomic.write_json(
            place / TRAINED,
            {
                "step": outcome.step,
                "best": outcome.best,
                "tokens": int(outcome.tokens),
                "seconds": round(outcome.seconds, 3),
                "waited": round(outcome.waited, 4),
                "device": hosts.chosen(config.devices)[0].device_kind,
            },
        )
    return outcome


def _with_length(config: RunConfig, steps: int, minutes: float) -> RunConfig:
    train = dataclasses.replace(
        config.train, steps=steps or config.train.steps, minutes=minutes if minutes < 1e6 else 0.0
    )
    return dataclasses.replace(config, train=train)


def _seconds(plan: Study, planned: PlannedRun) -> float:
    """The seconds that end a run; 0 if steps do."""
    if not planned.seconds_of:
        return planned.seconds
    other = known_object(plan.place(planned.seconds_of) / TRAINED)
    if other is None:
        raise UserError(
            f"{planned.name!r} takes as long as {planned.seconds_of!r}, which is not trained yet"
        )
    return float(other["seconds"])


def _steps(run: Run, tokens: int) -> int:
    """The steps that see about so many target tokens, by those of the first batches."""
    run.make_vocabulary()
    batches = Batches(run.tokens(), run.config.batch)
    counted = [int((batches[i]["target_segments"] > 0).sum()) for i in range(_SAMPLE)]
    return max(1, round(tokens * _SAMPLE / max(sum(counted), 1)))


def translate(plan: Study, planned: PlannedRun, progress: Progress) -> None:
    """Translate the held-out text with the last weights, and count the loads of the experts."""
    began = time.monotonic()
    run = Run.open(plan.place(planned.name))
    config = dataclasses.replace(plan.evaluate, checkpoint="last")
    sets = sets_of(run, config)
    system = Systems(run, config).system(config.checkpoint)
    store, found = translations(run.folder, system, config, sets, progress)
    loads_of(store.folder, system, sets, progress)
    atomic.write_json(
        run.folder / TRANSLATED,
        {
            "step": system.step,
            "digest": system.digest,
            "weights": system.weights,
            "sentences": sum(map(len, found.values())),
            "seconds": round(time.monotonic() - began, 1),
        },
    )


def score(plan: Study, planned: PlannedRun, progress: Progress) -> dict[str, Any]:
    """The scores of what was translated, `evaluation.json`; the weights need not be there."""
    run = Run.open(plan.place(planned.name))
    run.make_vocabulary()
    system = made_by(plan, planned.name)
    return evaluate(run, plan.evaluate, lambda _: system, progress)


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
                names.append(prepare(plan, run).name)
            known.append(programs)
    if plan.baselines and wanted.has(BASELINES) and baselines_stage(plan) == "waiting":
        prepare(plan, plan.run(plan.baselines.of))
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
            if train(plan, run, progress, left) is None:
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
            translate(plan, run, bars)
        shown.note(f"{run.name}: translated in {time.monotonic() - began:.1f} s")
    return True


def _baselines(plan: Study, wanted: Wanted, shown: Shown) -> None:
    stage = baselines_stage(plan)
    assert plan.baselines
    assert stage
    wants_scores = wanted.needs("scored")
    if stage == "scored" or (stage == "translated" and not wants_scores):
        return
    run = prepare(plan, plan.run(plan.baselines.of))
    run.make_vocabulary()
    devices = hosts.chosen(DeviceConfig())
    models = BaselineModels(run, plan.baselines.config, devices)
    began = time.monotonic()
    with shown.bars() as bars:
        (models.measure if wants_scores else models.translate)(plan.evaluate, bars)
    took = {"seconds": round(time.monotonic() - began, 1)}
    atomic.write_json(run.folder / BASELINES_TRANSLATED, took)
    shown.note(f"baselines: {took['seconds']} s")


def _scores(plan: Study, runs: Sequence[PlannedRun], shown: Shown) -> None:
    for run in runs:
        found = entry(plan, run)
        if found.stage == "translated":
            with shown.bars() as bars:
                means = score(plan, run, bars)["averages"]["all"]
            shown.note(f"{run.name}: BLEU {means['bleu']:.2f}, chrF++ {means['chrf']:.2f}")
