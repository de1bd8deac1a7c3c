"""Which bilingual baselines a run needs, and how each is to be trained.

They are sized by their data as the paper's are (section 4.1: "Transformer-Big or Transformer-Base
layout, for high or low-resourced languages", with batch size and dropout tuned): the run's own dims
where there is much text, half of them and more dropout where there is little.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import gshard
from gshard.errors import UserError
from gshard.mt.batching.tokenizer import Task
from gshard.mt.batching.tokens import TaskTokens, open_tokens, some_of
from gshard.mt.data.splits import fingerprint
from gshard.mt.evaluation.baseline_group import BaselineTraining
from gshard.nn.config import Batch, TransformerConfig
from gshard.nn.step import init_state, train_step

if TYPE_CHECKING:
    from gshard.mt.run import Run

_ENOUGH_DEV = 30  # sentences; with fewer, some training text is set aside instead
_NARROWEST = 128  # model dim below which nothing is halved


@dataclass(frozen=True)
class Size:
    """A kind of baseline: for tasks with at least `pairs` training pairs."""

    name: str
    pairs: int
    dropout: float
    rows: int  # of a batch, at most; small tasks learn better from small batches
    epochs: int  # at most
    halve_width: bool = False
    halve_layers: bool = False

    def model(self, config: TransformerConfig) -> TransformerConfig:
        """The dense model of this size, for a run with a model of `config`."""
        half = 2 if self.halve_width and config.model_dim >= 2 * _NARROWEST else 1
        pairs = 2 if self.halve_layers else 1
        return dataclasses.replace(
            config,
            encoder_layers=max(2, config.encoder_layers // 2 // pairs * 2),
            decoder_layers=max(2, config.decoder_layers // 2 // pairs * 2),
            model_dim=config.model_dim // half,
            hidden_dim=config.hidden_dim // half,
            heads=max(1, config.heads // half),
            experts=0,
            expert_hidden_dim=None,
            groups=None,
            input_dropout=self.dropout,
            residual_dropout=self.dropout,
            attention_dropout=self.dropout,
            weight_dtype="float32",
            remat="none",
            # What can be mapped over models, whatever the run itself is computed with.
            dispatch="index",
            loss_chunks=1,
        )


# The run's own dims for tasks with much text, half of them for the others: Big and Base.
SIZES = (
    Size("large", 200_000, dropout=0.1, rows=128, epochs=20),
    Size("medium", 20_000, dropout=0.2, rows=64, epochs=40, halve_width=True),
    Size("small", 0, dropout=0.3, rows=32, epochs=80, halve_width=True, halve_layers=True),
)


@dataclass(frozen=True)
class BaselineConfig:
    """How the baselines are trained."""

    steps: int = 4_000  # of each model, at most
    models: int = 16  # side by side, at most
    training: BaselineTraining = dataclasses.field(default_factory=BaselineTraining)
    sizes: tuple[Size, ...] = SIZES
    save_seconds: float = 120.0  # between two copies of a group in training
    seed: int = 0
    workers: int = 0  # processes that read ahead; 0 is a thread

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"{self.steps} training steps of a baseline are too few; 4000 is usual")
        if self.models < 1:
            raise UserError(f"{self.models} models side by side are too few; at least 1 is needed")


def of_steps(steps: int, fall: float = 0.0) -> BaselineConfig:
    """The usual training within so many steps: with fewer, a shorter warmup, and dev text often."""
    every, warmup = min(100, max(10, steps // 40)), min(400, max(1, steps // 4))
    training = BaselineTraining(warmup=warmup, fall=fall, dev_every=every)
    return BaselineConfig(steps, training=training)


@dataclass(frozen=True)
class Baseline:
    """The baseline of one task: all that its training depends on."""

    task: Task
    size: Size
    model: TransformerConfig
    train: TaskTokens
    dev: TaskTokens
    rows: int
    limit: int  # steps
    seed: int
    digest: str  # equal only for equal trainings


def plan_baselines(run: Run, tasks: Sequence[Task], config: BaselineConfig) -> list[Baseline]:
    """What there is to train, the task with the most text first."""
    found = []
    folder = run.folder / "tokens"
    for task in sorted(tasks, key=lambda task: (-run.corpus.count(task.foreign), str(task))):
        (train,) = open_tokens(run.corpus, run.tokenizer, folder, "train", [task])
        if run.corpus.count(task.foreign, "dev") >= _ENOUGH_DEV:
            (dev,) = open_tokens(run.corpus, run.tokenizer, folder, "dev", [task])
        else:
            train, dev = set_aside(train)
        size = next(size for size in config.sizes if train.pairs >= size.pairs)
        rows = min(run.config.batch.rows, size.rows)
        row = run.config.batch.target_length
        in_batch = max(1.0, rows * row / max(1.0, float(np.mean(train.target.lengths))))
        limit = int(np.clip(size.epochs * train.pairs / in_batch, 1, config.steps))
        model = size.model(run.model_config)
        seed = fingerprint(f"{config.seed} {task}") % 2**31
        entry = run.corpus.manifest["languages"][task.foreign]
        settings: Any = [dataclasses.asdict(c) for c in (model, size, config.training)]
        settings += [rows, limit, seed, run.config.batch.source_length, row]
        settings += [run.tokenizer.digest, entry["train"]["sha256"], entry.get("dev", {})]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        found.append(Baseline(task, size, model, train, dev, rows, limit, seed, digest))
    return found


def set_aside(tokens: TaskTokens) -> tuple[TaskTokens, TaskTokens]:
    """Training text without a twentieth of it, at most 200 sentences, and that twentieth."""
    count = int(np.clip(tokens.pairs // 20, 1, 200))
    order = np.random.default_rng(0).permutation(tokens.pairs)
    dev, train = np.sort(order[:count]), np.sort(order[count:])
    ways = np.arange(tokens.target.times) * tokens.pairs
    train = (ways[:, None] + train).ravel()
    return some_of(tokens, train if len(train) else dev), some_of(tokens, dev)


def baseline_groups(
    baselines: Sequence[Baseline], room: Callable[[Baseline], int]
) -> list[list[Baseline]]:
    """Groups of one shape, of tasks with about equal text, which take about as long.

    `room` says how many models of a baseline's shape there is memory for.
    """
    alike: dict[Any, list[Baseline]] = {}
    for baseline in baselines:
        alike.setdefault((baseline.model, baseline.rows), []).append(baseline)
    groups = []
    for members in alike.values():
        count = -(-len(members) // room(members[0]))  # as few as possible, of equal sizes
        size = -(-len(members) // count)
        groups += [members[i : i + size] for i in range(0, len(members), size)]
    return groups


def room_for(
    baseline: Baseline,
    lengths: tuple[int, int],
    devices: Sequence[jax.Device],
    training: BaselineTraining,
) -> int:
    """How many such models the devices can train at once, by the forecast of a step of one."""
    optimizer = training.optimizer(1)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(baseline.model, optimizer, key), key)
    source, target = (jax.ShapeDtypeStruct((baseline.rows, n), np.int32) for n in lengths)
    batch = Batch(source, source, source, target, target, target, target)  # type: ignore[arg-type]
    step = gshard.jit(
        functools.partial(train_step, optimizer=optimizer), devices=1, donate_argnums=0
    )
    forecast = step.lower(state, batch, key).forecast()
    # The best weights are kept beside the newest.
    best = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.model))
    one = forecast.memory_bytes + best
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return max(1, int(0.9 * stats["bytes_limit"] / one) * len(devices))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, int(0.5 * memory / one))
