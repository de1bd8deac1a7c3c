"""The ways of operators: each is priced as what the plan then sends."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning

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


def pooled(x):
    return lax.reduce_window(x, -np.inf, lax.max, (3, 3), (2, 2), "SAME")


@custom_partitioning
def centered(x):
    return x - x.mean(1, keepdims=True)


centered.def_partition(
    partition=lambda mesh, args, result: (mesh, centered.fun, result.sharding, (result.sharding,)),
    sharding_rule="i j -> i j",
    need_replication_factors=("j",),
)


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
    "pool's gradient": (lambda x, y: jax.vjp(pooled, x)[1](y)[0], (32, 32), (16, 16)),
    "rows between": (lambda x: lax.slice(x, (0, 1), (16, 64), (1, 3)), M),
    "custom_partitioning": (centered, M),
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
    """The operator `name` with operands and results under these assignments."""
    fn, *shapes = SENT[name]
    arguments = [jnp.zeros(s, np.int32 if len(s) == 1 else np.float32) for s in shapes]
    results = jax.tree.leaves(jax.eval_shape(fn, *arguments))
    inputs = [assigned(here, s) for s in shapes]
    assert_as_planned(fn, arguments, inputs, [assigned(there, r.shape) for r in results])


def assert_as_planned(fn, arguments, inputs, outputs=(), **options):
    """Without latencies: of all equations, the bytes of the way that was chosen. Returns which."""
    latency, (chosen, lowered) = (
        GENERIC_COSTS.latency,
        planned(fn, arguments, inputs, outputs, options),
    )
    assert sum(sent for _, sent in chosen.values()) == lowered.plan.bytes < latency, chosen
    return {operator for operator, _ in chosen.values()}


def planned(fn, arguments, inputs, outputs, options, prices=price):
    """The operator of every equation and what its way costs without work and latencies."""
    latency, chosen = GENERIC_COSTS.latency, {}
    cheapest, in_place = Choice.cheapest, Choice.in_place

    def recorded(way, eqn, shardings, targets):
        if way is not None:
            cost = prices(way, eqn, shardings, targets) - way.work
            chosen[eqn] = eqn.primitive.name, cost % latency
        return way

    def found(self, eqn, rule, tiles, targets):
        shardings = [t.sharding for t in tiles]
        return recorded(cheapest(self, eqn, rule, tiles, targets), eqn, shardings, targets)

    def remembered(self, eqn, shardings, targets):
        return recorded(in_place(self, eqn, shardings, targets), eqn, shardings, targets)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Choice, "cheapest", found)
        patched.setattr(Choice, "in_place", remembered)
        jitted = gshard.jit(annotated(fn, inputs, outputs), devices=8, **options)
        return chosen, jitted.lower(*arguments)


@pytest.mark.parametrize("name", SENT)
def test_what_the_chosen_ways_send_is_what_the_plan_sends(name):
    for here, there in SOME:
        assert_ways_send_what_the_plan_does(name, here, there)


def through_experts(x, expert, up):
    """Rows go to their experts and back."""
    order = jnp.argsort(expert)
    hidden = lax.ragged_dot(x[order], up, jnp.bincount(expert, length=8))
    return jnp.zeros((x.shape[0], up.shape[2])).at[order].set(hidden)


def test_what_ways_of_rows_that_are_grouped_by_expert_send():
    arguments = jnp.zeros((64, 4)), jnp.zeros(64, jnp.int32), jnp.zeros((8, 4, 6))
    inputs = [even_split(rank, 0, 8) for rank in (2, 1, 3)]
    own = lambda way, *_: way.work + way.sent  # noqa: E731  (indices are computed, and not moved)
    chosen, lowered = planned(through_experts, arguments, inputs, (), {}, own)
    by_operator = {operator: bytes for operator, bytes in chosen.values() if bytes}
    rows = [c.total_bytes for c in lowered.collectives if c.kind == "all_to_all"]
    assert by_operator == dict(zip(("take_rows", "put_rows"), filter(None, rows), strict=True))
    assert "grouped_dot" in dict(chosen.values())  # a ring of matrices, if numbers are unbalanced


def test_what_a_ring_sends():
    def attention(q, k, v):
        return jax.nn.softmax(q @ k.T) @ v

    arguments = [jnp.zeros((16, 4))] * 3
    found = assert_as_planned(attention, arguments, [even_split(2, 0, 8)] * 3, memory_limit=64)
    assert "ring_pass" in found


def test_what_sums_in_one_order_send():
    arguments, inputs = [jnp.zeros(M)], [even_split(2, 1, 8)]
    found = assert_as_planned(lambda x: x.sum(1), arguments, inputs, reproducible=True)
    assert "tree_sum" in found


@pytest.mark.slow
@pytest.mark.parametrize(("here", "there"), [*itertools.product(ASSIGNED, repeat=2)])
@pytest.mark.parametrize("name", SENT)
def test_all_that_ways_send(name, here, there):
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
