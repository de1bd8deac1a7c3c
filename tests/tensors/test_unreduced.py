"""Unreduced is a part of a sharding: kept where tiles keep it, gone when the value is reduced."""

import pickle

import pytest

from gshard.moving.partial import combine_cost, reducing_groups
from gshard.moving.plan import reshard_cost
from gshard.tensors.sharding import Sharding, Split

PAIRS, HALVES = Split.of([0, 0, 1, 1]), Split.of([0, 1, 0, 1])
ROWS, WHOLE = Sharding((PAIRS, None), 4), Sharding.replicated(2, 4)


def test_an_unreduced_value_is_not_a_reduced_one_with_the_same_tiles():
    parts = ROWS.unreduced_over([HALVES])
    assert parts is ROWS.unreduced_over([HALVES])
    assert parts is not ROWS
    assert parts.reduced is ROWS
    assert ROWS.reduced is ROWS
    assert parts.tiles == ROWS.tiles
    assert ROWS.unreduced_over([]) is ROWS
    assert pickle.loads(pickle.dumps(parts)) is parts
    assert str(parts) == f"unreduced over 2, {ROWS}"


def test_a_value_that_every_device_has_a_part_of_is_not_replicated():
    assert WHOLE.is_replicated
    assert not WHOLE.unreduced_over([PAIRS]).is_replicated


def test_devices_reduce_with_those_that_hold_other_parts_of_the_same_tile():
    assert reducing_groups(ROWS.unreduced_over([HALVES])) == ((0, 1), (2, 3))
    assert reducing_groups(WHOLE.unreduced_over([PAIRS, HALVES])) == ((0, 1, 2, 3),)


@pytest.mark.parametrize("target", [ROWS, WHOLE, Sharding((None, PAIRS), 4)])
def test_what_is_reduced_costs_its_reshard_alone(target):
    class Aval:
        shape, dtype = (64, 64), "float32"

    moved = reshard_cost(ROWS, target, Aval.shape, Aval.dtype)
    assert combine_cost(ROWS, "", target, Aval) == moved
    assert combine_cost(ROWS.unreduced_over([HALVES]), "sum", target, Aval) > moved
