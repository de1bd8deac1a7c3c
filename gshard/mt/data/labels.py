"""Which test a held-out sentence belongs to: far, near, or one of another domain.

*far*: nothing of its origin (a package, or a document) is in the training text, and no training
English of any language is close to it. *near*: all others of the same kind of text.
Sources that a tier names as other domains are tests of their own, called like the source.

A copy of training text with a change is no test of a model. Two sentences are close if one word
(inserted, left out or replaced) makes them equal, if their sets of words are alike (Jaccard of at
least 0.8), or if they share eight words in a row. Millions of training sentences pass by in parts,
as arrays of hashes:

- within one word: hashes of the sentence, of it without each word, and with a blank for each;
- alike: two such sets share one of their rarest fifth of words, so only those pairs are counted;
- eight in a row: hashes of all windows.

A hash is a sum of words times powers in 64 bits: taking out a word, or a window, is arithmetic.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from scipy import sparse

from gshard.mt.data.corpus import write_rows
from gshard.mt.data.splits import CorpusRow, fingerprint, fold, in_groups

WINDOW = 8  # words in a row
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
_INVERSE = pow(_BASE, -1, 2**64)
_BLANK = np.uint64(fingerprint("a blank"))
_PART = 50_000  # training sentences compared at a time


class _Fingerprints(dict[str, int]):
    def __missing__(self, word: str) -> int:
        self[word] = found = fingerprint(word)
        return found


@dataclass(frozen=True)
class _Hashed:
    """Sentences as hashes, of all their words one after the other."""

    word: np.ndarray
    row: np.ndarray  # the sentence that a word is in
    length: np.ndarray  # of each sentence
    full: np.ndarray  # each sentence
    without: np.ndarray  # the sentence without a word
    blank: np.ndarray  # the sentence with a blank in the word's place
    window: np.ndarray
    window_row: np.ndarray  # the sentence that a window is in


def _hashed(texts: Sequence[str], known: _Fingerprints) -> _Hashed:
    split = [text.split() for text in texts]
    length_S = np.array([len(words) for words in split], np.int64)
    word_W = np.array([known[word] for words in split for word in words], np.uint64)
    row_W = np.repeat(np.arange(len(split)), length_S)
    place_W = np.arange(len(word_W)) - np.repeat(np.cumsum(length_S) - length_S, length_S)
    longest = int(length_S.max(initial=0))
    power, inverse = (_powers(base, longest + 1) for base in (_BASE, _INVERSE))
    term_W = word_W * power[place_W]
    sum_W = np.concatenate([np.zeros(1, np.uint64), np.cumsum(term_W)])
    end_S = np.cumsum(length_S)
    start_W = np.repeat(end_S - length_S, length_S)
    full_S = sum_W[end_S] - sum_W[end_S - length_S]
    before_W = sum_W[:-1] - sum_W[start_W]
    after_W = full_S[row_W] - before_W - term_W
    first = np.flatnonzero(place_W + WINDOW <= length_S[row_W])
    window_V = (sum_W[first + WINDOW] - sum_W[first]) * inverse[place_W[first]]
    without_W = before_W + after_W * np.uint64(_INVERSE)
    blank_W = full_S[row_W] + (_BLANK - word_W) * power[place_W]
    return _Hashed(
        word_W, row_W, length_S, full_S, without_W, blank_W, window_V, row_W[first]
    )  # fmt: skip


def _powers(base: int, count: int) -> np.ndarray:
    steps = np.full(count, base, np.uint64)
    steps[:1] = 1
    return np.multiply.accumulate(steps)


def _once(values: np.ndarray) -> np.ndarray:
    """Sorted and without repetitions; NumPy's own hashes them first, which is slower here."""
    values = np.sort(values)
    return values[np.concatenate([[True], values[1:] != values[:-1]])[: len(values)]]


