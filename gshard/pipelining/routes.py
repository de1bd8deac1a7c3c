"""Where values are between two operations of a schedule: messages on their way, and slots.

A stage keeps what it received, residuals of forward passes and what weight gradients need in slots
of buffers, as few as the schedule allows. Slots and messages are tables of integers, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from gshard.pipelining.schedules import B, F, Schedule, W, Work

HEAD = 4  # the forward pass of the last position, and the head after it
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
    layers: Any  # that the chunk has
    batch: Any  # the microbatch whose gradient leaves the pipeline, if one does
    receive: tuple[Any, ...] = ()  # a slot for each channel
    sends: tuple[Any, ...] = ()  # which stages send on each channel


@dataclass(frozen=True, eq=False)
class Routes:
    """`rows` are tables of integers, [ticks, stages].

    `send[channel]` are the sets of pairs of stages that have something to send at the same time,
    each an open chain; `rows.sends` are the numbers of these sets, 0 for none. What arrives and
    nobody needs is received in the slot after the last.
    """

    rows: Row
    send: dict[str, list[Pairs]]
    slots: tuple[int, int, int]  # of the inbox, of residuals, of what weight gradients need


def route(schedule: Schedule, layers: Sequence[int]) -> Routes:
    """The routes of a schedule, which may have forward passes only; layers at each position."""
    positions, last = schedule.positions, len(schedule.positions) - 1
    op, chunk, microbatch = np.moveaxis(schedule.table, -1, 0).copy()
    first, inbox, saved, kept, count = (np.zeros_like(op) for _ in range(5))
    batch = np.full_like(op, schedule.microbatches)
    works: dict[int, list[tuple[Work, Work]]] = {F: [], B: [], W: []}  # F leaves to B, B to W
    handed: list[tuple[Work, Work]] = []
    for (kind, n, m), tick in schedule.when.items():
        here, work = (tick, positions[n][0]), (kind, n, m)
        count[here] = layers[n]
        works[kind].append((work, (kind + 1, n, m)))
        if kind == F:
            first[here] = n == 0
            handed.append((work, (F, n + 1, m) if n < last else (B, n, m)))
            op[here] = HEAD if n == last else F
        if kind == B and n:
            handed.append((work, (B, n - 1, m)))
        elif kind == B:
            batch[here] = m
    messages, slots = _stored(schedule, handed)
    sent: dict[str, list[list[tuple[int, int]]]] = {}
    receive: dict[str, np.ndarray] = {}
    for made, read, slot in messages:
        source, to, tick = positions[made[1]][0], positions[read[1]][0], schedule.when[made]
        channel = _channel(source, to)
        sent.setdefault(channel, [[] for _ in op])[tick].append((source, to))
        receive.setdefault(channel, np.full_like(op, slots))[tick, to] = slot
        inbox[schedule.when[read], to] = slot
    slot_counts = [slots]
    for kind, table in ((F, saved), (B, kept)):
        values, slots = _stored(schedule, works[kind])
        slot_counts.append(slots)
        for made, read, slot in values:
            owner = positions[made[1]][0]
            table[schedule.when[made], owner] = table[schedule.when[read], owner] = slot
    sets = {channel: [tuple(sorted(now)) for now in ticks] for channel, ticks in sent.items()}
    send = {channel: sorted({(), *found}) for channel, found in sets.items()}
    sends = [
        np.array([send[channel].index(now) for now in found])[:, None] + 0 * op
        for channel, found in sets.items()
    ]
    tables = op, chunk, microbatch, first, inbox, saved, kept, count, batch
    rows = Row(*tables, tuple(receive[channel] for channel in send), tuple(sends))
    return Routes(rows, send, (slot_counts[0], slot_counts[1], slot_counts[2]))


def _channel(source: int, to: int) -> str:
    """Messages between the same neighbours share a permute: each is an open chain."""
    return {0: LOCAL, 1: "down", -1: "up"}.get(to - source, "around" if source > to else "back")


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
