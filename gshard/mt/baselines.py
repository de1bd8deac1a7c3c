"""Bilingual models, one for each task: the zero line of the paper's Delta-BLEU (section 4.1).

They are dense Transformers with the run's own vocabularies, sized by their data as the paper's are
(Big for languages with much text, Base for those with little, and more dropout the less there is),
and stopped early on their dev text. What is trained stays in `RUN/baselines`, so that another
search or test set needs no training.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from gshard.mt import atomic
from gshard.mt.batches import BatchConfig, Batches
from gshard.mt.checkpoint import named, unnamed
from gshard.mt.errors import UserError
from gshard.mt.evaluate import EvaluateConfig, digest_of, signatures, task_scores, weights_of
from gshard.mt.gather import Progress, Silent
from gshard.mt.heldout import HeldOut, held_out, tasks_of
from gshard.mt.loads import batches_of
from gshard.mt.packing import Arrays
from gshard.mt.scores import averages, resource_groups
from gshard.mt.side_by_side import GroupState, Schooling, group_of, model_of
from gshard.mt.splits import fingerprint
from gshard.mt.tokenizer import Task
from gshard.mt.tokens import TaskTokens, open_tokens, some_of
from gshard.mt.translations import Store, Translates, folder_of, translate_all
from gshard.nn.remat import step_memory
from gshard.nn.transformer import Batch, Transformer, TransformerConfig

if TYPE_CHECKING:
    from gshard.mt.run import Run

VERSION = 1
BASELINES = "baselines.json"
_ENOUGH_DEV = 30  # sentences; with fewer, some training text is set aside instead
_DEV_BATCHES = 16
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
    schooling: Schooling = dataclasses.field(default_factory=Schooling)
    sizes: tuple[Size, ...] = SIZES
    save_seconds: float = 120.0  # between two copies of a group in training
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UserError(f"{self.steps} steps of training a baseline are none; 4000 is usual")
        if self.models < 1:
            raise UserError(f"{self.models} models side by side train nothing")


@dataclass(frozen=True)
class Pupil:
    """A task whose baseline is wanted, with all that its training depends on."""

    task: Task
    size: Size
    model: TransformerConfig
    train: TaskTokens
    dev: TaskTokens
    rows: int
    limit: int  # steps
    seed: int
    digest: str  # equal only for equal trainings


def pupils(run: Run, tasks: Sequence[Task], config: BaselineConfig) -> list[Pupil]:
    """What there is to train, the task with the most text first."""
    found = []
    folder = run.folder / "tokens"
    for task in sorted(tasks, key=lambda task: (-run.corpus.count(task.foreign), str(task))):
        (train,) = open_tokens(run.corpus, run.tokenizer, folder, "train", [task])
        if run.corpus.count(task.foreign, "dev") >= _ENOUGH_DEV:
            (dev,) = open_tokens(run.corpus, run.tokenizer, folder, "dev", [task])
        else:
            train, dev = set_aside(train)
        size = next(size for size in config.sizes if len(train) >= size.pairs)
        rows = min(run.config.batch.rows, size.rows)
        row = run.config.batch.target_length
        in_batch = max(1.0, rows * row / max(1.0, float(np.mean(train.target.lengths))))
        limit = int(np.clip(size.epochs * len(train) / in_batch, 1, config.steps))
        model = size.model(run.model_config)
        seed = fingerprint(f"{config.seed} {task}") % 2**31
        entry = run.corpus.manifest["languages"][task.foreign]
        settings: Any = [dataclasses.asdict(c) for c in (model, size, config.schooling)]
        settings += [rows, limit, seed, run.config.batch.source_length, row]
        settings += [run.tokenizer.digest, entry["train"]["sha256"], entry.get("dev", {})]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
        found.append(Pupil(task, size, model, train, dev, rows, limit, seed, digest))
    return found


def set_aside(tokens: TaskTokens) -> tuple[TaskTokens, TaskTokens]:
    """Training text without a twentieth of it, at most 200 sentences, and that twentieth."""
    count = int(np.clip(len(tokens) // 20, 1, 200))
    order = np.random.default_rng(0).permutation(len(tokens))
    dev, train = np.sort(order[:count]), np.sort(order[count:])
    return some_of(tokens, train if len(train) else dev), some_of(tokens, dev)


def groups_of(pupils: Sequence[Pupil], room: Callable[[Pupil], int]) -> list[list[Pupil]]:
    """Groups of one shape, of tasks with about equal text, which take about as long.

    `room` says how many models of a pupil's shape there is memory for.
    """
    alike: dict[Any, list[Pupil]] = {}
    for pupil in pupils:
        alike.setdefault((pupil.model, pupil.rows), []).append(pupil)
    groups = []
    for members in alike.values():
        count = -(-len(members) // room(members[0]))  # as few as possible, of equal sizes
        size = -(-len(members) // count)
        groups += [members[i : i + size] for i in range(0, len(members), size)]
    return groups


def room_for(
    pupil: Pupil, lengths: tuple[int, int], devices: Sequence[jax.Device], schooling: Schooling
) -> int:
    """How many such models the devices can train at once, by what a step of one keeps."""
    model = jax.eval_shape(lambda: Transformer(pupil.model, jax.random.key(0)))
    optimizer = jax.eval_shape(schooling.optimizer().init, model)
    source, target = (jax.ShapeDtypeStruct((pupil.rows, n), np.int32) for n in lengths)
    batch = Batch(source, source, source, target, target, target, target)  # type: ignore[arg-type]
    # The best weights stand beside the newest; the rest is for what XLA needs in between.
    one = 1.5 * step_memory(model, optimizer, batch).total + 4 * weights_of(model)
    stats = devices[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return max(1, int(0.9 * stats["bytes_limit"] / one) * len(devices))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, int(0.5 * memory / one))


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
        most = max(pupil.limit for pupil in group) // config.schooling.look_every + 1
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
