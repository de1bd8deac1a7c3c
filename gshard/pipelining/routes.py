"""Where values are between two operations of a schedule: messages on their way, and slots.

A stage keeps what it received, residuals of forward passes and what weight gradients need in slots
of buffers, as few as the schedule allows. Slots and messages are tables of integers, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from gshard.pipelining.schedules import B, F, Schedule, W, Work

HEAD = 4  # the forward pass of the last position, and the head after it
LOCAL = "local"
Pairs = tuple[tuple[int, int], ...]
Interval = tuple[int, int]  # the tick in which a value is stored, and the last that reads it


@dataclass(frozen=True, eq=False)
class Routes:
    """What every stage does in every tick, each a table of integers, [ticks, stages].

    `op` is the operation, with `HEAD` for the last forward pass. `inbox`, `saved` and `kept` are
    the slots that it reads or writes. `send[channel]` are the sets of pairs of stages that have
    something to send at the same time, each an open chain; `sends[channel]` is the number of such a
    set for every tick, 0 for none. `receive[channel]` are the slots for what arrives; the one after
    the last is for what nobody needs.
    """

    op: np.ndarray
    chunk: np.ndarray
    microbatch: np.ndarray
    first: np.ndarray  # whether it is at the first position: its input is from the batch
    inbox: np.ndarray
    saved: np.ndarray
    kept: np.ndarray
    send: dict[str, list[Pairs]]
    sends: dict[str, np.ndarray]
    receive: dict[str, np.ndarray]
    slots: tuple[int, int, int]  # of the inbox, of residuals, of what weight gradients need


def route(schedule: Schedule) -> Routes:
    """The routes of a schedule, which may have forward passes only."""
    when, positions = schedule.when, schedule.positions
    shape, last = schedule.table.shape[:2], len(positions) - 1
    op, chunk, microbatch = np.moveaxis(schedule.table, -1, 0).copy()
    first, inbox = np.zeros(shape, int), np.zeros(shape, int)
    messages: list[tuple[Work, Work]] = []
    for work, tick in when.items():
        kind, position, m = work
        if kind == F:
            messages.append((work, (F, position + 1, m) if position < last else (B, position, m)))
            if position == last:
                op[tick, positions[position][0]] = HEAD
        if kind == B and position:
            messages.append((work, (B, position - 1, m)))
        if kind == F and position == 0:
            first[tick, positions[0][0]] = 1
    messages = [(made, read) for made, read in messages if read in when]
    stored = [(positions[read[1]][0], (when[made], when[read])) for made, read in messages]
    slots, count = _assigned(stored, schedule.stages)
    pairs: dict[str, list[list[tuple[int, int]]]] = {}
    receive: dict[str, np.ndarray] = {}
    for (made, read), slot in zip(messages, slots, strict=True):
        source, to = positions[made[1]][0], positions[read[1]][0]
        channel = _channel(source, to)
        pairs.setdefault(channel, [[] for _ in schedule.table])[when[made]].append((source, to))
        receive.setdefault(channel, np.full(shape, count))[when[made], to] = slot
        inbox[when[read], to] = slot
    saved, residuals = _between(schedule, F, B, shape)
    kept, pending = _between(schedule, B, W, shape)
    send: dict[str, list[Pairs]] = {}
    sends: dict[str, np.ndarray] = {}
    for channel, by_tick in pairs.items():
        sets = [tuple(sorted(found)) for found in by_tick]
        send[channel] = sorted({(), *sets})
        sends[channel] = np.array([send[channel].index(found) for found in sets])
    tables = op, chunk, microbatch, first, inbox, saved, kept
    return Routes(*tables, send, sends, receive, (count, residuals, pending))


def _channel(source: int, to: int) -> str:
    """Messages between the same neighbours share a permute: each is an open chain."""
    return {0: LOCAL, 1: "down", -1: "up"}.get(to - source, "around" if source > to else "back")


def _between(
    schedule: Schedule, start: int, end: int, shape: tuple[int, ...]
) -> tuple[np.ndarray, int]:
    """The slots of what one operation leaves to another of the same position."""
    works = [w for w in schedule.when if w[0] == start and (end, *w[1:]) in schedule.when]
    ends = [(end, *work[1:]) for work in works]
    owners = [schedule.positions[work[1]][0] for work in works]
    pairs = zip(works, ends, strict=True)
    ticks = [(schedule.when[a], schedule.when[b]) for a, b in pairs]
    slots, count = _assigned(zip(owners, ticks, strict=True), schedule.stages)
    table = np.zeros(shape, int)
    for owner, (made, read), slot in zip(owners, ticks, slots, strict=True):
        table[made, owner] = table[read, owner] = slot
    return table, count


def _assigned(intervals: Iterable[tuple[int, Interval]], stages: int) -> tuple[list[int], int]:
    """A slot for each value of a stage, and how many slots the stage with most of them needs.

    A value is stored at the end of a tick: its slot may be read in that same tick.
    """
    listed = list(intervals)
    slots, free = [0] * len(listed), [list[int]() for _ in range(stages)]
    count = [0] * stages
    busy: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    for number in sorted(range(len(listed)), key=lambda n: listed[n][1]):
        stage, (made, read) = listed[number]
        free[stage] += [slot for end, slot in busy[stage] if end <= made]
        busy[stage] = [(end, slot) for end, slot in busy[stage] if end > made]
        if not free[stage]:
            free[stage].append(count[stage])
            count[stage] += 1
        slots[number] = free[stage].pop()
        busy[stage].append((read, slots[number]))
    return slots, max(count, default=0)
