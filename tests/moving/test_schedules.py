"""Plans as tables: who sends what to whom, and what it costs, counted element by element."""

import collections

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard.moving import plan, routes
from gshard.moving.costs import cost_model
from gshard.moving.nodes import planned_bytes
from gshard.moving.plan import plan_reshard, reshard_cost
from gshard.moving.row_windows import in_rounds, plan_fetch
from gshard.moving.steps import copies_as_split
from gshard.tensors.sharding import Sharding, Split
from tests.moving.test_reshard import reshardings
from tests.oracle import even_split, random_array, sent

Piece = collections.namedtuple("Piece", "sender receiver")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12), st.integers(1, 6))
@settings(max_examples=60)
def test_in_a_round_a_device_sends_once_and_receives_once(pairs, limit):
    pieces = [Piece(*pair) for pair in pairs]
    rounds = in_rounds(pieces)
    assert sorted(piece for part in rounds for piece in part) == sorted(pieces)
    for part in rounds:
        assert len({p.sender for p in part}) == len({p.receiver for p in part}) == len(part)
    remote = sum(part[0].sender != part[0].receiver for part in rounds)
    assert in_rounds(pieces, limit) == (rounds if remote <= limit else None)


def held(sharding: Sharding, shape: tuple[int, ...], device: int) -> np.ndarray:
    """Which elements a device has."""
    found = np.full(shape, sharding.tile_index[device] >= 0)
    for dim, (split, rows) in enumerate(
        zip(sharding.splits, sharding.local_shape(shape), strict=True)
    ):
        if split:
            own = np.arange(shape[dim]) // max(rows, 1) == split.coords[device]
            found &= np.expand_dims(own, [d for d in range(len(shape)) if d != dim])
    return found


@given(reshardings())
@settings(max_examples=40)
def test_what_devices_lack_is_a_lower_bound_of_what_is_sent(case):
    shape, source, target = case
    lacks = [
        np.sum(held(target, shape, d) & ~held(source, shape, d)) for d in range(source.num_devices)
    ]
    assert plan._missing(source, target, shape) == max(lacks)
    if 0 not in shape and source != target:
        assert sum(s.bytes for s in plan_reshard(source, target, shape, np.int8)) >= max(lacks)


@given(reshardings())
@settings(max_examples=40)
def test_no_direct_way_takes_fewer_bytes_than_the_plan(case):
    shape, source, target = case
    if 0 in shape or source == target:
        return
    planned = sum(s.bytes for s in plan_reshard(source, target, shape, np.float32))
    for step in plan._direct(source, target, shape, 4):
        assert planned <= step.bytes


@given(reshardings())
@settings(max_examples=40)
def test_every_element_is_sent_once_and_its_holders_take_turns(case):
    shape, source, target = case
    if 0 in shape:
        return
    pieces = routes._pieces(source, target, shape)
    got = np.zeros((source.num_devices, *shape), int)
    turns: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    for piece in pieces:
        box = tuple(slice(a, b) for a, b in zip(piece.low, piece.high, strict=True))
        assert held(source, shape, piece.sender)[box].all()
        got[(piece.receiver, *box)] += 1
        if held(source, shape, piece.receiver)[box].all():
            assert piece.sender == piece.receiver
        else:
            turns[int(source.tile_index[piece.sender])][piece.sender] += 1
    for device in range(source.num_devices):
        np.testing.assert_array_equal(got[device], held(target, shape, device))
    for index, senders in turns.items():
        counts = [senders[d] for d in np.flatnonzero(source.tile_index == index)]
        assert max(counts) - min(counts) <= 1
    for part in routes.plan_boxes(source, target, shape):
        assert all(b <= n for b, n in zip(part.box, shape, strict=True))


ORDER = [3, 1, 2, 0, 7, 5, 6, 4]
BY_8, BY_2 = even_split(2, 0, 8), np.array([[0], [4]])


