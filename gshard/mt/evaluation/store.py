"""Held-out sentences, and their translations on disk as they arrive.

Which sentences are taken when not all are depends on the sentences alone, so that everybody who
measures n of a language measures the same n, and more of them include those.

An interrupted evaluation resumes without repeating any: the translations by one system under one
setting are one folder of `RUN/translations`. Its file is only ever added to, a few hundred
sentences at a time, and a line that a crash left unfinished is removed. Sentences are looked up by
their text and the target language, which is all that a translator is given: another choice of
sentences finds those it shares.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from gshard.errors import UserError, nearest
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import Task, Tokenizer
from gshard.mt.data.corpus import Corpus
from gshard.mt.data.splits import SPLITS, fingerprint
from gshard.mt.progress import SILENT, Progress


@dataclass(frozen=True)
class HeldOut:
    """Sentences of one task, their references, and which test each belongs to."""

    task: Task
    sources: tuple[str, ...]
    references: tuple[str, ...]
    train_pairs: int
    tests: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.sources)


def tasks_of(tokenizer: Tokenizer, languages: Sequence[str] = ()) -> list[Task]:
    """The directions between English and `languages` that a model was trained for, or all."""
    for language in languages:
        if language not in tokenizer.config.languages:
            known = tokenizer.config.languages
            raise UserError(
                f"the run has no language {language!r}{nearest(language, known)} "
                f"(it has {', '.join(known)})"
            )
    return [task for task in tokenizer.tasks if not languages or task.foreign in languages]


def held_out(
    corpus: Corpus, tasks: Sequence[Task], split: str = "test", most: int = 0
) -> list[HeldOut]:
    """At most `most` (0: all) sentences of each task and test, the tasks with most text first.

    A task without sentences in `split` is left out; if all are, that is an error.
    """
    if split not in SPLITS:
        raise UserError(f"no split {split!r}{nearest(split, SPLITS)}")
    if most < 0:
        raise UserError(f"{most} sentences of each language are not possible; 0 means all")
    found = []
    for task in sorted(tasks, key=lambda task: (-corpus.count(task.foreign), str(task))):
        if not corpus.count(task.foreign, split):
            continue
        rows = list(corpus.labelled(task.foreign, split))
        if most:
            # By hash, then back in the order of the file.
            ranked = sorted(range(len(rows)), key=lambda i: fingerprint("\t".join(rows[i][:2])))
            taken = Counter[str]()
            chosen = []
            for i in ranked:
                taken[rows[i][2]] += 1
                chosen += [i] if taken[rows[i][2]] <= most else []
            rows = [rows[i] for i in sorted(chosen)]
        foreign, english, tests = zip(*rows, strict=True)
        sides = (foreign, english) if task.target == "en" else (english, foreign)
        found.append(HeldOut(task, *sides, corpus.count(task.foreign), tests))
    if not found:
        asked = ", ".join(dict.fromkeys(task.foreign for task in tasks))
        has = [s for s in SPLITS if any(corpus.count(task.foreign, s) for task in tasks)]
        raise UserError(
            f"no {split} sentences of {asked} in {corpus.folder}"
            + (f"; there are {' and '.join(has)} ones (--split)" if has else "")
        )
    return found


_LINES = "translations.jsonl"
_NOTE = "note.json"
CHUNK = 128  # sentences: full batches on any device, and a bar that moves


class Translation(NamedTuple):
    """A translation and its score, the length-normalized log-probability."""

    text: str
    score: float


class AnyTranslator(Protocol):
    """Anything that translates as a `Translator` does, and so can be measured."""

    def translate(self, texts: Sequence[str], target: str = "en") -> Sequence[Sequence[Any]]:
        """For each text its best translations, each with `text` and `score`."""


class Store:
    """The translations of one system under one setting.

    `note` names the system: if the folder was made by another one (the run was trained again), its
    contents are deleted.
    """

    def __init__(self, folder: Path, note: dict[str, Any]):
        self.folder = folder
        if atomic.known_object(folder / _NOTE) != note:
            shutil.rmtree(folder, ignore_errors=True)
            atomic.write_json(folder / _NOTE, note)
        self._known: dict[tuple[str, str], Translation] = {}
        if (folder / _LINES).is_file():
            self._read(folder / _LINES)

    def _read(self, path: Path) -> None:
        whole = 0
        with path.open("rb") as file:
            for line in file:
                if (found := _parsed(line)) is None:
                    break
                target, source, translation = found
                self._known[target, source] = translation
                whole += len(line)
        if whole < path.stat().st_size:
            with atomic.open_in_place(path) as file:
                file.truncate(whole)

    def __len__(self) -> int:
        return len(self._known)

    def get(self, target: str, source: str) -> Translation | None:
        """The translation of a sentence into a language, if it is there."""
        return self._known.get((target, source))

    def add(self, new: Iterable[tuple[str, str, Translation]]) -> None:
        """Write (target, source, translation)s down, all of them before this returns."""
        rows = [(target, source, t.text, t.score) for target, source, t in new]
        lines = "".join(json.dumps([*row, _check(row)], ensure_ascii=False) + "\n" for row in rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic.open_in_place(self.folder / _LINES) as file:
            atomic.write_all(file, lines.encode())
        for target, source, text, score in rows:
            self._known[target, source] = Translation(text, score)


def _check(row: Sequence[Any]) -> int:
    """A checksum of (target, source, text, score): a letter that rots gives another score."""
    return zlib.crc32(json.dumps(row).encode())


def _parsed(line: bytes) -> tuple[str, str, Translation] | None:
    """A line of the file; None if truncated or damaged. Lines of earlier versions have no check."""
    try:
        target, source, text, score, *check = json.loads(line)
        if not line.endswith(b"\n") or check not in ([], [_check([target, source, text, score])]):
            return None
        return str(target), str(source), Translation(str(text), float(score))
    except (ValueError, TypeError, RecursionError):
        return None


def translate_all(
    store: Store,
    sets: Sequence[HeldOut],
    open_translator: Callable[[], AnyTranslator],
    progress: Progress = SILENT,
    stage: str = "translate",
    rows: int = 0,
) -> dict[str, list[Translation]]:
    """The translations of every set, in order; what `store` lacks is translated and added to it.

    All tasks into one language go together, the longest sentences first: batches are full, of
    one length, and what does not fit in memory shows at once. The translator is not even opened
    when there is nothing to do.
    """
    texts: dict[str, dict[str, None]] = {}
    for held in sets:
        mine = texts.setdefault(held.task.target, {})
        mine.update((s, None) for s in held.sources if store.get(held.task.target, s) is None)
    chunks = []
    for target, mine in texts.items():
        ordered = sorted(mine, key=len, reverse=True)
        size = max(CHUNK, rows)  # of a translator that takes so many at a time
        chunks += [(target, ordered[i : i + size]) for i in range(0, len(ordered), size)]
    if chunks:
        step = progress.stage(stage, len(chunks))
        translator = open_translator()
        done, total = 0, sum(len(chunk) for _, chunk in chunks)
        for target, chunk in chunks:
            found = translator.translate(chunk, target)
            if len(found) != len(chunk):
                raise ValueError(f"{len(found)} translations of {len(chunk)} sentences")
            pairs = zip(chunk, found, strict=True)
            store.add((target, source, _best(hypotheses)) for source, hypotheses in pairs)
            done += len(chunk)
            step(f"{done:,} of {total:,} sentences")
    return {
        str(held.task): [
            known for source in held.sources if (known := store.get(held.task.target, source))
        ]
        for held in sets
    }


def _best(hypotheses: Sequence[Any]) -> Translation:
    """The first of an n-best list; nothing at all is an empty translation."""
    if not hypotheses:
        return Translation("", float("-inf"))
    return Translation(str(hypotheses[0].text), float(hypotheses[0].score))


def folder_of(run: Path, system: str, split: str, beam: int, alpha: float) -> Path:
    """Where the translations of one system and setting are."""
    return run / "translations" / f"{system}-{split}-beam-{beam}-alpha-{alpha:g}"
