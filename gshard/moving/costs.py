"""The cost model, and the limits of the planners: every constant that a plan depends on.

Costs are in bytes that a device sends. Everything else that takes time (latency, arithmetic,
memory) counts as the bytes that could be sent in that time.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class CostModel:
    """The speeds of hardware, each relative to the speed of the links between devices."""

    latency: float = 16 * 2**10  # bytes that could be sent during the latency of a collective
    flops_per_byte: float = 512  # operations per byte sent
    memory_per_byte: float = 16  # bytes of memory traffic per byte sent
    calls_to_compare: bool = False  # in sorts, one call per comparison, except for integers
    rings: bool = False  # collectives go around a ring of processes, one message after the other

    @property
    def largest_combined(self) -> float:
        """Bytes up to which a collective is combined with others: copying them, which reads and
        writes them once, takes no longer than the latency of a collective of its own."""
        return self.latency * self.memory_per_byte / 2

    def __hash__(self) -> int:
        return hash(self.latency)  # part of the key of every plan; there are few of them


GENERIC_COSTS = CostModel()  # typical of present accelerators
_planned_for = contextvars.ContextVar("planned_for", default=GENERIC_COSTS)


def cost_model() -> CostModel:
    """The cost model that plans are made with now."""
    return _planned_for.get()


@contextlib.contextmanager
def use_cost_model(chosen: CostModel) -> Iterator[None]:
    """A context in which plans are made with this cost model."""
    token = _planned_for.set(chosen)
    try:
        yield
    finally:
        _planned_for.reset(token)


def sent_bytes(kind: str, size: int, members: int) -> int:
    """What one of `members` devices sends, each of which has an operand of `size` bytes."""
    if kind == "collective_permute":
        return size
    if kind == "all_gather":
        return size * (members - 1)
    times = 2 if kind == "all_reduce" else 1
    return times * size * (members - 1) // members


def timed(sent: float, collectives: int = 1) -> float:
    """The cost of collectives that send so many bytes in all: with the latency of each."""
    return sent + collectives * cost_model().latency


def passes(rows: float) -> float:
    """How often a sort or a transform of so many rows touches each of them."""
    return max(1.0, math.log2(max(rows, 1)))


def worked(flops: float = 0.0, touched: float = 0.0) -> float:
    """The cost of operations and of bytes of memory traffic: the slower of the two decides."""
    speeds = cost_model()
    return max(flops / speeds.flops_per_byte, touched / speeds.memory_per_byte)


STEP_COST = 64  # bytes by which a reshard with one step less is preferred; not a latency: a
# reshard by itself takes the fewest bytes, and small tensors must not be gathered to save a step

LATENCIES = 32  # the most latencies whose bytes a combined collective sends:
# to start it takes 3% of its time then, and more would hold memory without a gain

EXCHANGED = 4 * 2**20  # bytes up to which AllToAlls replace a ring over sockets: they hold two more
# copies, and above it is the bytes that take the time, not the steps
AT_ONCE = 64 * 2**10  # bytes up to which one AllToAll of all numbers replaces two of their parts:
# over sockets it takes milliseconds to wake all processes once more

MEMORY_LIMIT = 2 * 2**30  # the most bytes of one gathered operand

# Bounds on planning. The first three keep programs from growing with the number of devices.
MAX_ROUNDS = 8  # permutes for one redistribution point to point
MAX_SHIFTS = 6  # neighbours of a halo exchange
WIDE_WINDOW = 4  # a window this many times larger than the result is reduced in parts
MAX_STATES = 400  # shardings that a search visits before it falls back to a gather
