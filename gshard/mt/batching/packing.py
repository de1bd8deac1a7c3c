"""Where each sentence goes in a batch, and the arrays that come of it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np

from gshard.mt.batching.tokenizer import PAD, START
from gshard.mt.batching.tokens import TaskTokens

Arrays = dict[str, np.ndarray]


def pack(
    sources: np.ndarray, targets: np.ndarray, source_room: int, target_room: int
) -> list[list[int]]:
    """Rows of indices such that every row's source and target lengths fit its rooms.

    Row by row: of the sentences that still fit, the next has the largest dot product of its shares
    of both rooms with the shares that are left of them. So long ones go first, and a row is filled
    on both sides alike (Panigrahy et al., Heuristics for Vector Bin Packing, 2011). Each sentence
    must fit a row by itself.
    """
    if len(sources) == 0:
        return []
    if sources.max() > source_room or targets.max() > target_room:
        raise ValueError("a sentence is longer than a row")
    waiting = _Unpacked(sources, targets, source_room, target_room)
    rows: list[list[int]] = []
    while waiting.count:
        row: list[int] = []
        left_source, left_target = source_room, target_room
        while taken := waiting.take(left_source, left_target):
            sentence, source, target = taken
            row.append(sentence)
            left_source -= source
            left_target -= target
        rows.append(row)
    return rows


class _Unpacked:
    """The sentences that are in no row yet. Many are alike: only lengths are compared.

    The U source lengths and V target lengths that occur are sorted. `_longest[v]` has for each of
    the source lengths the longest of the first v target lengths that waits together with it, as a
    pair (source, target), or (0, -1) where there is none: one row of it is all that may be best.
    """

    def __init__(
        self, sources: np.ndarray, targets: np.ndarray, source_room: int, target_room: int
    ):
        # In whole numbers, so that all machines plan alike: s/S a/S + t/T b/T, times (S T / gcd)^2.
        common = math.gcd(source_room, target_room)
        self._source_scale = (target_room // common) ** 2
        self._target_scale = (source_room // common) ** 2
        source_U, u_N = np.unique(sources, return_inverse=True)
        target_V, v_N = np.unique(targets, return_inverse=True)
        U, V = len(source_U), len(target_V)
        pair_N = v_N * U + u_N
        count_VU = np.bincount(pair_N, minlength=V * U)
        end_VU = np.cumsum(count_VU)
        self.count = len(sources)
        self._sources, self._targets = source_U.tolist(), target_V.tolist()
        self._place = {target: v for v, target in enumerate(self._targets)}
        # Sentences by pair, each pair's in the order given: from the next one to the end.
        self._by_pair = np.argsort(pair_N, kind="stable").tolist()
        self._next, self._end = (end_VU - count_VU).tolist(), end_VU.tolist()
        target_VU = np.where(count_VU.reshape(V, U) > 0, target_V[:, None], -1)
        self._longest = np.zeros((V + 1, 2, U), np.int64)
        self._longest[0, 1] = -1
        self._longest[1:, 1] = np.maximum.accumulate(target_VU, axis=0)
        self._longest[1:, 0] = np.where(self._longest[1:, 1] < 0, 0, source_U)

    def take(self, left_source: int, left_target: int) -> tuple[int, int, int] | None:
        """The best sentence for a row with so much left, and its lengths; None if nothing fits.

        Where several are equally good, the shortest source goes first.
        """
        U = bisect.bisect_right(self._sources, left_source)
        V = bisect.bisect_right(self._targets, left_target)
        if not U or not V:
            return None
        best_2U = self._longest[V, :, :U]
        weights = [left_source * self._source_scale, left_target * self._target_scale]
        u = int((np.array(weights, np.int64) @ best_2U).argmax())
        source, target = best_2U[:, u].tolist()
        if target < 0:
            return None
        v = self._place[target]
        pair = v * len(self._sources) + u
        sentence = self._by_pair[self._next[pair]]
        self._next[pair] += 1
        self.count -= 1
        if self._next[pair] == self._end[pair]:  # the next shorter target is now the longest
            longest_V2 = self._longest[v + 1 :, :, u]
            longest_V2[longest_V2[:, 1] == target] = self._longest[v, :, u]
        return sentence, source, target


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
