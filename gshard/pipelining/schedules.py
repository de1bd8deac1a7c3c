"""Schedules: which stage works on which microbatch in every tick, as tables.

A stage does one thing in a tick (docs/howto/pipelines.md): F, B or W of a microbatch. What it sends
in a tick arrives before the next one.

A stage may have several chunks of layers. A microbatch passes through `positions`, each a chunk of
a stage: from stage to stage and around again, or, in a V, down to the last stage and back up.

Between two operations, a stage keeps what it received, residuals of F and what W needs in slots, as
few as the schedule allows. Slots and messages are tables of integers, too: a schedule's routes.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

IDLE, F, B, W = range(4)
HEAD, BOTH = 4, 5  # the last forward pass, and the head after it; B and W of a layer at once
Seconds = tuple[float, ...]  # of IDLE, F, B, W and BOTH of a layer, and of HEAD without F
EQUAL: Seconds = (0.0, 1.0, 1.0, 1.0, 0.0, 2.0)
LETTERS = ".FBW"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
Work = tuple[int, int, int]  # an operation, the position it is at, and the microbatch
Stored = tuple[Work, Work, int]  # who makes a value, who reads it, and the slot it is in


@dataclass(frozen=True, eq=False)
class Schedule:
    """`when` is the tick of every operation; in a V (`vee`) chunk 1 begins at the last stage."""

    schedule: str  # its name
    stages: int
    microbatches: int
    chunks: int = 1
    vee: bool = False
    when: Mapping[Work, int] = field(default_factory=dict)

    @functools.cached_property
    def positions(self) -> list[tuple[int, int]]:
        """The stage and the chunk of every position, in the order of the layers."""
        stages = range(self.stages)
        if self.vee:
            return [*((stage, 0) for stage in stages), *((stage, 1) for stage in reversed(stages))]
        return [(stage, chunk) for chunk in range(self.chunks) for stage in stages]

    @functools.cached_property
    def table(self) -> np.ndarray:
        """`table[tick, stage]` is an operation, a chunk and a microbatch."""
        table = np.zeros((1 + max(self.when.values()), self.stages, 3), int)
        for (op, position, m), tick in self.when.items():
            stage, chunk = self.positions[position]
            table[tick, stage] = op, chunk, m
        return table

    @property
    def ticks(self) -> int:
        """How many ticks a step takes."""
        return len(self.table)

    @property
    def bubble(self) -> float:
        """The idle share of all ticks of all stages."""
        return float((self.table[..., 0] == IDLE).mean())

    @functools.cached_property
    def joined(self) -> frozenset[tuple[int, int]]:
        """Positions and microbatches whose W follows B at once: the stage before waits for both."""
        when = self.when
        return frozenset(
            (n, m) for (op, n, m), tick in when.items()
            if op == B and when[W, n, m] == tick + 1 != when.get((B, n - 1, m))
        )  # fmt: skip

    @property
    def in_flight(self) -> int:
        """The most microbatches (or chunks of them) that a stage keeps for the backward pass."""
        forward, backward = (self.table[..., 0] == op for op in (F, B))
        return int((np.cumsum(forward, 0) - np.cumsum(backward, 0) + backward).max())

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks a stage" if self.chunks > 1 else ""
        title = (
            f"{self.schedule}: {self.stages} stages{chunks}, {self.microbatches} microbatches, "
            f"{self.ticks} ticks, bubble {100 * self.bubble:.1f}%, {self.in_flight} in flight"
        )
        return f"{title}\n{self.text}"

    @property
    def cells(self) -> list[list[str]]:
        """A list for each stage: F3 is the forward pass of microbatch 3, F3.1 that of chunk 1."""
        return [[self._cell(*work) for work in row] for row in self.table.swapaxes(0, 1).tolist()]

    @property
    def text(self) -> str:
        """The table, a line for each stage."""
        width = max(len(cell) for row in self.cells for cell in row)
        return "\n".join(" ".join(c.ljust(width) for c in row).rstrip() for row in self.cells)

    def needs(self, work: Work) -> list[Work]:
        """What is done in earlier ticks."""
        op, position, m = work
        if op == W:
            return [(B, position, m)]
        if op == F:
            return [(F, position - 1, m)] if position else []
        return [(F, position, m), (B, position + 1, m)][: len(self.positions) - position]

    def _cell(self, op: int, chunk: int, microbatch: int) -> str:
        number = f"{microbatch}.{chunk}" if self.chunks > 1 else str(microbatch)
        return LETTERS[op] + (number if op else "")

    def said(self, work: Work) -> str:
        """An operation, for an error."""
        stage, chunk = self.positions[work[1]]
        return f"{self._cell(work[0], chunk, work[2])} of stage {stage}"


def make(name: str, stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The schedule of a name in `NAMES`; `chunks` are those of an interleaved one."""
    if name == "interleaved" and chunks > 1 and microbatches % stages:
        raise ValueError(
            f"schedule='interleaved': {microbatches} microbatches do not divide by {stages} "
            "stages; a multiple of the stages is allowed, or schedule='zbv'"
        )
    if name not in NAMES:
        raise ValueError(
            f"schedule={name!r}: allowed are {', '.join(map(repr, NAMES))}, 'auto', and a table of "
            "your own as text, a line for each stage"
        )
    chunks = {"interleaved": chunks, "zbv": 2}.get(name, 1)
    empty = Schedule(name, stages, microbatches, chunks, name == "zbv" and stages > 1)
    most = {"gpipe": microbatches, "zbv": 2 * stages}.get(name, 0)
    limits = [most or stages * chunks - stage for stage in range(stages)]
    late = {"zb-h1": range(stages), "zbv": [2 * microbatches] * stages}.get(name)
    return _listed(empty, limits, late, most + 2 if name == "zbv" else sys.maxsize)


