"""Where values are between two operations of a schedule: messages on their way, and slots.

A stage keeps what it received, residuals of forward passes and what weight gradients need in slots
of buffers, as few as the schedule allows. Slots and messages are tables of integers, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gshard.pipelining.schedules import B, F, Schedule, W, Work

HEAD = 4  # the forward pass of the last position, and the head after it
BOTH = 5  # B and W of a layer, at once
Seconds = tuple[float, ...]  # of IDLE, F, B, W and BOTH of a layer, and of HEAD without F
EQUAL: Seconds = (0.0, 1.0, 1.0, 1.0, 0.0, 2.0)
LOCAL = "local"
Pairs = tuple[tuple[int, int], ...]
Stored = tuple[Work, Work, int]  # who makes a value, who reads it, and the slot it is in


class Row(NamedTuple):
    """What a stage does in a tick: its operation, and the slots that it reads and writes."""

    op: Any  # with `HEAD` for the last forward pass
    chunk: Any
    microbatch: Any
    first: Any  # whether its input is from the batch
    inbox: Any
    saved: Any
    kept: Any
    base: Any  # the first of the chunk's layers that it does, and how many
    layers: Any
    batch: Any  # the microbatch whose gradient leaves the pipeline, if one does
    receive: tuple[Any, ...] = ()  # a slot for each channel
    sends: tuple[Any, ...] = ()  # which stages send on each channel


@dataclass(frozen=True, eq=False)
class Routes:
    """`rows` are tables of integers, [ticks, stages].

    `send[channel]` are the sets of pairs of stages that have something to send at the same time:
    open chains, since a channel is between the same neighbours. `rows.sends` are the numbers of
    these sets, 0 for none. What nobody needs is received in the slot after the last.
    """

    rows: Row
    send: dict[str, list[Pairs]]
    slots: tuple[int, int, int]  # of the inbox, of residuals, of what weight gradients need
    spent: np.ndarray  # seconds

    @property
    def step_seconds(self) -> float:
        """In every tick the stages wait for the slowest."""
        return float(self.spent.max(1).sum())


@functools.lru_cache(maxsize=256)
def route(schedule: Schedule, layers: tuple[int, ...], seconds: Seconds = EQUAL) -> Routes:
    """The routes of a schedule, which may have forward passes only; layers at each position.

    Where W follows B at once, both may be done in halves, if that is faster.
    """
    options = [_routed(schedule, layers, seconds, False)]
    if schedule.is_whole and min(layers) > 1:
        options.append(_routed(schedule, layers, seconds, True))
    return min(options, key=lambda found: found.step_seconds)


def _routed(schedule: Schedule, layers: tuple[int, ...], seconds: Seconds, halves: bool) -> Routes:
    """In `halves`, B and W each do all that there is to do for half of the layers."""
    positions, last = schedule.positions, len(schedule.positions) - 1
    op, chunk, microbatch = np.moveaxis(schedule.table, -1, 0).copy()
    first, inbox, saved, kept, base, count = (np.zeros_like(op) for _ in range(6))
    batch = np.full_like(op, schedule.microbatches)
    end = W if halves else B  # the stage before waits for it
    handed: list[tuple[Work, Work]] = []
    for work, tick in schedule.when.items():
        kind, n, m = work
        here, lower = (tick, positions[n][0]), layers[n] // 2
        part = {B: (lower, layers[n]), W: (0, lower)} if halves else {}
        base[here], above = part.get(kind, (0, layers[n]))
        count[here] = above - base[here]
        if kind == F:
            first[here] = n == 0
            handed.append((work, (F, n + 1, m) if n < last else (B, n, m)))
            op[here] = HEAD if n == last else F
        elif kind != end:
            handed += [(work, (W, n, m))] if halves else []
        elif n:
            handed.append((work, (B, n - 1, m)))
        else:
            batch[here] = m
    messages, slots = _stored(schedule, handed)
    sent: dict[str, list[list[tuple[int, int]]]] = {}
    receive: dict[str, np.ndarray] = {}
    for made, read, slot in messages:
        source, to, tick = positions[made[1]][0], positions[read[1]][0], schedule.when[made]
        around = "around" if source > to else "back"
        channel = {0: LOCAL, 1: "down", -1: "up"}.get(to - source, around)
        sent.setdefault(channel, [[] for _ in op])[tick].append((source, to))
        receive.setdefault(channel, np.full_like(op, slots))[tick, to] = slot
        inbox[schedule.when[read], to] = slot
    counts = [slots]
    for table, kind, until in ((saved, F, end), (kept, B, W)):
        works = [(work, (until, *work[1:])) for work in schedule.when if work[0] == kind]
        values, slots = _stored(schedule, () if halves and kind == B else works)
        counts.append(slots)
        for made, _, slot in values:
            for now in (F, B, W):
                place = schedule.when[now, *made[1:]], positions[made[1]][0]
                table[place] = slot
    sets = {channel: [tuple(sorted(now)) for now in ticks] for channel, ticks in sent.items()}
    send = {channel: sorted({(), *found}) for channel, found in sets.items()}
    sends = [
        np.array([send[channel].index(now) for now in found])[:, None] + 0 * op
        for channel, found in sets.items()
    ]
    tables = op, chunk, microbatch, first, inbox, saved, kept, base, count, batch
    rows = Row(*tables, tuple(receive[channel] for channel in send), tuple(sends))
    own = np.array(seconds)[np.where((op == B) | (op == W), BOTH, op) if halves else op]
    spent = np.where(op == HEAD, count * seconds[F] + seconds[HEAD], count * own)
    return Routes(rows, send, (counts[0], counts[1], counts[2]), spent)


def _stored(schedule: Schedule, pairs: Iterable[tuple[Work, Work]]) -> tuple[list[Stored], int]:
    """Values in slots of the stages that read them, and how many slots a stage needs.

    A value is stored at the end of a tick: its slot may be read in that same tick.
    """
    when, found = schedule.when, list[Stored]()
    ends: list[list[int]] = [[] for _ in range(schedule.stages)]  # the last to read each slot
    there = (pair for pair in pairs if pair[1] in when)
    for made, read in sorted(there, key=lambda pair: when[pair[0]]):
        slots = ends[schedule.positions[read[1]][0]]
        free = (n for n, end in enumerate(slots) if end <= when[made])
        slot = next(free, len(slots))
        slots[slot : slot + 1] = [when[read]]
        found.append((made, read, slot))
    return found, max(map(len, ends))
