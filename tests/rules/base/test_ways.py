"""The ways of operators: each is priced as what the plan then sends."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import gshard
from gshard.moving.costs import GENERIC_COSTS, MEMORY_LIMIT
from gshard.moving.partial import combine_cost
from gshard.moving.plan import reshard_cost
from gshard.planning.choose import Choice
from gshard.rules.base.rule import RULES
from gshard.rules.base.ways import FactorSplit, least, price, ways_of
from gshard.tensors.sharding import Sharding
from tests.oracle import annotated, check, even_split, random_array

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


def combined(x, y):
    return x * y + x + y


def called(x):
    wanted = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.pure_callback(np.asarray, wanted, x, vmap_method="sequential")


M = (16, 64)
SENT = {  # operators, with the shapes of their operands
    "sort": (lambda x: lax.sort(x, dimension=1), M),
    "columnsort": (lambda x: lax.sort(x, dimension=0), (64, 2)),
    "top_k": (lambda x: lax.top_k(x, 2), M),
    "slice": (lambda x: x[3:11, 2:20], M),
    "strided": (lambda x: lax.slice(x, (1, 0), (16, 64), (2, 1)), M),
    "pad": (lambda x: lax.pad(x, np.float32(0), ((1, 2, 0), (0, 3, 1))), M),
    "rev": (lambda x: lax.rev(x, (0,)), M),
    "concatenate": (lambda x, y: lax.concatenate([x, y], 1), M, M),
    "dynamic_slice": (lambda x: lax.dynamic_slice(x, (0, 3), (16, 9)), M),
    "update": (lambda x, y: lax.dynamic_update_slice(x, y, (0, 2)), M, (16, 60)),
    "gather": (lambda x, i: x.at[i].get(mode="clip"), M, (24,)),
    "scatter": (lambda x, i, y: x.at[i].add(y), M, (24,), (24, 64)),
    "dot": (jnp.dot, M, (64, 24)),
    "sum": (lambda x: x.sum(1), M),
    "max": (lambda x: x.max(0), M),
    "argmax": (lambda x: lax.argmax(x, 1, jnp.int32), M),
    "argmin": (lambda x: lax.argmin(x, 0, jnp.int32), M),
    "reduce": (lambda x: lax.reduce(x, np.float32(0), combined, (1,)), M),
    "cumsum": (lambda x: lax.cumsum(x, 1), M),
    "cummax": (lambda x: lax.cummax(x, 0, reverse=True), M),
    "fft": (lambda x: lax.fft(x, "RFFT", (64,)), M),
    "merge": (lambda x: x.reshape(-1), M),
    "mix": (lambda x: x.reshape(14, 15), (6, 35)),
    "transpose": (jnp.transpose, M),
    "uniform": (lambda a, b: lax.rng_uniform(a, b, M), (), ()),
    "barrier": (lax.optimization_barrier, M),
    "callback": (called, M),
    "cholesky": (lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (16, 8, 8)),
    "convolution": (
        lambda x, k: lax.conv(x[None, None], k[None, None], (1, 1), "SAME")[0, 0],
        (32, 32),
        (3, 3),
    ),
    "windows": (
        lambda x: lax.reduce_window(x, np.float32(0), lax.add, (3, 2), (2, 1), "SAME"),
        (32, 32),
    ),
    "solve": (lambda a, x: lax.linalg.triangular_solve(a, x, left_side=True), (16, 16), M),
}


def assigned(name, shape):
    """A device assignment of a tensor with at least two dims, by name."""
    tiles = {"rows": [8, 1], "columns": [1, 8], "both": [2, 4]}.get(name)
    if tiles is None or len(shape) < 2:
        return None
    return np.arange(8).reshape([*tiles, *[1] * (len(shape) - 2)])


ASSIGNED = ("rows", "columns", "both", "any")
SOME = [("rows", "rows"), ("columns", "columns"), ("columns", "rows"), ("both", "any")]


def assert_ways_send_what_the_plan_does(name, here, there):
    """Without latencies: of all equations, the bytes of the way that was chosen."""
    latency, cheapest, chosen = GENERIC_COSTS.latency, Choice.cheapest, {}
    fn, *shapes = SENT[name]
    arguments = [jnp.zeros(s, np.int32 if len(s) == 1 else np.float32) for s in shapes]
    results = jax.tree.leaves(jax.eval_shape(fn, *arguments))

    def recorded(self, eqn, rule, tiles, targets):
        way = cheapest(self, eqn, rule, tiles, targets)
        cost = price(way, eqn, [t.sharding for t in tiles], targets) - way.work
        chosen[eqn] = eqn.primitive.name, cost % latency
        return way

    inputs = [assigned(here, s) for s in shapes]
    outputs = [assigned(there, r.shape) for r in results]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Choice, "cheapest", recorded)
        lowered = gshard.jit(annotated(fn, inputs, outputs), devices=8).lower(*arguments)
    assert sum(sent for _, sent in chosen.values()) == lowered.plan.bytes < latency, chosen


@pytest.mark.parametrize("name", SENT)
def test_what_the_chosen_ways_send_is_what_the_plan_sends(name):
    for here, there in SOME:
        assert_ways_send_what_the_plan_does(name, here, there)


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), [*itertools.product(ASSIGNED, repeat=2)])
@pytest.mark.parametrize("name", sorted(SENT.keys() - {"strided"}))
def test_all_that_ways_send(name, here, there):
    """Without a slice that is gathered at once, as is cheaper for all slices of a tensor."""
    assert_ways_send_what_the_plan_does(name, here, there)


def test_a_rule_of_a_user_lists_ways_of_its_own():
    """The ranking and the planner read the same list."""
    primitive = lax.sin_p
    rule = RULES[primitive]
    asked = []

    def ways(eqn, shardings, targets, limit):
        asked.append((tuple(shardings), tuple(targets)))
        return gshard.extend.by_factors(eqn, rule.factors(eqn), shardings, targets)

    def run(ctx, eqn, way, tiles, targets):
        assert way == gshard.extend.cheapest(ctx, eqn, RULES[eqn.primitive], tiles, targets)
        assert isinstance(way.how, FactorSplit)
        ready = ctx.reshard(tiles[0], way.operands[0], gshard.extend.Reason("operand", "sin"))
        return [gshard.extend.Tile(lax.sin(ready.array), way.results[0], ready.shape)]

    try:
        gshard.register_rule(primitive, gshard.extend.Rule(rule.factors, ways=ways, run=run))
        check(jnp.sin, random_array((13, 8)), inputs=[even_split(2, 0, 8)])
    finally:
        gshard.register_rule(primitive, rule)
    assert asked == [((ROWS,), (ROWS,))]