def forward_only(schedule: Schedule) -> Schedule:
    """Forward passes alone, on the same stages and chunks, as early as they can be."""
    most = [schedule.microbatches * schedule.chunks + 1] * schedule.stages
    return _listed(schedule, most, most, ops=(F,))


def _listed(
    empty: Schedule, limits: Sequence[int], late: Sequence[int] | None, most: int = sys.maxsize,
    ops: Sequence[int] = (F, B, W),
) -> Schedule:  # fmt: skip
    """A list scheduler: in every tick each stage does the first work on its list that it can.

    First comes what others wait for: B before F before W. At most `limits[stage]` microbatches wait
    for B, and `most` for B or W. Once `late[stage]` wait for W, it follows each B at once, and the
    stage before waits for both, until the last F is done: nothing has to be kept for it. Without
    `late` it always does, and B is due when the limit is reached: a stage waits for what is due.
    That is GPipe, 1F1B, and interleaved 1F1B, whose chunks take turns after as many microbatches as
    there are stages.
    """
    done, count, every = dict[Work, int](), Counter[tuple[int, int]](), empty.microbatches
    places, tick, joined = list(enumerate(empty.positions)), 0, dict[Work, Work]()
    waiting: list[list[Work]] = [[] for _ in limits]  # for W, the last one first

    def can(work: Work) -> bool:
        needed = [joined.get(each, each) for each in empty.needs(work) if work[0] != W]
        return work[0] in ops and work[2] < every and all(done.get(w, tick) < tick for w in needed)

    def chosen(stage: int, wait: list[Work]) -> Work | None:
        mine = [n for n, (owner, _) in places if owner == stage]
        ahead, behind = ([(op, n, count[op, n]) for n in mine] for op in (F, B))
        begun, back = (sum(work[2] for work in part) for part in (ahead, behind))
        full = begun - back >= limits[stage] or begun - back + len(wait) >= most
        is_left = begun < every * len(mine)
        if wait and wait[0] in joined.values():
            works = wait[:1]
        elif late is None:
            due = ahead if is_left and not full else behind
            works = [min(due, key=lambda w: (w[2] // empty.stages, w[1] if w[0] == F else -w[1]))]
        else:
            works = [*behind, *([] if full else ahead[::-1]), *wait]
        found = next(filter(can, works), None)
        waits = not late or not late[stage] or (is_left and len(wait) >= late[stage])
        if found and found[0] == B and waits:
            joined[found] = (W, *found[1:])
        return found

    while len(done) < len(ops) * every * len(places):
        now = [work for stage, wait in enumerate(waiting) if (work := chosen(stage, wait))]
        assert now, f"a schedule of {empty.stages} stages waits for itself"
        for work in now:
            done[work], wait = tick, waiting[empty.positions[work[1]][0]]
            count[work[:2]] += 1
            if work[0] == B:
                wait.insert(0, (W, *work[1:]))
            elif work[0] == W:
                wait.remove(work)
        tick += 1
    return replace(empty, when=done)


def parse(text: str, vee: bool = False, name: str = "own") -> Schedule:
    """The schedule of a table as `Schedule.text` prints it; an error says what is wrong with it."""
    works, stages = list[tuple[int, int, int, int, int]](), text.strip().splitlines()
    for stage, line in enumerate(stages):
        for tick, cell in enumerate(line.split()):
            if found := re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", cell):
                op, m, chunk = found.groups()
                works.append((LETTERS.index(op), stage, int(chunk or 0), int(m), tick))
            elif cell != LETTERS[IDLE]:
                raise ValueError(
                    f"the schedule's table, stage {stage}, tick {tick}: {cell!r}; allowed are '.', "
                    "and F, B or W with the number of a microbatch, and of a chunk after a point"
                )
    if not works:
        raise ValueError("the schedule's table has no work in it")
    microbatches, chunks = (1 + max(work[i] for work in works) for i in (3, 2))
    empty = Schedule(name, len(stages), microbatches, chunks, vee)
    when = {(op, empty.positions.index((s, c)), m): tick for op, s, c, m, tick in works}
    if len(when) != len(works):
        raise ValueError("the schedule's table does the same work twice")
    return check(replace(empty, when=when))


def check(schedule: Schedule) -> Schedule:
    """The schedule; an error where it misses work or does it before what that depends on."""
    positions, microbatches = range(len(schedule.positions)), range(schedule.microbatches)
    works = [(op, n, m) for op in (F, B, W) for n in positions for m in microbatches]
    if missing := next((work for work in works if work not in schedule.when), None):
        raise ValueError(f"the schedule's table never does {schedule.said(missing)}")
    for work, tick in schedule.when.items():
        for needed in schedule.needs(work):
            if schedule.when[needed] >= tick:
                raise ValueError(
                    f"the schedule's table does {schedule.said(work)} in tick {tick}, before it "
                    f"can: {schedule.said(needed)} is done in tick {schedule.when[needed]}"
                )
    return schedule


class Row(NamedTuple):
    """What a stage does in a tick: its operation, and the slots that it reads and writes."""

    op: Any  # with `HEAD` for the last forward pass
    chunk: Any
    microbatch: Any
    inbox: Any  # the one after the last where its input is from the batch
    saved: Any
    kept: Any
    base: Any  # the first of the chunk's layers that it does, and how many
    layers: Any
    batch: Any  # the microbatch that leaves the pipeline, if one does
    receive: tuple[Any, ...] = ()  # a slot for each channel
    sends: tuple[Any, ...] = ()  # which stages send on each channel


@dataclass(frozen=True, eq=False)
class Routes:
    """`rows` are tables of integers, [ticks, stages].

    A channel is a distance: `send[distance]` are the sets of stages that send so far at the same
    time, [sets, stages], and `rows.sends` the numbers of these sets. What nobody needs is received
    in the slot after the last.
    """

    rows: Row
    send: dict[int, np.ndarray]
    slots: tuple[int, int, int]  # of the inbox, of residuals, of what weight gradients need
    spent: np.ndarray  # seconds

    @functools.cached_property
    def critical(self) -> np.ndarray:
        """The stage that a step waits for in every tick: pairs with a message leave it together."""
        ticks, stages = self.spent.shape
        ends, cause = np.zeros(stages), np.zeros((ticks, stages), int)
        for tick, spent in enumerate(self.spent):
            ends, cause[tick] = ends + spent, np.arange(stages)
            for (distance, sets), which in zip(self.send.items(), self.rows.sends, strict=True):
                before, why = ends.copy(), cause[tick].copy()
                for a in np.flatnonzero(sets[which[tick, 0]]):
                    b = a + distance
                    last, other = (a, b) if before[a] > before[b] else (b, a)
                    if before[last] > ends[other]:
                        ends[other], cause[tick, other] = before[last], why[last]
        path = [int(ends.argmax())]
        for causes in cause[::-1]:
            path.append(causes[path[-1]])
        return np.array(path[:0:-1])

    @functools.cached_property
    def step_seconds(self) -> float:
        """What the critical stages spend, tick by tick."""
        return float(np.take_along_axis(self.spent, self.critical[:, None], 1).sum())


@functools.lru_cache(maxsize=256)
def route(schedule: Schedule, layers: tuple[int, ...], seconds: Seconds = EQUAL) -> Routes:
    """The routes of a schedule, which may have forward passes only; layers at each position.

    Where W follows B at once, both may be done in halves, if that is faster.
    """
    options = [frozenset[tuple[int, int]](), *([schedule.joined] if min(layers) > 1 else [])]
    found = (_routed(schedule, layers, seconds, joined) for joined in options)
    return min(found, key=lambda routes: routes.step_seconds)


def _routed(
    schedule: Schedule, layers: tuple[int, ...], seconds: Seconds, joined: Set[tuple[int, int]]
) -> Routes:
    """Where they are `joined`, B and W each do all that there is to do for half of the layers."""
    positions, last = schedule.positions, len(schedule.positions) - 1
    op, chunk, microbatch = np.moveaxis(schedule.table, -1, 0).copy()
    row = Row(op, chunk, microbatch, *np.zeros((6, *op.shape), int))
    row.batch[:] = schedule.microbatches
    at = {work: (tick, positions[work[1]][0]) for work, tick in schedule.when.items()}
    handed, residuals, pending = (list[tuple[Work, Work]]() for _ in range(3))
    for work, here in at.items():
        kind, n, m = work
        lower = layers[n] // 2 if (n, m) in joined else 0
        end = W if lower else B  # the stage before waits for it
        row.base[here] = lower if kind == B else 0
        row.layers[here] = lower if lower and kind == W else layers[n] - row.base[here]
        if kind == F:
            op[here] = HEAD if n == last else F
            reader = (B, n, m) if n == last else (F, n + 1, m)
            residuals.append((work, (end, n, m)))
        else:
            op[here] = BOTH if lower else kind
            reader = (B, n - 1, m) if kind == end else (W, n, m)
        if kind == B and not lower:
            pending.append((work, (W, n, m)))
        if work != reader:
            handed.append((work, reader))
            row.batch[here] = row.batch[here] if reader in at else m
    messages, slots = _stored(schedule, handed)
    row.inbox[:] = slots
    channels = dict[int, tuple[np.ndarray, np.ndarray]]()  # who sends, and where it is received
    for made, read, slot in messages:
        (tick, source), (_, to) = at[made], at[read]
        empty = np.zeros(op.shape, bool), np.full_like(op, slots)
        sent, received = channels.setdefault(to - source, empty)
        sent[tick, source], received[tick, to], row.inbox[at[read]] = True, slot, slot
    counts = [slots]
    for table, waiting in ((row.saved, residuals), (row.kept, pending)):
        values, slots = _stored(schedule, waiting)
        counts.append(slots)
        for (_, n, m), _, slot in values:
            for kind in (F, B, W):
                table[at[kind, n, m]] = slot
    found = [np.unique(sent, axis=0, return_inverse=True) for sent, _ in channels.values()]
    own = np.array(seconds)[np.where(op == HEAD, F, op)]
    spent = row.layers * own + (op == HEAD) * seconds[HEAD]
    row = row._replace(
        receive=tuple(received for _, received in channels.values()),
        sends=tuple(which.reshape(-1, 1) + 0 * op for _, which in found),
    )
    send = dict(zip(channels, (sets for sets, _ in found), strict=True))
    return Routes(row, send, (counts[0], counts[1], counts[2]), spent)


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
