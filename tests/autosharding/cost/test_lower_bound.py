"""What a bound is made of, in programs whose annotations leave one layout: it is its forecast."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.autosharding.cost.lower_bound import (
    LowerBoundBuilder,
)
from gshard.autosharding.solver.problem import FORBIDDEN
from gshard.forecast.hardware import hardware
from tests.autosharding.test_bound import bound_of, struct

MACHINE = hardware("h100")


def forecast(fn, *args):
    jitted = gshard.jit(fn, devices=8, hardware="h100")
    return jitted.lower(*args).forecast().serial_seconds


def dispatched(equation, shape, dim):
    """Rows of experts, made by one product where groups are split, and read by another where
    experts are."""

    def fn(x, w, experts):
        made = gshard.split(x, 0, 8) @ gshard.replicate(w)
        return gshard.split(jnp.einsum(equation, made, gshard.split(experts, 0, 8)), dim, 8)

    return fn, (struct(*shape), struct(shape[-1], 256), struct(16, 256, 256))


@pytest.mark.parametrize(
    ("equation", "shape", "dim"),
    [
        ("gecm,emn->gecn", (64, 16, 128, 512), 1),  # exchanged and transposed for it
        ("gecm,emn->egcn", (64, 16, 128, 512), 0),
        ("gcem,emn->gcen", (64, 128, 16, 512), 2),
    ],
)
def test_an_exchange_between_products_without_the_copy_for_it(equation, shape, dim):
    """A compiler may fuse the copy that puts together what is sent to one device."""
    fn, args = dispatched(equation, shape, dim)
    operators = gshard.jit(fn, devices=8, hardware="h100").lower(*args).forecast().operators
    copy = min(each.alone_seconds for each in operators if not each.collective)
    seconds, bound = forecast(fn, *args), bound_of(fn, args, meshes=[(8,)])
    assert bound == pytest.approx(seconds - copy, rel=1e-6)
    assert bound_of(fn, args) <= bound  # over two axes, experts may be gathered in steps


def test_a_sum_that_leaves_its_loop_unreduced_pays_no_latency_there():
    """What the runs add up is reduced once, after the loop."""

    def fn(x):
        def body(total, x):
            return total + jnp.sum(gshard.split(x, 0, 8), 0), None

        return jax.lax.scan(body, jnp.zeros(64), x)[0]

    x = struct(1000, 64, 64)
    assert bound_of(fn, (x,), meshes=[(8,)]) <= forecast(fn, x)


def test_arithmetic_of_random_bits_counts():
    """A mask reads nothing and writes little: what takes time is the hashing."""

    def fn(key, x):
        return jax.random.bernoulli(key, 0.9, x.shape)

    args = jax.eval_shape(lambda: jax.random.key(0)), struct(65_536, 1024)
    best = min(forecast(lambda k, x, d=d: gshard.split(fn(k, x), d, 8), *args) for d in (0, 1))
    written = 65_536 * 1024 / 8 / (MACHINE.memory_bandwidth * MACHINE.efficiency.memory)
    assert 2 * written < 0.8 * best < bound_of(fn, args) <= best


def least(costs, edges, chosen):
    """The least cost of all answers that begin with what is chosen."""
    return min(
        sum(costs[n][s] for n, s in enumerate(answer))
        + sum(table[answer[a], answer[b]] for a, b, table in edges)
        for rest in itertools.product(*[range(len(c)) for c in costs[len(chosen) :]])
        for answer in [(*chosen, *rest)]
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.sampled_from([2, 3, 17]), st.integers(0, 2**32 - 1))
def test_readers_pay_for_the_most_expensive_move(readers, specs, seed):
    """At most it with many specs, where each pays a share; else exactly it."""
    rng = np.random.default_rng(seed)
    tables = [rng.choice([0.0, 3.0, 8.0, FORBIDDEN], (2, specs)) for _ in range(readers)]
    costs = [np.zeros(specs), *(np.zeros(2) for _ in tables)]
    edges: list = []
    builder = LowerBoundBuilder.__new__(LowerBoundBuilder)  # with nothing but its readers
    builder.nodes, builder.costs, builder.edges = {"x": 0}, costs, edges
    builder.reads = {"x": list(enumerate(tables, 1))}
    builder.finish()
    for spec, *strategies in itertools.product(range(specs), *[range(2)] * readers):
        moves = [table[s, spec] for table, s in zip(tables, strategies, strict=True)]
        found = least(costs, edges, (spec, *strategies))
        if max(moves) >= FORBIDDEN:
            assert found >= FORBIDDEN
        elif specs < 17:
            assert found == max(moves)
        else:
            assert sum(moves) / readers - readers < found <= max(moves)
