"""Splits whose tiles have as many rows as data say."""

import pickle

from gshard.tensors.sharding import Ragged, Sharding, Split, fitting_part
from gshard.tensors.tile import Tile
from tests.oracle import random_array

BY_FOUR = Split.of([0, 1, 2, 3])
RAGGED = BY_FOUR.ragged_by(Ragged(0, 6))
ROWS = Sharding((RAGGED, None), 4)


def test_a_tile_has_room_for_its_capacity_whatever_the_number_of_rows():
    assert ROWS.local_shape((12, 5)) == (6, 5)
    assert ROWS.replace(0, BY_FOUR).local_shape((12, 5)) == (3, 5)
    assert ROWS.ragged == 0
    assert ROWS.project([1, 0]).ragged == 1
    assert ROWS.replace(0, None).ragged is None


def test_equal_ragged_splits_are_one():
    assert BY_FOUR.ragged_by(Ragged(0, 6)) is RAGGED
    assert BY_FOUR.ragged_by(Ragged(1, 6)) is not RAGGED
    assert RAGGED.even is BY_FOUR
    assert pickle.loads(pickle.dumps(ROWS)) is ROWS


def test_a_ragged_split_is_never_coarsened():
    by_two = Split.of([0, 1, 0, 1])
    assert fitting_part((by_two,), BY_FOUR) is BY_FOUR.major(2)
    assert fitting_part((by_two,), RAGGED) is None
    assert fitting_part((), RAGGED) is RAGGED


def test_garbage_in_ragged_tiles_is_not_padding():
    tile = Tile(random_array((6, 5)), ROWS, (12, 5))
    assert tile.is_standard
    assert tile.padded_dims() == []


def test_it_says_so():
    assert str(ROWS) == "split dim 0 by 4 ragged"
