"""The weights of a run or a release, and what they depend on.

Weights are read replicated, or in the shards that a strategy asks for. What the losses of a run
depend on is bound into its checkpoints: one can only be resumed with the settings, the vocabularies
and the text that it was made with. Otherwise, editing a file between two trainings would silently
change the losses.
"""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

import gshard
from gshard.errors import UserError
from gshard.mt import atomic, hosts
from gshard.mt.config import CHANGEABLE, OptimizerConfig, fall_if_changeable
from gshard.mt.run import Run
from gshard.mt.training import weights as files
from gshard.mt.training.weights import named, unnamed
from gshard.nn.config import Int8, TransformerConfig
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer

_CHECKED_BY_CONTENT = ("data.",)  # where text and vocabularies are does not matter
# What a translation depends on and the shapes of the weights do not tell.
_OF_THE_MODEL = ("model.heads", "model.gating.top_k", "model.gating.second_expert")


def identity(run: Run) -> dict[str, Any]:
    """The settings that matter, and checksums of vocabularies, languages' text and the teacher."""
    unbound = (*CHANGEABLE, *_CHECKED_BY_CONTENT)
    languages = run.corpus.manifest["languages"]
    text = {
        language: {
            split: languages[language][split]["sha256"]
            for split in ("train", "dev")
            if split in languages.get(language, {})
        }
        for language in sorted({task.foreign for task in run.tokenizer.tasks})
    }
    teacher = run.config.distill.teacher
    settings = {n: v for n, v in run.settings.items() if not n.startswith(unbound)}
    return {
        "settings": _plain(settings),
        "vocabulary": run.tokenizer.digest,
        "text": text,
        "teacher": SavedWeights.of_teacher(run).digest() if teacher else "",
    }


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint gives it back."""
    return dict(json.loads(json.dumps(settings)))


def refuse_changes(
    run: Run,
    mine: dict[str, Any],
    note: dict[str, Any] | None,
    so: str = "its losses would differ; restore what changed, or start a new run",
) -> None:
    """An error if something that results depend on is not as a checkpoint notes it."""
    if note and (changed := differences(note["identity"], mine, note["step"])):
        lines = "\n  ".join(changed)
        raise UserError(f"{run.folder} is not as it was at step {note['step']}:\n  {lines}\n{so}")


def differences(saved: dict[str, Any], now: dict[str, Any], done: int) -> list[str]:
    """What changed since the checkpoint of step `done`, a line each."""
    before, after = saved["settings"], now["settings"]
    changeable = fall_if_changeable(_rate(before), _rate(after), done)
    # A setting that an older release did not have gets the value of its behaviour.
    lines = [
        f"{name} was {before[name]} and is now {after[name]}"
        for name in sorted(before.keys() & after.keys())
        if before[name] != after[name] and name not in changeable
    ]
    if saved["vocabulary"] != now["vocabulary"]:
        lines.append("the vocabularies are others")
    if saved.get("teacher", "") != now.get("teacher", ""):
        lines.append("the teacher is another one (distill.teacher, distill.checkpoint)")
    old, new = saved["text"], now["text"]
    changed = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    if changed:
        lines.append(f"the corpus has other text of {', '.join(changed)}")
    return lines


def _rate(saved: dict[str, Any]) -> OptimizerConfig:
    """How the learning rate falls, of settings as a checkpoint has them."""
    return OptimizerConfig(fall=saved.get("optimizer.fall", 0), end=saved.get("optimizer.end", 0))


@dataclass(frozen=True)
class SavedWeights:
    """The weights of a run, "best", "last" or those of a step; or of a release, which has one."""

    run: Run
    which: str = "best"

    @staticmethod
    def of_teacher(run: Run) -> SavedWeights:
        """The weights of a run's teacher, which has the vocabularies of the run."""
        folder = run.config.distill.teacher
        if Path(folder).resolve() == run.folder.resolve():
            raise UserError(f"distill.teacher is {folder}, the run itself; it is another run")
        teacher = Run.open(folder)
        if teacher.tokenizer.digest != run.tokenizer.digest:
            raise UserError(
                f"the teacher {folder} has other vocabularies than {run.folder}: a student learns "
                f"the teacher's probabilities of every piece. With "
                f"data.vocabulary={folder}/vocabulary it gets the teacher's"
            )
        return SavedWeights(teacher, run.config.distill.checkpoint)

    def digest(self) -> str:
        """The checksum of their files: other weights have another one."""
        folder = self.run.folder
        if not files.is_release(self.run):
            checkpoints, step = self._checkpoints()
            folder = checkpoints.folder / str(step)
        return atomic.checksum(folder / files.CHECKSUMS)

    def load(self, like: Any = None) -> tuple[Transformer, int]:
        """The model and its step; `like` is the model as shapes with shardings (`model_like`)."""
        like = model_like(self.run.model_config) if like is None else like
        if files.is_release(self.run):
            return self._released(like)
        checkpoints, step = self._checkpoints()
        found = checkpoints.restore_some(step, {"model": like})
        if saved := found["note"].get("identity"):
            of_model = {n: v for n, v in self.run.settings.items() if n.startswith(_OF_THE_MODEL)}
            now = {"settings": _plain(of_model), "vocabulary": self.run.tokenizer.digest}
            so = "its translations would differ; restore what changed"
            refuse_changes(self.run, {**saved, **now}, found["note"], so)
        return found["model"], step

    def _checkpoints(self) -> tuple[Any, int]:
        from gshard.mt.training.checkpoint import Checkpoints  # Orbax, which releases do without

        checkpoints = Checkpoints(self.run.folder, read_only=True)
        return checkpoints, checkpoints.chosen(self.which)

    def _released(self, like: Any) -> tuple[Transformer, int]:
        """The weights of a release in the model's dtypes; the first process checks it before."""
        run, first = self.run, hosts.is_first()
        if why := hosts.told_by_any(files.release_problem(run) if first else ""):
            raise UserError(why)
        if first and not files.has_checksums(run):
            print(f"gshard: {files.unverifiable(run)}", file=sys.stderr)
        step, wanted = files.step_of(run, self.which), named(like)
        weights = files.WeightsFile(run.folder / files.WEIGHTS)

        def part(name: str, where: Any) -> np.ndarray:
            return weights.part(name, where).astype(wanted[name].dtype)

        placed = {
            name: jax.make_array_from_callback(
                leaf.shape, leaf.sharding, functools.partial(part, name), dtype=leaf.dtype
            )
            for name, leaf in wanted.items()
        }
        return unnamed(placed, like), step


