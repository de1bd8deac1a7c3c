"""Python's garbage collector, while programs are lowered."""

import gc
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.runtime.garbage import new_objects_only

ROWS = np.ones(16, np.float32)


@pytest.fixture(autouse=True)
def _nothing_frozen():
    """The tests' own process has frozen objects (conftest.py)."""
    gc.unfreeze()
    yield
    gc.freeze()


class Cycle:
    """An object that only the collector frees."""

    def __init__(self):
        self.own = self


def cycle():
    """A reference to garbage."""
    return weakref.ref(Cycle())


def test_garbage_from_before_is_collected_afterwards():
    gc.disable()
    try:
        before = cycle()
        with new_objects_only():
            inside = cycle()
            gc.collect()
            assert inside() is None
            assert before() is not None
        gc.collect()
        assert before() is None
    finally:
        gc.enable()


def test_an_error_inside_leaves_the_collector_as_it_was():
    with pytest.raises(KeyError), new_objects_only():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_user_froze_stays_frozen():
    gc.freeze()
    kept = gc.get_freeze_count()
    gshard.jit(lambda x: gshard.split(jnp.sin(x), 0, 8)).lower(ROWS)
    assert 0.9 * kept < gc.get_freeze_count() <= kept


def test_a_lowering_looks_through_new_objects_only():
    counts = []

    def fn(x):
        counts.append(gc.get_freeze_count())
        return gshard.split(jnp.sin(x), 0, 8)

    gshard.jit(fn).lower(ROWS)
    assert counts[0] > 0
    assert gc.get_freeze_count() == 0
