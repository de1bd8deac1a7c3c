"""Bilingual models, one for each task: the zero line of the paper's Delta-BLEU (section 4.1).

They are dense Transformers with the run's own vocabularies, sized by their data (`pupils`), many of
them trained at once (`side_by_side`) and stopped early on their dev text. What is trained stays in
`RUN/baselines`, so that another search or test set needs no training. They translate by the code
that the run translates by, and are scored by the code that scores it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import gshard
from gshard.mt import atomic
from gshard.mt.batching.batches import BatchConfig, Batches
from gshard.mt.batching.packing import Arrays
from gshard.mt.batching.tokens import TaskTokens
from gshard.mt.data.gather import Progress, Silent
from gshard.mt.decoding.translator import Translator
from gshard.mt.errors import UserError
from gshard.mt.evaluation.baseline_group import GroupState, group_of, model_of
from gshard.mt.evaluation.baseline_plan import BaselineConfig, Pupil, groups_of, pupils, room_for
from gshard.mt.evaluation.evaluate import (
    EvaluateConfig,
    digest_of,
    signatures,
    task_scores,
    weights_of,
)
from gshard.mt.evaluation.expert_loads import batches_of
from gshard.mt.evaluation.heldout import HeldOut, held_out, tasks_of
from gshard.mt.evaluation.scores import averages, resource_groups
from gshard.mt.evaluation.store import Store, Translates, folder_of, translate_all
from gshard.mt.training.checkpoint import named, unnamed
from gshard.nn.transformer import Transformer

if TYPE_CHECKING:
    from gshard.mt.run import Run

VERSION = 1
BASELINES = "baselines.json"
_DEV_BATCHES = 16


def train_baselines(
    run: Run,
    wanted: Sequence[Pupil],
    config: BaselineConfig,
    devices: Sequence[jax.Device] | None = None,
    progress: Progress | None = None,
) -> None:
    """Train those that are not there yet, group by group, each on its own text."""
    progress = progress or Silent()
    devices = list(jax.devices()[:1] if devices is None else devices)
    lengths = (run.config.batch.source_length, run.config.batch.target_length)
    missing = [pupil for pupil in wanted if read_note(run.folder, pupil) is None]

    def room(pupil: Pupil) -> int:
        return min(config.models, room_for(pupil, lengths, devices, config.schooling))

    groups = groups_of(missing, room)
    for number, group in enumerate(groups, 1):
        most = -(-max(pupil.limit for pupil in group) // config.schooling.look_every)
        name = f"baselines {number}/{len(groups)}"
        _train_group(run, group, config, devices, progress.stage(name, most))


def _train_group(
    run: Run,
    group: Sequence[Pupil],
    config: BaselineConfig,
    devices: Sequence[jax.Device],
    tell: Callable[[str], None],
) -> None:
    began = saved = time.monotonic()
    lengths = (run.config.batch.source_length, run.config.batch.target_length)
    batches, dev = [], []
    for pupil in group:
        settings = BatchConfig(pupil.rows, *lengths, seed=pupil.seed)
        batches.append(Batches([pupil.train], settings))
        dev.append(dev_batches(pupil.dev, pupil.rows, lengths))
    programs = group_of(group[0].model, config.schooling, len(group), tuple(devices))
    marks = hashlib.sha256(" ".join(pupil.digest for pupil in group).encode()).hexdigest()[:16]
    place = run.folder / "baselines" / f"unfinished-{marks}.npz"
    seeds, limits = [p.seed for p in group], [p.limit for p in group]
    state = read_tree(place, programs.state_like())

    def looked(step: int, state: GroupState) -> None:
        nonlocal saved
        running = int(np.asarray(state.running).sum())
        nll = float(np.mean(np.asarray(state.best_nll)))
        tell(f"step {step:,}, {running} of {len(group)} learning, dev {nll:.3f}")
        if time.monotonic() - saved > config.save_seconds:
            write_tree(place, state)
            saved = time.monotonic()

    state = programs.train(batches, dev, seeds, limits, state, looked)
    seconds = time.monotonic() - began
    nll_N, step_N = np.asarray(state.best_nll), np.asarray(state.best_step)
    for i, pupil in enumerate(group):
        note = {
            "digest": pupil.digest,
            "size": pupil.size.name,
            "train_pairs": len(pupil.train),
            "steps": int(step_N[i]),
            "dev_nll": float(nll_N[i]),
            "seconds": round(seconds / len(group), 1),
        }
        with atomic.new_folder(_place(run.folder, pupil)) as part:
            write_tree(part / "weights.npz", model_of(state.best, i))
            atomic.write_json(part / "note.json", note)
    place.unlink(missing_ok=True)


def dev_batches(dev: TaskTokens, rows: int, lengths: tuple[int, int]) -> list[Arrays]:
    """The dev text of a task; one empty batch if none of it fits a row."""
    return batches_of(dev, rows, *lengths, least=1)[:_DEV_BATCHES]


def evaluate_baselines(
    run: Run,
    evaluation: EvaluateConfig,
    config: BaselineConfig,
    open_translator: Callable[[Transformer], Translates],
    devices: Sequence[jax.Device] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train what is missing, measure all on the sentences of `evaluation`: `baselines.json`."""
    began = time.monotonic()
    progress = progress or Silent()
    tasks = tasks_of(run.tokenizer, evaluation.languages)
    sets = held_out(run.corpus, tasks, evaluation.split, evaluation.sentences)
    wanted = pupils(run, [held.task for held in sets], config)
    train_baselines(run, wanted, config, devices, progress)
    groups = resource_groups(run.corpus, run.tokenizer.config.languages)
    step = progress.stage("baselines say", len(sets))
    measured: dict[str, dict[str, Any]] = {}
    for held, pupil in zip(sets, wanted, strict=True):
        note = read_note(run.folder, pupil) or {}
        model = read_model(run.folder, pupil)
        store = Store(
            folder_of(
                run.folder,
                f"baseline-{held.task}",
                evaluation.split,
                evaluation.beam,
                evaluation.alpha,
            ),
            {"weights": digest_of(model, run.tokenizer.digest)},
        )
        measured[str(held.task)] = {
            "group": groups[held.task.foreign],
            "size": note["size"],
            "steps": note["steps"],
            "dev_nll": note["dev_nll"],
            "train_seconds": note["seconds"],
            "weights": weights_of(model),
            **_scores(store, held, model, open_translator),
        }
        step(str(held.task))
    result = {
        "version": VERSION,
        "run": run.name,
        "split": evaluation.split,
        "sentences_asked": evaluation.sentences,
        "beam": evaluation.beam,
        "alpha": evaluation.alpha,
        "steps_allowed": config.steps,
        "vocabulary": "the run's own",
        "seconds": round(time.monotonic() - began, 1),
        "signatures": signatures(measured),
        "tasks": measured,
        "averages": averages(measured),
    }
    atomic.write_json(run.folder / BASELINES, result)
    return result


