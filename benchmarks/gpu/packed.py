"""Rows of packed sentence pairs with lengths like those of real text, from a seed."""

from __future__ import annotations

import numpy as np

from gshard.nn.config import Batch


def packed_batch(
    rows: int, lengths: tuple[int, int], vocabs: tuple[int, int], seed: int = 0
) -> Batch:
    """Rows of so many tokens on each side, filled with sentence pairs first come, first served.

    A sentence's length is log-normal with a mean of about 28 tokens in rows of 256, and the target
    is as much longer or shorter as its row is, give or take.
    """
    rng = np.random.default_rng(seed)
    fields = {
        name: np.zeros((rows, lengths[not name.startswith("source")]), np.int32)
        for name in Batch._fields
    }
    used = np.zeros((rows, 2), int)
    count = np.zeros(rows, int)
    misses = 0
    while misses < 300:
        source = int(np.clip(rng.lognormal(3.1, 0.65), 3, lengths[0]))
        ratio = rng.lognormal(0.0, 0.15) * lengths[1] / lengths[0]
        target = int(np.clip(source * ratio, 3, lengths[1]))
        fits = np.flatnonzero((used + np.array([source, target]) <= lengths).all(axis=1))
        if not len(fits):
            misses += 1
            continue
        row = fits[0]
        count[row] += 1
        for i, (side, size) in enumerate((("source", source), ("target", target))):
            place = slice(used[row, i], used[row, i] + size)
            fields[f"{side}_segments"][row, place] = count[row]
            fields[f"{side}_positions"][row, place] = np.arange(size)
            tokens = rng.zipf(1.3, size) % (vocabs[i] - 4) + 4
            if side == "source":
                fields["source"][row, place] = tokens
            else:
                fields["labels"][row, place] = tokens
                fields["inputs"][row, place] = np.concatenate([[1], tokens[:-1]])
        used[row] += (source, target)
    return Batch(**fields)
