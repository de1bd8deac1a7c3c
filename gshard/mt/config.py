"""The configuration of a training run: typed, named, overridden on the command line, saved with it.

A setting has a dotted name, such as `model.experts` or `model.gating.top_k`, and the type of its
field; a value of another type, or a name that does not exist, is refused before anything starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from gshard.errors import UserError, nearest
from gshard.mt import atomic
from gshard.mt.batching.batches import BatchConfig
from gshard.mt.batching.tokenizer import VocabularyConfig
from gshard.mt.typed import alternatives, built, described, out_of_bounds
from gshard.nn.config import LARGEST, Count, Dropped, Positive, SettingBounds, TransformerConfig

_INFINITE = float("inf")
_Amount = Annotated[float, SettingBounds(0, _INFINITE)]


@dataclass(frozen=True)
class DataConfig:
    """Where the text is."""

    corpus: str = "corpus"  # the folder of a gathered corpus
    vocabulary: str = ""  # the folder of finished vocabularies; trained if empty
    workers: Count = 0  # processes that read ahead; 0 is threads


@dataclass(frozen=True)
class OptimizerConfig:
    """The paper's Adafactor, or Adam.

    The rate rises over `rise` steps to `learning_rate` / sqrt(`warmup`) and falls with the square
    root of the step after `warmup`. Adafactor's rate is relative to the size of each weight. The
    paper's setting is 1.0 with a warmup of 10,000. With `end`, over the last `fall` steps before
    step `end` the rate is drawn down to 0 in a line, which a short run gains much by. Both may be
    changed when a run is resumed, as long as the rate has not begun to fall.
    `fused` computes Adafactor in fewer passes.
    """

    name: Literal["adafactor", "adam"] = "adafactor"
    learning_rate: Annotated[float, SettingBounds(0, 1e6)] = 1.0
    warmup: Positive = 10_000
    rise: Count = 0
    fall: Count = 0
    end: Count = 0  # the step at which the rate is 0; never, if 0
    fused: bool = False

    def begins_to_fall(self) -> float:
        """The step up to which the rate is the same whatever `fall` and `end` are."""
        return self.end - self.fall if self.fall else _INFINITE


@dataclass(frozen=True)
class TrainConfig:
    """How long, how often, and when to stop."""

    steps: Positive = 10_000
    minutes: _Amount = 0.0  # stop after so long, to be resumed; 0 is no limit
    seed: Count = 0
    label_smoothing: Dropped = 0.1
    log_every: Positive = 20
    save_every: Positive = 500  # a checkpoint, and the loss on dev text with it
    dev_batches: Count = 8
    keep: Positive = 2  # the newest checkpoints, and the best beside them
    spike: _Amount = 6.0  # a loss so many deviations above its mean is not learned from
    patience: Positive = 20  # updates left out in a row before training gives up


@dataclass(frozen=True)
class DistillConfig:
    """A teacher whose probabilities are learned from, beside the labels: a run or a release."""

    teacher: str = ""  # its folder; its vocabularies are this run's too. Empty: no teacher
    checkpoint: str = "best"  # or last, or a step
    share: Annotated[float, SettingBounds(0, 1)] = 0.8  # of the loss, by its probabilities


@dataclass(frozen=True)
class DeviceConfig:
    """How the model is spread over devices."""

    count: Count = 0  # 0: every accelerator, or 8 virtual devices on a machine without
    tensor: Positive = 1  # how many ways the hidden dims and heads are split
    stages: Positive = 1  # both stacks as pipelines: each stage has its layers, on its devices
    microbatches: Count = 0  # of a batch, with stages; 0: twice as many as stages
    split_update: bool = False  # optimizer state of replicated weights in pieces
    layout: Literal["paper", "auto"] = "paper"  # groups and experts split, or chosen (layout.json)


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run. The model's two vocabulary sizes are filled in from the tokenizer."""

    model: TransformerConfig
    name: str = "run"
    data: DataConfig = field(default_factory=DataConfig)
    vocabulary: VocabularyConfig = field(default_factory=VocabularyConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    devices: DeviceConfig = field(default_factory=DeviceConfig)
    reproducible: bool = False  # the same bits on any number of devices

    def __post_init__(self) -> None:
        for name, value, kind in settings(self):
            if why := out_of_bounds(value, kind, (-LARGEST, LARGEST)):
                raise ValueError(f"{name} {why}")


# What may change when a run is resumed: nothing that the losses depend on. (Another number of
# devices adds in another order, unless the run is `reproducible`: the last bits of a sum differ.)
# Microbatches of a pipeline draw random numbers of their own.
CHANGEABLE = (
    "name", "data.corpus", "data.workers", "distill.teacher", "distill.checkpoint",
    "devices.count", "devices.tensor", "devices.split_update", "devices.layout", "train.steps",
    "train.minutes", "train.log_every", "train.save_every", "train.keep", "train.patience",
)  # fmt: skip
# These may change too, before the learning rate begins to fall.
_FALL = ("optimizer.fall", "optimizer.end")
# Known only when the vocabularies are there.
_FILLED_IN = ("model.source_vocab", "model.target_vocab")


def settings(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted name, value, type) of every setting."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    for each in dataclasses.fields(config):
        name, value = prefix + each.name, getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            yield from settings(value, name + ".")
        elif name not in _FILLED_IN:
            yield name, value, hints[each.name]


def override(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """The configuration with `name=value` settings replaced."""
    known = {name: kind for name, _, kind in settings(config)}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise UserError(f"{assignment!r} is not a setting: settings are written name=value")
        if name not in known:
            raise UserError(
                f"no setting {name!r}{nearest(name, known)} "
                "(`gshard train --settings` lists all of them)"
            )
        try:
            config = _replaced(config, name.split("."), _parsed(text, known[name]))
        except ValueError as error:
            raise UserError(f"{assignment}: {error}") from None
    return config


def _replaced(config: Any, path: Sequence[str], value: Any) -> Any:
    if len(path) > 1:
        value = _replaced(getattr(config, path[0]), path[1:], value)
    return dataclasses.replace(config, **{path[0]: value})


def _parsed(text: str, kind: Any) -> Any:
    """A value of type `kind` from its text; a ValueError says what is allowed."""
    for each in alternatives(kind):
        with contextlib.suppress(ValueError):
            return _as(text, each)
    literals = [str(each) for each in alternatives(kind) if not isinstance(each, type)]
    raise ValueError(f"{text!r} is not {described(kind)}{nearest(text, literals)}")


_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _as(text: str, kind: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        element = typing.get_args(kind)[0]
        return tuple(_parsed(piece, element) for piece in text.split(",") if piece)
    if kind in (int, float):
        return kind(text.replace("_", ""))
    if kind is str:
        return text
    known = {"none": None} if kind is type(None) else _BOOLS if kind is bool else {str(kind): kind}
    plain = text.lower() if isinstance(kind, type) else text
    if plain not in known:
        raise ValueError(f"{text!r} is none of {', '.join(known)}")
    return known[plain]


def to_json(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts of plain values."""
    nested = dataclasses.asdict(config)
    for name in _FILLED_IN:
        del nested["model"][name.rpartition(".")[2]]
    return nested


def from_json(nested: dict[str, Any]) -> RunConfig:
    """The configuration that `to_json` wrote; settings it does not know are errors."""
    filled = {**nested, "model": {**nested["model"], "source_vocab": 0, "target_vocab": 0}}
    return built(RunConfig, filled)


def read(path: Path) -> RunConfig:
    """The configuration in a JSON file."""
    try:
        return from_json(atomic.read_object(path))
    except FileNotFoundError:
        raise UserError(f"no configuration at {path}") from None
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        raise UserError(f"{path} does not contain a configuration: {error}") from None


def conflicts(saved: RunConfig, wanted: RunConfig, done: int) -> list[str]:
    """Settings that differ and that a run of `done` steps may not change, a line each."""
    before = {name: value for name, value, _ in settings(saved)}
    changeable = CHANGEABLE + fall_if_changeable(saved.optimizer, wanted.optimizer, done)
    return [
        f"{name} was {before[name]} and is now {value}"
        for name, value, _ in settings(wanted)
        if before[name] != value and not name.startswith(changeable)
    ]


def fall_if_changeable(
    saved: OptimizerConfig, wanted: OptimizerConfig, done: int
) -> tuple[str, ...]:
    """The settings of the learning rate's fall, if none of `done` steps depends on them."""
    return _FALL if done <= min(saved.begins_to_fall(), wanted.begins_to_fall()) else ()
