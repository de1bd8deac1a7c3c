"""What planning may use in place of a reshard: copies under other shardings, and views of them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gshard.graph.evaluate import bind
from gshard.graph.reason import NO_REASON
from gshard.moving.available import Available, Mover, Seen
from gshard.moving.recompute import Made
from gshard.rules import RULES
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, Value
from tests.oracle import even_split

DEVICES = 4


def under(assignment) -> Sharding:
    return Sharding.of_assignment(np.asarray(assignment), DEVICES)


def tile_of(shape, sharding: Sharding) -> Tile:
    local = sharding.local_shape(shape)
    array = jnp.arange(np.prod(local), dtype=jnp.float32).reshape(local)
    return Tile(array, sharding, shape, value=Value(None))


WHOLE = Sharding.replicated(3, DEVICES)
ROWS, COLUMNS = (under(even_split(3, d, DEVICES)) for d in (0, 1))
SHAPE = (8, 4, 12)


def test_a_tensor_is_found_under_the_sharding_to_which_it_was_moved_and_no_other():
    known, tile, moved = Available(), tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)
    other_order = under(even_split(3, 1, DEVICES)[:, ::-1])
    known.add(tile, moved)
    assert known.of(tile)[COLUMNS] is moved
    assert other_order.tiles == COLUMNS.tiles
    assert other_order not in known.of(tile)


def test_a_part_of_a_replicated_tensor_is_the_tensor_again():
    known, tile = Available(), tile_of(SHAPE, WHOLE)
    known.add(tile, part := replace(tile_of(SHAPE, ROWS), value=tile.value))
    assert known.of(part)[WHOLE] is tile


def test_one_array_may_be_a_tile_of_two_tensors():
    """A reshape from 4 rows of 8 to one of 32 changes nothing on a device."""
    known, replicated = Available(), Sharding.replicated(2, DEVICES)
    tile = tile_of((DEVICES, 8), under(even_split(2, 0, DEVICES)))
    known.add(tile, tile_of(tile.shape, replicated))
    flat = Tile(tile.array, under(even_split(2, 1, DEVICES)), (1, 8 * DEVICES))
    assert replicated not in known.of(flat)


def test_what_the_body_of_a_loop_moves_is_not_available_outside():
    known, tile, moved = Available(), tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)
    known.add(tile, tile_of(SHAPE, WHOLE))
    inside = known.inner()
    inside.add(tile, moved)
    assert inside.of(tile)[COLUMNS] is moved
    assert COLUMNS not in known.of(tile)


def viewed(fn, source: Tile, sharding: Sharding) -> tuple[Mover, Tile]:
    """A view of `source`, and what brings it under other shardings."""
    (eqn,) = jax.make_jaxpr(fn)(jnp.zeros(SHAPE)).eqns
    result = replace(tile_of(eqn.outvars[0].aval.shape, sharding), value=None)
    mover = Mover(Place(("devices",), DEVICES), Seen())
    local = lambda ctx, eqn, tiles, shapes: bind(eqn, [t.array for t in tiles])  # noqa: E731
    made = Made(result, eqn, (source,), local, None, RULES[eqn.primitive].factors)
    return mover, mover.remember(eqn.outvars[0], result, made)


def moved_as_decided(mover: Mover, tile: Tile, target: Sharding) -> Tile:
    _, decided = mover.cheapest(tile, target, {})
    mover.decided[tile.value.var, tile.sharding, target] = decided
    return mover.reshard(tile, target, NO_REASON)


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (0, 2, 1)])
def test_a_transpose_of_what_was_moved_is_made_of_it_and_conversely(order):
    source, moved = tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)
    mover, result = viewed(lambda x: lax.transpose(x, order), source, ROWS.project(order))
    target = COLUMNS.project(order)
    mover.available.add(source, moved)
    assert target in mover.forms(result)
    found = moved_as_decided(mover, result, target)
    assert found.is_standard
    np.testing.assert_array_equal(found.array, np.transpose(moved.array, order))

    mover, result = viewed(lambda x: lax.transpose(x, order), source, ROWS.project(order))
    mover.available.add(result, found)
    assert COLUMNS in mover.forms(source)
    again = moved_as_decided(mover, source, COLUMNS)
    np.testing.assert_array_equal(again.array, moved.array)


def test_a_reversed_dim_that_is_split_is_not_reversed_in_place():
    """The rows of a device are those of another one in the reversed tensor."""
    source = tile_of(SHAPE, WHOLE)
    mover, result = viewed(lambda x: lax.rev(x, (0,)), source, WHOLE)
    for moved in (tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)):
        mover.available.add(source, moved)
    assert mover.forms(result) == {WHOLE, COLUMNS}
