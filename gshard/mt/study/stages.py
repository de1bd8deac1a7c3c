"""What is done with a planned run: its folder, its training, its translations, its scores.

Training and translating need the accelerator, scoring does not: it reads what the others left, so
that a study can be scored on another machine, to which no weights have to travel.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path
from typing import Any

from gshard.mt import atomic, hosts
from gshard.mt.batching.batches import Batches
from gshard.mt.batching.tokenizer import Tokenizer, train_tokenizer
from gshard.mt.config import RunConfig
from gshard.mt.data.corpus import Corpus
from gshard.mt.errors import UserError
from gshard.mt.evaluation.evaluate import System, evaluate, loads_of, translations
from gshard.mt.evaluation.heldout import held_out, tasks_of
from gshard.mt.evaluation.systems import system_of
from gshard.mt.lock import locked
from gshard.mt.progress import Progress, TrainingProgress
from gshard.mt.run import ID, METRICS, Run
from gshard.mt.study.ledger import TRAINED, TRANSLATED, read_json
from gshard.mt.study.plan import PlannedRun, Study
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
        if config.data.vocabulary:
            Tokenizer.load(config.data.vocabulary).save(place)
        else:
            corpus = Corpus.open(config.data.corpus)
            train_tokenizer(corpus, config.vocabulary).save(place)
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
        outcome = loop.train(run, progress, intruder=held.intruder)
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
    other = read_json(plan.place(planned.seconds_of) / TRAINED)
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
    sets = held_out(
        run.corpus, tasks_of(run.tokenizer, config.languages), config.split, config.sentences
    )
    system = system_of(run, config.checkpoint, config)
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
    note = read_json(run.folder / TRANSLATED)
    if note is None:
        raise UserError(f"{run.folder} has not been translated with yet")

    def gone(*_: Any) -> Any:
        raise UserError(
            f"translations of {run.folder} are missing; remove its {TRANSLATED}, and the study "
            "makes them again where its checkpoints are"
        )

    loads = gone if run.config.model.experts else None
    system = System(note["step"], note["digest"], note["weights"], gone, loads)
    return evaluate(run, plan.evaluate, lambda _: system, progress)
