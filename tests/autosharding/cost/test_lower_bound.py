"""What a bound is made of, in programs whose annotations leave one layout: it is its forecast."""

import math

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.autosharding.cost.lower_bound import transposes
from gshard.autosharding.cost.rates import LowerBoundRates, PartialSum, Rates
from gshard.autosharding.cost.sharing import Sharing
from gshard.autosharding.cost.specs import NONE, specs_of
from gshard.autosharding.smaller import most_seconds
from gshard.autosharding.traced import border_ends, leaving_borders
from gshard.forecast.hardware import hardware
from gshard.propagation.flow import Flow
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


@pytest.mark.parametrize(
    ("dims", "here", "there", "expected"),
    [
        (None, 0, 1, 1),  # transposed before it is sent; tiles of dim 0 arrive one after the other
        (None, 1, 0, 1),
        (None, 1, 2, 2),
        ((1, 0, 2), 0, 1, 0),  # dim 1 comes first where it is written, and dim 0 where it is read
        ((1, 0, 2), 1, 0, 1),
        ((0, 2, 1), 1, 2, 1),
        (None, 0, -1, 0),  # nothing is exchanged
        (None, 1, 1, 0),
    ],
)
def test_copies_of_an_exchange(dims, here, there, expected):
    assert transposes((16, 16, 16), dims, (here,), (there,), (8,)) == expected


def test_dims_with_one_row_need_no_copies():
    assert transposes((8, 16, 16), None, (0,), (1,), (8,)) == 0
    assert transposes((8, 16, 16), None, (0,), (1,), (4,)) == 1


def test_two_axes_between_the_same_dims_are_one_exchange():
    assert transposes((16, 16, 16), None, (0, 0), (1, 1), (2, 4)) == 1
    assert transposes((16, 16, 16), None, (0, 0), (1, 2), (2, 4)) == 0


def test_large_collectives_pay_their_latency():
    """As combined in lowered programs: those that take long to copy are not, nor exchanges."""
    largest = int(MACHINE.cost_model.largest_combined) // 8 * 8
    alone, least = Rates(MACHINE, (8,)), LowerBoundRates(MACHINE, (8,), largest)
    for spec in ((NONE,), (0,)):
        for size in (largest, largest + 8):
            partial = PartialSum((size,), 1, (NONE,), (0,))
            alike = [rates.sums(partial, spec) for rates in (alone, least)]
            again = least.gathering((0,)) if spec == (NONE,) else 0.0
            together = alike[1] + (least.reducing(partial) and least.reducing(partial) + again)
            assert alike[1] < alike[0] if size == largest else alike[1] == pytest.approx(alike[0])
            assert together == pytest.approx(alike[0])
    for size in (largest, largest + 8):
        tables = [rates.reshards((size, 8), 1) for rates in (alone, least)]
        none, rows, columns = range(3)
        assert tables[1][rows, columns] == pytest.approx(tables[0][rows, columns])
        gathered = [rates.reshards((size,), 1)[1, none] for rates in (alone, least)]
        assert (
            gathered[1] + least.gathering((0,)) == pytest.approx(gathered[0])
            if size == largest
            else gathered[1] == pytest.approx(gathered[0])
        )


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


@pytest.mark.parametrize("name", ["h100", "tpu-v4", "cpu"])
def test_moves_along_two_axes_cost_no_more_than_one_collective_for_both(name):
    """A mesh of one axis has the same devices in one group: all that it can do, two axes can."""
    machine = hardware(name)
    one, two = LowerBoundRates(machine, (8,), math.inf), LowerBoundRates(machine, (2, 4), math.inf)
    shape = (64, 64)
    both = {spec: n for n, spec in enumerate(specs_of(shape, (2, 4)))}
    for here, spec in enumerate(specs_of(shape, (8,))):
        for there, other in enumerate(specs_of(shape, (8,))):
            joint = two.reshards(shape, 4)[both[spec * 2], both[other * 2]]
            assert joint <= one.reshards(shape, 4)[here, there] * (1 + 1e-12)
        for other in specs_of(shape, (8,)) if spec == (NONE,) else ():
            partial = [PartialSum(shape, 4, spec * n, tuple(range(n))) for n in (1, 2)]
            sums = [
                r.sums(p, other * n) for r, p, n in zip((one, two), partial, (1, 2), strict=True)
            ]
            assert sums[1] <= sums[0] * (1 + 1e-12)
            assert two.reducing(partial[1]) <= one.reducing(partial[0]) * (1 + 1e-12)
    assert two.gathering((0, 1)) <= one.gathering((0,)) * (1 + 1e-12)


