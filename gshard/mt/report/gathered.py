"""What the folder of a run says, read once, checked, and as plain typed values.

A report is wanted most when something went wrong, so nothing here gives up: a file that is missing
or damaged is named among the run's problems, and everything that can be read is kept. What leaves
this module is clean: finite numbers, whole lists, known names.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gshard.errors import UserError
from gshard.mt import atomic

FILES = ("config.json", "metrics.jsonl", "evaluation.json", "baselines.json")
VERSION = 1  # of evaluation.json and baselines.json
GROUPS = ("high", "mid", "low")
SIDES = ("encoder", "decoder")

Record = dict[str, float]
Experts = dict[str, dict[str, list[list[float]]]]  # side, task: of each layer each expert's share


@dataclass(frozen=True)
class Direction:
    """The scores of one direction, such as de-en; None is what the evaluation does not say."""

    name: str
    language: str = ""
    target: str = ""
    sentences: float | None = None
    train_pairs: float | None = None
    group: str = ""
    bleu: float | None = None
    chrf: float | None = None
    copy_bleu: float | None = None
    copy_chrf: float | None = None
    nearest_bleu: float | None = None
    untrained_bleu: float | None = None
    few: bool = False  # so few sentences that the evaluation's averages leave it out

    @property
    def into_english(self) -> bool:
        """Whether English is the target, as for all tasks of the paper."""
        return self.target == "en"


@dataclass(frozen=True)
class Example:
    """A sentence of the test set with its translation."""

    task: str
    source: str
    translation: str
    reference: str = ""
    score: float | None = None  # of the model, for its own translation
    chrf: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """What `gshard evaluate` found."""

    tasks: dict[str, Direction] = field(default_factory=dict)
    averages: dict[str, Record] = field(default_factory=dict)
    tests: dict[str, Record] = field(default_factory=dict)  # the averages over all tasks, of each
    examples: tuple[Example, ...] = ()
    experts: Experts = field(default_factory=dict)
    about: Record = field(default_factory=dict)  # checkpoint, beam, alpha, seconds, weights
    split: str = ""
    signatures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Baselines:
    """The bilingual models beside the run: BLEU, weights and so on of each task."""

    tasks: dict[str, Record] = field(default_factory=dict)
    seconds: float | None = None
    signatures: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Gathered:
    """All that a report knows of one run."""

    name: str
    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    train: tuple[Record, ...] = ()
    dev: tuple[Record, ...] = ()
    evaluation: Evaluation | None = None
    baselines: Baselines | None = None
    pairs: dict[str, float] = field(default_factory=dict)  # training pairs of each language
    begun: float | None = None  # when config.json was written, in seconds since 1970
    ended: float | None = None  # when metrics.jsonl was last written
    problems: tuple[str, ...] = ()

    def setting(self, *path: str) -> float | None:
        """A setting of the configuration that is a number, or None."""
        value: Any = self.config
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        return number(value)

    @property
    def last(self) -> Record:
        """The newest known value of everything that training records have; the step that a run
        stopped at may have been saved, with its dev loss, and not logged."""
        found = {name: value for record in self.train for name, value in record.items()}
        saved = self.dev[-1] if self.dev else {}
        if saved.get("step", 0) > found.get("step", 0):
            found |= {name: saved[name] for name in ("step", "tokens", "seconds") if name in saved}
        return found


def gather(folders: Sequence[str | Path]) -> list[Gathered]:
    """The runs in `folders`, each once, under names that differ."""
    found: dict[Path, Path] = {}  # by where it is
    for folder in folders:
        path = Path(folder)
        if not path.is_dir():
            raise UserError(
                f"there is no run at {folder}: a run is a folder that gshard train makes"
            )
        if not any((path / name).exists() for name in FILES):
            raise UserError(f"{folder} is not a run: it has none of {', '.join(FILES)}")
        found.setdefault(path.resolve(), path)
    paths = list(found.values())
    return [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def number(value: Any) -> float | None:
    """A finite number as it is, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can hold
        return None


