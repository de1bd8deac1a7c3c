"""What a leading process says to the others, through a service that is made up here."""

import jax
import numpy as np
import pytest

from gshard.mt import _jax, broadcast
from gshard.mt.broadcast import Broadcast, Message, meet


class Service:
    """JAX's coordination service, as far as it is used, with everybody in one process."""

    def __init__(self):
        self.values, self.late = {}, 1

    def key_value_set_bytes(self, key, value):
        assert key not in self.values
        self.values[key] = value

    def key_value_delete(self, key):
        del self.values[key]

    def blocking_key_value_get_bytes(self, key, timeout):
        if self.late:
            self.late -= 1
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody has said it yet")
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: process 0 is gone")
        return self.values[key]


@pytest.fixture
def service(monkeypatch):
    made = Service()
    monkeypatch.setattr(_jax, "coordination", lambda: made)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return made


def test_the_others_hear_what_is_run_in_order(service):
    leader = Broadcast()
    leader.step = 40
    with leader.leading():
        with leader.running("load", "best"):
            pass
        with leader.running("search", "best", np.arange(6).reshape(2, 3), np.ones(2, np.float32)):
            pass
    first, second = Broadcast().receive()
    assert first == Message("load", "best", [], 41)
    assert (second.kind, second.whose, second.step) == ("search", "best", 42)
    np.testing.assert_array_equal(second.arrays[0], [[0, 1, 2], [3, 4, 5]])
    assert second.arrays[1].dtype == np.float32


def test_the_end_is_told_whatever_happens(service):
    with pytest.raises(KeyboardInterrupt), Broadcast().leading():
        raise KeyboardInterrupt
    assert list(Broadcast().receive()) == []


def test_what_was_heard_long_ago_is_forgotten(service):
    leader = Broadcast()
    with leader.leading():
        for _ in range(100):
            with leader.running("search", "", np.zeros(3)):
                pass
    assert len(service.values) <= broadcast._KEPT


def test_a_leader_that_is_gone_is_an_error(service):
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        list(Broadcast().receive())


def test_nobody_is_spoken_to_outside_of_leading(service):
    with Broadcast().running("search", ""):
        pass
    assert not service.values


def test_all_meet(service):
    service.values["gshard/here/1"] = b""
    meet("here")
    assert "gshard/here/0" in service.values
