"""The system that a model has to beat: the translation of the most similar training sentence.

Test sentences of one kind of text, such as messages of programs, have near duplicates in training.
What a translation memory makes of them shows how much of a score that is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import sparse

from gshard.mt.batching.tokenizer import Task
from gshard.mt.data.corpus import Corpus

_BUCKETS = 1 << 20
_ROWS = 64  # sentences compared at a time, each with all training text of a language


def from_training(corpus: Corpus, task: Task, sources: Sequence[str]) -> list[str]:
    """For each source the target of the training pair whose source has most trigrams in common.

    Similarity is Jaccard's, of the sets of lower-case character trigrams; of equals, the first.
    """
    columns = ("english", "source") if task.source == "en" else ("source", "english")
    rows = corpus.read(task.foreign, "train", list(columns))
    known, targets = (rows[column].to_pylist() for column in columns)
    if not known:
        return [""] * len(sources)
    train_NB, test_MB = _trigrams(known), _trigrams(sources)
    size_N, size_M = (np.asarray(each.sum(axis=1)).ravel() for each in (train_NB, test_MB))
    found: list[str] = []
    for first in range(0, len(sources), _ROWS):
        part = slice(first, first + _ROWS)
        common_MN = (test_MB[part] @ train_NB.T).toarray()
        jaccard_MN = common_MN / (size_M[part, None] + size_N - common_MN)
        found += [targets[place] for place in jaccard_MN.argmax(axis=1)]
    return found


def _trigrams(texts: Sequence[str]) -> sparse.csr_matrix:
    """Which trigrams, by their hashes, each text has: [texts, buckets] of 0 and 1."""
    padded = [f" {text.lower()} \0" for text in texts]  # no text is empty, and none joins the next
    codes = np.frombuffer("".join(padded).encode("utf-32-le", "surrogatepass"), np.uint32)
    row = np.repeat(np.arange(len(padded)), [len(text) for text in padded])
    within = row[:-2] == row[2:]
    codes = codes.astype(np.uint64)
    hashes = (codes[:-2] * 0x9E3779B1 + codes[1:-1] * 0x85EBCA77 + codes[2:] * 0xC2B2AE3D) >> 7
    places = (row[:-2][within], (hashes[within] % _BUCKETS).astype(np.int64))
    found = sparse.csr_matrix((np.ones(within.sum(), np.float32), places), (len(padded), _BUCKETS))
    found.data[:] = 1  # a trigram that a text has twice was added up
    return found
