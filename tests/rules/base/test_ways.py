"""The ways of operators: each is priced as what the plan then sends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard.moving.costs import MEMORY_LIMIT, cost_model
from gshard.moving.partial import combine_cost
from gshard.moving.plan import reshard_cost
from gshard.rules.base.rule import RULES
from gshard.rules.base.ways import Layout, least, price, ways_of
from gshard.tensors.sharding import Sharding
from tests.oracle import check, even_split, random_array

ROWS, COLUMNS = (Sharding.of_assignment(even_split(2, d, 8), 8) for d in (0, 1))
WHOLE = Sharding.replicated(2, 8)
BOTH = Sharding.of_assignment(np.arange(8).reshape(2, 4), 8)
ALL = (ROWS, COLUMNS, WHOLE, BOTH)

X = np.zeros((16, 24), np.float32)
OPERATORS = {
    "sort": lambda x: lax.sort(x, dimension=1),
    "top_k": lambda x: lax.top_k(x, 2)[0],
    "slice": lambda x: x[3:11, 2:20],
    "strided": lambda x: lax.slice(x, (1, 0), (16, 24), (2, 1)),
    "pad": lambda x: lax.pad(x, 0.0, ((1, 2, 0), (0, 3, 1))),
    "rev": lambda x: lax.rev(x, (0,)),
    "concatenate": lambda x: lax.concatenate([x, x], 1),
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (0, 3), (16, 9)),
    "update": lambda x: lax.dynamic_update_slice(x, x[:, :20], (0, 2)),
    "fft": lambda x: jnp.fft.fft2(x + 0j).real,
    "gather": lambda x: x[jnp.arange(7) % 5],
    "scatter": lambda x: x.at[jnp.arange(16)[::-1]].add(x),
    "dot": lambda x: x @ x.T,
    "sum": lambda x: x.sum(1),
}


def equations(fn):
    """The equations whose operands and results are all matrices, or scalars."""
    jaxpr = jax.make_jaxpr(fn)(X).jaxpr
    return [e for e in jaxpr.eqns if e.primitive in RULES]


def under(sharding, atom):
    """A sharding for a matrix; everything else is replicated."""
    rank = len(atom.aval.shape)
    return sharding if rank == 2 else Sharding.replicated(rank, 8)


@pytest.mark.parametrize("name", OPERATORS)
@given(here=st.sampled_from(ALL), there=st.sampled_from(ALL))
def test_the_cheapest_way_is_the_least_of_all_sums_of_parts(name, here, there):
    """Priced by hand: its own cost, moves of operands, reductions and moves of results."""
    for eqn in equations(OPERATORS[name]):
        operands = [under(here, a) for a in eqn.invars]
        results = [under(there, v) for v in eqn.outvars]
        ways = list(ways_of(RULES[eqn.primitive], eqn, operands, results, MEMORY_LIMIT))

        def by_hand(way, eqn=eqn, operands=operands, results=results):
            total = way.work + way.sent
            for atom, now, wanted in zip(eqn.invars, operands, way.operands, strict=True):
                total += reshard_cost(now, wanted, atom.aval.shape, atom.aval.dtype)
            for var, made, wanted in zip(eqn.outvars, way.results, results, strict=True):
                total += combine_cost(made, way.kind, wanted, var.aval)
            return total

        costs = [by_hand(way) for way in ways]
        assert [price(way, eqn, operands, results) for way in ways] == pytest.approx(costs)
        found = least(ways, eqn, operands, results)
        assert by_hand(found) == pytest.approx(min(costs))
        for way in ways:
            for atom, sharding in zip(
                (*eqn.invars, *eqn.outvars), (*way.operands, *way.results), strict=True
            ):
                assert sharding.rank == len(atom.aval.shape)


@pytest.mark.parametrize("name", ["slice", "strided", "rev", "dynamic_slice", "update"])
@pytest.mark.parametrize(("here", "there"), [(0, 0), (1, 1), (1, 0)])
def test_what_a_way_sends_is_what_the_plan_sends(name, here, there):
    """Of an operator that sends inside: the bytes of the way, without latencies."""
    x = random_array((16, 64))
    fn = {**OPERATORS, "update": lambda x: lax.dynamic_update_slice(x, x * 2, (0, 0))}[name]
    low = check(fn, x, inputs=[even_split(2, here, 8)], outputs=[even_split(2, there, 8)])
    (eqn,) = [e for e in jax.make_jaxpr(fn)(x).jaxpr.eqns if e.primitive.name not in _SCALAR]
    operands = [under((ROWS, COLUMNS)[here], a) for a in eqn.invars]
    targets = [(ROWS, COLUMNS)[there]]
    ways = ways_of(RULES[eqn.primitive], eqn, operands, targets, MEMORY_LIMIT)
    way = least(ways, eqn, operands, targets)
    cost = price(way, eqn, operands, targets) - way.work
    latencies = round((cost - low.plan.bytes) / cost_model().latency)
    assert cost == low.plan.bytes + latencies * cost_model().latency


_SCALAR = ("mul", "broadcast_in_dim", "convert_element_type", "lt", "add", "select_n")


def test_a_rule_of_a_user_lists_ways_of_its_own():
    """The ranking and the planner read the same list."""
    primitive = lax.sin_p
    rule = RULES[primitive]
    asked = []

    def ways(eqn, shardings, targets, limit):
        asked.append((tuple(shardings), tuple(targets)))
        return gshard.extend.by_factors(eqn, rule.factors(eqn), shardings, targets)

    def partition(ctx, eqn, tiles, targets):
        way = gshard.extend.cheapest(ctx, eqn, RULES[eqn.primitive], tiles, targets)
        assert isinstance(way.how, Layout)
        ready = ctx.reshard(tiles[0], way.operands[0], gshard.extend.Reason("operand", "sin"))
        return [gshard.extend.Tile(lax.sin(ready.array), way.results[0], ready.shape)]

    try:
        gshard.register_rule(
            primitive, gshard.extend.Rule(rule.factors, partition=partition, ways=ways)
        )
        check(jnp.sin, random_array((13, 8)), inputs=[even_split(2, 0, 8)])
    finally:
        gshard.register_rule(primitive, rule)
    assert asked == [((ROWS,), (ROWS,))]
