"""When a training stops: signals, and what several hosts tell each other."""

import os
import signal
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from gshard.mt.training.agreement import Stop, Wishes
from gshard.mt.training.loop import Spent


@pytest.fixture(autouse=True)
def heard():
    """What `nohup`, or a shell in the background, ignores is heard here."""
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def exchange(monkeypatch):
    """Two hosts; the other one wants nothing. What is in the list happens during an exchange."""
    during = []

    def allgather(mine):
        for happens in during:
            happens()
        return np.stack([mine, np.zeros_like(mine)])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    return during


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_alone_it_stops_after_the_step_that_runs(number):
    before = signal.getsignal(number)
    with Stop(0) as stop:
        assert stop(1) == Wishes()
        os.kill(os.getpid(), number)
        assert stop(2) == Wishes(stop=True)
    assert stop.signal == number
    assert signal.getsignal(number) is before


def test_a_closed_terminal_sends_sighup_twice_and_ctrl_c_still_ends_it():
    with Stop(0) as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop(2) == Wishes(stop=True)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGHUP


def test_what_is_ignored_stays_ignored():
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Stop(0) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop(2) == Wishes()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_that_comes_while_hosts_talk_is_not_forgotten(exchange):
    with Stop(0) as stop:
        exchange.append(lambda: os.kill(os.getpid(), signal.SIGTERM))
        first = stop(1)
        exchange.clear()
        later = [stop(step) for step in range(2, 60)]
    assert not first.stop  # the others have not heard of it yet
    assert any(wishes.stop for wishes in later)
    assert stop.signal == signal.SIGTERM


def test_what_one_host_wants_all_do(exchange, monkeypatch):
    def allgather(mine):
        return np.stack([mine, [signal.SIGTERM, 0, 1, 0.1]])

    monkeypatch.setattr(multihost_utils, "process_allgather", allgather)
    with Stop(0) as stop:
        assert stop(1) == Wishes(stop=True, save=True)
    assert stop.signal == signal.SIGTERM


def test_the_time_left_ends_with_the_minutes():
    assert Spent(pace=0.5).left(10) == 5.0
    assert Spent(pace=10.0, until=time.monotonic() + 300).left(800) <= 300
    assert Spent(pace=10.0, until=time.monotonic() - 1).left(800) == 0.0
