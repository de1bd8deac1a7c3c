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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

IDLE, F, B, W = range(4)
LETTERS = ".FBW"
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
Work = tuple[int, int, int]  # an operation, the position it is at, and the microbatch


@dataclass(frozen=True, eq=False)
class Schedule:
    """A checked table: `table[tick, stage]` is an operation, a chunk and a microbatch.

    In a V (`vee`) the second chunk of layers passes through the stages in reverse.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    vee: bool
    table: np.ndarray

    @functools.cached_property
    def positions(self) -> list[tuple[int, int]]:
        """The stage and the chunk of every position, in the order of the layers."""
        return _positions(self.stages, self.chunks, self.vee)

    @property
    def ticks(self) -> int:
        """How many ticks a step takes."""
        return len(self.table)

    @property
    def idle(self) -> int:
        """The ticks in which a stage does nothing, of each stage."""
        return self.ticks - 3 * self.microbatches * self.chunks

    @property
    def bubble(self) -> float:
        """The idle share of all ticks of all stages."""
        return float((self.table[..., 0] == IDLE).mean())

    @functools.cached_property
    def when(self) -> dict[Work, int]:
        """The tick of every operation."""
        position = {place: number for number, place in enumerate(self.positions)}
        return {
            (int(op), position[stage, int(chunk)], int(m)): tick
            for tick, row in enumerate(self.table)
            for stage, (op, chunk, m) in enumerate(row)
            if op != IDLE
        }

    def alive(self, first: int, last: int) -> int:
        """The most microbatches of a stage between the operations `first` and `last`."""
        change = np.zeros((self.ticks + 1, self.stages), int)
        for (op, position, _), tick in self.when.items():
            if op in (first, last):
                stage = self.positions[position][0]
                change[tick + (op == last), stage] += 1 if op == first else -1
        return int(np.cumsum(change, axis=0).max())

    @property
    def in_flight(self) -> int:
        """The most microbatches (or chunks of them) that a stage keeps for the backward pass."""
        return self.alive(F, B)

    @property
    def pending(self) -> int:
        """The most whose weight gradients a stage has still to compute."""
        return self.alive(B, W)

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
        return [[_cell(op, chunk, m, self.chunks) for op, chunk, m in row] for row in rows]

    @property
    def text(self) -> str:
        """The table, a line for each stage."""
        width = max(len(cell) for row in self.cells for cell in row)
        return "\n".join(" ".join(c.ljust(width) for c in row).rstrip() for row in self.cells)

    @property
    def schedule(self) -> str:
        """Its name."""
        return self.name


def _cell(op: int, chunk: int, microbatch: int, chunks: int) -> str:
    if op == IDLE:
        return LETTERS[IDLE]
    return f"{LETTERS[op]}{microbatch}" + (f".{chunk}" if chunks > 1 else "")


def make(name: str, stages: int, microbatches: int, chunks: int = 2) -> Schedule:
    """The schedule of a name in `NAMES`; `chunks` are those of an interleaved one."""
    if name in ("gpipe", "1f1b", "interleaved"):
        count = chunks if name == "interleaved" else 1
        if count > 1 and microbatches % stages:
            raise ValueError(
                f"schedule='interleaved': {microbatches} microbatches do not divide by {stages} "
                "stages; a multiple of the stages is allowed, or schedule='zbv'"
            )
        works = _in_order(stages, microbatches, count, everything_first=name == "gpipe")
        return _schedule(name, stages, microbatches, count, False, works)
    if name == "zb-h1":
        limits = [stages - stage for stage in range(stages)]
        works = _greedy(stages, microbatches, 1, limits, (3 * stages + 1) // 2)
        return _schedule(name, stages, microbatches, 1, False, works)
    if name == "zbv":
        works = _greedy(stages, microbatches, 2, [2 * stages] * stages, 2 * stages + 2)
        return _schedule(name, stages, microbatches, 2, stages > 1, works)
    raise ValueError(
        f"schedule={name!r}: allowed are {', '.join(map(repr, NAMES))}, 'auto', and a table of "
        "your own as text, a line for each stage"
    )


def forward_only(schedule: Schedule) -> Schedule:
    """Forward passes alone, on the same stages and chunks, as early as they can be."""
    stages, microbatches, chunks = schedule.stages, schedule.microbatches, schedule.chunks
    positions = schedule.positions
    mine = [
        [n for n, (owner, _) in enumerate(positions) if owner == stage] for stage in range(stages)
    ]
    count = [0] * len(positions)

    def choose(stage: int, can: Callable[[Work], bool], done: Mapping[Work, int]) -> Work | None:
        works = ((F, n, count[n]) for n in reversed(mine[stage]))
        chosen = next((work for work in works if work[2] < microbatches and can(work)), None)
        if chosen:
            count[chosen[1]] += 1
        return chosen

    when = _simulate(stages, microbatches, chunks, choose, False, operations=1)
    table = _table(positions, stages, when)
    return Schedule(schedule.name, stages, microbatches, chunks, schedule.vee, table)


def parse(text: str, vee: bool = False, name: str = "own") -> Schedule:
    """The schedule of a table as `Schedule.text` prints it; an error says what is wrong with it."""
    lines = [line.split() for line in text.strip().splitlines()]
    ticks, works = max(map(len, lines)), dict[tuple[int, int], tuple[int, int, int]]()
    for stage, cells in enumerate(lines):
        for tick, cell in enumerate(cells):
            found = re.fullmatch(r"([FBW])(\d+)(?:\.(\d+))?", cell)
            if found:
                op, microbatch, chunk = found.groups()
                works[tick, stage] = (LETTERS.index(op), int(chunk or 0), int(microbatch))
            elif cell != LETTERS[IDLE]:
                raise ValueError(
                    f"the schedule's table, stage {stage}, tick {tick}: {cell!r}; allowed are '.', "
                    "and F, B or W with the number of a microbatch, and of a chunk after a point"
                )
    if not works:
        raise ValueError("the schedule's table has no work in it")
    table = np.zeros((ticks, len(lines), 3), int)
    for place, work in works.items():
        table[place] = work
    _, chunks, microbatches = (1 + table.reshape(-1, 3).max(0)).tolist()
    return check(Schedule(name, len(lines), microbatches, chunks, vee, table))


def check(schedule: Schedule) -> Schedule:
    """The schedule; an error where it misses work or does it before what that depends on."""
    when, last = schedule.when, len(schedule.positions) - 1
    busy = int((schedule.table[..., 0] != IDLE).sum())
    for op in (F, B, W):
        for position in range(last + 1):
            for m in range(schedule.microbatches):
                if (op, position, m) not in when:
                    raise ValueError(
                        f"the schedule's table never does {_said(schedule, (op, position, m))}"
                    )
    if busy != len(when):
        raise ValueError("the schedule's table does the same work twice")
    for work, tick in when.items():
        for needed in _needs(work, last):
            if when[needed] >= tick:
                raise ValueError(
                    f"the schedule's table does {_said(schedule, work)} in tick {tick}, before it "
                    f"can: {_said(schedule, needed)} is done in tick {when[needed]}"
                )
    return schedule


def _said(schedule: Schedule, work: Work) -> str:
    op, position, m = work
    stage, chunk = schedule.positions[position]
    return f"{_cell(op, chunk, m, schedule.chunks)} of stage {stage}"


def _positions(stages: int, chunks: int, vee: bool) -> list[tuple[int, int]]:
    if vee:
        down = [(stage, 0) for stage in range(stages)]
        return down + [(stage, 1) for stage in reversed(range(stages))]
    return [(stage, chunk) for chunk in range(chunks) for stage in range(stages)]


def _needs(work: Work, last: int, whole: bool = False) -> list[Work]:
    """What has to be done in an earlier tick; a `whole` backward pass is B and W, then sent."""
    op, position, m = work
    if op == W:
        return [(B, position, m)]
    if op == F:
        return [(F, position - 1, m)] if position else []
    after = [(W if whole else B, position + 1, m)] if position < last else []
    return [(F, position, m), *after]


def _schedule(
    name: str, stages: int, microbatches: int, chunks: int, vee: bool, when: Mapping[Work, int]
) -> Schedule:
    table = _table(_positions(stages, chunks, vee), stages, when)
    return check(Schedule(name, stages, microbatches, chunks, vee, table))


def _table(
    positions: Sequence[tuple[int, int]], stages: int, when: Mapping[Work, int]
) -> np.ndarray:
    table = np.zeros((1 + max(when.values()), stages, 3), int)
    for (op, position, m), tick in when.items():
        stage, chunk = positions[position]
        table[tick, stage] = op, chunk, m
    return table


def _in_order(
    stages: int, microbatches: int, chunks: int, everything_first: bool
) -> dict[Work, int]:
    """Each stage does a list of its own in order, and waits: GPipe, 1F1B, interleaved 1F1B.

    The first forward passes fill the pipeline; then a backward pass, all of it, and a forward pass
    take turns. Chunks take turns after as many microbatches as there are stages.
    """
    lists = []
    for stage in range(stages):
        rounds = [
            [(position, m) for m in range(first, min(first + stages, microbatches))]
            for first in range(0, microbatches, stages)
            for position in range(stage, stages * chunks, stages)
        ]
        forward = [(F, *each) for turn in rounds for each in turn]
        turns = [rounds[i : i + chunks][::-1] for i in range(0, len(rounds), chunks)]
        backward = [each for group in turns for turn in group for each in turn]
        filling = len(forward) if everything_first else stages * chunks - stage
        later = [[work] for work in forward[filling:]] + [[]] * len(forward)
        works = forward[:filling]
        for each, more in zip(backward, later, strict=False):
            works += [(B, *each), (W, *each), *more]
        lists.append(works)

    def choose(stage: int, can: Callable[[Work], bool], done: Mapping[Work, int]) -> Work | None:
        following = next((work for work in lists[stage] if work not in done), None)
        return following if following and can(following) else None

    return _simulate(stages, microbatches, chunks, choose, whole=True)


def _greedy(
    stages: int, microbatches: int, chunks: int, limits: Sequence[int], most: int
) -> dict[Work, int]:
    """Each stage does what others wait for: B before F before W.

    At most `limits[stage]` microbatches wait for B, and at most `most` for W.
    """
    mine = [
        [n for n, (owner, _) in enumerate(_positions(stages, chunks, chunks > 1)) if owner == stage]
        for stage in range(stages)
    ]
    count = dict.fromkeys(((op, n) for op in (F, B, W) for n in range(stages * chunks)), 0)

    def choose(stage: int, can: Callable[[Work], bool], done: Mapping[Work, int]) -> Work | None:
        forward, backward, weights = (sum(count[op, n] for n in mine[stage]) for op in (F, B, W))
        full = forward - backward >= limits[stage] or forward - weights >= most
        works = [
            *((B, n, count[B, n]) for n in mine[stage]),
            *(() if full else ((F, n, count[F, n]) for n in reversed(mine[stage]))),
            *((W, n, count[W, n]) for n in mine[stage]),
        ]
        chosen = next((work for work in works if work[2] < microbatches and can(work)), None)
        if chosen:
            count[chosen[:2]] += 1
        return chosen

    return _simulate(stages, microbatches, chunks, choose, whole=False)


def _simulate(
    stages: int,
    microbatches: int,
    chunks: int,
    choose: Callable[[int, Callable[[Work], bool], Mapping[Work, int]], Work | None],
    whole: bool,
    operations: int = 3,
) -> dict[Work, int]:
    """The tick of all work, if every stage chooses in each tick of what can be done."""
    done: dict[Work, int] = {}
    last, tick = stages * chunks - 1, 0
    while len(done) < operations * microbatches * (last + 1):

        def can(work: Work, tick: int = tick) -> bool:
            return all(done.get(needed, tick) < tick for needed in _needs(work, last, whole))

        chosen = [choose(stage, can, done) for stage in range(stages)]
        if not any(chosen):
            raise ValueError(f"a schedule of {stages} stages waits for itself in tick {tick}")
        done.update((work, tick) for work in chosen if work)
        tick += 1
    return done
