"""What the folder of a run says, read once, checked, and as plain typed values.

A report is wanted most when something went wrong, so nothing here gives up: a file that is missing
or damaged is named among the run's problems, and everything that can be read is kept. What leaves
this module is clean: finite numbers, whole lists, known names.
"""

from __future__ import annotations

import json
import math
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
_SCORES = ("bleu", "chrf", "copy_bleu", "copy_chrf", "nearest_bleu", "untrained_bleu")
_FIGURES = ("sentences", "train_pairs", *_SCORES)  # of a direction

Record = dict[str, float]


@dataclass(frozen=True)
class Direction:
    """The scores of one direction, such as de-en; None is what the evaluation does not say."""

    name: str
    language: str
    target: str
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
    reference: str
    translation: str
    score: float | None = None  # of the model, for its own translation
    chrf: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """What `gshard evaluate` found."""

    tasks: dict[str, Direction]
    averages: dict[str, Record]
    tests: dict[str, Record]  # the averages over all tasks, of each test
    examples: tuple[Example, ...]
    experts: dict[str, dict[str, list[list[float]]]]  # side, task: the share of each expert
    about: Record  # checkpoint, beam, alpha, seconds, weights
    split: str
    signatures: dict[str, str]


@dataclass(frozen=True)
class Baselines:
    """The bilingual models beside the run: BLEU, weights and so on of each task."""

    tasks: dict[str, Record]
    seconds: float | None
    signatures: dict[str, str]


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
    paths: list[Path] = []
    for folder in folders:
        path = Path(folder)
        if not path.is_dir():
            raise UserError(
                f"there is no run at {folder}: a run is a folder that gshard train makes"
            )
        if not any((path / name).exists() for name in FILES):
            raise UserError(f"{folder} is not a run: it has none of {', '.join(FILES)}")
        if path.resolve() not in [known.resolve() for known in paths]:
            paths.append(path)
    return [_read_run(path, name) for path, name in zip(paths, _names(paths), strict=True)]


def number(value: Any) -> float | None:
    """A finite number as it is, and None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can hold
        return None


def numbers(value: Any) -> Record:
    """The finite numbers of a JSON object, by name."""
    if not isinstance(value, dict):
        return {}
    clean = {name: number(each) for name, each in value.items()}
    return {name: each for name, each in clean.items() if each is not None}


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
        atomic.refuse_special(path)
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        problems.append("metrics.jsonl is missing: nothing is known of the training")
        return (), ()
    except OSError as error:
        problems.append(f"metrics.jsonl is damaged and left out: {error}")
        return (), ()
    kinds: dict[str, list[Record]] = {"train": [], "dev": []}
    damaged: list[int] = []
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            value = None
        record = numbers(value)
        if not isinstance(value, dict) or "step" not in record:
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
    tasks = {name: _task(name, entry) for name, entry in value["tasks"].items()}
    found = [value.get(name) for name in ("averages", "tests")]
    averages, tests = (each if isinstance(each, dict) else {} for each in found)
    examples = value.get("examples")
    return Evaluation(
        tasks=tasks,
        averages={name: numbers(averages[name]) for name in averages},
        tests={n: numbers(t.get("all")) for n, t in tests.items() if isinstance(t, dict)},
        examples=tuple(_examples(examples if isinstance(examples, list) else [])),
        experts=_experts(value.get("experts"), problems),
        about=numbers(value),
        split=value["split"] if isinstance(value.get("split"), str) else "",
        signatures=_texts(value.get("signatures")),
    )


def _task(name: str, entry: Any) -> Direction:
    entry = entry if isinstance(entry, dict) else {}
    source, _, target = name.partition("-")
    known, texts = numbers(entry), _texts(entry)
    group, target = texts.get("group", ""), texts.get("target", target)
    language = texts.get("language", source if target == "en" else target)
    figures = {each: known.get(each) for each in _FIGURES}
    few, group = entry.get("few") is True, group if group in GROUPS else ""
    return Direction(name, language, target, group=group, few=few, **figures)


def _examples(values: list[Any]) -> list[Example]:
    found = []
    for value in values:
        texts = _texts(value)
        if {"task", "source", "translation"} <= texts.keys():
            scores = [number(value.get(name)) for name in ("score", "chrf")]
            reference = texts.get("reference", "")
            pair = (texts["task"], texts["source"], reference, texts["translation"])
            found.append(Example(*pair, *scores))
    return found


def _experts(value: Any, problems: list[str]) -> dict[str, dict[str, list[list[float]]]]:
    """The shares of the experts, of tasks that have the same layers and experts as the others."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    if value is None:
        return found
    dropped = 0
    for side in SIDES:
        tasks = value.get(side) if isinstance(value, dict) else None
        good: dict[str, list[list[float]]] = {}
        expected: list[int] | None = None
        for task, layers in (tasks if isinstance(tasks, dict) else {}).items():
            rows = layers if isinstance(layers, list) else []
            if not rows or not all(
                isinstance(row, list) and row and all(number(x) is not None for x in row)
                for row in rows
            ):
                dropped += 1
                continue
            sizes = [len(row) for row in rows]
            expected = expected or sizes
            if sizes == expected:
                good[task] = rows
            else:
                dropped += 1
        if good:
            found[side] = good
    if dropped or not isinstance(value, dict):
        problems.append(
            f"evaluation.json: the experts' shares of {dropped or 'all'} tasks are damaged "
            "and left out"
        )
    return found


def _read_baselines(path: Path, problems: list[str]) -> Baselines | None:
    value = _read_versioned(path, problems)
    if value is None:
        return None
    tasks = {name: numbers(entry) for name, entry in value["tasks"].items()}
    return Baselines(
        tasks={name: entry for name, entry in tasks.items() if "bleu" in entry},
        seconds=number(value.get("seconds")),
        signatures=_texts(value.get("signatures")),
    )


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {name: each for name, each in value.items() if isinstance(each, str)}


def _pairs(
    folder: Path,
    config: dict[str, Any],
    evaluation: Evaluation | None,
    baselines: Baselines | None,
    problems: list[str],
) -> dict[str, float]:
    """Training pairs by language: from the corpus if it is still there, else the evaluation's."""
    data = config.get("data")
    corpus = data.get("corpus") if isinstance(data, dict) else None
    if isinstance(corpus, str) and corpus:
        for place in (Path(corpus), folder / corpus, folder.parent / corpus):
            manifest = _read_object(place / "manifest.json", problems)
            languages = manifest.get("languages") if manifest else None
            if isinstance(languages, dict):
                counts = {
                    name: numbers(splits.get("train")).get("pairs", 0)
                    for name, splits in languages.items()
                    if isinstance(splits, dict)
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
