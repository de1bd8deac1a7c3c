"""Schedules: which stage works on which microbatch in every tick, as tables.

A stage does one thing in a tick: the forward pass of a microbatch (F), the part of the backward
pass that the stage before waits for (B), or the gradient of its own weights (W). These cost about
the same, so that stages keep in step. What a stage sends in a tick arrives before the next one.

A stage may have several chunks of layers. A microbatch passes through `positions`, each a chunk of
a stage: from stage to stage and around again, or, in a V, down to the last stage and back up.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

IDLE, F, B, W = range(4)
LETTERS = ".FBW"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
Work = tuple[int, int, int]  # an operation, the position it is at, and the microbatch


@dataclass(frozen=True, eq=False)
class Schedule:
    """A schedule: `when` is the tick of every operation.

    In a V (`vee`) the second chunk of layers passes through the stages in reverse.
    """

    name: str
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

    @property
    def is_whole(self) -> bool:
        """Whether each W follows its B at once, and the stage before waits for both."""
        late = {work[1:]: tick for work, tick in self.when.items() if work[0] == W}
        ends = ((n, m, t) for (op, n, m), t in self.when.items() if op == B)
        return bool(late) and all(
            late[n, m] == t + 1 and (n == 0 or self.when[B, n - 1, m] > t + 1) for n, m, t in ends
        )

    @property
    def in_flight(self) -> int:
        """The most microbatches (or chunks of them) that a stage keeps for the backward pass."""
        change = np.zeros((self.ticks + 1, self.stages), int)
        for (op, position, _), tick in self.when.items():
            if op in (F, B):
                change[tick + (op == B), self.positions[position][0]] += 1 if op == F else -1
        return int(np.cumsum(change, axis=0).max())

    def __str__(self) -> str:
        chunks = f", {self.chunks} chunks a stage" if self.chunks > 1 else ""
        title = (
            f"{self.name}: {self.stages} stages{chunks}, {self.microbatches} microbatches, "
            f"{self.ticks} ticks, bubble {100 * self.bubble:.1f}%, {self.in_flight} in flight"
        )
        return f"{title}\n{self.text}"

    @property
    def cells(self) -> list[list[str]]:
        """A list for each stage: F3 is the forward pass of microbatch 3, F3.1 that of chunk 1."""
        rows = self.table.swapaxes(0, 1).tolist()
        return [[self._cell(*work) for work in row] for row in rows]

    @property
    def text(self) -> str:
        """The table, a line for each stage."""
        width = max(len(cell) for row in self.cells for cell in row)
        return "\n".join(" ".join(c.ljust(width) for c in row).rstrip() for row in self.cells)

    @property
    def schedule(self) -> str:
        """Its name."""
        return self.name

    def needs(self, work: Work, whole: bool = False) -> list[Work]:
        """What is done in earlier ticks; a `whole` backward pass is B and W, then sent."""
        op, position, m = work
        if op == W:
            return [(B, position, m)]
        if op == F:
            return [(F, position - 1, m)] if position else []
        is_last = position == len(self.positions) - 1
        return [(F, position, m), *([] if is_last else [(W if whole else B, position + 1, m)])]

    def _cell(self, op: int, chunk: int, microbatch: int) -> str:
        if op == IDLE:
            return LETTERS[IDLE]
        return f"{LETTERS[op]}{microbatch}" + (f".{chunk}" if self.chunks > 1 else "")

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
    late = {"zb-h1": (3 * stages + 1) // 2, "zbv": 2 * stages + 2}.get(name, 0)
    return _listed(empty, limits, late)


def forward_only(schedule: Schedule) -> Schedule:
    """Forward passes alone, on the same stages and chunks, as early as they can be."""
    most = schedule.microbatches * schedule.chunks + 1
    return _listed(schedule, [most] * schedule.stages, most, (F,))


def _listed(
    empty: Schedule, limits: Sequence[int], late: int, ops: Sequence[int] = (F, B, W)
) -> Schedule:
    """A list scheduler: in every tick each stage does the first work on its list that it can.

    At most `limits[stage]` microbatches wait for B, and at most `late` for W: first comes what
    others wait for, B before F before W. With `late` 0 a backward pass is B and W, one after the
    other. It is due when the limit is reached, and a stage waits for what is due: GPipe, 1F1B, and
    interleaved 1F1B, where chunks take turns after as many microbatches as there are stages.
    """
    done, count, every = dict[Work, int](), Counter[tuple[int, int]](), empty.microbatches
    places, tick = list(enumerate(empty.positions)), 0

    def can(work: Work) -> bool:
        ready = all(done.get(needed, tick) < tick for needed in empty.needs(work, not late))
        return work[0] in ops and work[2] < every and ready

    def works(stage: int) -> list[Work]:
        mine = [n for n, (owner, _) in places if owner == stage]
        ahead, behind, last = ([(op, n, count[op, n]) for n in mine] for op in (F, B, W))
        begun, back, ended = (sum(count[op, n] for n in mine) for op in (F, B, W))
        full = begun - back >= limits[stage] or begun - ended >= (late or begun + 1)
        if late:
            return [*behind, *([] if full else ahead[::-1]), *last]
        if back > ended:
            return last
        if full or begun == every * len(mine):
            return [min(behind, key=lambda work: (work[2] // empty.stages, -work[1]))]
        return [min(ahead, key=lambda work: (work[2] // empty.stages, work[1]))]

    while len(done) < len(ops) * every * len(places):
        found = [next(filter(can, works(stage)), None) for stage in range(empty.stages)]
        now = [work for work in found if work]
        if not now:
            raise ValueError(f"a schedule of {empty.stages} stages waits for itself: {done}")
        done.update(dict.fromkeys(now, tick))
        count.update(work[:2] for work in now)
        tick += 1
    return Schedule(empty.name, empty.stages, every, empty.chunks, empty.vee, done)


def parse(text: str, vee: bool = False, name: str = "own") -> Schedule:
    """The schedule of a table as `Schedule.text` prints it; an error says what is wrong with it."""
    lines = [line.split() for line in text.strip().splitlines()]
    works: list[tuple[int, int, int, int, int]] = []
    for stage, cells in enumerate(lines):
        for tick, cell in enumerate(cells):
            found = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", cell)
            if found:
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
    empty = Schedule(name, len(lines), microbatches, chunks, vee)
    when = {(op, empty.positions.index((s, c)), m): tick for op, s, c, m, tick in works}
    if len(when) != len(works):
        raise ValueError("the schedule's table does the same work twice")
    return check(Schedule(name, len(lines), microbatches, chunks, vee, when))


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