def _scores(
    store: Store,
    held: HeldOut,
    model: Transformer,
    open_translator: Callable[[Transformer], Translates],
) -> dict[str, Any]:
    """A baseline's scores, by the code that gives the run its own."""
    said = translate_all(store, [held], lambda: open_translator(model))
    return task_scores(held, said[str(held.task)])


class OneOfMany(Translator):
    """A translator that shares its compiled programs with those of other models of its shape."""

    def __init__(self, *settings: Any, programs: dict[Any, Any]):
        super().__init__(*settings)
        self._shared = programs

    def compiled(
        self, name: str, fn: Callable[..., Any], *shapes: tuple[int, ...]
    ) -> Callable[..., Any]:
        """`fn(model, *arrays)`, compiled by whoever needed it first, with this model's weights."""
        if (name, shapes) not in self._programs:
            arrays = [np.zeros(shape, np.int32) for shape in shapes]
            key = (self.model_config, self.config, name, shapes)
            if key not in self._shared:
                jitted = gshard.jit(fn, devices=self._devices)
                self._shared[key] = jitted.lower(self._model, *arrays).compile()
            program = self._shared[key]
            self._model, *_ = program.place(self._model, *arrays)
            self._programs[name, shapes] = functools.partial(program, self._model)
        return self._programs[name, shapes]


def read_model(run: Path, pupil: Pupil) -> Transformer:
    """The weights of a baseline that is there."""
    shapes = jax.eval_shape(lambda: Transformer(pupil.model, jax.random.key(0)))
    model = read_tree(_place(run, pupil) / "weights.npz", shapes)
    if model is None:
        raise UserError(f"{_place(run, pupil)} is damaged; remove it and evaluate again")
    return model


def read_note(run: Path, pupil: Pupil) -> dict[str, Any] | None:
    """What is known of a finished baseline; None if it was trained otherwise, or not at all."""
    try:
        note = json.loads((_place(run, pupil) / "note.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if note.get("digest") == pupil.digest else None


def write_tree(path: Path, tree: Any) -> None:
    """The arrays of a tree by name, in one file, whole or absent."""
    with atomic.new_file(path) as part, part.open("wb") as file:
        arrays: Any = {name: np.asarray(leaf) for name, leaf in named(tree).items()}
        np.savez(file, **arrays)


def read_tree(path: Path, like: Any) -> Any:
    """The tree that `write_tree` wrote, shaped like `like`; None if there is none such."""
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError):
        return None
    shapes = {name: leaf.shape for name, leaf in named(like).items()}
    if shapes != {name: array.shape for name, array in arrays.items()}:
        return None
    return unnamed(arrays, like)


def _place(run: Path, pupil: Pupil) -> Path:
    return run / "baselines" / str(pupil.task)
