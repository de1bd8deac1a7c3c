"""Decisions that give right values either way, asked of the functions that make them."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import primitives as p

import gshard
from gshard.graph.reason import Reason
from gshard.graph.regions import walk
from gshard.moving import costs, row_windows
from gshard.moving.collectives import AllReduce
from gshard.moving.nodes import add_node
from gshard.moving.partial import _in_pairs
from gshard.planning.improve.combine import combinations_of
from gshard.planning.planner import Planner
from gshard.propagation.flow import Flow
from gshard.propagation.spread import DimGroups, Spread
from gshard.rules.base.rule import RULES
from gshard.rules.control import _summed_if_large
from gshard.rules.painting import RowMap
from gshard.rules.reduction import cumulative_ways
from gshard.rules.row_map import _sent
from gshard.rules.window_reduce import _in_parts
from gshard.tensors.meshes import expressed, mesh_shapes, partition_spec
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile
from tests.oracle import annotated, check, even_split, kinds, random_array

D = 8


def by(*tiles):
    """A sharding over 8 devices with so many tiles of each dim, the major dim first."""
    coords = np.unravel_index(np.arange(D), (*tiles, D // math.prod(tiles)))
    return Sharding(tuple(Split.of(c) for c in coords[:-1]), D)


# --------------------------------------------------------------- rows of plans


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_rows_are_scattered_only_where_windows_meet(monkeypatch, gap):
    """A ReduceScatter gives device c what follows that of device c - 1, and nothing else."""
    for few in ("_rounds", "_shifts"):
        monkeypatch.setattr(row_windows, few, lambda *_: None)  # too many of them
    held = row_windows.Runs.even(4, 3, 12)
    windows = row_windows.Windows.of(held, 3, np.arange(4) * (2 + gap), 2)
    plan = row_windows.plan_windows.__wrapped__(windows)
    assert plan.kind == ("gather" if gap else "scatter")


@pytest.mark.parametrize(("size", "tiles", "fits"), [(16, 8, True), (8, 8, False), (12, 4, False)])
def test_pairs_of_16_bits_stay_on_one_device(size, tiles, fits):
    tile = Tile(jnp.zeros((2, size // tiles), jnp.bfloat16), by(1, tiles), (2, size))
    assert _in_pairs(jnp.bfloat16, tile, by(1, tiles)) is fits
    assert _in_pairs(jnp.bfloat16, tile, by(1, 1)) is fits
    assert not _in_pairs(jnp.float32, tile, by(1, tiles))


# --------------------------------------------------------------- what slices cost


def sliced(*rows):
    (eqn,) = jax.make_jaxpr(lambda x: x[rows])(jnp.zeros((16, 64))).eqns
    return eqn


def test_a_slice_that_shrinks_one_dim_makes_the_other_cheaper():
    """Dims change one after the other; rows of the second are as short as the first left them."""
    here, eqn = by(2, 4), sliced(slice(0, 4), slice(8, 40))
    row_map, shape = RowMap(eqn), (16, 64)
    found, steps = _sent(row_map, row_map.layers, shape, here, here, jnp.float32)
    rows = [row_map.rows(row_map.layers[0], d, {}).sent(shape[d], 2 + 2 * d) for d in (0, 1)]
    first = 4 * rows[0] * here.local_shape(shape)[1]
    second = 4 * rows[1] * here.local_shape((4, 32))[0]
    assert (found, steps) == (first + second, 2)


def test_idle_devices_do_not_collect_a_slice():
    """The result of a slice is collected by a sum over all devices, of which each has a part."""
    idle, whole = (
        Sharding((Split.of([0, 1, 2, 3, 4, 5, -1, -1]), None), D),
        Sharding.replicated(2, D),
    )
    for here, collected in ((idle, False), (by(8, 1), True)):
        ways = RULES[p.slice_p].ways(sliced(slice(2, 9)), [here], [whole], 10**9)
        kept = [w for w in ways if w.operands[0].splits[0] and not w.results[0].splits[0]]
        assert bool(kept) is collected


@pytest.mark.parametrize(("window", "in_parts"), [(7, []), (31, []), (32, [0])])
def test_windows_are_reduced_in_parts_if_they_are_much_larger_than_the_result(window, in_parts):
    x = jnp.zeros(window + 7)
    pooled = jax.make_jaxpr(lambda x: lax.reduce_window(x, 0.0, lax.add, (window,), (1,), "VALID"))
    (eqn,) = [e for e in walk(pooled(x).jaxpr) if e.primitive.name == "reduce_window_sum"]
    assert eqn.outvars[0].aval.shape == (8,)
    assert _in_parts(eqn) == in_parts


# --------------------------------------------------------------- meshes, collectives, reasons


@given(st.lists(st.sampled_from([(8,), (2,), (4,), (1,)]), min_size=1, max_size=3), st.booleans())
def test_the_mesh_is_one_that_expresses_most_arrays(tiles, crossed):
    shardings = [by(*t) for t in tiles]
    if crossed:  # as on the axes of a 2 x 4 mesh, the second one major
        shardings.append(Sharding((Split.of(np.arange(D) % 4), Split.of(np.arange(D) // 4)), D))
        shardings.append(Sharding((Split.of(np.arange(D) % 2),), D))
    shapes = [(16,) * s.rank for s in shardings]
    _, found = expressed(shardings, shapes, D)
    fewest = min(
        sum(partition_spec(s, n, axes) is None for s, n in zip(shardings, shapes, strict=True))
        for axes in mesh_shapes(shardings, D)
    )
    assert found.count(None) == fewest


def test_a_large_collective_is_not_copied_to_be_combined():
    largest = costs.cost_model().latency * costs.cost_model().memory_per_byte / 2

    node = AllReduce(Reason("result", "dot_general"), (tuple(range(D)),), "sum")

    def fn(*arrays):
        return [add_node(node, x) for x in arrays]

    small, large = (jnp.zeros(4), jnp.zeros(int(largest) // 4 + 1))
    arrays = [small, large, small * 2, large * 2]
    traced = jax.make_jaxpr(fn)(*arrays)
    (found,) = combinations_of(traced.jaxpr)
    assert [e.outvars[0].aval.shape for e in found.members] == [(4,), (4,)]


# --------------------------------------------------------------- loops


def test_a_carry_that_the_body_leaves_under_another_sharding():
    def fn(x):
        def body(carry, _):
            y = gshard.split(jnp.sin(carry), 1, D) * gshard.split(jnp.cos(carry), 1, D)
            return gshard.split(jnp.sort(gshard.split(y + 1, 0, D), 1), 0, D), y.sum()

        return lax.scan(body, gshard.split(x, 1, D), None, length=3)

    low = check(fn, random_array((8, 16)))
    (moved,) = [c for c in low.collectives if c.reason.startswith("carried value of scan")]
    assert (moved.kind, moved.count) == ("all_to_all", 3)


def test_integers_are_replicated_by_computing_them_again():
    """They are made of others that every device has."""

    def fn(x):
        x = gshard.replicate(x)
        part = gshard.split(gshard.split(x, 0, D) * 2 + gshard.split(jnp.arange(64), 0, D), 0, D)
        return gshard.replicate(part), part

    assert not check(fn, np.arange(64)).collectives


def test_padded_indices_are_not_unique():
    """The padding of indices may repeat some of them; what is promised to XLA has to hold."""

    def fn(x, rows, updates):
        rows = gshard.split(rows, 0, D)
        return x.at[rows].add(gshard.split(updates, 0, D), unique_indices=True)

    def unique(count):
        args = jnp.zeros((64, 3)), jnp.arange(count), jnp.ones((count, 3))
        lowered = gshard.jit(fn, devices=D).lower(*args)
        (eqn,) = [e for e in walk(lowered.jaxpr) if e.primitive.name == "scatter-add"]
        return eqn.params["unique_indices"]

    assert unique(16)
    assert not unique(13)


def test_two_products_with_one_weight_share_its_gather():
    """For one of them it would be dearer than to exchange the rows and to scatter the sums."""
    x, w = jax.ShapeDtypeStruct((128, 512), jnp.float32), jax.ShapeDtypeStruct((512, 64), "f4")

    def sends(fn, *arguments):
        rows = [even_split(2, 0, 8)] * len(arguments)
        return kinds(gshard.jit(annotated(fn, rows, rows[1:]), devices=8).lower(*arguments))

    assert sends(lambda w, x: [x @ w], w, x) == {"all_to_all": 1, "reduce_scatter": 1}
    assert sends(lambda w, x, y: [x @ w, y @ w], w, x, x) == {"all_gather": 1}


# --------------------------------------------------------------- tiles of other sizes


@pytest.mark.parametrize(("tiles", "room"), [(1, (0, 1)), (2, (1,)), (4, (1,)), (8, ())])
def test_a_split_leaves_room_for_another_while_two_devices_have_the_same_tile(tiles, room):
    flow = SimpleNamespace(num_devices=D, closed={}, open={"x": room}, given={"x": (None, None)})
    split = by(tiles, 1).splits[0] if tiles > 1 else None
    assert tuple(Flow.open_dims(flow, "x", (split, None))) == room
    flow.edges = ()
    for held, dims in (((), room), (("x",), ())):
        assert Spread(flow, DimGroups(), held).open["x"] == dims


@pytest.mark.parametrize(("kind", "stays"), [("sum", True), ("max", False)])
def test_only_sums_stay_unreduced(kind, stays):
    tile = Tile(jnp.ones((2, 2)), by(1, 1), (2, 2))
    planner = SimpleNamespace(unreduced={"x": 1.0})
    assert Planner.stays_unreduced(planner, "x", tile, kind) is stays
    assert not Planner.stays_unreduced(planner, "y", tile, kind)


@pytest.mark.parametrize(("limit", "reduced"), [(5 * 64, False), (5 * 64 - 1, True)])
def test_a_stack_of_unreduced_results_is_within_the_memory_limit(limit, reduced):
    unreduced = by(1, 1).unreduced_over([by(8, 1).splits[0]])
    tile = Tile(jnp.zeros((4, 4)), unreduced, (4, 4))
    ctx = SimpleNamespace(
        memory_limit=limit, sharding=lambda var: by(4, 1), reshard=lambda *_: "reduced"
    )
    assert (_summed_if_large(ctx, tile, None, length=5) == "reduced") is reduced


# --------------------------------------------------------------- what later operators move anyway


def test_what_a_later_operator_moves_anyway_costs_nothing():
    """All rows of x are needed to decompose it, so that they are summed on each device then."""

    def fn(x):
        x = gshard.split(x, 0, 8)
        return jnp.sum(x, 0), jnp.linalg.svd(x, compute_uv=False)

    assert kinds(check(fn, random_array((16, 16)))) == {"all_gather": 1}


def test_a_later_operator_that_does_not_move_a_value_is_no_reason_to_move_it():
    """The other operator runs on rows: a sum over them is reduced, and nothing is gathered."""

    def fn(x):
        x = gshard.split(x, 0, 8)
        return jnp.sum(x, 0), gshard.split(jnp.sin(x), 0, 8)

    assert kinds(gshard.jit(fn).lower(random_array((16, 16)))) == {"all_reduce": 1}


def test_a_cumulative_sum_counts_the_totals_that_it_gathers():
    """One row of each tile, which 7 other devices get; along another dim nothing is sent."""
    eqn = jax.make_jaxpr(lambda x: lax.cumsum(x, 0))(jnp.ones((64, 8))).eqns[-1]
    (along,) = cumulative_ways(eqn, [by(8, 1)], [by(8, 1)], 0)
    (across,) = cumulative_ways(eqn, [by(1, 8)], [by(1, 8)], 0)
    assert (along.sent, across.sent) == (7 * 8 * 4, 0)


def test_a_later_product_whose_weight_is_gathered_moves_nothing():
    """Products of one norm (Phi, GPT-J): gradients of their input are added before the reduction,
    which makes it cheap to split the products by features, if their weights were not there."""

    def loss(layers, x):
        for q, k, v, up, down in layers:
            h = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
            attended = jnp.tanh(h @ q.T) * jnp.tanh(h @ k.T) + jnp.tanh(h @ v.T)
            x = x + attended + jax.nn.gelu(h @ up.T) @ down.T
        return (x**2).sum()

    def step(layers, x):
        layers, x = gshard.fsdp(layers, D), gshard.split(x, 0, D)
        return jax.tree.map(lambda w, g: w - g, layers, jax.grad(loss)(layers, x))

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    layers = [(*[shape(64, 64)] * 3, shape(128, 64), shape(64, 128))] * 2
    sent = [
        (c.kind, c.bytes) for c in gshard.jit(step).lower(layers, shape(16, 16, 64)).collectives
    ]
    weights = 4 * sum(w.size for w in jax.tree.leaves(layers))
    assert sent == [("all_gather", weights * 7 // 8), ("reduce_scatter", weights * 7 // 8)]
