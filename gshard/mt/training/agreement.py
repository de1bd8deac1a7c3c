"""What the hosts of a training agree on: when to stop, and that a save has failed.

A training stops at a signal or a time limit, on all hosts after the same step. Hosts ask each other
every few seconds, by an exchange that all of them make after the same step. How many steps that is
follows from the pace that they agreed on the last time.

Hosts hear of each other's failed saves, and what still comes of one is silenced. Orbax's threads
wait for each other twice in a save, when everything is written and when it has its name, and once
more at its end, which a save that has failed comes to at once. With Orbax's own barriers the host
that failed then waits at the end for the others, and they in the middle for it. After a failure
Orbax has closed its event loop, and writes fail on.
"""

from __future__ import annotations

import functools
import itertools
import logging
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from gshard.mt import _jax, hosts
from gshard.mt.launch.status import is_second_request, stop_signals

_SECONDS = 2.0  # between two exchanges, about


class Wishes(NamedTuple):
    """What any of the hosts wants after a step."""

    stop: bool = False
    save: bool = False  # the last attempt failed somewhere


class Stop:
    """A signal ends the training after the step that runs; a second one ends it at once."""

    def __init__(self, minutes: float):
        self.until = time.monotonic() + 60 * minutes if minutes else float("inf")
        self._alone = jax.process_count() == 1
        self._next = 0  # the step after which hosts talk again
        self._last = (0, time.monotonic())
        self.signal = 0
        self._before = {each: signal.getsignal(each) for each in stop_signals()}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._restore(is_second_request)

    def _restore(self, which: Callable[[int], bool] = lambda number: True) -> None:
        for each, handler in self._before.items():
            if which(each):
                signal.signal(each, handler)

    def __enter__(self) -> Stop:
        for each in self._before:
            signal.signal(each, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def __call__(self, step: int, save: bool = False) -> Wishes:
        """What to do after this step; `save` is whether this host has a save to repeat."""
        mine = [self.signal, time.monotonic() > self.until, save]
        if self._alone:
            return Wishes(bool(mine[0] or mine[1]), save)
        if step < self._next:
            return Wishes()
        before, since = self._last
        pace = (time.monotonic() - since) / max(step - before, 1)
        self._last = (step, time.monotonic())
        told = np.asarray(multihost_utils.process_allgather(np.array([*mine, pace])))
        told = told.reshape(-1, 4).max(axis=0)
        self._next = step + int(np.clip(_SECONDS / max(told[3], 1e-3), 1, 50))
        self.signal = self.signal or int(told[0])  # it may have come during the exchange
        return Wishes(bool(told[0] or told[1]), bool(told[2]))


_UNHEARD = ("exception was never retrieved", "was destroyed but it is pending")  # asyncio's words


def silence_orbax_after_failure() -> None:
    """Silence writes that end after their save has failed and was reported.

    TensorStore and asyncio would show a traceback for each of them, thousands when the disk is
    full, since their event loop is closed.
    """
    sys.unraisablehook = functools.partial(_hook, sys.unraisablehook)
    logging.getLogger("asyncio").addFilter(_is_heard)


def _hook(shown: Callable[[Any], object], unraisable: Any) -> None:
    late = isinstance(unraisable.exc_value, RuntimeError)
    if not (late and str(unraisable.exc_value) == "Event loop is closed"):
        shown(unraisable)


def _is_heard(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in _UNHEARD)


_IN_A_SAVE = "async_"  # in the names of Orbax's barriers that a save which fails never comes to
_rounds = itertools.count()  # the same one on every host, since all wait in every round


class OtherHostError(Exception):
    """The save has failed on another host, which knows why."""


def wait_in_save(*, key: str, timeout_ms: int) -> None:
    """Return when all hosts are at the barrier `key`; an error if the save of one has failed."""
    client = _jax.coordination()
    while client is not None:
        number = next(_rounds)
        place = "middle" if _IN_A_SAVE in key else "end"
        client.key_value_set(_folder(number) + place, "", allow_overwrite=True)
        client.wait_at_barrier(f"gshard save {number}", timeout_ms)
        apart = len(client.key_value_dir_get(_folder(number))) > 1
        if hosts.is_first():  # all have read the round before
            client.key_value_delete(_folder(number - 1))
        if not apart:
            return
        if place == "middle":
            raise OtherHostError("the save of another host has failed")
        # The others come to the end too, now that they have heard of it.


def _folder(number: int) -> str:
    return f"gshard/save/{number}/"
