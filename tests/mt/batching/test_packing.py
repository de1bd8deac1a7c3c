"""Packing: each sentence once, within the rooms, by the rule, and in few rows."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.mt.batching import batches
from gshard.mt.batching.batches import BatchConfig, Batches
from gshard.mt.batching.packing import fill, pack
from gshard.mt.batching.tokenizer import Task
from gshard.mt.batching.tokens import Side, TaskTokens


@st.composite
def problems(draw):
    """Lengths of sentences, many of them alike, and rooms that hold the longest."""
    rooms = draw(st.tuples(st.integers(1, 40), st.integers(1, 40)))
    longest = [draw(st.integers(1, room)) for room in rooms]
    pairs = st.tuples(*(st.integers(1, n) for n in longest))
    return draw(st.lists(pairs, max_size=60)), rooms


def columns(lengths):
    return np.array(lengths, int).reshape(-1, 2).T


def by_the_rule(lengths, rooms):
    """The rule of `pack` as it is told, one sentence after another, in fractions."""

    def worth(i):
        dot = sum(
            Fraction(length, room) * Fraction(rest, room)
            for length, rest, room in zip(lengths[i], left, rooms, strict=True)
        )
        return -dot, lengths[i][0], i

    waiting, rows = set(range(len(lengths))), []
    while waiting:
        left, row = list(rooms), []
        while fits := [i for i in waiting if lengths[i][0] <= left[0] and lengths[i][1] <= left[1]]:
            best = min(fits, key=worth)
            waiting.remove(best)
            row.append(best)
            left = [rest - length for rest, length in zip(left, lengths[best], strict=True)]
        rows.append(row)
    return rows


@given(problems())
def test_packed_rows_fit_and_hold_everything_by_the_rule(problem):
    lengths, rooms = problem
    sources, targets = columns(lengths)
    rows = pack(sources, targets, *rooms)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert sources[row].sum() <= rooms[0]
        assert targets[row].sum() <= rooms[1]
    assert rows == by_the_rule(lengths, rooms)


def first_fit(lengths, rooms):
    """How many rows the longest first need, each in the first row that has room."""
    rows = []
    shares = (lengths / rooms).max(axis=1)
    for pair in lengths[np.argsort(-shares, kind="stable")].tolist():
        for left in rows:
            if pair[0] <= left[0] and pair[1] <= left[1]:
                break
        else:
            rows.append(left := list(rooms))
        left[0] -= pair[0]
        left[1] -= pair[1]
    return len(rows)


def realistic_lengths(rooms, seed):
    """About 1,500 pairs whose source is longer by a factor of 1.7, more or less by language."""
    rng = np.random.default_rng(seed)
    source = rng.lognormal(2.9, 0.65, 1500)
    target = source * rng.lognormal(-0.55, 0.3, 1500)
    lengths = np.maximum(np.stack([source, target], axis=1).astype(int), 2)
    if rooms[0] < rooms[1]:
        lengths = lengths[:, ::-1]
    return lengths[(lengths <= rooms).all(axis=1)]


@pytest.mark.parametrize("rooms", [(448, 256), (256, 448), (64, 36), (36, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_fuller_than_first_fit_makes_them(rooms, seed):
    lengths = realistic_lengths(rooms, seed)
    rows = pack(*lengths.T, *rooms)
    assert len(rows) < first_fit(lengths, rooms)
    assert max(lengths.sum(axis=0) / rooms) / len(rows) > 0.975


@pytest.mark.parametrize("rooms", [(64, 48), (448, 448), (128, 256)])
def test_rows_with_room_to_spare_on_one_side_are_as_full_as_by_first_fit(rooms):
    lengths = realistic_lengths(rooms, 0)
    rows = pack(*lengths.T, *rooms)
    assert len(rows) <= first_fit(lengths, rooms) + 1
    assert max(lengths.sum(axis=0) / rooms) / len(rows) > 0.985


def test_nothing_to_pack_and_too_much():
    assert pack(*columns([]), 20, 12) == []
    for lengths in ([(21, 1)], [(1, 13)]):
        with pytest.raises(ValueError, match="longer than a row"):
            pack(*columns([(3, 3), *lengths]), 20, 12)


def test_long_rows_do_not_overflow():
    rooms = 40_009, 39_989  # with no common divisor
    lengths = [(40_000, 39_900), (40_009, 80), (9, 89), (2, 39_989)]
    assert pack(*columns(lengths), *rooms) == by_the_rule(lengths, rooms)


def test_a_row_may_be_empty(tokens):
    batch = fill([[], [(0, 1)], []], tokens, 48, 48, True)
    assert batch["source_segments"].any(axis=1).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(8, 48, 48), (320, 448, 256)])
def test_a_block_fills_its_rows_and_hardly_more(tokens, monkeypatch, shape):
    made = []

    def counted(*args):
        made.append(pack(*args))
        return made[-1]

    monkeypatch.setattr(batches, "pack", counted)
    some = Batches(tokens, BatchConfig(*shape))
    made.clear()
    step = 0
    while len(made) < 7:  # until the seventh block begins
        rows = step * shape[0]
        assert some[step]["source_segments"].any(axis=1).all()
        step += 1
    assert sum(map(len, made[:-1])) / rows == pytest.approx(1.03, abs=0.01)


def test_long_and_short_sentences_have_the_same_chance():
    """The rows that are left out must not be the last ones, which have what fits nowhere else."""
    lengths = realistic_lengths((64, 36), 0)
    ends = np.concatenate([[[0, 0]], lengths.cumsum(axis=0)])
    sides = (Side(np.zeros(end[-1], np.int32), end) for end in ends.T)
    made_up = TaskTokens(Task("de", "en"), *sides, np.full(len(lengths), 9), Path())
    some = Batches([made_up], BatchConfig(32, 64, 36))
    found = np.zeros(3)
    for step in range(124):  # 4 blocks
        batch = some[step]
        segments = batch["source_segments"], batch["target_segments"]
        found += *map(np.count_nonzero, segments), segments[0].max(axis=1).sum()
    np.testing.assert_allclose(found[:2] / found[2], lengths.mean(axis=0), rtol=0.01)
