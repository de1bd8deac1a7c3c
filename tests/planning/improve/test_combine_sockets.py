"""Between processes on CPUs collectives are rings: AllToAlls replace them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

import gshard
from gshard.moving import costs
from gshard.runtime import pipeline
from tests.oracle import check, kinds, random_array, sent
from tests.planning.improve.test_combine import gradients, programs


@pytest.fixture
def rings(monkeypatch):
    """As if the devices were in several processes on CPUs, where collectives go round in rings.

    No number of bytes is small.
    """
    monkeypatch.setattr(pipeline, "_has_rings", lambda order: True)
    monkeypatch.setattr(costs, "AT_ONCE", 0)


def sums(x, w):
    """An AllReduce."""
    return gshard.split(x, 1, 8) @ gshard.split(w, 0, 8)


def in_groups(x, w):
    """One among the devices of each row of a mesh."""
    ids = np.arange(8).reshape(2, 4)
    return gshard.shard(x, ids) @ gshard.shard(w, ids.T.reshape(4, 2)[:, :1])


def scattered(x, w):
    """A ReduceScatter along the second dim."""
    return gshard.split(sums(x, w), 1, 8)


def gathered(x, w):
    """An AllGather along the second dim."""
    return gshard.replicate(gshard.split(x, 1, 8) * 2) + 0 * w[0, 0]


def largest(x, w):
    """An AllReduce that is no sum."""
    return jnp.max(gshard.split(x, 1, 8), 1) + 0 * w[0, 0]


def looped(x, w):
    """An AllReduce of two numbers in each turn of a loop."""

    def turn(x, _):
        return x * 0.9, jnp.stack([jnp.sum(jnp.sin(x)), jnp.sum(x)])

    return jax.lax.scan(turn, gshard.split(x, 1, 8), None, length=3)


@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (sums, jnp.bfloat16),
        (in_groups, np.float32),
        (scattered, jnp.bfloat16),
        (gathered, np.int16),
        (largest, np.float32),
        (looped, np.float32),
    ],
)
def test_rings_are_avoided_in_as_many_bytes(fn, dtype, rings):
    args = random_array((24, 16), dtype), random_array((16, 40), dtype)
    low = check(fn, *args, rtol=0.05, atol=0.05)
    assert kinds(low).keys() == {"all_to_all"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_has_rings", lambda order: False)
        before = gshard.jit(lambda *args: fn(*args)).lower(*args)
    assert "all_to_all" not in kinds(before)
    assert sent(low) <= max(sent(before), 3 * 7 * 2 * 4)  # two numbers take as little as one each
    assert {c.source for c in low.collectives} == {c.source for c in before.collectives}


def test_combinations_avoid_rings(rings):
    step, weights, x = gradients(19)
    low = check(step, weights, x, rtol=1e-4, atol=1e-4)
    parts, whole = low.collectives  # each device sums a part of all values, and sends it to all
    assert (parts.kind, whole.kind) == ("all_to_all", "all_to_all")
    assert whole.values == 19
    assert whole.reason.startswith("19 values combined: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "at_once"),
    [(sums, 8 * 24 * 40 * 4), (in_groups, 4 * 12 * 40 * 4), (largest, 8 * 24 * 4)],
)
def test_few_numbers_are_exchanged_at_once(fn, at_once, rings, monkeypatch):
    """Up to as many bytes as a member has then; one less, and it takes two steps."""
    args = random_array((24, 16)), random_array((16, 40))
    for limit, steps in ((at_once, 1), (at_once - 1, 2)):
        monkeypatch.setattr(costs, "AT_ONCE", limit)
        low = check(lambda *args: fn(*args), *args, rtol=1e-4, atol=1e-4)
        assert kinds(low) == {"all_to_all": steps}


def test_groups_of_different_sizes_stay_an_all_reduce(rings):
    def fn(x):
        return jnp.sum(gshard.shard(x, np.arange(6).reshape(2, 3)), 1)

    low = check(fn, random_array((24, 12)), rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_reduce": 1}  # 2 groups of 3, and 2 devices by themselves


@pytest.mark.slow
@settings(max_examples=20)
@given(programs())
def test_any_program_has_the_same_values_without_rings(fn):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_has_rings", lambda order: True)
        low = check(fn, random_array((8, 8)), random_array((8, 8)), rtol=1e-3, atol=1e-3)
    assert not {"all_reduce", "all_gather", "reduce_scatter"} & kinds(low).keys()
