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

# Where work is counted: the seconds of processor time that may pass for each second that was given,
# and of wall time for each of these: a machine may be slower, and others may use it.
_PROCESSOR, _WALL = 1.2, 10.0

# The seconds of every search until a layout fits, and of solving the model on the first mesh: with
# less, large programs would have no answer at all.
LEAST = 10.0

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
    """Time that passes as work is done (`counted`), or as it does on the wall.

    A `part` of a clock has some of its time: work that is charged to it is charged to all of it.
    """

    def __init__(self, seconds: float, counted: bool = False, root: Clock | None = None) -> None:
        self.root: Clock = self if root is None else root.root
        if root is None:
            self.counted, self.done = counted, 0.0
            self.last = max(seconds, LEAST) + (0.0 if counted else time.monotonic())
            processor = _PROCESSOR * max(seconds, LEAST)
            self.wall = time.monotonic() + (_WALL * processor if counted else seconds)
            self.processor = time.process_time() + (processor if counted else math.inf)
        self.end = self._now() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left, of work where that is counted; none where real time is over."""
        left = self.end - self._now()
        return left if self.guard_left > 0 else min(left, 0.0)

    @property
    def guard_left(self) -> float:
        """Seconds until work has to end whatever is done by then, of processor time where work is
        counted."""
        root = self.root
        return min(root.wall - time.monotonic(), root.processor - time.process_time())

    def part(self, seconds: float) -> Clock:
        """A clock with so many of the seconds that are left."""
        return Clock(min(seconds, self.left), root=self)

    def charge(self, seconds: float) -> None:
        """Count work."""
        self.root.done += seconds

    def extend(self, seconds: float) -> None:
        """Have so many seconds from now on, as far as the search has them in all."""
        self.end = max(self.end, min(self._now() + seconds, self.root.last))

    def _now(self) -> float:
        return self.root.done if self.root.counted else time.monotonic()


# The phases of a search in their order, and the share of the work that each may take.
PHASES = {
    "first layouts": 0.12,  # nothing split, the batch, the batch and the states
    "solving": 0.25,  # the model, for as many meshes as there is time
    "annotations": 0.30,  # from which propagation finds an answer
    "bound": 0.18,  # the lower bound of all layouts
    "single changes": 0.05,  # the sharding of one argument after the other
    "removal": 0.10,  # annotations that make little difference
}


class Budget:
    """The phases of a search: what each may take, and what it took.

    A phase ends when it and those before it have taken their shares: it has what they left, and
    lacks what they took too much.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock, self.spent = clock, dict.fromkeys(PHASES, 0.0)
        self.given, self.phase, self.began = clock.left, "", 0.0
        self.restart()

    def restart(self) -> None:
        """Begin again with the time that the clock has now."""
        self._leave()
        self.total, self.start = self.clock.left, self.began

    def enter(self, phase: str) -> Clock:
        """Begin a phase, which has this clock; the one before it ends."""
        self._leave()
        names = list(PHASES)
        number, done = names.index(phase) + 1, self.began - self.start
        if self.phase != phase:
            PROGRESS.info(
                "%s (phase %d of %d, %.0f of %.0f s of work done)",
                *(phase, number, len(names), done, self.total),
            )
        self.phase = phase
        return self.clock.part(self.total * sum(list(PHASES.values())[:number]) - done)

    def _leave(self) -> None:
        now = self.clock.root.done
        if self.phase:
            self.spent[self.phase] += now - self.began
        self.began = now

    def report(self) -> dict[str, tuple[float, float]]:
        """What each phase took, and what it was given."""
        self._leave()
        return {name: (took, PHASES[name] * self.given) for name, took in self.spent.items()}


class MeasuredWork(NamedTuple):
    """Seconds of work on a core of an ordinary machine, as they were measured there."""

    tracing: float = 6e-4  # an equation of a program that is traced
    lowering: float = 1.1e-3  # an equation of a program that is lowered
    propagating: float = 4.5e-4  # an equation of a program that shardings propagate in
    model_edge: float = 5e-4  # an operator of a model that is built
    model_pair: float = 4e-6  # and a pair of specs of its largest tensor
    presolve_node: float = 9e-5  # a node that presolve looks at
    presolve_entry: float = 4e-9  # and a number that it computes there
    sweep: float = 5e-3  # messages along all edges
    sweep_edge: float = 3e-6  # and along each one
    sweep_pair: float = 1e-8  # and for each pair of strategies
    draw: float = 5e-3  # an answer that is drawn
    pass_edge: float = 2e-5  # an edge of the nodes that a pass optimizes
    program_entry: float = 1e-6  # an entry of the matrix of a linear program
    iteration: float = 5e-5  # an iteration of the simplex method
    iteration_entry: float = 1e-9  # and each entry of the matrix


WORK = MeasuredWork()
