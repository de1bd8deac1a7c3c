"""Any sharding to any other: values, and the fewest bytes."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

import gshard
from gshard.graph.reason import Reason
from gshard.moving import plan
from gshard.moving.plan import Reshard, plan_reshard
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile
from tests.oracle import DEVICE_COUNTS, assignments, check, even_split, kinds, random_array, sent

SIZES = (0, 1, 2, 3, 5, 8, 12, 13, 16)


def tiles_of(x: np.ndarray, sharding: Sharding) -> np.ndarray:
    """The tile of every device, NaN where there is padding or nothing."""
    local = sharding.local_shape(x.shape)
    padded = np.full(sharding.padded_shape(x.shape), np.nan, x.dtype)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    out = np.full((sharding.num_devices, *local), np.nan, x.dtype)
    for device in np.flatnonzero(sharding.tile_index >= 0):
        starts = [
            int(s.coords[device]) * l if s else 0
            for s, l in zip(sharding.splits, local, strict=True)
        ]
        out[device] = padded[tuple(slice(a, a + l) for a, l in zip(starts, local, strict=True))]
    return out


@st.composite
def reshardings(draw):
    devices = draw(st.sampled_from(DEVICE_COUNTS))
    shape = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=3)))
    whole = np.zeros([1] * len(shape), int)
    found = [draw(assignments(len(shape), devices)) for _ in range(2)]
    return shape, *(Sharding.of_assignment(whole if a is None else a, devices) for a in found)


def run(x, source, target):
    devices = source.num_devices
    mesh = Mesh(np.array(jax.devices()[:devices]), ("d",))

    def local(tile):
        node = Reshard(Reason("step", "test"), source, target, x.shape)
        done = node.run(Place(("d",), devices, planned=False), tile[0])
        assert done.shape == node.result(tile[0].shape)
        return done[None]

    spec = PartitionSpec("d")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return np.asarray(jax.jit(mapped)(tiles_of(x, source)))


def assert_arrives(shape, source, target):
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    got, wanted = run(x, source, target), tiles_of(x, target)
    np.testing.assert_array_equal(np.where(np.isnan(wanted), 0, got), np.nan_to_num(wanted))
    node = Reshard(Reason("step", "test"), source, target, shape)
    planned = [] if 0 in shape else plan_reshard(source, target, shape, np.float32)
    assert node.sent(source.local_shape(shape), x.dtype) == sum(step.bytes for step in planned)


@given(reshardings())
def test_everything_arrives(case):
    assert_arrives(*case)


def test_from_few_devices_to_copies_on_more():
    """No permute: each tile has one sender and two receivers."""
    source = Sharding.of_assignment(np.array([[0, 1, 2]]), 8)
    copies = Sharding(Sharding.of_assignment(np.array([[[0, 2], [1, 4], [3, 5]]]), 8).splits[:2], 8)
    assert (source.replicas, copies.replicas) == (1, 2)
    assert_arrives((3, 3), source, copies)


@given(reshardings())
def test_no_plan_replicates_on_the_way(case):
    """Unless the target is replicated, or devices are idle, no step holds the whole tensor."""
    shape, source, target = case
    if 0 in shape or target.is_replicated or source.is_replicated or source.idle or target.idle:
        return
    for step in plan_reshard(source, target, shape, np.float32):
        assert not step.target.is_replicated, [
            str(s.target) for s in plan_reshard(source, target, shape, np.float32)
        ]


@pytest.mark.slow
def test_everything_arrives_in_many_more_cases():
    from hypothesis import settings

    settings(max_examples=400)(given(reshardings())(lambda case: assert_arrives(*case)))()


def test_two_axes_of_a_mesh_at_once():
    """P(b, None, a) -> P(None, (a, b)): XLA gives up and replicates; it is one AllToAll."""
    mesh = np.arange(8).reshape(4, 2)
    x = random_array((8, 16, 4))
    lowered = check(
        lambda x: x,
        x,
        inputs=[mesh.reshape(4, 1, 2)],
        outputs=[mesh.T.reshape(1, 8, 1)],
        exact=True,
    )
    assert kinds(lowered) == {"all_to_all": 1}
    assert sent(lowered) == x.nbytes // 8 * 7 // 8


def test_another_device_order_is_one_permute():
    order = np.array([3, 1, 4, 0, 5, 7, 2, 6])
    x = random_array((16, 3))
    lowered = check(
        lambda x: x, x, inputs=[np.arange(8)[:, None]], outputs=[order[:, None]], exact=True
    )
    assert kinds(lowered) == {"collective_permute": 1}
    assert sent(lowered) == x.nbytes // 8


def test_gathering_one_of_two_dims_moves_only_what_is_missing():
    mesh = np.arange(8).reshape(2, 4)
    x = random_array((8, 8))
    lowered = check(lambda x: x, x, inputs=[mesh], outputs=[mesh[:, :1]], exact=True)
    assert kinds(lowered) == {"all_gather": 1}
    assert sent(lowered) == x.nbytes // 2 * 3 // 4


@pytest.mark.parametrize(
    ("tiling", "kind", "bytes_sent"),
    [
        ((7,), "all_gather", 7 * 3 * 4),
        ((3, 2), "all_gather", 7 * 7 * 4),
        ((3,), "all_reduce", 2 * 21 * 4 * 7 // 8),
    ],
    ids=str,
)
def test_from_some_devices_to_all(tiling, kind, bytes_sent):
    """Where most of them have a tile, all tiles are gathered; else parts are summed."""
    shape = (20, 2)[: len(tiling)]
    holders = np.random.default_rng(0).permutation(8)[: math.prod(tiling)]
    source = Sharding.of_assignment(holders.reshape(tiling), 8)
    target = Sharding.replicated(len(shape), 8)
    assert_arrives(shape, source, target)

    def fn(x):
        return gshard.replicate(gshard.shard(x, holders.reshape(tiling)))

    lowered = gshard.jit(fn, devices=8).lower(jax.ShapeDtypeStruct(shape, np.float32))
    assert kinds(lowered) == {kind: 1}
    assert sent(lowered) == bytes_sent


def test_cutting_what_is_replicated_is_free():
    lowered = check(lambda x: x * 1, random_array((13, 5)), outputs=[np.arange(8).reshape(4, 2)])
    assert lowered.collectives == []


def test_plans_for_thousands_of_devices_are_quick():
    """The same steps for 2048 devices as for 8."""
    for devices in (8, 2048):
        rows = Sharding.of_assignment(np.arange(devices)[:, None], devices)
        columns = Sharding.of_assignment(np.arange(devices)[None], devices)
        steps = plan_reshard(rows, columns, (8 * devices, 8 * devices), np.float32)
        assert [s.kind for s in steps] == ["exchange"]


def test_an_annotation_of_an_annotated_tensor_is_a_reshard():
    x = random_array((8, 8))
    step = gshard.jit(lambda x: gshard.split(gshard.split(x, 0, 8), 1, 8))
    np.testing.assert_array_equal(step(x), x)
    assert kinds(step.lower(x)) == {"all_to_all": 1}


TINY = [-0.0, 1e-42, -1e-42, np.nan, np.inf, 1.0]


@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.bool_])
def test_not_a_bit_changes_on_the_way_from_some_devices_to_all(dtype):
    """Three tiles on 8 devices, to copies of the whole: sums would lose -0.0 and tiny numbers."""
    x = np.resize(np.array(TINY, np.float32), (7, 2)).astype(dtype)
    spread = gshard.jit(lambda x: gshard.replicate(gshard.split(x, 0, 3)), devices=jax.devices())
    got = np.asarray(spread(x))
    np.testing.assert_array_equal(got.view(np.uint8), x.view(np.uint8))
    assert kinds(spread.lower(x)) == {"all_reduce": 1}


def test_routed_tiles_have_padding_that_is_poison():
    """The oracle's NaN must stand in what a route leaves open, or leaks would go unseen."""
    source = Sharding.of_assignment(np.arange(3)[:, None], 4)
    target = Sharding.of_assignment(np.arange(4)[:, None], 4)
    assert [s.kind for s in plan_reshard(source, target, (9, 5), np.float32)] == ["route"]
    x = np.ones((9, 5), np.float32)
    got, wanted = run(x, source, target), tiles_of(x, target)
    assert np.isnan(wanted).any()
    np.testing.assert_array_equal(got, wanted)


