"""The costs of one operator: what its operands need to move, and what its partial results add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.autosharding.cost import NONE, specs_of
from gshard.autosharding.cost.lower_bound import LowerBoundPrices
from gshard.autosharding.cost.strategies import PICO, MemoryTraffic, OperatorPrices
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import hardware

SHAPES = (256, 2048), (2048, 512)


def operator(fn, *shapes, prices=OperatorPrices):
    """The last operator of a function, and the tables of it on 8 devices."""
    args = tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    subject = TracedProgram.of(fn, args, 8)
    *_, edge = [e for e in subject.flow.edges if e.eqn is not None]
    return edge, prices(subject, (8,), hardware("h100"))


@pytest.fixture(scope="module")
def product():
    """The tables of a product on 8 devices, and the rows of its three factors."""
    edge, prices = operator(jnp.dot, *SHAPES)
    found = prices.of(edge, MemoryTraffic(), ((1.0, 1.0), (1.0,))).tables
    row = {factor: i for i, (factor,) in enumerate(prices.strategies(edge))}
    (contracted,) = edge.factors.reduced
    return prices, found, row[contracted], row[None]


def test_partial_results_cost_their_reduction(product):
    prices, (_, _, result), contracted, unsplit = product
    position = {spec: i for i, spec in enumerate(specs_of((256, 512), (8,)))}
    size = np.float64(256 * 512 * 4)
    seconds = {
        (NONE,): prices.alone.seconds("all_reduce", 0, size),
        (0,): prices.alone.seconds("reduce_scatter", 0, size),
        (1,): prices.alone.seconds("reduce_scatter", 0, size),
    }
    for spec, each in seconds.items():
        assert result[contracted, position[spec]] == np.rint(each * PICO) > 0
    assert seconds[0,] < seconds[NONE,]
    assert result[unsplit, position[NONE,]] == 0  # nothing is partial


def test_operands_cost_their_moves(product):
    _, (left, _, _), contracted, unsplit = product
    position = {spec: i for i, spec in enumerate(specs_of(SHAPES[0], (8,)))}
    assert left[contracted, position[1,]] == 0  # it is split as the product reads it
    assert left[contracted, position[NONE,]] == 0  # every device cuts its own part
    assert left[unsplit, position[1,]] > left[contracted, position[0,]] > 0  # gather, AllToAll


ROWS = (512, 256)


def inside(fn, *shapes):
    """What an operator sends by itself where a factor is split, in bytes, by factor."""
    edge, prices = operator(fn, *shapes)
    speed = prices.hardware.sent_per_second
    return {s: prices.sent_inside(edge, (s,)) * speed for (s,) in prices.strategies(edge)}


def test_a_slice_of_a_split_dim_sends_the_rows_that_change_tiles():
    """Tiles of 62 of the rows from 16 on: the last one lacks 50, the others less."""
    found = inside(lambda x: lax.slice_in_dim(x, 16, 512), ROWS)
    assert found["d1"] == found[None] == 0
    rows = max(16 + 62 * (tile + 1) - 64 * (tile + 1) for tile in range(8))
    assert found["d0"] >= rows * 256 * 4
    assert found["d0"] < 512 * 256 * 4 * 7 // 8  # less than to gather it


def test_a_sort_along_a_split_dim_costs_the_cheapest_of_its_ways():
    """Two exchanges with the other dim: each sends 7/8 of a tile, with a latency."""
    found = inside(lambda x: lax.sort(x, dimension=0), (4096, 1024))
    tile, latency = 4096 * 1024 * 4 // 8, hardware("h100").cost_model.latency
    assert found["d1"] == found[None] == 0
    assert found["d0"] == pytest.approx(2 * (tile * 7 // 8 + latency))


def test_a_bound_takes_what_is_sent_inside_for_free():
    edge, prices = operator(lambda x: lax.sort(x, dimension=0), ROWS, prices=LowerBoundPrices)
    assert {prices.sent_inside(edge, s) for s in prices.strategies(edge)} == {0.0}
