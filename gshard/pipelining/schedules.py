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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

IDLE, F, B, W = range(4)
LETTERS = ".FBW"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
Work = tuple[int, int, int]  # an operation, the position it is at, and the microbatch
# What a stage may do next, best first, given how often it did each operation at each position.
Choose = Callable[[int, Mapping[tuple[int, int], int]], Iterable[Work]]


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
    def owned(self) -> list[list[int]]:
        """The positions of every stage."""
        places = list(enumerate(self.positions))
        return [[n for n, (owner, _) in places if owner == stage] for stage in range(self.stages)]

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

    def simulated(
        self, choose: Choose, whole: bool = False, ops: Sequence[int] = (F, B, W)
    ) -> Schedule:
        """With the work done if every stage does in each tick the first it chooses that it can."""
        done, count, tick = dict[Work, int](), Counter[tuple[int, int]](), 0

        def can(work: Work) -> bool:
            ready = all(done.get(needed, tick) < tick for needed in self.needs(work, whole))
            return work[0] in ops and work[2] < self.microbatches and ready

        while len(done) < len(ops) * self.microbatches * len(self.positions):
            works = [next(filter(can, choose(s, count)), None) for s in range(self.stages)]
            now = [work for work in works if work]
            if not now:
                raise ValueError(f"a schedule of {self.stages} stages waits for itself: {done}")
            done.update(dict.fromkeys(now, tick))
            count.update(work[:2] for work in now)
            tick += 1
        return Schedule(self.name, self.stages, self.microbatches, self.chunks, self.vee, done)


def make(name: str, stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The schedule of a name in `NAMES`; `chunks` are those of an interleaved one."""
    if name == "interleaved" and chunks > 1 and microbatches % stages:
        raise ValueError(
            f"schedule='interleaved': {microbatches} microbatches do not divide by {stages} "
            "stages; a multiple of the stages is allowed, or schedule='zbv'"
        )
    if name in ("gpipe", "1f1b", "interleaved"):
        empty = Schedule(name, stages, microbatches, chunks if name == "interleaved" else 1)
        return empty.simulated(_in_order(empty), whole=True)
    if name == "zb-h1":
        empty = Schedule(name, stages, microbatches)
        return empty.simulated(_greedy(empty, range(stages, 0, -1), (3 * stages + 1) // 2))
    if name == "zbv":
        empty = Schedule(name, stages, microbatches, 2, stages > 1)
        return empty.simulated(_greedy(empty, [2 * stages] * stages, 2 * stages + 2))
    raise ValueError(
        f"schedule={name!r}: allowed are {', '.join(map(repr, NAMES))}, 'auto', and a table of "
        "your own as text, a line for each stage"
    )


def forward_only(schedule: Schedule) -> Schedule:
    """Forward passes alone, on the same stages and chunks, as early as they can be."""
    most = schedule.microbatches * schedule.chunks + 1
    return schedule.simulated(_greedy(schedule, [most] * schedule.stages, most), ops=(F,))


def _in_order(empty: Schedule) -> Choose:
    """Each stage does a list of its own in order, and waits: GPipe, 1F1B, interleaved 1F1B.

    The first forward passes fill the pipeline; then a backward pass, all of it, and a forward pass
    take turns. Chunks take turns after as many microbatches as there are stages.
    """
    stages, microbatches, chunks = empty.stages, empty.microbatches, empty.chunks
    lists = []
    for stage in range(stages):
        rounds = [
            [(position, m) for m in range(first, min(first + stages, microbatches))]
            for first in range(0, microbatches, stages)
            for position in empty.owned[stage]
        ]
        forward = [(F, *each) for turn in rounds for each in turn]
        turns = [rounds[i : i + chunks][::-1] for i in range(0, len(rounds), chunks)]
        backward = [each for group in turns for turn in group for each in turn]
        filling = len(forward) if empty.name == "gpipe" else stages * chunks - stage
        later = [[work] for work in forward[filling:]] + [[]] * len(forward)
        works = forward[:filling]
        for each, more in zip(backward, later, strict=False):
            works += [(B, *each), (W, *each), *more]
        lists.append(works)

    def choose(stage: int, count: Mapping[tuple[int, int], int]) -> list[Work]:
        done = sum(count[op, n] for op in (F, B, W) for n in empty.owned[stage])
        return lists[stage][done : done + 1]

    return choose


def _greedy(empty: Schedule, limits: Sequence[int], most: int) -> Choose:
    """Each stage does what others wait for: B before F before W.

    At most `limits[stage]` microbatches wait for B, and at most `most` for W.
    """

    def choose(stage: int, count: Mapping[tuple[int, int], int]) -> list[Work]:
        mine = empty.owned[stage]
        forward, backward, weights = (sum(count[op, n] for n in mine) for op in (F, B, W))
        full = forward - backward >= limits[stage] or forward - weights >= most
        ahead = [] if full else [(F, n, count[F, n]) for n in reversed(mine)]
        behind, late = ([(op, n, count[op, n]) for n in mine] for op in (B, W))
        return [*behind, *ahead, *late]

    return choose


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
