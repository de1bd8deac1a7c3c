"""What planning may use in place of a reshard: copies under other shardings, and views of them."""

import jax.numpy as jnp
import numpy as np
import pytest

from gshard.moving.available import Available, View
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile
from tests.oracle import even_split

DEVICES = 4


def under(assignment) -> Sharding:
    return Sharding.of_assignment(np.asarray(assignment), DEVICES)


def tile_of(shape, sharding: Sharding) -> Tile:
    local = sharding.local_shape(shape)
    return Tile(jnp.arange(np.prod(local), dtype=jnp.float32).reshape(local), sharding, shape)


WHOLE = Sharding.replicated(3, DEVICES)
ROWS, COLUMNS = (under(even_split(3, d, DEVICES)) for d in (0, 1))
SHAPE = (8, 4, 12)


def test_a_tensor_is_found_under_the_sharding_to_which_it_was_moved_and_no_other():
    known, tile, moved = Available(), tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)
    other_order = under(even_split(3, 1, DEVICES)[:, ::-1])
    known.add(tile, moved)
    assert known.under(tile, COLUMNS) is moved
    assert other_order.tiles == COLUMNS.tiles
    assert known.under(tile, other_order) is None


def test_a_part_of_a_replicated_tensor_is_the_tensor_again():
    known, tile = Available(), tile_of(SHAPE, WHOLE)
    known.add(tile, part := tile_of(SHAPE, ROWS))
    assert known.under(part, WHOLE) is tile


def test_what_the_body_of_a_loop_moves_is_not_available_outside():
    known, tile, moved = Available(), tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)
    inside = known.inner()
    inside.add(tile, moved)
    assert inside.under(tile, COLUMNS) is moved
    assert known.under(tile, COLUMNS) is None


@pytest.mark.parametrize("order", [(1, 2, 0), (2, 0, 1), (0, 2, 1)])
def test_a_transpose_of_what_was_moved_is_made_of_it(order):
    known, source, moved = Available(), tile_of(SHAPE, ROWS), tile_of(SHAPE, COLUMNS)
    shape = tuple(SHAPE[d] for d in order)
    result = tile_of(shape, ROWS.project(order))
    known.views[result.key] = View(source, order, ())
    known.add(source, moved)
    target = COLUMNS.project(order)
    found = known.under(result, target)
    assert found is not None
    assert found.is_standard
    np.testing.assert_array_equal(found.array, np.transpose(moved.array, order))


def test_a_reversed_dim_that_is_split_is_not_reversed_in_place():
    """The rows of a device are those of another one in the reversed tensor."""
    known, source, moved = Available(), tile_of(SHAPE, WHOLE), tile_of(SHAPE, ROWS)
    result = tile_of(SHAPE, WHOLE)
    known.views[result.key] = View(source, (0, 1, 2), (0,))
    known.add(source, moved)
    assert known.under(result, ROWS) is None
    known.add(source, tile_of(SHAPE, COLUMNS))
    assert known.under(result, COLUMNS) is not None