def load_model(run: Run, which: str = "best", like: Any = None) -> tuple[Transformer, int]:
    """The weights of a run and their step: "best", "last", a step, or "untrained" for fresh ones.

    `like` is the model as shapes with shardings (`model_like`); each host then reads only what
    its devices hold. Without it this process reads all of the weights.
    """
    return (_fresh(run, like), 0) if which == "untrained" else SavedWeights(run, which).load(like)


def teacher_of(run: Run, strategy: Strategy, *, shapes: bool = False) -> Transformer | None:
    """The weights of a run's teacher, or only their shapes, in the shards of a strategy."""
    if not run.config.distill.teacher:
        return None
    saved = SavedWeights.of_teacher(run)
    like = model_like(saved.run.model_config, strategy)
    return like if shapes else saved.load(like)[0]


def in_int8(model: Transformer) -> Transformer:
    """The model for decoding with its weights in 8 bits, those of experts too."""
    rounded, round_ = {}, jax.jit(Int8.of, static_argnums=1)
    for name, leaf in named(model).items():
        axes = files.summed_axes(name)
        rounded[name] = leaf if axes is None else round_(leaf, axes)
    return unnamed(rounded, model)


def model_like(config: TransformerConfig, strategy: Strategy = ONE_DEVICE) -> Transformer:
    """A model as shapes with the shardings of a strategy: experts split, the rest replicated."""
    shapes = eqx.filter_eval_shape(Transformer, config, jax.random.key(0))
    if strategy.devices > 1:
        spread = gshard.jit(
            functools.partial(strategy.weights, stacked=1),
            devices=jax.devices()[: strategy.devices],
        )
        (shapes,) = spread.lower(shapes).in_info
        return shapes
    whole = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), shapes
    )


def _fresh(run: Run, like: Any) -> Transformer:
    """The weights before training, made where they belong."""

    def fresh() -> Transformer:
        return Transformer(run.model_config, jax.random.key(run.config.train.seed))

    if like is None:
        return fresh()
    return jax.jit(fresh, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, like))()
