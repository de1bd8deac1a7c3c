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
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import numpy as np

import gshard
from gshard.mt import hosts
from gshard.mt.config import CHANGEABLE, OptimizerConfig, fall_if_changeable, settings
from gshard.mt.errors import UserError, nearest
from gshard.mt.run import Run
from gshard.mt.training import released
from gshard.mt.training.names import named, unnamed
from gshard.mt.training.weights import WEIGHTS, WeightsFile, summed_axes
from gshard.nn.config import TransformerConfig
from gshard.nn.int8 import Int8
from gshard.nn.strategy import ONE_DEVICE, Strategy
from gshard.nn.transformer import Transformer

if TYPE_CHECKING:
    from gshard.mt.training.checkpoint import Checkpoints

_CHECKED_BY_CONTENT = ("data.",)  # where text and vocabularies are does not matter
# What a translation depends on and the shapes of the weights do not tell.
_OF_THE_MODEL = ("model.heads", "model.gating.top_k", "model.gating.second_expert")


def identity(run: Run, teacher: str = "") -> dict[str, Any]:
    """The settings that matter, and checksums of vocabularies, languages' text and the teacher."""
    matters = {
        name: value
        for name, value, _ in settings(run.config)
        if not name.startswith((*CHANGEABLE, *_CHECKED_BY_CONTENT))
    }
    languages = run.corpus.manifest["languages"]
    text = {
        language: {
            split: languages[language][split]["sha256"]
            for split in ("train", "dev")
            if split in languages.get(language, {})
        }
        for language in sorted({task.foreign for task in run.tokenizer.tasks})
    }
    found = {
        "settings": matters,
        "vocabulary": run.tokenizer.digest,
        "text": text,
        "teacher": teacher,
    }
    return dict(json.loads(json.dumps(found)))  # as a checkpoint gives it back


def other_model(note: dict[str, Any], run: Run) -> list[str]:
    """What the weights of a checkpoint do not go with any more, of the model and vocabularies."""
    if "identity" not in note:
        return []
    saved = note["identity"]
    now = {
        "settings": {n: v for n, v, _ in settings(run.config) if n.startswith(_OF_THE_MODEL)},
        "vocabulary": run.tokenizer.digest,
        # Which translating does not depend on:
        "text": saved["text"],
        "teacher": saved.get("teacher", ""),
    }
    return differences(saved, dict(json.loads(json.dumps(now))), note["step"])


def refuse_changes(run: Run, mine: dict[str, Any], note: dict[str, Any] | None) -> None:
    """An error if something that the losses depend on is not as the last checkpoint notes it."""
    if note and (changed := differences(note["identity"], mine, note["step"])):
        lines = "\n  ".join(changed)
        raise UserError(
            f"{run.folder} is not as it was at step {note['step']}:\n  {lines}\n"
            "its losses would differ; restore what changed, or start a new run"
        )


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


def load_model(run: Run, which: str = "best", like: Any = None) -> tuple[Transformer, int]:
    """The weights of a run and their step: "best", "last", a step, or "untrained" for fresh ones.

    `like` is the model as shapes with shardings (`model_like`); each host then reads only what
    its devices hold. Without it this process reads all of the weights.
    """
    return (_fresh(run, like), 0) if which == "untrained" else trained_model(run, which, like)


def trained_model(run: Run, which: str, like: Any = None) -> tuple[Transformer, int]:
    """The same of weights that were trained."""
    if released.is_release(run):
        return _released(run, which, like)
    checkpoints, step = _chosen(run, which)
    if like is None:
        like = model_like(run.model_config)
    model, note = checkpoints.restore_model(step, like)
    if changed := other_model(note, run):
        lines = "\n  ".join(changed)
        raise UserError(
            f"{run.folder} is not as it was at step {step}:\n  {lines}\n"
            "its translations would differ; restore what changed"
        )
    return model, step


def in_int8(model: Transformer) -> Transformer:
    """The model for decoding with its weights in 8 bits, those of experts too."""
    rounded = {}
    for name, leaf in named(model).items():
        axes = summed_axes(name)
        rounded[name] = leaf if axes is None else Int8.of(leaf, axes)
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


def _released(run: Run, which: str, like: Any) -> tuple[Transformer, int]:
    """The weights of a release, which has those of one step, in the model's dtypes."""
    like = like or model_like(run.model_config)
    wanted = named(like)
    step = _opened(run, which)
    weights = WeightsFile(run.folder / WEIGHTS)

    def part(name: str, where: Any) -> np.ndarray:
        return weights.part(name, where).astype(wanted[name].dtype)

    placed = {
        name: jax.make_array_from_callback(
            leaf.shape, leaf.sharding, functools.partial(part, name), dtype=leaf.dtype
        )
        for name, leaf in wanted.items()
    }
    return unnamed(placed, like), step


def _opened(run: Run, which: str) -> int:
    """The step of a release that the first of all processes has found intact."""
    first = hosts.is_first()
    if why := hosts.told_by_any(released.problem(run) if first else ""):
        raise UserError(why)
    if first and not released.has_checksums(run):
        print(f"gshard: {released.unverifiable(run)}", file=sys.stderr)
    return released.step_of(run, which)


def chosen_step(run: Run, which: str) -> int:
    """The step of the checkpoint that "best", "last" or a number names."""
    return _chosen(run, which)[1]


def _chosen(run: Run, which: str) -> tuple[Checkpoints, int]:
    from gshard.mt.training.checkpoint import Checkpoints  # Orbax, which releases do without

    folder = run.folder
    checkpoints = Checkpoints(folder, read_only=True)
    steps = checkpoints.steps
    if not steps:
        raise UserError(
            f"{folder} has no complete checkpoint yet; `gshard train {folder}` makes some"
        )
    if which == "best":
        return checkpoints, checkpoints.best()
    if which == "last":
        return checkpoints, steps[-1]
    if which in map(str, steps):
        return checkpoints, int(which)
    known = ("best", "last", "untrained", *map(str, steps))
    raise UserError(
        f"no checkpoint {which!r} in {folder}; there are {', '.join(known)}{nearest(which, known)}"
    )
