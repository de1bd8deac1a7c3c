"""The costs of one operator: what its operands need to move, and what its partial results add."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.autosharding.specs import NONE, specs_of
from gshard.autosharding.tables import PICO, Tables
from gshard.autosharding.touched import Touches
from gshard.forecast.hardware import hardware
from gshard.propagation.flow import Flow

SHAPES = (256, 2048), (2048, 512)


@pytest.fixture(scope="module")
def product():
    """The tables of a product on 8 devices, and the rows of its three factors."""
    jaxpr = jax.make_jaxpr(jnp.dot)(*[jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES]).jaxpr
    flow = Flow(8)
    flow.add(jaxpr)
    (edge,) = [e for e in flow.edges if e.eqn is not None]
    tables = Tables(jaxpr, (8,), hardware("h100"), optimistic=False)
    _, found, _ = tables.of(edge, Touches(), ((1.0, 1.0), (1.0,)))
    row = {factor: i for i, (factor,) in enumerate(tables._strategies(edge))}
    (contracted,) = edge.factors.reduced
    return tables, found, row[contracted], row[None]


def test_partial_results_cost_their_reduction(product):
    tables, (_, _, result), contracted, unsplit = product
    position = {spec: i for i, spec in enumerate(specs_of((256, 512), (8,)))}
    size = 256 * 512 * 4
    seconds = {
        (NONE,): tables.alone.seconds("all_reduce", 0, size),
        (0,): tables.alone.seconds("reduce_scatter", 0, size),
        (1,): tables.alone.seconds("reduce_scatter", 0, size),
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
