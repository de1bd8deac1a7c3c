"""`gshard.check` and `replay` inside of manual regions, rings and experts without a capacity."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard import manual as by_devices
from gshard.graph.reason import Reason
from gshard.moving import by_index, collectives
from gshard.rules import manual
from gshard.rules.base.rule import REGIONS, RegionRule
from gshard.tensors.manual import over_groups_p, to_auto_p, to_manual_p
from tests.oracle import random_array

D = 8
P = jax.P


def mesh():
    return jax.make_mesh((2, 4), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def mapped(body, *specs, out):
    return jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=out, check_vma=False)


def line_of(fn, offset):
    return f"tests/checking/test_regions.py:{fn.__code__.co_firstlineno + offset}"


# --------------------------------------------------------------- right programs


def ring(x, w):
    """Loops, branches and collectives; what a device computes depends on its number."""

    def body(x, w):
        number = lax.axis_index("m")

        def step(carry, _):
            total, passing = carry
            following = lax.ppermute(passing, "m", [(k, (k + 1) % 4) for k in range(4)])
            return (total + jnp.tanh(passing @ w), following), passing.sum()

        (total, _), sums = lax.scan(step, (jnp.zeros((4, 4)), x), None, length=4)
        total = lax.cond(number > 1, jnp.sin, lambda a: jnp.cos(a) * 2, total)
        runs = lax.while_loop(lambda c: c < number, lambda c: c + 1, jnp.int32(0))
        parts = lax.psum_scatter(lax.all_gather(total, "d", tiled=True), "d", tiled=True)
        return lax.pmean(parts, "m") * runs + total, sums + number

    y, sums = mapped(body, P("d", "m"), P(), out=(P("d", "m"), P(("d", "m"))))(jnp.sin(x), w)
    return (y * 2).sum() + sums.sum()


def test_a_ring_by_hand():
    args = random_array((8, 16)), random_array((4, 4), seed=1)
    np.testing.assert_allclose(gshard.jit(ring)(*args), jax.jit(ring)(*args), rtol=1e-5)
    report = gshard.check(ring, *args, devices=D)
    assert report.ok, report
    assert not report.not_compared
    inside = {line.operator for line in report.table}
    assert {"lower_named_axes", "row_of_device", "auto_to_manual", "tanh", "while"} <= inside


def test_its_gradient():
    args = random_array((8, 16)), random_array((4, 4), seed=1)
    report = gshard.check(jax.grad(ring, argnums=(0, 1)), *args, devices=D)
    assert report.ok, report
    assert set(report.not_compared) <= {
        "rewritten as a part of other operators",
        "not computed by any device",
    }


def uneven(x):
    part = gshard.auto_to_manual_spmd_partition(gshard.split(x, 0, D))
    more = part * 2 + gshard.partition_id()
    return gshard.manual_to_auto_spmd_partition(more, np.arange(D).reshape(D, 1), (13, 3)) + 1


def test_parts_with_padding():
    report = gshard.check(uneven, random_array((13, 3)), devices=D)
    assert report.ok, report
    assert not report.not_compared


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")


def by_hand(kinds, groups, dtype):
    """A region with some of the paper's collectives in it, each of which keeps the shape."""

    def collective(kind, x):
        if kind == "collective_permute":
            return by_devices.collective_permute(
                x, [(g[i], g[i - 1]) for g in groups for i in (0, 1)]
            )
        if kind == "all_gather":
            return by_devices.all_gather(x, 0, groups)[: x.shape[0]] * 2
        if kind == "reduce_scatter":
            return by_devices.reduce_scatter(jnp.concatenate([x] * len(groups[0])), 0, groups)
        if kind == "all_to_all":
            return by_devices.all_to_all(x, groups)
        return by_devices.all_reduce(x, groups)

    def fn(x):
        part = gshard.auto_to_manual_spmd_partition(gshard.split(x.astype(dtype), 0, D))
        for kind in kinds:
            part = jnp.tanh(collective(kind, part))
        return jnp.sum(gshard.manual_to_auto_spmd_partition(part, np.arange(D).reshape(D, 1)))

    return fn


@settings(max_examples=8)
@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    st.sampled_from([((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))]),
    st.sampled_from([jnp.float32, jnp.bfloat16]),
    st.booleans(),
)
def test_random_regions(kinds, groups, dtype, gradient):
    fn = by_hand(kinds, groups, dtype)
    report = gshard.check(jax.grad(fn) if gradient else fn, random_array((D * 4, 3)), devices=D)
    assert report.ok, report
    assert report.compared > 2 * len(kinds)


def test_until_nan_in_a_region():
    def fn(x):
        def body(x):
            y = jnp.log(x - lax.axis_index("m"))
            return jnp.where(y > 9, y, 0)

        return mapped(body, P("d", "m"), out=P("d", "m"))(x)

    x = np.full((4, 8), 2.5, np.float32)
    replay = gshard.jit(fn, devices=D).lower(x).replay(x, until="nan")
    step = replay.run()
    assert (step.operator, step.source) == ("log", line_of(fn, 2))
    assert step.device == 3  # the first with axis index 3


# --------------------------------------------------------------- planted faults


def rule_of(monkeypatch, primitive, change):
    """The rule of a primitive of regions, with its results changed by `change(ctx, tiles)`."""
    right = REGIONS[primitive].partition
    wrong = RegionRule(lambda ctx, *args: change(ctx, right(ctx, *args)))
    monkeypatch.setitem(REGIONS, primitive, wrong)