def test_two_axes_that_change_places_may_be_one_permutation():
    """Of tiles that a device has and another one needs, all are sent once."""
    least, shape = LowerBoundRates(MACHINE, (4, 2), 0.0), (8192, 8192)
    number = {spec: n for n, spec in enumerate(specs_of(shape, (4, 2)))}
    table, tile = least.reshards(shape, 4), 8192 * 8192 * 4 / 8
    swapped = table[number[0, 1], number[1, 0]]
    assert swapped < table[number[0, 1], number[1, 1]] + table[number[1, 1], number[1, 0]]
    assert swapped >= tile / MACHINE.network.inside_bandwidth


def test_arithmetic_of_random_bits_counts():
    """A mask reads nothing and writes little: what takes time is the hashing."""

    def fn(key, x):
        return jax.random.bernoulli(key, 0.9, x.shape)

    args = jax.eval_shape(lambda: jax.random.key(0)), struct(65_536, 1024)
    best = min(forecast(lambda k, x, d=d: gshard.split(fn(k, x), d, 8), *args) for d in (0, 1))
    written = 65_536 * 1024 / 8 / (MACHINE.memory_bandwidth * MACHINE.efficiency.memory)
    assert 2 * written < 0.8 * best < bound_of(fn, args) <= best


def test_values_flow_into_a_loop_to_its_next_run_and_out_of_it():
    """A loop in a loop, whose results are the outer body's."""

    def fn(x, ws):
        def body(c, w):
            return jax.lax.scan(lambda c, v: (c * v, c + v), c, w)

        return jax.lax.scan(body, x, ws)

    flat = jax.make_jaxpr(fn)(struct(16), struct(3, 2, 16))
    flow = Flow(flat.jaxpr, 8)
    outwards = leaving_borders(flat)
    found = {border_ends(edge, outwards) for edge in flow.edges if edge.eqn is None}
    (outer,) = flat.eqns
    body = outer.params["jaxpr"].jaxpr
    (inner,) = body.eqns
    last = inner.params["jaxpr"].jaxpr
    expected = set()
    for loop, inside in ((outer, body), (inner, last)):
        (first, each), (carry, slices) = loop.invars, inside.invars
        (end, stack), (again, made) = loop.outvars, inside.outvars
        expected |= {(first, carry), (each, slices), (again, carry), (carry, end), (made, stack)}
    assert found == expected


def test_transposed_values_have_the_readers_of_their_source():
    def fn(x):
        return jnp.transpose(jnp.transpose(x * 2, (1, 2, 0)), (2, 1, 0)) + 1

    flat = jax.make_jaxpr(fn)(struct(8, 16, 24))
    first, _, second, _ = (eqn.outvars[0] for eqn in flat.eqns)
    flow = Flow(flat.jaxpr, 8)
    sharing = Sharing(flow, optimistic=True)
    assert sharing.source(second) == (first, (0, 2, 1))
    # Specs of both are: none, dim 0, dim 1, dim 2.
    assert sharing.columns(second, (8,)).tolist() == [0, 1, 3, 2]
    assert Sharing(flow, optimistic=False).source(second) == (second, (0, 1, 2))


def test_fewer_annotations_keep_a_gap_that_is_small():
    assert most_seconds(1.0, 0.5) == pytest.approx(1.01)  # the gap is large already
    assert most_seconds(1.0, 0.995) == pytest.approx(0.995 / 0.99)
    assert most_seconds(1.0, 1.0) == pytest.approx(1 / 0.99, rel=2e-4)
