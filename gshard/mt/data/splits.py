"""Train, dev and test without leaks: a sentence's split is a function of its English alone.

The same English is translated into a hundred languages, so a split made for each language would
train on the references of the others' tests. Here the English, with case, punctuation, digits and
placeholders folded away, is hashed, and the hash decides for all languages at once. Gathering more
text later never moves a sentence, and a smaller share holds out a subset of what a larger one does.

Rows that repeat others are left out first, however many there are (`without_duplicates`).
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np

from gshard.errors import UserError
from gshard.mt.data.clean import PLACEHOLDER

T = TypeVar("T")
SPLITS = ("train", "dev", "test")  # the stronger one last
MIN_WORDS, MAX_WORDS = 5, 40  # of a held-out sentence

_NOT_LETTERS = re.compile(r"[\W\d_]+")


class CorpusRow(NamedTuple):
    """A clean pair of one language.

    `split` is "" unless a user's file says where the pair belongs, or a tier: "far" of a held-out
    document, "other" of another domain. The rows of a test have its label there.
    """

    source: str
    english: str
    origin: str
    split: str = ""


def in_groups(rows: Iterable[T], size: int) -> Iterator[list[T]]:
    """So many of them at a time."""
    rest = iter(rows)
    while group := list(itertools.islice(rest, size)):
        yield group


def fold(text: str) -> str:
    """The text with case, punctuation, digits and placeholders folded away: what leaks compare."""
    return _NOT_LETTERS.sub(" ", PLACEHOLDER.sub(" ", text.casefold())).strip()


def fingerprint(key: str) -> int:
    """64 bits of a folded text, equal on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True)
class HeldOutShares:
    """How much of the long sentences to hold out, and at most how many a language."""

    test: float = 0.02
    dev: float = 0.01
    most: Mapping[str, int] = field(default_factory=lambda: {"test": 1000, "dev": 500})

    def __post_init__(self) -> None:
        if not (self.test >= 0 and self.dev >= 0 and self.test + self.dev < 1):  # nan too
            raise UserError(f"cannot hold out {self.test} for test and {self.dev} for dev")

    def split_of(self, key: str) -> str:
        """The split of a folded English sentence; short ones are always for training."""
        if not MIN_WORDS <= key.count(" ") + 1 <= MAX_WORDS:
            return "train"
        place = fingerprint(key) / 2**64
        if place < self.test:
            return "test"
        return "dev" if place >= 1 - self.dev else "train"


def given_splits(
    rows: Iterable[tuple[str, str]], shares: HeldOutShares, forced: dict[int, str]
) -> dict[int, str]:
    """Add to `forced` the splits that users' files force, from (English, split), by fingerprint.

    Test is stronger than dev and dev than train. Only what differs from the hash's own answer, or
    holds something out, needs to be remembered.
    """
    for english, given in rows:
        split = "test" if given == "other" else given
        key = fold(english)
        if split == "train" and shares.split_of(key) == "train":
            continue
        if given == "far" or (given == "other" and not fit_to_hold_out(english)):
            continue  # a menu's words, which training text has from elsewhere
        mark = fingerprint(key)
        if SPLITS.index(split) >= SPLITS.index(forced.get(mark, "train")):
            forced[mark] = split
    return forced


def fit_to_hold_out(english: str) -> bool:
    """Whether a sentence makes a fair test: 5 to 40 words and no placeholder."""
    return MIN_WORDS <= len(english.split()) <= MAX_WORDS and not PLACEHOLDER.search(english)


class _HeldOutRows:
    """Sentences that may be held out: the ones with the least fingerprints.

    By fingerprint, so that which ones stay does not depend on the order of the sources.
    """

    def __init__(self, most: int):
        self._most = most
        self._rows: dict[int, CorpusRow] = {}
        self.marks: set[int] = set()

    def add(self, mark: int, row: CorpusRow) -> None:
        """Take in a sentence that has not been seen yet."""
        self.marks.add(mark)
        self._rows[mark] = row
        if len(self._rows) > 2 * self._most + 1000:
            self._rows = dict(sorted(self._rows.items())[: self._most])

    def rows(self) -> list[CorpusRow]:
        """No more than are wanted."""
        return [row for _, row in sorted(self._rows.items())[: self._most]]


