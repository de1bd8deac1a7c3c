"""What a bound is made of, in programs whose annotations leave one layout: it is its forecast."""

import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.autosharding.cost import NONE
from gshard.autosharding.cost.lower_bound import (
    Latencies,
    LowerBoundBuilder,
    LowerBoundPrices,
    SharedMoves,
)
from gshard.autosharding.cost.rates import LowerBoundRates, PartialSum
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
def test_an_exchange_between_products_and_the_copies_for_it(equation, shape, dim):
    fn, args = dispatched(equation, shape, dim)
    seconds, bound = forecast(fn, *args), bound_of(fn, args, meshes=[(8,)])
    assert bound == pytest.approx(seconds, rel=1e-6)
    assert bound_of(fn, args) <= bound <= seconds  # over two axes, experts may be gathered in steps


def _sums_in_a_loop(x, ws):
    """A sum over rows in each of six runs, which the next one needs; rows are split."""

    def body(x, w):
        x = gshard.split(x - jnp.mean(jnp.sin(x) * w, 0), 0, 8)
        return x, jnp.sum(x * x, 0)

    return jax.lax.scan(body, x, ws)


@pytest.mark.parametrize("columns", [4, 64])
def test_each_run_of_a_loop_pays_the_latency_of_its_small_sums(columns):
    """Sums of two bodies cannot be combined, but those of one body. Four columns cannot be cut for
    eight devices; others can, but have to be gathered again for the next run."""
    args = struct(2**26 // columns, columns), struct(6, columns)
    least = LowerBoundRates(MACHINE, (8,), math.inf)
    latency = least.reducing(PartialSum((columns,), 4, (NONE,), (0,))) + least.gathering((0,))
    bound = bound_of(_sums_in_a_loop, args, meshes=[(8,)])
    work = 6 * 4 * 2**26 // 8 * 4 / MACHINE.memory_bandwidth / MACHINE.efficiency.memory
    assert work + 6 * latency <= bound <= forecast(_sums_in_a_loop, *args)


def test_a_sum_that_leaves_its_loop_unreduced_pays_no_latency_there():
    """What the runs add up is reduced once, after the loop."""

    def fn(x):
        def body(total, x):
            return total + jnp.sum(gshard.split(x, 0, 8), 0), None

        return jax.lax.scan(body, jnp.zeros(64), x)[0]

    x = struct(1000, 64, 64)
    seconds = forecast(fn, x)
    assert bound_of(fn, (x,), meshes=[(8,)]) <= seconds
    least = LowerBoundRates(MACHINE, (8,), math.inf)
    assert seconds < 1000 * least.reducing(PartialSum((64,), 4, (NONE,), (0,)))


def test_arithmetic_of_random_bits_counts():
    """A mask reads nothing and writes little: what takes time is the hashing."""

    def fn(key, x):
        return jax.random.bernoulli(key, 0.9, x.shape)

    args = jax.eval_shape(lambda: jax.random.key(0)), struct(65_536, 1024)
    best = min(forecast(lambda k, x, d=d: gshard.split(fn(k, x), d, 8), *args) for d in (0, 1))
    written = 65_536 * 1024 / 8 / (MACHINE.memory_bandwidth * MACHINE.efficiency.memory)
    assert 2 * written < 0.8 * best < bound_of(fn, args) <= best


def test_transposed_values_have_the_readers_of_their_source():
    def fn(x):
        return jnp.transpose(jnp.transpose(x * 2, (1, 2, 0)), (2, 1, 0)) + 1

    flat = jax.make_jaxpr(fn)(struct(8, 16, 24))
    first, _, second, _ = (eqn.outvars[0] for eqn in flat.eqns)
    prices = LowerBoundPrices(flat.jaxpr, (8,), hardware("h100"))
    builder = LowerBoundBuilder(flat, prices, 1e9, fused_on=8)
    assert builder.source(second) == (first, (0, 2, 1))
    # Specs of both are: none, dim 0, dim 1, dim 2.
    assert builder.columns(second).tolist() == [0, 1, 3, 2]


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
    shared = SharedMoves()
    for reader, table in enumerate(tables, 1):
        shared.add("x", reader, table)
    shared.write({"x": 0}, costs, edges)
    for spec, *strategies in itertools.product(range(specs), *[range(2)] * readers):
        moves = [table[s, spec] for table, s in zip(tables, strategies, strict=True)]
        found = least(costs, edges, (spec, *strategies))
        if max(moves) >= FORBIDDEN:
            assert found >= FORBIDDEN
        elif specs < 17:
            assert found == max(moves)
        else:
            assert sum(moves) / readers - readers < found <= max(moves)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_a_body_pays_the_longest_latency_that_its_gathers_need(readers, seed):
    """One latency for all readers in a body; none for a tensor that is made elsewhere."""
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.exp(x)))(1.0).jaxpr
    made, read = (eqn.outvars[0] for eqn in jaxpr.eqns)
    rng = np.random.default_rng(seed)
    tables = [rng.choice([0.0, 3.0, 8.0], (2, 3)) for _ in range(readers)]
    edge = SimpleNamespace(eqn=jaxpr.eqns[1], runs=1)
    for var, expected in ((made, True), (jaxpr.invars[0], False)):
        latencies, edges = Latencies(jaxpr), []
        costs = [np.zeros(3), *(np.zeros(2) for _ in tables)]
        for reader, table in enumerate(tables, 1):
            latencies.add_read(edge, var, reader, table)
        latencies.write({var: 0, read: 0}, costs, edges)
        for spec, *strategies in itertools.product(range(3), *[range(2)] * readers):
            needed = [table[s, spec] for table, s in zip(tables, strategies, strict=True)]
            found = least(costs, edges, (spec, *strategies))
            assert found == (max(needed) if expected else 0.0)
