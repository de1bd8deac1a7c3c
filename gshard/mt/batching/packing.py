"""Where each sentence goes in a batch, and the arrays that come of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gshard.mt.batching.tokenizer import PAD, START
from gshard.mt.batching.tokens import TaskTokens

Arrays = dict[str, np.ndarray]


def pack(
    sources: np.ndarray, targets: np.ndarray, source_room: int, target_room: int
) -> list[list[int]]:
    """Rows of indices such that every row's source and target lengths fit its rooms.

    First fit, longest first, over two capacities at once. Each sentence must fit a row by itself.
    """
    if len(sources) == 0:
        return []
    if sources.max() > source_room or targets.max() > target_room:
        raise ValueError("a sentence is longer than a row")
    order = np.argsort(-np.maximum(sources / source_room, targets / target_room), kind="stable")
    # Longest first needs at most twice the rows that the fuller side fills, and one more.
    most = int(2 * max(sources.sum() / source_room, targets.sum() / target_room)) + 2
    most = min(max(most, 1), len(sources))
    left_source = np.full(most, source_room)
    left_target = np.full(most, target_room)
    rows: list[list[int]] = []
    for i in order:
        fits = (left_source[: len(rows)] >= sources[i]) & (left_target[: len(rows)] >= targets[i])
        row = int(fits.argmax()) if len(fits) else 0
        if not len(fits) or not fits[row]:
            row = len(rows)
            rows.append([])
            if row == len(left_source):
                left_source = np.append(left_source, np.full(most, source_room))
                left_target = np.append(left_target, np.full(most, target_room))
        rows[row].append(int(i))
        left_source[row] -= sources[i]
        left_target[row] -= targets[i]
    return rows


def fill(
    rows: Sequence[Sequence[tuple[int, int]]],
    tokens: Sequence[TaskTokens],
    source_length: int,
    target_length: int,
    languages: bool,
) -> Arrays:
    """The arrays of a batch, named and shaped as the model's `Batch`: segment 0 is padding."""
    draws = [draw for row in rows for draw in row]
    row_N = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    segment_N = np.array([n for row in rows for n in range(1, len(row) + 1)], dtype=np.int64)
    batch: Arrays = {}
    for side, length in (("source", source_length), ("target", target_length)):
        pieces = [getattr(tokens[task], side)[i] for task, i in draws]
        size_N = np.array([len(piece) for piece in pieces], dtype=np.int64)
        first_N = np.cumsum(size_N) - size_N  # of each sentence, among all tokens
        position = np.arange(size_N.sum()) - np.repeat(first_N, size_N)
        # A sentence begins where the ones before it in its row end.
        row_first = np.searchsorted(row_N, row_N)
        start_N = first_N - first_N[row_first] if len(draws) else first_N
        place = np.repeat(row_N * length + start_N, size_N) + position

        def filled(values: np.ndarray, empty: int = PAD) -> np.ndarray:
            flat = np.full(len(rows) * length, empty, np.int32)  # noqa: B023
            flat[place] = values  # noqa: B023
            return flat.reshape(len(rows), length)  # noqa: B023

        ids = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
        batch[f"{side}_segments"] = filled(np.repeat(segment_N, size_N))
        batch[f"{side}_positions"] = filled(position)
        if side == "source":
            batch["source"] = filled(ids)
            if languages:
                batch["languages"] = filled(np.repeat([task for task, _ in draws], size_N), -1)
        else:
            batch["labels"] = filled(ids)
            batch["inputs"] = filled(np.where(position == 0, START, np.roll(ids, 1)))
    return batch
