"""A corpus as token ids, in arrays that are mapped into memory: made once, then read at once.

With every length known beforehand, batches can be planned before any is read, and no sentence is
tokenized while the device waits. A host touches only the pages of the sentences it needs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gshard.errors import UserError
from gshard.mt import atomic
from gshard.mt.batching.tokenizer import Task, Tokenizer
from gshard.mt.progress import Advance

if TYPE_CHECKING:
    from gshard.mt.data.corpus import Corpus

_NOTE = "tokens.json"
_CHUNK = 50_000  # sentences encoded at a time
_WAYS = 8  # to cut a source into pieces, at most


@dataclass(frozen=True)
class Side:
    """Sentences one after the other: sentence i is `ids[ends[i]:ends[i + 1]]`."""

    ids: np.ndarray
    ends: np.ndarray
    times: int = 1  # how often all of them follow one another

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each sentence, its end included."""
        return np.tile(np.diff(self.ends), self.times)

    def __getitem__(self, i: int) -> np.ndarray:
        i %= len(self.ends) - 1
        return self.ids[self.ends[i] : self.ends[i + 1]]

    def __len__(self) -> int:
        return self.times * (len(self.ends) - 1)

    @staticmethod
    def of(sentences: Sequence[Sequence[int]], kind: Any = np.uint32) -> Side:
        """Sentences in memory, their ids of some type."""
        ids = np.fromiter(itertools.chain.from_iterable(sentences), kind)
        return Side(ids, np.cumsum([0, *map(len, sentences)], dtype=np.int64))


@dataclass(frozen=True)
class TaskTokens:
    """The examples of one direction of translation.

    Pairs whose source is cut into pieces several ways are as many examples: first all pairs with
    the likeliest pieces, then all with drawn ones, and so on, with the targets of the first.
    """

    task: Task
    source: Side
    target: Side
    english_words: np.ndarray  # of each example, at most 255
    place: Path

    def __len__(self) -> int:
        return len(self.source)

    @property
    def pairs(self) -> int:
        """The different examples."""
        return len(self) // self.target.times

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers map the files themselves; a pickled map would carry the whole corpus.
        if self.place.name:
            return open_task, (self.place, self.task)
        return TaskTokens, (self.task, self.source, self.target, self.english_words, self.place)


def open_tokens(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: str | Path,
    split: str = "train",
    tasks: Sequence[Task] | None = None,
    step: Advance | None = None,
    verify: bool = False,
) -> list[TaskTokens]:
    """The examples of `tasks` (all of the tokenizer's) as ids, encoded into `folder` when absent.

    A task is one small folder, written completely or not at all. It is made again when corpus or
    tokenizer change, and with `verify` also when a file is not as it was written.
    """
    opened = []
    for task in tokenizer.tasks if tasks is None else tasks:
        if corpus.count(task.foreign, split):
            place = Path(folder) / split / str(task)
            entry = corpus.manifest["languages"][task.foreign][split]
            wanted = {"tokenizer": tokenizer.digest, "corpus": entry["sha256"]}
            if not _good(place, wanted, verify):
                _encode(corpus, tokenizer, task, split, place, wanted)
            try:
                opened.append(open_task(place, task))
            except (ValueError, OSError, EOFError):  # truncated, for example
                _encode(corpus, tokenizer, task, split, place, wanted)
                opened.append(open_task(place, task))
            if step:
                step(str(task))
    if not opened:
        raise UserError(f"the corpus has no {split} sentences for the languages asked for")
    return opened


def in_memory(
    tokenizer: Tokenizer, task: Task, sources: Sequence[str], targets: Sequence[str]
) -> TaskTokens:
    """Sentence pairs of a task as ids in memory: for a few sentences, and one process."""
    source = Side.of(tokenizer.encode_source(sources, task.target))
    target = Side.of(tokenizer.encode_target(targets))
    words = _count_words(targets if task.target == "en" else sources)
    return TaskTokens(task, source, target, words, Path())


def some_of(tokens: TaskTokens, examples: np.ndarray) -> TaskTokens:
    """Only these examples of a task, in memory."""
    sides = []
    for side in (tokens.source, tokens.target):
        pieces = [side.ids[:0], *(side[i] for i in examples)]
        ends = np.cumsum([0, *map(len, pieces[1:])], dtype=np.int64)
        sides.append(Side(np.concatenate(pieces), ends))
    words = np.asarray(tokens.english_words)[examples]
    return TaskTokens(tokens.task, sides[0], sides[1], words, Path())


def _count_words(texts: Sequence[str]) -> np.ndarray:
    return np.array([min(255, len(text.split())) for text in texts], np.uint8)


def _good(place: Path, wanted: dict[str, str], verify: bool) -> bool:
    """Whether the tokens in `place` were made from what is wanted, and are still the same."""
    try:
        note = atomic.read_object(place / _NOTE)
        files = dict(note.pop("files"))
        same = (
            all(atomic.checksum(place / name) == digest for name, digest in files.items())
            if verify
            else all((place / name).is_file() for name in files)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return note == wanted and same


def _encode(
    corpus: Corpus, tokenizer: Tokenizer, task: Task, split: str, place: Path, note: dict[str, str]
) -> None:
    table = corpus.read(task.foreign, split, ["source", "english"])
    foreign, english = table["source"].to_pylist(), table["english"].to_pylist()
    source, target = (foreign, english) if task.target == "en" else (english, foreign)
    encode: dict[str, Callable[[list[str]], list[list[int]]]] = {
        "source": lambda texts: tokenizer.encode_source(texts, task.target),
        "target": tokenizer.encode_target,
    }
    sizes = {"source": tokenizer.source_size, "target": tokenizer.target_size}
    wanted = tokenizer.config.segment_to if split == "train" else 0
    drawn = range(1, min(_WAYS, -(-wanted // len(source))))
    with atomic.new_folder(place) as part:
        for name, texts in (("source", source), ("target", target)):
            small = np.uint16 if sizes[name] <= 1 << 16 else np.uint32
            chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
            sides = [Side.of(encode[name](chunk), small) for chunk in chunks]
            if name == "source":
                drawings = (tokenizer.draw_source(source, task.target, seed) for seed in drawn)
                sides += [Side.of(drawing, small) for drawing in drawings]
            lengths = np.concatenate([side.lengths for side in sides])
            _save(part / f"{name}.npy", np.concatenate([side.ids for side in sides]))
            _save(part / f"{name}_ends.npy", np.cumsum([0, *lengths], dtype=np.int64))
        _save(part / "words.npy", _count_words(english))
        files = {path.name: atomic.checksum(path) for path in sorted(part.iterdir())}
        atomic.write_json(part / _NOTE, {**note, "files": files})


def _save(path: Path, array: np.ndarray) -> None:
    # To a file that is open for writing alone NumPy writes by itself, and does not say why it
    # could not.
    with path.open("w+b") as file:
        np.save(file, array)


def open_task(place: Path, task: Task) -> TaskTokens:
    """The examples of a task as they were encoded into a folder."""

    def array(name: str) -> np.ndarray:
        # A plain view of the map: slicing a memmap itself is slow.
        return np.load(place / f"{name}.npy", mmap_mode="r").view(np.ndarray)

    words, source = array("words"), Side(array("source"), array("source_ends"))
    target = Side(array("target"), array("target_ends"), len(source) // max(1, len(words)))
    for side in (source, target):
        if len(side) != target.times * len(words) or side.ends[-1] != len(side.ids):
            raise ValueError(f"{place} is damaged: its files do not belong together")
    return TaskTokens(task, source, target, np.tile(words, target.times), place)
