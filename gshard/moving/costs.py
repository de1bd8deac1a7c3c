"""What moving costs, and how far the planners look: every constant that a plan depends on.

Costs are bytes that a device sends. Whatever else takes time (to start a collective, to compute,
to read memory) counts as the bytes that could be sent meanwhile, so that one number compares them.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The speeds of a machine, each by its ratio to the speed of the links between devices."""

    latency: float = 16 * 2**10  # bytes sent in the time that a collective takes to get going
    flops_per_byte: float = 512  # what a device computes while it sends a byte
    memory_per_byte: float = 16  # bytes that a device reads from its own memory meanwhile
    calls_to_compare: bool = False  # a sort calls a function for each two numbers but integers

    def __hash__(self) -> int:
        return hash(self.latency)  # it is part of the key of every plan, and there are few machines


MACHINE = Machine()  # about what accelerators of today have in common
_planned_for = contextvars.ContextVar("planned_for", default=MACHINE)


def machine() -> Machine:
    """The machine that plans are made for now."""
    return _planned_for.get()


@contextlib.contextmanager
def planning_for(chosen: Machine) -> Iterator[None]:
    """Plans made inside are for this machine."""
    token = _planned_for.set(chosen)
    try:
        yield
    finally:
        _planned_for.reset(token)


STEP_COST = 64  # bytes by which a reshard with one step less is preferred; not a latency: a
# reshard by itself takes the fewest bytes, and small tensors must not be gathered to save a step

LATENCIES = 32  # a bundle of small collectives grows up to the bytes sent in so many latencies:
# to start it takes 3% of its time then, and more would hold memory for nothing

EXCHANGED = 4 * 2**20  # bytes up to which AllToAlls replace a ring over sockets: they hold two more
# copies, and above it is the bytes that take the time, not the steps
AT_ONCE = 64 * 2**10  # bytes up to which one AllToAll of all numbers replaces two of their parts:
# over sockets it takes milliseconds to wake all processes once more

MEMORY_LIMIT = 2 * 2**30  # bytes of one operand that may be gathered whole

# Bounds on planning. The first three keep programs from growing with the number of devices.
MAX_ROUNDS = 8  # permutes for one redistribution point to point
MAX_SHIFTS = 6  # neighbours that a halo exchange hears from
WIDE_WINDOW = 4  # a window this many times larger than the result is reduced in parts
MAX_STATES = 400  # shardings that a search visits before it takes the plan that always works
