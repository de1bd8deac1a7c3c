"""Planning: few bytes, and little work for many devices, in whatever order they stand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.moving import plan, routes
from gshard.moving.collectives import sent_in_groups
from gshard.moving.costs import STEP_COST
from gshard.moving.plan import plan_reshard
from gshard.moving.routes import can_exchange, exchange_groups, kept_tiles
from gshard.moving.steps import Route
from gshard.tensors.sharding import Sharding, Split
from tests.oracle import assignments

MESH = np.arange(512).reshape(8, 8, 8)
SHUFFLED = np.random.default_rng(0).permutation(512).reshape(8, 8, 8)


def layouts(mesh: np.ndarray) -> list[Sharding]:
    """A tensor of three dims over a mesh of three axes, in ways that have little in common."""
    found = [
        mesh,
        mesh.transpose(2, 1, 0),
        mesh.reshape(64, 8, 1),
        mesh.transpose(2, 0, 1).reshape(64, 1, 8),
        mesh.transpose(1, 0, 2).reshape(1, 1, 512),
        mesh[:, :, :1],
    ]
    return [Sharding.of_assignment(m, 512) for m in found]


@st.composite
def pairs(draw):
    devices = draw(st.sampled_from((4, 6, 8, 12)))
    rank = draw(st.integers(1, 3))
    found = [draw(assignments(rank, devices)) for _ in range(2)]
    whole = np.zeros([1] * rank, int)
    return tuple(Sharding.of_assignment(whole if a is None else a, devices) for a in found)


@st.composite
def meshes_of_four_axes(draw):
    """Three shardings of one tensor by axes of a mesh, each in one of two device orders."""
    sizes = draw(st.sampled_from([(2, 2, 2, 2), (2, 2, 2, 1), (2, 3, 2, 1), (4, 2, 2, 1)]))
    devices, rank = math.prod(sizes), draw(st.integers(1, 3))
    orders = [np.arange(devices), np.array(draw(st.permutations(range(devices))))]
    shape = tuple(draw(st.sampled_from([480, 960, 1440])) for _ in range(rank))

    def sharding() -> Sharding:
        order, splits = draw(st.sampled_from(orders)), [[] for _ in range(rank + 1)]
        for axis in draw(st.permutations(range(4))):
            splits[draw(st.integers(0, rank))].append(axis)  # the last one: not split
        tiles = [math.prod(sizes[a] for a in axes) for axes in splits]
        return _of_mesh(order.reshape(sizes).transpose([*itertools.chain(*splits)]).reshape(tiles))

    return shape, sharding(), sharding(), sharding()


def _of_mesh(mesh: np.ndarray) -> Sharding:
    """Tiles along the first axes of a mesh, copies along the last one."""
    splits = []
    for index in np.indices(mesh.shape)[:-1]:
        coords = np.zeros(mesh.size, int)
        coords[mesh] = index
        splits.append(Split.of(coords))
    return Sharding(tuple(splits), mesh.size)


@settings(max_examples=100)
@given(meshes_of_four_axes())
def test_no_detour_is_cheaper(case):
    """Redistribution is consistent: from a to c costs no more than from a to b and from b to c."""
    shape, a, b, c = case

    def price(here: Sharding, target: Sharding) -> int:
        steps = plan_reshard(here, target, shape, np.float32)
        return sum(step.bytes + STEP_COST * step.rounds for step in steps)

    assert price(a, c) <= price(a, b) + price(b, c)


@given(pairs())
def test_where_an_exchange_is_possible_there_are_groups_for_it(case):
    """Members share what is kept, and give and take every part once between them."""
    here, target = case
    if not can_exchange(here, target):
        return
    kept, groups = kept_tiles(here, target), exchange_groups(here, target)
    size = math.prod(t // k for t, k in zip(here.tiles, kept, strict=True))
    assert sorted(itertools.chain(*groups)) == np.flatnonzero(here.tile_index >= 0).tolist()
    for group in groups:
        for sharding in (here, target):
            parts = list(zip(sharding.splits, kept, strict=True))
            shared = {tuple(s.coords[d] // (s.tiles // k) for s, k in parts if s) for d in group}
            rest = {tuple(s.coords[d] % (s.tiles // k) for s, k in parts if s) for d in group}
            assert len(shared) == 1
            assert len(rest) == len(group) == size


def test_planning_for_many_devices_builds_no_groups(monkeypatch):
    """A search that matched devices for every step took seconds for one of these, 30 for another.

    That there are groups is known from the tile counts; they are made for the steps taken.
    """
    monkeypatch.setattr(routes, "exchange_groups", None)
    monkeypatch.setattr(routes, "_matching", None)
    expanded = []
    steps = plan._steps
    monkeypatch.setattr(plan, "_steps", lambda *args: expanded.append(args) or steps(*args))
    shape = (512, 510, 509)
    tile = 4 * math.prod(-(-n // 8) for n in shape)
    sources, targets = layouts(MESH), layouts(MESH) + layouts(SHUFFLED)
    for source, target in [(s, t) for s in sources[::2] for t in targets[::3] if s != t]:
        found = plan_reshard(source, target, shape, np.float32)
        assert found[-1].target == target
        assert sum(s.bytes for s in found) <= 24 * tile
    assert len(expanded) < 3000


@pytest.mark.parametrize("mesh", [MESH.transpose(1, 2, 0), SHUFFLED])
def test_copies_are_cut_before_they_move(mesh):
    """Eight copies of 64 tiles, to 512 tiles in another order: one permute of the small tiles."""
    source, target = Sharding.of_assignment(MESH[:, :, :1], 512), Sharding.of_assignment(mesh, 512)
    steps = plan_reshard(source, target, (64, 64, 64), np.float32)
    assert sum(s.bytes for s in steps) <= 8 * 8 * 8 * 4


@given(
    st.sampled_from([(1, 5, 16), (4, 6, 8), (3, 7, 5)]),
    st.tuples(st.integers(0, 2), st.permutations([0, 1, -1])),
    st.tuples(st.integers(0, 2), st.permutations([0, 1, -1])),
)
def test_between_tiles_with_idle_devices_no_more_is_sent_than_rows_to_who_needs_them(
    shape, before, after
):
    """An AllToAll whose groups omit a device is emitted as a dearer collective."""
    source, target = (
        Sharding(tuple(Split.of(coords) if d == dim else None for d in range(3)), 3)
        for dim, coords in (before, after)
    )
    sent = sum(step.bytes for step in plan_reshard(source, target, shape, np.float32))
    assert sent <= Route(source, target, shape, 4).bytes


def test_devices_that_are_idle_before_or_after_take_no_part_in_an_exchange():
    """A group of three would need the fourth device, which has nothing to give."""
    here = Sharding((Split.of([0, 1, 2, -1]), None), 4)
    same, others = (
        Sharding((None, Split.of(coords)), 4) for coords in ([0, 1, 2, -1], [-1, 0, 1, 2])
    )
    assert can_exchange(here, same)
    assert not can_exchange(here, others)


def test_a_group_that_omits_a_device_gathers_by_a_sum():
    """An AllGather has groups of one size: three of four devices sum a tensor of their parts."""
    assert sent_in_groups("all_gather", 8, members=2, groups=2, num_devices=4) == 8
    sent = sent_in_groups("all_gather", 8, members=3, groups=1, num_devices=4)
    assert sent == 2 * (3 * 8) * 2 // 3
