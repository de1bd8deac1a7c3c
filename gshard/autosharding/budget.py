"""Memory that a step may hold, and the time that a search has.

That is work that is counted, with limits of real time far around it. A search that is ended by the
clock ends elsewhere on a busy machine than on a free one. Where work is counted, in seconds that it
takes on a core of an ordinary machine, equal inputs have equal answers. Beyond that there are
guards: of processor time, which other programs hardly change, and of wall time.
"""

from __future__ import annotations

import logging
import math
import time
from typing import NamedTuple

PROGRESS = logging.getLogger("gshard.auto")  # a line for each phase as it begins

# Where work is counted: the seconds of processor time and of wall time that may pass for each
# second that was given.
_PROCESSOR, _WALL = 1.5, 10.0

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def bytes_of(memory: str | int) -> int:
    """Bytes from a number, or from text such as "16 GB" or "80 GiB"."""
    if isinstance(memory, int) and memory > 0:
        return memory
    number, _, unit = str(memory).strip().partition(" ")
    try:
        found = float(number) * _UNITS[(unit or "B").upper()]
    except (ValueError, KeyError):
        found = 0.0
    if found <= 0:
        raise ValueError(f"memory is {memory!r}; allowed are bytes, or text such as '16 GB'")
    return int(found)


class Clock:
    """Time that passes as work is done (`counted`, the seconds of work that may be done), or as it
    does on the wall."""

    def __init__(self, seconds: float, counted: float | None = None) -> None:
        self.counted = counted
        self.done = 0.0
        self.wall = time.monotonic() + (seconds if counted is None else _WALL * seconds)
        self.processor = time.process_time() + _PROCESSOR * seconds

    @property
    def left(self) -> float:
        """Seconds that are left, of work where that is counted."""
        return self.guard_left if self.counted is None else self.counted - self.now()

    @property
    def guard_left(self) -> float:
        """Seconds until work has to end whatever is done by then, of processor time where work is
        counted."""
        wall = self.wall - time.monotonic()
        return wall if self.counted is None else min(wall, self.processor - time.process_time())

    def now(self) -> float:
        """What to measure durations by; infinite when counted work has run out of real time."""
        if self.counted is None:
            return time.monotonic()
        return self.done if self.guard_left > 0 else math.inf

    def charge(self, seconds: float) -> None:
        """Count work."""
        self.done += seconds

    def extend(self, seconds: float) -> None:
        """Have at least so many seconds of real time from now on."""
        self.wall = max(self.wall, time.monotonic() + seconds)
        self.processor = max(self.processor, time.process_time() + seconds)


# The phases of a search in their order, and the share of the counted work that each may take.
PHASES = {
    "first layouts": 0.12,  # nothing split, the batch, the batch and the states
    "solving": 0.23,  # the model, for as many meshes as there is time
    "annotations": 0.30,  # from which propagation finds an answer
    "single annotations": 0.08,  # which the model may misjudge
    "bound": 0.17,  # the lower bound of all layouts
    "single changes": 0.05,  # the sharding of one argument after the other
    "removal": 0.05,  # annotations that make little difference
}
_LAST = ("bound", "single changes", "removal")  # for which the phases before leave time


class Budget:
    """The phases of a search: what each may take, what it took, and what later ones need."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.total = clock, clock.left
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.phase, self.began = next(iter(PHASES)), clock.done
        self.ended: dict[str, None] = {}  # the phases that are over
        self._tell()

    def share(self, phase: str) -> float:
        """Seconds of work that are set aside for a phase."""
        return PHASES[phase] * self.total

    def seconds(self, phase: str) -> float:
        """Seconds of work that a phase may take: its own, and what the phases before have left."""
        left = sum(self.share(name) - self.spent[name] for name in self.ended if name != phase)
        return self.share(phase) + max(0.0, left)

    def enter(self, phase: str) -> None:
        """Begin a phase; the one before it ends."""
        self.spent[self.phase] += self.clock.done - self.began
        self.ended[self.phase] = None
        before, self.phase, self.began = self.phase, phase, self.clock.done
        if before != phase:
            self._tell()

    def _tell(self) -> None:
        number = list(PHASES).index(self.phase) + 1
        PROGRESS.info(
            "%s (phase %d of %d, %.0f of %.0f s of work done)",
            *(self.phase, number, len(PHASES), self.clock.done, self.total),
        )

    @property
    def reserved(self) -> float:
        """Seconds of work that the last phases need after the present one."""
        numbers = list(PHASES)
        later = (name for name in _LAST if numbers.index(name) > numbers.index(self.phase))
        return sum(map(self.share, later))

    def report(self) -> dict[str, tuple[float, float]]:
        """What each phase took, and what it was given."""
        self.enter(self.phase)
        return {name: (spent, self.share(name)) for name, spent in self.spent.items()}


class MeasuredWork(NamedTuple):
    """Seconds of work on a core of an ordinary machine, as they were measured there."""

    lowering: float = 1e-3  # an equation of a program that is lowered
    propagating: float = 2e-4  # an equation of a program that shardings propagate in
    model_node: float = 1e-4  # a node of a model that is built
    presolve_node: float = 2.5e-4  # a node of a problem that is presolved
    presolve_pair: float = 6e-6  # and a pair of strategies that an edge of it allows
    sweep: float = 5e-3  # messages along all edges
    sweep_edge: float = 3e-6  # and along each one
    sweep_pair: float = 1e-8  # and for each pair of strategies
    draw: float = 5e-3  # an answer that is drawn
    pass_edge: float = 2e-5  # an edge of the nodes that a pass optimizes
    iteration: float = 5e-5  # an iteration of the simplex method
    iteration_entry: float = 1e-9  # and each entry of its matrix


WORK = MeasuredWork()