def _in(values: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Which values are among many others."""
    others = np.sort(others)
    place = np.minimum(np.searchsorted(others, values), len(others) - 1)
    return others[place] == values if len(others) else np.zeros(len(values), bool)


class _WordSets:
    """The held-out sentences as sets of words, to find those that are alike."""

    def __init__(self, held: _Hashed):
        self._words, counts = np.unique(held.word, return_counts=True)
        self._rank = np.argsort(np.argsort(counts, kind="stable"), kind="stable")
        self._sizes, self._sets, prefix, row = self._prepared(held)
        order = np.argsort(prefix, kind="stable")
        self._prefix, self._row = prefix[order], row[order]

    def alike(self, other: _Hashed) -> np.ndarray:
        """The rows of held-out sentences that one of the others is alike to."""
        sizes, sets, prefix, row = self._prepared(other)
        first, last = (np.searchsorted(self._prefix, prefix, side) for side in ("left", "right"))
        times = last - first
        theirs = np.repeat(row, times)
        within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        mine = self._row[np.repeat(first, times) + within]
        near = 5 * np.minimum(a := self._sizes[mine], b := sizes[theirs]) >= 4 * np.maximum(a, b)
        mine, theirs = np.divmod(_once(mine[near] * len(sizes) + theirs[near]), len(sizes))
        common = np.asarray(self._sets[mine].multiply(sets[theirs]).sum(axis=1)).ravel()
        return mine[9 * common >= 4 * (self._sizes[mine] + sizes[theirs])]

    def _prepared(
        self, texts: _Hashed
    ) -> tuple[np.ndarray, sparse.csr_matrix, np.ndarray, np.ndarray]:
        """Sizes of the sets, which held-out words each has, its rarest words and their rows.

        A word that no held-out sentence has is rarer than all others, and finds nothing.
        """
        words, number_W = np.unique(texts.word, return_inverse=True)
        row, number = np.divmod(_once(texts.row * len(words) + number_W), len(words))
        sizes = np.bincount(row, minlength=len(texts.length))
        place = np.minimum(np.searchsorted(self._words, words), len(self._words) - 1)
        place, known = place[number], (self._words[place] == words)[number]
        rank = np.where(known, self._rank[place] + 1, 0)
        order = np.lexsort((rank, row))  # rows stay together, the rarest word first
        nth = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rare = order[nth <= sizes[row] - (4 * sizes[row] + 4) // 5]
        rare = rare[known[rare]]
        shape = (len(sizes), len(self._words))
        ones = np.ones(int(known.sum()), np.int64)
        sets = sparse.csr_matrix((ones, (row[known], place[known])), shape)
        return sizes, sets, rank[rare], row[rare]


def close(held_out: Sequence[str], training: Iterable[str]) -> np.ndarray:
    """For each held-out sentence whether one of the training sentences is close to it.

    Both are folded (`splits.fold`): words are separated by spaces.
    """
    found = np.zeros(len(held_out), bool)
    if not any(held_out):
        return found
    known = _Fingerprints()
    held = _hashed(held_out, known)
    sets = _WordSets(held)
    for part in in_groups(training, _PART):
        other = _hashed(part, known)
        found[_in(held.full, np.concatenate([other.full, other.without]))] = True
        found[held.row[_in(held.without, other.full)]] = True
        found[held.row[_in(held.blank, other.blank)]] = True
        found[held.window_row[_in(held.window, other.window)]] = True
        found[sets.alike(other)] = True
    return found


def label_tests(
    folder: Path, entries: dict[str, dict[str, Any]], most: int
) -> tuple[Counter[str], int]:
    """Write the test sentences of all languages again with their labels.

    Returns what is dropped, and how many different English sentences the training text has.
    Sentences of held-out documents that are training text of another origin too are dropped, and
    of each label those above `most`, unless the user gave them. `entries` are the manifest's.
    """
    rows = {
        language: _rows(folder, language) for language, entry in entries.items() if "test" in entry
    }
    keys = sorted({fold(row.english) for each in rows.values() for row in each})
    same, seen = set[str](), set[int]()
    training = _training(folder, entries, set(keys), same, seen)
    is_close = dict(zip(keys, close(keys, training), strict=True))
    deque(training, 0)  # which is not read where no sentence is held out
    origins = {
        name for entry in entries.values() for name in entry.get("train", {}).get("origins", ())
    }
    dropped: Counter[str] = Counter()
    for language, each in rows.items():
        kept: dict[str, dict[int, CorpusRow]] = {}
        given: list[CorpusRow] = []
        for row in each:
            key = fold(row.english)
            label = "near" if row.origin in origins or is_close[key] else "far"
            labelled = row._replace(split=row.origin if row.split == "other" else label)
            if row.split == "test":
                given.append(labelled)
            elif key in same:
                dropped["held out, and in the training text"] += 1
            else:
                kept.setdefault(labelled.split, {})[fingerprint(key)] = labelled
        least = [
            row for _, found in sorted(kept.items()) for _, row in sorted(found.items())[:most]
        ]
        dropped["held out, more than needed"] += sum(map(len, kept.values())) - len(least)
        entry = write_rows(given + least, folder / "test" / f"{language}.parquet", "test")
        entries[language] |= {"test": entry}
        if entry is None:
            (folder / "test" / f"{language}.parquet").unlink()
            del entries[language]["test"]
    return dropped, len(seen)


def _rows(folder: Path, language: str) -> list[CorpusRow]:
    table = pq.read_table(folder / "test" / f"{language}.parquet")
    return list(map(CorpusRow, *(column.to_pylist() for column in table.columns)))


def _training(
    folder: Path, entries: Mapping[str, Any], held_out: set[str], same: set[str], seen: set[int]
) -> Iterator[str]:
    """The training English of all languages, folded and once; what is held out goes to `same`."""
    for language, entry in entries.items():
        if "train" not in entry:
            continue
        file = pq.ParquetFile(folder / "train" / f"{language}.parquet")
        for batch in file.iter_batches(columns=["english"]):
            for text in pa.compute.unique(batch["english"]).to_pylist():
                if (mark := hash(text)) not in seen:
                    seen.add(mark)
                    key = fold(text)
                    same.update({key} & held_out)
                    yield key
