"""Shared copies: what operators read of a tensor, and the bytes of it."""

import numpy as np

from gshard.autosharding.cost import NONE, specs_of
from gshard.autosharding.cost.copies import MOST_SPECS, SharedCopy, _pairs
from gshard.autosharding.solver.problem import FORBIDDEN


def test_a_copy_that_is_the_tensor_itself_takes_nothing():
    copy = SharedCopy(np.array([0, 0, 1]), np.array([0, 1, 1]), True, first=3)
    assert copy.held(np.array([8.0, 2.0])).tolist() == [0, 2, 0]


def test_operators_read_a_copy_that_is_counted_as_it_is():
    """Where strategies are pairs, a reshard after the copy would be counted nowhere."""
    own, read = np.array([0, 0, 1]), np.array([0, 1, 1])
    by_spec = np.array([[0.0, 5.0], [4.0, 0.0]])
    counted = SharedCopy(own, read, True, first=0).table(by_spec)
    assert counted.tolist() == [[0, FORBIDDEN, FORBIDDEN], [FORBIDDEN, 0, 0]]
    assert SharedCopy(own, read, False, first=0).table(by_spec).tolist() == [[0, 5, 5], [4, 0, 0]]


def test_of_many_specs_a_copy_is_the_tensor_or_gathered_from_it():
    few, mesh = specs_of((8, 8), (2,)), (2,)
    own, read = _pairs((8, 8), mesh)
    assert len(own) == len(few) ** 2
    mesh = (2, 2, 2)
    many = specs_of((8, 8, 8), mesh)
    assert len(many) > MOST_SPECS
    own, read = _pairs((8, 8, 8), mesh)
    assert {(a, a) for a in range(len(many))} <= set(zip(own.tolist(), read.tolist(), strict=True))
    for a, b in zip(own, read, strict=True):
        assert all(y in (x, NONE) for x, y in zip(many[a], many[b], strict=True))
