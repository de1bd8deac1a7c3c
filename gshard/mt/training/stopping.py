"""When a training stops: at a signal or a time limit, on all hosts after the same step.

Hosts ask each other every few seconds, by an exchange that all of them make after the same step.
How many steps that is follows from the pace that they agreed on the last time.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from gshard.mt.launch.signals import is_second_request, stop_signals

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
