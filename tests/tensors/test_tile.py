"""A device's part of a tensor: its padding, and what differs per device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.tensors.devices import Place, groups_by
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, itemsize_of


def tile_of(size: int, tiles: int, local: int) -> Tile:
    return Tile(np.zeros(local), Sharding((Split.of(np.arange(tiles)),), tiles), (size,))


@pytest.mark.parametrize("tiles", [2, 3, 8])
def test_a_dim_is_padded_where_a_device_has_rows_beyond_its_end(tiles):
    for size in range(1, 3 * tiles):
        least = -(-size // tiles)
        for local in (least, least + 1):
            tile = tile_of(size, tiles, local)
            rows = np.arange(tiles)[:, None] * local + np.arange(local)
            assert tile.padded_dims() == ([0] if (rows >= size).any() else [])
            assert tile.is_standard == (local == least)


def test_a_sharding_of_a_manual_region_is_another_one():
    outside, inside = Sharding((None,), 4), Sharding((None,), 4, manual=True)
    assert outside is not inside
    assert (outside.manual, inside.manual) == (False, True)


def test_a_random_key_counts_as_its_integers():
    key = jax.random.key(0)
    assert itemsize_of(key.dtype) == jax.random.key_data(key).nbytes


def test_devices_of_no_group_are_left_out():
    assert groups_by(np.array([1, -1, 0, 1, -1, 0]), np.array([1, 0, 0, 0, 1, 1])) == (
        (2, 5),
        (3, 0),
    )


def test_values_of_two_types_on_some_devices():
    chosen = np.arange(4) == 2

    def both(number):
        place = Place(("devices",), 4).numbered(number)
        return place.where(chosen, jnp.ones(3)), place.where(chosen, jnp.ones(3, jnp.int32))

    for number in range(4):
        found = jax.jit(both)(number)
        assert [x.dtype for x in found] == [jnp.float32, jnp.int32]
        assert all((x == (number == 2)).all() for x in found)
