"""The moves of a tensor in a bound: all that read it pay together for the dearest form."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.autosharding.cost.lower_bound import Latencies, SharedMoves
from gshard.autosharding.cost.work import FusedWork
from gshard.autosharding.solver.problem import FORBIDDEN
from gshard.forecast.hardware import hardware


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
def test_readers_pay_for_the_dearest_move(readers, specs, seed):
    """At most it with many specs, where each pays a share; else exactly it."""
    rng = np.random.default_rng(seed)
    tables = [rng.choice([0.0, 3.0, 8.0, FORBIDDEN], (2, specs)) for _ in range(readers)]
    costs = [np.zeros(specs), *(np.zeros(2) for _ in tables)]
    edges: list = []
    dearest = SharedMoves()
    for reader, table in enumerate(tables, 1):
        dearest.add("x", reader, table)
    dearest.write({"x": 0}, costs, edges)
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


@pytest.mark.parametrize(
    ("axes", "reads"),
    [
        ((0,), True),  # rows are summed up: nothing can be fused with what reads the sums
        ((0, 1, 2), True),  # so many rows that no device has a single one
        ((1, 2), False),  # a device may have one row of dim 1, and keep it on chip
    ],
)
def test_only_reductions_of_rows_may_read_nothing(axes, reads):
    jaxpr = jax.make_jaxpr(lambda x: jnp.exp(x - jnp.sum(x * x, axes, keepdims=True)))(
        jax.ShapeDtypeStruct((64, 8, 128), jnp.float32)
    ).jaxpr
    touched = FusedWork(jaxpr, hardware("h100"), 8, optimistic=True)
    eqn = next(e for e in jaxpr.eqns if e.primitive.name == "mul")
    assert bool(touched.of(eqn).reads) == reads