def kept(kind: Any, value: Any) -> Any:
    """What of a JSON value is of a type, without all that is not; None if nothing can be."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # or None
        return kept(parts[0], value)
    if kind is float:
        return number(value)
    if origin is tuple:
        found = [kept(parts[0], each) for each in (value if isinstance(value, list) else ())]
        return tuple(each for each in found if each is not None)
    if isinstance(kind, type) and origin is None and not dataclasses.is_dataclass(kind):
        return value if type(value) is kind else None
    if not isinstance(value, dict):
        return None
    if origin is dict:
        clean = {name: kept(parts[1], each) for name, each in value.items()}
        return {name: each for name, each in clean.items() if each is not None}
    known = {n: kept(hint, value.get(n)) for n, hint in typing.get_type_hints(kind).items()}
    try:
        return kind(**{name: each for name, each in known.items() if each is not None})
    except TypeError:  # it lacks a field
        return None


def numbers(value: Any) -> Record:
    """The finite numbers of a JSON object, by name."""
    return kept(Record, value) or {}


def _names(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of their parents' as tell them apart."""
    parts = [path.resolve().parts for path in paths]
    for depth in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-depth:]).replace("//", "/") for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def _read_run(folder: Path, name: str) -> Gathered:
    problems: list[str] = []
    config = _read_object(folder / "config.json", problems)
    if config is None and not (folder / "config.json").exists():
        problems.append("config.json is missing: the model's dims and the corpus are not known")
    train, dev = _read_metrics(folder / "metrics.jsonl", problems)
    evaluation = _read_evaluation(folder / "evaluation.json", problems)
    baselines = _read_baselines(folder / "baselines.json", problems)
    return Gathered(
        name=name,
        folder=folder,
        config=config or {},
        train=train,
        dev=dev,
        evaluation=evaluation,
        baselines=baselines,
        pairs=_pairs(folder, config or {}, evaluation, baselines, problems),
        begun=_written(folder / "config.json"),
        ended=_written(folder / "metrics.jsonl"),
        problems=tuple(problems),
    )


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The JSON object in a file; None if there is none, with a problem if it is damaged."""
    try:
        return atomic.read_object(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} is damaged and left out: {error}")
        return None


def _read_versioned(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """As `_read_object`, and its version is one that this report can read."""
    value = _read_object(path, problems)
    if value is None:
        return None
    if value.get("version") != VERSION:
        problems.append(
            f"{path.name} has version {value.get('version')!r} and is left out: "
            f"this report reads version {VERSION}"
        )
        return None
    if not isinstance(value.get("tasks"), dict):
        problems.append(f"{path.name} is damaged and left out: it has no tasks")
        return None
    return value


def _read_metrics(path: Path, problems: list[str]) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """The training and dev records in order of their steps.

    A run that was killed and resumed writes some steps again; what it wrote first is forgotten,
    as the weights it belonged to were.
    """
    try:
        found = atomic.read_records(path)
    except FileNotFoundError:
        problems.append("metrics.jsonl is missing: nothing is known of the training")
        return (), ()
    except OSError as error:
        problems.append(f"metrics.jsonl is damaged and left out: {error}")
        return (), ()
    kinds: dict[str, list[Record]] = {"train": [], "dev": []}
    damaged: list[int] = []
    for place, value in found:
        record = numbers(value)
        if value is None or "step" not in record:
            damaged.append(place)
        elif value.get("kind") in ("train", "dev"):
            records = kinds[value["kind"]]
            while records and records[-1]["step"] >= record["step"]:
                records.pop()
            records.append(record)
    if damaged:
        several = f"{len(damaged)} lines are" if len(damaged) > 1 else "one line is"
        problems.append(
            f"metrics.jsonl: {several} damaged and left out (the first is line {damaged[0]})"
        )
    return tuple(kinds["train"]), tuple(kinds["dev"])


def _read_evaluation(path: Path, problems: list[str]) -> Evaluation | None:
    value = _read_versioned(path, problems)
    if value is None:
        return None
    tests = kept(dict[str, dict[str, Record]], value.get("tests")) or {}
    plain = {name: value.get(name) for name in ("averages", "examples", "split", "signatures")}
    return dataclasses.replace(
        kept(Evaluation, plain),
        tasks={name: _task(name, entry) for name, entry in value["tasks"].items()},
        tests={name: means.get("all", {}) for name, means in tests.items()},
        experts=_experts(value.get("experts"), problems),
        about=numbers(value),
    )


def _task(name: str, entry: Any) -> Direction:
    found = kept(Direction, {**(entry if isinstance(entry, dict) else {}), "name": name})
    source, _, target = name.partition("-")
    target = found.target or target
    language = found.language or (source if target == "en" else target)
    group = found.group if found.group in GROUPS else ""
    return dataclasses.replace(found, language=language, target=target, group=group)


def _experts(value: Any, problems: list[str]) -> Experts:
    """The shares of the experts, of tasks that have the same layers and experts as the others."""
    found: Experts = {}
    if value is None:
        return found
    dropped = 0
    for side in SIDES:
        tasks = value.get(side) if isinstance(value, dict) else None
        tasks = tasks if isinstance(tasks, dict) else {}
        sizes = {task: _sizes(layers) for task, layers in tasks.items()}
        expected = next(filter(None, sizes.values()), None)
        good = {task: tasks[task] for task, size in sizes.items() if size == expected}
        dropped += len(tasks) - len(good) if expected else len(tasks)
        if good and expected:
            found[side] = good
    if dropped or not isinstance(value, dict):
        problems.append(
            f"evaluation.json: the experts' shares of {dropped or 'all'} tasks are damaged "
            "and left out"
        )
    return found


def _sizes(layers: Any) -> list[int]:
    """How many experts each layer of a task has; none if a share is damaged."""
    clean = [list(row) for row in kept(tuple[tuple[float, ...], ...], layers)]
    return [len(row) for row in clean] if all(clean) and clean == layers else []


def _read_baselines(path: Path, problems: list[str]) -> Baselines | None:
    value = _read_versioned(path, problems)
    if value is None:
        return None
    found: Baselines = kept(Baselines, value)
    tasks = {name: entry for name, entry in found.tasks.items() if "bleu" in entry}
    return dataclasses.replace(found, tasks=tasks)


def _pairs(
    folder: Path,
    config: dict[str, Any],
    evaluation: Evaluation | None,
    baselines: Baselines | None,
    problems: list[str],
) -> dict[str, float]:
    """Training pairs by language: from the corpus if it is still there, else the evaluation's."""
    corpus = (kept(dict[str, str], config.get("data")) or {}).get("corpus")
    for place in (Path(corpus), folder / corpus, folder.parent / corpus) if corpus else ():
        manifest = _read_object(place / "manifest.json", problems) or {}
        languages = kept(dict[str, dict[str, Record]], manifest.get("languages"))
        if languages is not None:
            counts = {
                name: each.get("train", {}).get("pairs", 0) for name, each in languages.items()
            }
            return {name: count for name, count in counts.items() if count > 0}
    found: dict[str, float] = {}
    for task in evaluation.tasks.values() if evaluation else ():
        pairs = task.train_pairs
        if pairs is None and baselines:
            pairs = baselines.tasks.get(task.name, {}).get("train_pairs")
        if pairs:
            found[task.language] = max(found.get(task.language, 0), pairs)
    return found