def first_of(fn, *args):
    report = gshard.check(fn, *args, devices=D)
    assert not report.ok
    return report.first


def test_a_collective_of_a_region_that_is_wrong_on_one_device(monkeypatch):
    def fn(x):
        def body(x):
            y = lax.psum(x * 2, "m")
            return jnp.tanh(y)

        return mapped(body, P("d", "m"), out=P("d", "m"))(x)

    assert gshard.check(lambda x: fn(x), random_array((4, 8)), devices=D).ok

    def change(ctx, tiles):
        spoiled = jnp.where(ctx.place.device_id() == 5, tiles[0].array * 1.001, tiles[0].array)
        return [manual.own(ctx, spoiled)]

    rule_of(monkeypatch, over_groups_p, change)
    found = first_of(fn, random_array((4, 8)))
    assert (found.operator, found.device) == ("lower_named_axes", 5)
    assert found.source == line_of(fn, 2)


@pytest.mark.parametrize("primitive", [to_manual_p, to_auto_p])
def test_a_border_with_parts_of_other_devices(monkeypatch, primitive):
    def change(ctx, tiles):
        pairs = [(d, (d + 1) % D) for d in range(D)]
        reason = Reason("asked", "a test")
        moved = collectives.collective_permute(ctx.place, tiles[0].array, pairs, reason)
        return [replace(tiles[0], array=moved)]

    rule_of(monkeypatch, primitive, change)
    found = first_of(uneven, random_array((13, 3)))
    assert found.operator == primitive.name


def test_a_region_that_leaves_copies_which_differ():
    """The user's own fault: the result is said to be replicated, and is not."""

    def fn(x):
        def body(x):
            return x * lax.axis_index("m")

        return mapped(body, P("d"), out=P("d"))(x)

    found = first_of(fn, random_array((4, 3)))
    assert found.operator == "manual_to_auto"
    assert found.source == line_of(fn, 4)


# --------------------------------------------------------------- rings and experts


def attention(q, k, v):
    """With so little memory for the scores, keys and values pass along a ring."""
    q, k, v = (gshard.split(x, 1, D) for x in (q, k, v))
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
    return jnp.einsum("bqk,bkd->bqd", weights, v) * 2


def attention_arguments():
    return [random_array((2, 16, 4), seed=seed) for seed in range(3)]


def test_attention_in_a_ring():
    args, step = attention_arguments(), jax.grad(lambda *a: jnp.sum(attention(*a) ** 2), (0, 1, 2))
    jitted = gshard.jit(step, devices=D, memory_limit=64)
    assert any(c.kind == "collective_permute" for c in jitted.lower(*args).collectives)
    report = gshard.check(jitted, *args)
    assert report.ok, report
    # Scores and what is computed of them: a device has some columns at a time.
    assert report.not_compared["rewritten as a part of other operators"] > 0


def test_a_ring_that_passes_nothing_on(plant):
    plant(collectives, "collective_permute", lambda place, x, pairs, reason: x)
    jitted = gshard.jit(lambda *a: attention(*a), devices=D, memory_limit=64)
    report = gshard.check(jitted, *attention_arguments())
    assert report.first is not None
    assert report.first.source == line_of(attention, 3)  # the sum of the softmax


def dropless(x, up, sizes):
    x, up = gshard.split(x, 0, D), gshard.split(up, 0, D)
    hidden = lax.ragged_dot(x, up, sizes)
    return jnp.tanh(hidden)


def dropless_arguments(sizes):
    return random_array((32, 4)), random_array((D, 4, 6), seed=1), np.array(sizes, np.int32)


EVEN, UNEVEN = [3, 5, 4, 5, 3, 4, 5, 3], [3, 0, 9, 1, 4, 7, 2, 6]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [EVEN, UNEVEN])  # rows to their experts, or the opposite
def test_experts_without_a_capacity(sizes):
    args = dropless_arguments(sizes)
    lowered = gshard.jit(dropless, devices=D).lower(*args)
    assert {c.kind for c in lowered.collectives} & {"all_to_all", "collective_permute"}
    report = lowered.check(*args)
    assert report.ok, report
    replay = lowered.replay(*args)
    assert replay.run() is None
    np.testing.assert_allclose(replay.results, jax.jit(dropless)(*args), rtol=1e-5)


@pytest.mark.slow
def test_rows_that_are_not_exchanged(plant):
    """The products have no rows in the user's order: what is compared next is named."""
    plant(by_index, "all_to_all", lambda place, x, groups, reason: x)
    report = gshard.check(lambda *a: dropless(*a), *dropless_arguments(EVEN), devices=D)
    assert report.first is not None
    assert report.first.source == line_of(dropless, 3)


def test_what_a_loop_of_a_region_begins_with_is_used_by_others():
    """Zeros of the shape of a tile are values of the region, since the loop's are; so are rows."""

    def ring(q):
        zeros = jnp.zeros_like(q)
        turn = [(n, (n + 1) % 8) for n in range(8)]

        def run(_, carry):
            total, first, tile = carry
            return total + first[:, None], first + tile[:, 0], lax.ppermute(tile, "d", turn)

        return lax.fori_loop(0, 8, run, (zeros, zeros[:, 0], q))[0]

    of_all = jax.sharding.Mesh(np.array(jax.devices()[:D]), ("d",))
    fn = jax.shard_map(ring, mesh=of_all, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    report = gshard.check(fn, random_array((16, 4)), devices=D)
    assert report.exact, report