@pytest.mark.parametrize(
    ("source", "target", "kind", "sent"),
    [
        (BY_8, np.array(ORDER).reshape(8, 1), "permute", 2 * 24),
        (BY_8, np.zeros((1, 1), int), "gather", 7 * 2 * 24),
        (BY_8, BY_2, "gather", 3 * 2 * 24),
        (BY_8, even_split(2, 1, 8), "exchange", 2 * 24 * 7 // 8),
        (BY_2, BY_8, "slice", 0),
        (np.arange(8).reshape(8, 1), np.arange(6).reshape(6, 1), "route", 4 * 24),
    ],
)
def test_one_step_where_one_leads_there(source, target, kind, sent):
    found = [Sharding.of_assignment(a, 8) for a in (source, target)]
    (step,) = plan_reshard(*found, (16, 24), np.int8)
    assert step.kind == kind
    assert step.bytes == sent
    wanted = 0 if kind == "slice" else sent + cost_model().latency
    assert reshard_cost(*found, (16, 24), np.int8) == wanted


def test_copies_are_numbered_as_the_devices_are():
    assert copies_as_split(Sharding.replicated(1, 8)) is Split.of(np.arange(8))
    assert copies_as_split(Sharding.of_assignment(BY_2, 8)) is Split.of(np.arange(8) % 4)


@pytest.mark.parametrize("devices", [8, 6])
@pytest.mark.parametrize("shape", [(16, 24), (13, 10)])
def test_what_a_plan_says_is_sent(shape, devices):
    """An exchange, gathers, routes, idle devices, uneven tiles: all in one program."""
    ways = [
        even_split(2, 0, devices),
        even_split(2, 1, devices),
        np.arange(devices).reshape(2, -1),
        np.arange(devices)[::-1].reshape(-1, 2),
        even_split(2, 0, devices - 1),
        np.zeros((1, 1), int),
        even_split(2, 0, 4),
    ]

    def fn(x):
        for way in ways:
            x = gshard.shard(x * 2, way)
        return x

    lowered = gshard.jit(fn, devices=devices).lower(random_array(shape))
    assert planned_bytes(lowered._program.history.programs["share"]) == sent(lowered) > 0


def test_what_a_plan_says_of_a_loop_is_sent_in_every_run():
    def fn(x, w):
        return lax.scan(lambda c, w: (jnp.tanh(gshard.split(c, 1, 8) @ w), None), x, w)[0]

    lowered = gshard.jit(fn, devices=8).lower(random_array((4, 16)), random_array((5, 16, 16)))
    assert 5 in [c.count for c in lowered.collectives]
    assert planned_bytes(lowered._program.history.programs["share"]) == sent(lowered)


def test_what_a_plan_says_of_halos_is_sent():
    def fn(x):
        x = gshard.split(x, 0, 8)
        y = jnp.pad(x[2:], ((1, 0), (0, 0))) + x[1:] * jnp.roll(x, 3, 0)[:-1]
        return y, lax.reduce_window(x, 1.0, lax.mul, (17, 1), (1, 1), "VALID"), x[::-1]

    for rows in (24, 61):
        lowered = gshard.jit(fn, devices=8).lower(random_array((rows, 4)))
        assert planned_bytes(lowered._program.history.programs["share"]) == sent(lowered) > 0


@pytest.mark.parametrize(
    ("starts", "width", "kind", "rows"),
    [
        ([0, 4, 8, 12], 5, "shifts", 1),
        ([-2, 2, 6, 10], 6, "shifts", 2),
        ([-1, 3, 7, 11], 7, "shifts", 3),  # a row of one neighbour, two of the other
        ([3, 3, 3, 3], 2, "rounds", 3),
        ([8, 8, 8, 8], 8, "gather", 12),
    ],
)
def test_rows_of_a_window_that_are_sent(starts, width, kind, rows):
    found = plan_fetch(4, 16, np.array(starts), width)
    assert (found.kind, found.sent) == (kind, rows)
