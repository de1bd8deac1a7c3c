"""The problem as a mixed-integer linear program, solved to proven optimality.

Linking is the local polytope: s[p] says whether a node takes strategy p, e[p, q] whether the ends
of an edge take p and q; the sum of e[p, q] over q is s[p], over p it is s[q]. Only s is integral.
Rows of the memory limit are added at the times where the last answer exceeds it, which are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from gshard.autosharding.backend import Backend, open_backend
from gshard.autosharding.clock import Clock
from gshard.autosharding.memory import Floats, Ints
from gshard.autosharding.problem import NoAnswerError, Problem

# Rows added after one solve; more are rarely needed, and fewer mean more solves.
_ROWS_AT_ONCE = 10

# A time is full if its usage exceeds the limit by more than this share of it: rounding of sums of
# exact numbers stays below, and answers are checked against the limit itself.
_ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class Result:
    """The best answer found (None if there is none yet), its cost, and a lower bound of all."""

    answer: Ints | None
    cost: float
    bound: float

    @property
    def gap(self) -> float:
        """By how much the cost may exceed the best one, as a share of the cost."""
        if self.answer is None:
            return np.inf
        return max(0.0, self.cost - self.bound) / max(abs(self.cost), 1e-30)


Progress = Callable[[Result], None]


class LinearProgram:
    """The linear program of a problem, with the memory rows that were needed so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        sizes = [len(c) for c in problem.costs]
        self.first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.count = int(self.first[-1])
        memory = problem.memory
        within = np.arange(len(memory.usage)) - np.repeat(memory.first[:-1], memory.sizes)
        self.column = np.repeat(self.first[memory.node], memory.sizes) + within
        self.backend = self._build()
        self.times: set[int] = set()

    def _build(self) -> Backend:
        """Columns: s of each node, then e of each edge. Rows: one per node, then of each edge."""
        rows, columns, values = [], [], []
        nodes = np.repeat(np.arange(len(self.problem.costs)), np.diff(self.first))
        rows.append(nodes)
        columns.append(np.arange(self.count))
        values.append(np.ones(self.count))
        costs = [np.concatenate([*self.problem.costs, np.zeros(0)])]
        row, column = len(self.problem.costs), self.count
        for edge in self.problem.edges:
            ends = np.nonzero(np.isfinite(edge.costs))
            own = column + np.arange(len(ends[0]))
            costs.append(edge.costs[ends])
            column += len(own)
            for node, end, size in zip(
                (edge.first, edge.second), ends, edge.costs.shape, strict=True
            ):
                rows += [row + end, row + np.arange(size)]
                columns += [own, self.first[node] + np.arange(size)]
                values += [np.ones(len(own)), -np.ones(size)]
                row += size
        right = np.zeros(row)
        right[: len(self.problem.costs)] = 1.0
        matrix = np.concatenate(rows), np.concatenate(columns), np.concatenate(values)
        return open_backend(np.concatenate(costs), matrix, right, self.count)

    def usage(self, chosen: Floats) -> Floats:
        """The memory at each time, with shares of strategies as a relaxation chooses them."""
        memory = self.problem.memory
        if not len(memory.node):
            return np.zeros(len(memory.limit))
        weighed = memory.usage * chosen[self.column]
        return memory.over_time(np.add.reduceat(weighed, memory.first[:-1]))

    def cut(self, chosen: Floats) -> bool:
        """Add memory rows where an answer exceeds the limit; whether there were any."""
        memory = self.problem.memory
        excess = self.usage(chosen) - memory.limit
        excess[excess <= _ROUNDING * np.abs(memory.limit)] = 0.0
        near = max(1, len(excess) // 50)  # neighbouring times hold nearly the same
        added = 0
        while added < _ROWS_AT_ONCE and excess.max(initial=0.0) > 0.0:
            time_ = int(excess.argmax())
            if time_ in self.times:
                break
            self._add_row(time_)
            excess[max(0, time_ - near) : time_ + near + 1] = 0.0
            added += 1
        return added > 0

    def _add_row(self, at: int) -> None:
        memory = self.problem.memory
        entries, _ = memory.at(at)
        usage = np.bincount(self.column[entries], memory.usage[entries], self.count)
        columns = np.flatnonzero(usage)
        scale = max(float(usage.max()), 1.0)
        self.backend.add_row(columns, usage[columns] / scale, float(memory.limit[at]) / scale)
        self.times.add(at)

    def answer(self, chosen: Floats) -> Ints:
        """The strategy of each node that a solution chooses."""
        pieces = np.split(chosen[: self.count], self.first[1:-1])
        return np.array([int(piece.argmax()) for piece in pieces], dtype=np.int64)

    def start(self, answer: Ints) -> Floats:
        """An answer as a solution: s and e."""
        values = [np.zeros(self.count)]
        values[0][self.first[:-1] + answer] = 1.0
        for edge in self.problem.edges:
            table = np.zeros(edge.costs.shape)
            table[answer[edge.first], answer[edge.second]] = 1.0
            values.append(table[np.isfinite(edge.costs)])
        return np.concatenate(values)


def solve_exactly(
    problem: Problem,
    seconds: float,
    start: Ints | None = None,
    progress: Progress | None = None,
    tolerance: float = 1e-9,
    clock: Clock | None = None,
) -> Result:
    """The best answer, proven up to `tolerance`, or the best one known when time runs out.

    `start` is an answer within the limit. Raises `NoAnswerError` where there is none.
    """
    if not problem.costs:
        if (problem.memory.limit < 0).any():
            raise NoAnswerError("the memory limit is below what every answer needs")
        return Result(np.zeros(0, dtype=np.int64), problem.constant, problem.constant)
    clock = Clock(seconds) if clock is None else clock
    until = clock.now() + seconds
    program = LinearProgram(problem)
    best = Result(start, np.inf if start is None else problem.cost(start), -np.inf)
    for integral in (False, True):
        while (left := until - clock.now()) > 0:
            given = None if best.answer is None or not integral else program.start(best.answer)
            solved = program.backend.run(integral, left, tolerance, given, clock)
            if solved.infeasible:
                raise NoAnswerError("no combination of strategies fits into memory")
            bound = max(best.bound, solved.bound + problem.constant)
            best = dataclasses.replace(best, bound=min(bound, best.cost))
            if solved.values is None and not integral:
                return best  # no time for the relaxation, so none for more
            if solved.values is None:
                break
            answer = program.answer(solved.values)
            cost = problem.cost(answer)
            if cost < best.cost and problem.excess(answer) <= 0:
                best = Result(answer, cost, min(best.bound, cost))
            if progress is not None:
                progress(best)
            if best.gap <= tolerance or not program.cut(solved.values):
                break
        if best.gap <= tolerance:
            break
    return best