def test_moves_where_jax_counts_in_64_bits():
    """Starts of slices have to be of one type, whatever Python's integers are."""
    x = random_array((16, 6), np.float64)
    with jax.enable_x64(True):
        for tiles in (6, 5, 3):
            wanted = [even_split(2, 0, tiles)]
            lowered = check(lambda x: x * 2, x, inputs=[even_split(2, 0, 8)], outputs=wanted)
            assert lowered.collectives
        check(lambda x: x * 2, x, inputs=[even_split(2, 0, 5)], outputs=[even_split(2, 0, 1)])


@pytest.mark.parametrize(
    ("shape", "devices", "source", "target", "fewest"),
    [
        ((1, 16), 4, [[0], [1]], [[0, 2, 1, 3]], 32),  # not a gather and a slice
        ((8, 2, 3), 8, [[[1, 0, 2, 7, 5, 3, 6, 4]]], [[[d] for d in range(8)]], 140),  # two steps
        ((16, 8, 5), 6, [[[0, 1]]], [[[2, 4, 1], [3, 0, 5]]], 512),  # straight to where it belongs
        ((3, 12), 8, [[0, 1, 6], [2, 3, 5]], [[0], [1], [2]], 32),  # two devices have nothing
    ],
)
def test_the_fewest_bytes_of_some_plans(shape, devices, source, target, fewest):
    before, after = (Sharding.of_assignment(np.array(a), devices) for a in (source, target))
    assert sum(step.bytes for step in plan_reshard(before, after, shape, np.float32)) == fewest
    assert_arrives(shape, before, after)


def test_a_tile_that_is_too_large_is_evened_out(monkeypatch):
    """Even if its sharding is the target already; and rows that shift are counted."""
    rows = Sharding.of_assignment(np.arange(4)[:, None], 4)
    place, why, shape = Place(("d",), 4), Reason("step", "test"), (10, 2)
    large = Tile(np.zeros((4, 2), np.float32), rows, shape)  # 3 rows are the standard
    monkeypatch.setattr(
        plan, "communicate", lambda node, x, _: np.zeros(node.result(x.shape), x.dtype)
    )
    evened = plan.reshard(place, large, rows, why)
    assert evened.is_standard
    assert plan.reshard(place, evened, rows, why) is evened
    node = Reshard(why, rows, rows, shape)
    assert node.sent((3, 2), np.float32) == 0
    assert node.sent((4, 2), np.float32) > 0
