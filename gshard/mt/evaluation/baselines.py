"""Bilingual models, one for each task: the zero line of the paper's Delta-BLEU (section 4.1).

They are dense Transformers with the run's own vocabularies, sized by their data (`baseline_plan`),
many of them trained at once (`baseline_group`) and stopped early by the loss on their dev text.
Trained weights stay in `RUN/baselines`, so that another search or test set needs no training. The
baselines translate and are scored by the same code as the run.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.batches import BatchConfig, Batches
from gshard.mt.decoding.translator import Translator
from gshard.mt.evaluation import baseline_plan as plans
from gshard.mt.evaluation import evaluate
from gshard.mt.evaluation import store as stored
from gshard.mt.evaluation.baseline_group import GroupState, compiled_group, model_of
from gshard.mt.evaluation.scores import resource_groups
from gshard.mt.evaluation.systems import batches_of
from gshard.mt.progress import SILENT, Advance, Progress
from gshard.mt.training.weights import count_of, named, unnamed
from gshard.nn.strategy import Strategy
from gshard.nn.transformer import Transformer

if TYPE_CHECKING:
    from gshard.mt.run import Run

BASELINES = "baselines.json"
_DEV_BATCHES = 16


@dataclass(frozen=True)
class BaselineModels:
    """The baselines of a run: how they are trained, and on which devices.

    Each program of a search is compiled once for all models of a shape.
    """

    run: Run
    config: plans.BaselineConfig
    devices: Sequence[jax.Device] = field(default_factory=lambda: jax.devices()[:1])
    programs: dict[Any, Any] = field(default_factory=dict)

    @property
    def _lengths(self) -> tuple[int, int]:
        """The lengths of a row, of its source and its target: the run's own."""
        return self.run.config.batch.source_length, self.run.config.batch.target_length

    def groups(self, wanted: Sequence[plans.Baseline]) -> list[list[plans.Baseline]]:
        """Which models are trained side by side: as many as are allowed and fit the devices."""

        def room(baseline: plans.Baseline) -> int:
            fit = plans.room_for(baseline, self._lengths, self.devices, self.config.training)
            return min(self.config.models, fit)

        return plans.baseline_groups(wanted, room)

    def train(self, wanted: Sequence[plans.Baseline], progress: Progress = SILENT) -> None:
        """Train those that are not there yet, group by group, each on its own text."""
        groups = self.groups([each for each in wanted if read_note(self.run.folder, each) is None])
        for number, group in enumerate(groups, 1):
            most = -(-max(each.limit for each in group) // self.config.training.dev_every)
            self._train_group(group, progress.stage(f"baselines {number}/{len(groups)}", most))

    def _train_group(self, group: Sequence[plans.Baseline], tell: Advance) -> None:
        run, config = self.run, self.config
        began = saved = time.monotonic()
        batches, dev = [], []
        for baseline in group:
            settings = BatchConfig(baseline.rows, *self._lengths, seed=baseline.seed)
            batches.append(Batches([baseline.train], settings))
            # One empty batch if no dev text fits a row.
            found = batches_of(baseline.dev, baseline.rows, *self._lengths, least=1)
            dev.append(found[:_DEV_BATCHES])
        programs = compiled_group(group[0].model, config.training, len(group), tuple(self.devices))
        marks = hashlib.sha256(" ".join(baseline.digest for baseline in group).encode())
        place = run.folder / "baselines" / f"unfinished-{marks.hexdigest()[:16]}.npz"
        seeds, limits = [p.seed for p in group], [p.limit for p in group]
        state = read_tree(place, programs.state_like())

        def on_dev(step: int, state: GroupState) -> None:
            nonlocal saved
            running = int(np.asarray(state.running).sum())
            nll = float(np.mean(np.asarray(state.best_nll)))
            tell(f"step {step:,}, {running} of {len(group)} learning, dev {nll:.3f}")
            if time.monotonic() - saved > config.save_seconds:
                write_tree(place, state)
                saved = time.monotonic()

        state = programs.train(batches, dev, seeds, limits, state, on_dev, config.workers)
        seconds = time.monotonic() - began
        nll_N, step_N = np.asarray(state.best_nll), np.asarray(state.best_step)
        for i, baseline in enumerate(group):
            model = model_of(state.best, i)
            note = {
                "digest": baseline.digest,
                "size": baseline.size.name,
                "train_pairs": baseline.train.pairs,
                "steps": int(step_N[i]),
                "dev_nll": float(nll_N[i]),
                "seconds": round(seconds / len(group), 1),
                "limit": baseline.limit,
                "system": evaluate.digest_of(model, run.tokenizer.digest),
                "weights": count_of(model),
            }
            with atomic.new_folder(_place(run.folder, baseline)) as part:
                write_tree(part / "weights.npz", model)
                atomic.write_json(part / "note.json", note)
        place.unlink(missing_ok=True)

    def measure(
        self, evaluation: evaluate.EvaluateConfig, progress: Progress = SILENT
    ) -> dict[str, Any]:
        """Train what is missing, measure all on the sentences of `evaluation`: `baselines.json`."""
        began, run = time.monotonic(), self.run
        found = self.translate(evaluation, progress)
        groups = resource_groups(run.corpus, run.tokenizer.config.languages)
        step = progress.stage("score baselines", len(found))
        measured: dict[str, dict[str, Any]] = {}
        for held, note, translations in found:
            kept = ("size", "steps", "limit", "dev_nll", "weights")
            measured[str(held.task)] = {
                "group": groups[held.task.foreign],
                **{name: note[name] for name in kept},
                "train_seconds": note["seconds"],
                **evaluate.task_scores(held, translations),
            }
            step(str(held.task))
        allowed = {"steps_allowed": self.config.steps, "vocabulary": "the run's own"}
        result = evaluate.results_of(run, evaluation, measured, began) | allowed
        atomic.write_json(run.folder / BASELINES, result)
        return result

    def translate(
        self, evaluation: evaluate.EvaluateConfig, progress: Progress = SILENT
    ) -> list[tuple[stored.HeldOut, dict[str, Any], list[stored.Translation]]]:
        """Train what is missing; for each task its sentences, its note and translations.

        Weights are read only where translations are missing.
        """
        run = self.run
        sets = evaluate.sets_of(run, evaluation)
        wanted = plans.plan_baselines(run, [held.task for held in sets], self.config)
        self.train(wanted, progress)
        step = progress.stage("translate with baselines", len(sets))
        found = []
        search = (evaluation.split, evaluation.beam, evaluation.alpha)
        for held, baseline in zip(sets, wanted, strict=True):
            note = read_note(run.folder, baseline) or {}
            place = stored.folder_of(run.folder, f"baseline-{held.task}", *search)
            store = stored.Store(place, {"weights": note["system"]})
            translator = functools.partial(self.opened, baseline, evaluation)
            translations = stored.translate_all(store, [held], translator, rows=evaluation.rows)
            found.append((held, note, translations[str(held.task)]))
            step(str(held.task))
        return found

    def opened(
        self, baseline: plans.Baseline, evaluation: evaluate.EvaluateConfig
    ) -> stored.AnyTranslator:
        """The translator of a baseline that is there."""
        model, devices = read_model(self.run.folder, baseline), self.devices
        strategy, search = Strategy(len(devices)), evaluate.search_of(self.run, evaluation)
        return Translator(model, self.run.tokenizer, strategy, search, self.programs, devices)


def read_model(run: Path, baseline: plans.Baseline) -> Transformer:
    """The weights of a baseline that is there."""
    shapes = jax.eval_shape(lambda: Transformer(baseline.model, jax.random.key(0)))
    model = read_tree(_place(run, baseline) / "weights.npz", shapes)
    if model is None:
        raise UserError(f"{_place(run, baseline)} is damaged; remove it and evaluate again")
    return model


def read_note(run: Path, baseline: plans.Baseline) -> dict[str, Any] | None:
    """What is known of a finished baseline; None if it was trained otherwise, or not at all."""
    note = atomic.known_object(_place(run, baseline) / "note.json") or {}
    # Older notes name no system: their baselines are trained again.
    same = note.get("digest") == baseline.digest and "system" in note
    return note if same else None


def write_tree(path: Path, tree: Any) -> None:
    """The arrays of a tree by name, in one file, whole or absent."""
    with atomic.new_file(path) as part, part.open("wb") as file:
        arrays: Any = {name: np.asarray(leaf) for name, leaf in named(tree).items()}
        np.savez(file, **arrays)


def read_tree(path: Path, like: Any) -> Any:
    """The tree that `write_tree` wrote, shaped like `like`; None if there is none such."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception:  # a damaged archive raises a dozen kinds
        return None
    shapes = {name: leaf.shape for name, leaf in named(like).items()}
    if shapes != {name: array.shape for name, array in arrays.items()}:
        return None
    return unnamed(arrays, like)


def _place(run: Path, baseline: plans.Baseline) -> Path:
    return run / "baselines" / str(baseline.task)