def split_language(
    rows: Iterable[CorpusRow],
    shares: HeldOutShares,
    forced: Mapping[int, str],
    dropped: Counter[str],
    sample: tuple[float, float] = (1.0, 1.0),
) -> dict[str, Iterable[CorpusRow]]:
    """The rows of one language by split; what must not be trained on is dropped and counted.

    Rows to train on are read again, and dropped, when they are asked for. With a `sample` (f, p)
    about f * n**p of n stay.
    """
    held = {split: _HeldOutRows(shares.most[split]) for split in ("dev", "test")}
    apart: dict[str, _HeldOutRows] = {}  # of held-out documents and of other domains
    given: dict[str, list[CorpusRow]] = {"dev": [], "test": []}
    is_train = bytearray()
    for row in rows:
        is_train.append(False)
        key = fold(row.english)
        mark = fingerprint(key)
        split = forced.get(mark) or shares.split_of(key)
        if row.split in ("far", "other"):
            # Labels come later (`labels`), when all training text is known: more than enough.
            label = row.origin if row.split == "other" else row.split
            mine = apart.setdefault(label, _HeldOutRows(8 * shares.most["test"]))
            if not fit_to_hold_out(row.english):
                dropped["held out, not fit for a test"] += 1
            elif split == "dev" or mark in mine.marks:
                dropped["second reference of a held-out sentence"] += 1
            else:
                mine.add(mark, row)
        elif row.split and row.split != split:
            dropped["held out elsewhere"] += 1
        elif split == "train":
            is_train[-1] = True
        elif row.split:
            given[split].append(row)
        elif mark in held[split].marks:
            dropped["second reference of a held-out sentence"] += 1
        elif not fit_to_hold_out(row.english):
            dropped["held out, not fit for a test"] += 1
        else:
            held[split].add(mark, row)

    kept: dict[str, Iterable[CorpusRow]] = {}
    sources: set[int] = set()  # of what is held out so far
    for split in ("test", "dev"):
        ranked = held[split].rows()
        dropped["held out, more than needed"] += len(held[split].marks) - len(ranked)
        chosen = given[split] + ranked
        if split == "test":
            chosen += [row for _, rows_apart in sorted(apart.items()) for row in rows_apart.rows()]
        if split == "dev":
            chosen = list(_without_sources(chosen, sources, dropped))
        kept[split] = chosen
        sources |= {fingerprint(fold(row.source)) for row in chosen}
    train = _sampled(SomeRows(rows, is_train), sample, dropped)
    kept["train"] = _without_sources(train, sources, dropped)
    return kept


_SENTENCE, _PREFERRED = 4, 3.0  # words of what is likely a sentence, and how much likelier it stays


def _sampled(
    rows: SomeRows, sample: tuple[float, float], dropped: Counter[str]
) -> Iterator[CorpusRow]:
    """About f * n**p of n rows, sentences rather than labels of buttons, always the same ones."""
    count = int(sample[0] * len(rows) ** sample[1])
    if count >= len(rows):
        yield from rows
        return
    # The least of exponential variables: a row's chance is in proportion to its weight.
    drawn = np.array([(fingerprint(f"{r.english}\t{r.source}") + 0.5) / 2**64 for r in rows])
    weight = np.array([_PREFERRED if len(r.english.split()) >= _SENTENCE else 1.0 for r in rows])
    late = -np.log(drawn) / weight
    dropped["more than the sample"] += len(rows) - count
    yield from itertools.compress(rows, late < np.partition(late, count)[count])


def _without_sources(
    rows: Iterable[CorpusRow], sources: Container[int], dropped: Counter[str]
) -> Iterator[CorpusRow]:
    for row in rows:
        if fingerprint(fold(row.source)) in sources:
            dropped["source is held out"] += 1
        else:
            yield row


@dataclass(frozen=True)
class SomeRows:
    """The rows that `kept` has a 1 for, read as often as they are asked for."""

    rows: Iterable[CorpusRow]
    kept: bytes | bytearray

    def __len__(self) -> int:
        return sum(self.kept)

    def __iter__(self) -> Iterator[CorpusRow]:
        return itertools.compress(self.rows, self.kept)


MAX_VARIANTS = 4
_LIGHT = re.compile(r"[\s.:…!?,;\"“”'’*。：]+")  # noqa: RUF001
_UNTRANSLATED, _USUAL, _GIVEN = range(3)
# Fingerprints of the English and of the pair, and which of the three a row is.
_MARKS = np.dtype([("english", np.uint64), ("pair", np.uint64), ("kind", np.uint8)])


def without_duplicates(rows: Iterable[CorpusRow], dropped: Counter[str]) -> SomeRows:
    """Rows without repeated pairs, and with at most four translations of the same English.

    Rows with a given split are kept unless they are repeated exactly: the user chose that split.
    What is remembered of a row is its fingerprints.
    """
    marks = np.fromiter(map(_marks, rows), _MARKS)
    known = np.flatnonzero(marks["kind"] != _UNTRANSLATED)
    once = np.zeros(len(marks), bool)
    once[known[np.unique(marks["pair"][known], return_index=True)[1]]] = True
    usual = np.flatnonzero(once & (marks["kind"] == _USUAL))
    english = marks["english"][usual]
    order = np.argsort(english, kind="stable")
    variant = np.arange(len(order)) - np.searchsorted(english[order], english[order])
    too_many = usual[order[variant >= MAX_VARIANTS]]
    dropped["untranslated"] += len(marks) - len(known)
    dropped["duplicate"] += len(known) - int(once.sum())
    dropped["more than 4 translations"] += len(too_many)
    once[too_many] = False
    return SomeRows(rows, once.tobytes())


def _marks(row: CorpusRow) -> tuple[int, int, int]:
    """What tells a row from others."""
    if row.split:
        mark = fingerprint(f"{row.split}\t{row.english}\t{row.source}")
        return mark, mark, _GIVEN
    english, source = (_LIGHT.sub(" ", side.casefold()).strip() for side in row[1::-1])
    if not english or not source or english == source:
        return 0, 0, _UNTRANSLATED
    return fingerprint(english), fingerprint(f"{english}\t{source}"), _USUAL
