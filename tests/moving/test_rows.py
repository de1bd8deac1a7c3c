"""Rows of a split dim where tiles of the result need them: nodes, run on all devices in Python."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gshard.checking.collectives import RUN_TOGETHER
from gshard.checking.exact.number import spread
from gshard.checking.lockstep import Lockstep
from gshard.checking.replay import FLOATS
from gshard.graph.reason import Reason
from gshard.moving.collectives import all_gather, reduce_scatter
from gshard.moving.halo import Halo, collect, retile_elements
from gshard.moving.row_windows import Move, Runs, Windows, plan_windows
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Split

WHY = Reason("operand", "a test")
GARBAGE = -1


def on_all(run, tiles):
    """What `run(place, array)` gives on each device, and the bytes that one of them sends."""
    count = len(tiles)
    place = Place(("d",), count, planned=False)
    traced = jax.make_jaxpr(lambda x: run(place, x), axis_env=[("d", count)])(tiles[0])
    machine, sent = Lockstep({"d": count}, FLOATS), 0
    running = machine.run(traced, [np.stack(tiles)])
    while True:
        try:
            event = next(running)
        except StopIteration as end:
            return list(spread(end.value[0], count)), sent
        if event.eqn is not None and event.eqn.primitive.name == "ppermute":
            sent += event.values[0][0].nbytes
        elif event.eqn is not None and event.eqn.primitive in RUN_TOGETHER:
            sent = np.nan  # counted elsewhere


def split_of(tiles):
    return Sharding((Split.of(np.arange(tiles)), None), tiles)


def tiles_of(held, rows, size):
    """Local arrays with the rows 0, 1, ... of a tensor of `size` rows; padding is garbage."""
    found = []
    for low, high, first in zip(held.low, held.high, held.first, strict=True):
        tile = np.full((rows, 2), GARBAGE, np.int32)
        tile[first : first + high - low] = np.arange(low, high)[:, None] + [0, 1000]
        found.append(jnp.asarray(tile))
    return found


def assert_rows(got, starts, source):
    """Row j of window c is the logical row `source[starts[c] + j]`, where there is one."""
    for start, window in zip(starts, got, strict=True):
        for j, row in enumerate(window):
            wanted = source.get(start + j)
            if wanted is not None:
                assert row.tolist() == [wanted, wanted + 1000]


@st.composite
def tilings(draw):
    tiles, rows = draw(st.integers(2, 5)), draw(st.integers(1, 4))
    size = draw(st.integers((tiles - 1) * rows + 1, tiles * rows))
    shift = draw(st.integers(0, rows - 1))
    low = np.arange(tiles) * rows - shift
    held = Runs(low, low + rows, np.zeros(tiles, np.int64))
    return tiles, rows, size, held.only((0, min(size, int(low[-1]) + rows)))


@st.composite
def windows(draw, tiles, size):
    width = draw(st.integers(1, 5))
    if draw(st.booleans()):  # one behind the other, as a ReduceScatter gives them
        return draw(st.integers(-3, 3)) + np.arange(tiles) * width, width
    starts = draw(st.lists(st.integers(-3, size), min_size=tiles, max_size=tiles))
    return np.array(sorted(starts)), width


@st.composite
def blocks(draw, size):
    """Some blocks of rows, in another order."""
    cuts = draw(st.lists(st.integers(0, size), max_size=3))
    ends = sorted({0, size, *cuts})
    order = draw(st.permutations(list(itertools.pairwise(ends))))
    moves, at = [], 0
    for first, end in order:
        moves.append((first, end, at - first))
        at += end - first
    return tuple(moves[: draw(st.integers(1, len(moves)))])


def check_aligned(tiles, rows, size, held, starts, width, moves):
    moves = tuple(Move(*move) for move in moves)
    node = Halo(WHY, split_of(tiles), 0, Windows.of(held, rows, starts, width, moves))
    array = tiles_of(held, rows, size)
    got, sent = on_all(node.run, array)
    there = [r for a, b in zip(held.low, held.high, strict=True) for r in range(a, b)]
    source = {
        r + by: r for first, end, by in moves or [(0, size, 0)] for r in there if first <= r < end
    }
    assert_rows(got, starts, source)
    assert np.isnan(sent) or sent == node.sent(array[0].shape, array[0].dtype)


@given(st.data())
def test_rows_are_aligned(data):
    tiles, rows, size, held = data.draw(tilings())
    starts, width = data.draw(windows(tiles, size))
    moves = data.draw(st.one_of(st.just(()), blocks(size)))
    check_aligned(tiles, rows, size, held, starts, width, moves)


@pytest.mark.parametrize(
    ("rows", "counts", "first", "width"),
    [
        (3, [1, 2, 3, 1], [1, 1, 0, 2], 5),
        (4, [3, 3, 4, 3], [0, 1, 0, 1], 5),
        (2, [2, 0, 1, 0, 2], [0, 1, 1, 1, 0], 3),
        (4, [4, 1, 2, 1], [0, 0, 0, 2], 2),
    ],
)
def test_rows_of_tiles_that_are_not_full(rows, counts, first, width):
    """What a tile has beside its rows, as a slice with a stride leaves it, goes nowhere."""
    tiles, ends = len(counts), np.cumsum(counts)
    held = Runs(ends - counts, ends, np.array(first))
    check_aligned(tiles, rows, int(ends[-1]), held, np.arange(tiles) * width, width, ())


@pytest.mark.parametrize(
    ("tiles", "rows", "size", "starts", "width", "moves"),
    [
        (4, 3, 10, (0, 6, 12, 18), 6, ((3, 10, -3), (0, 3, 7))),
        (2, 5, 6, (0, 4), 6, ((2, 6, -2), (0, 2, 4))),
        (2, 2, 4, (0, 2), 2, ((3, 4, -3), (2, 3, -1), (0, 2, 2))),
    ],
)
def test_a_message_has_rows_that_belong_elsewhere(tiles, rows, size, starts, width, moves):
    """All messages of a round are as long as the longest: rows beyond a block are masked."""
    held = Runs.even(tiles, rows, size)
    check_aligned(tiles, rows, size, held, np.array(starts), width, moves)


@given(st.data())
def test_halos_of_a_part_of_the_rows(data):
    """What is beyond `only` is neither sent nor looked at."""
    tiles, rows, size, _ = data.draw(tilings())
    starts, width = data.draw(windows(tiles, size))
    first = data.draw(st.integers(0, size - 1))
    only = data.draw(st.sampled_from([None, (first, data.draw(st.integers(first + 1, size)))]))
    held = Runs.even(tiles, rows, size)
    node = Halo(WHY, split_of(tiles), 0, Windows.of(held.only(only), rows, starts, width))
    array = tiles_of(held, rows, size)
    got, sent = on_all(node.run, array)
    assert_rows(got, starts, {r: r for r in range(*(only or (0, size)))})
    assert np.isnan(sent) or sent == node.sent(array[0].shape, array[0].dtype)


@pytest.mark.parametrize(("only", "rows"), [(None, 1), ((4, 5), 0), ((2, 3), 1), ((3, 9), 1)])
def test_a_halo_sends_the_rows_that_are_needed(only, rows):
    """Windows of a tile and the row before it; row 4 is needed by the device that has it alone."""
    held = Runs.even(4, 3, 12)
    windows = Windows.of(held.only(only), 3, np.arange(4) * 3 - 1, 4)
    _, sent = on_all(Halo(WHY, split_of(4), 0, windows).run, tiles_of(held, 3, 12))
    assert sent == rows * 2 * 4


@pytest.mark.parametrize("only", [None, (8, 16)])
def test_windows_of_most_rows_are_gathered(only):
    held, starts = Runs.even(4, 4, 16).only(only), np.full(4, 8)
    assert plan_windows(Windows.of(held, 4, starts, 8)).kind == "gather"
    check_aligned(4, 4, 16, held, starts, 8, ())


def test_rows_stay_in_their_columns():
    """Tiles of both dims: rows are sent to the device that has the same columns."""
    rows, columns = np.divmod(np.arange(8), 2)
    sharding = Sharding((Split.of(rows), Split.of(columns)), 8)
    x = np.arange(12 * 4).reshape(12, 4)
    tiles = [
        jnp.asarray(x[3 * r : 3 * r + 3, 2 * c : 2 * c + 2])
        for r, c in zip(rows, columns, strict=True)
    ]
    starts, held = np.arange(4) * 3 - 2, Runs.even(4, 3, 12)
    got, _ = on_all(Halo(WHY, sharding, 0, Windows.of(held, 3, starts, 3)).run, tiles)
    for r, c, window in zip(rows, columns, got, strict=True):
        first = max(starts[r], 0)
        wanted = x[first : starts[r] + 3, 2 * c : 2 * c + 2]
        np.testing.assert_array_equal(window[first - starts[r] :], wanted)


def test_tiles_of_another_size_cost_what_changes_hands():
    """Of 13 rows in tiles of 4, made tiles of 5, the largest message to a neighbour has 2 rows."""
    assert retile_elements(split_of(4), (4, 2), 0, 5, (13, 2)) == 2 * 2
    assert retile_elements(split_of(4), (4, 2), 0, 4, (13, 2)) == 0


@pytest.mark.parametrize("collective", [all_gather, reduce_scatter])
def test_groups_that_leave_an_odd_number_of_devices(collective):
    """Three of eight devices: collectives with groups of one size do not cover the others."""
    tiles = [jnp.asarray(np.arange(6).reshape(3, 2) + 10 * n) for n in range(8)]
    got, _ = on_all(lambda p, x: collective(p, x, 0, [[0, 1, 2]], WHY), tiles)
    joined, total = np.concatenate(tiles[:3]), sum(np.asarray(t) for t in tiles[:3])
    for rank in range(3):
        wanted = joined if collective is all_gather else total[rank : rank + 1]
        np.testing.assert_array_equal(got[rank], wanted)


@given(tilings())
def test_rows_are_collected(case):
    tiles, rows, size, held = case
    end = int(held.high.max())
    array = tiles_of(held, rows, size)
    got, _ = on_all(lambda p, x: collect(p, x, split_of(tiles), 0, held, end, WHY), array)
    first = int(held.low.min())
    assert_rows(got, [0] * tiles, {r: r for r in range(first, end)})
