"""The problem as a mixed-integer linear program, solved to proven optimality.

Linking is the local polytope: s[p] says whether a node takes strategy p, e[p, q] whether the ends
of an edge take p and q; the sum of e[p, q] over q is s[p], over p it is s[q]. Only s is integral.
Rows of the memory limit are added at the times where the last answer exceeds it, which are few.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from typing import Any

import numpy as np

from gshard.autosharding.budget import PROGRESS, WORK, Clock
from gshard.autosharding.solver.problem import (
    ROUNDING,
    Floats,
    Ints,
    NoAnswerError,
    Problem,
    entries,
)

# Iterations of the simplex method: in a node of the search tree, roughly, and in any run at least.
_ITERATIONS = 100
_INTEGRAL = 8  # times the work, for iterations of an integral program


@dataclasses.dataclass(frozen=True)
class Solved:
    """What a run ended with: a solution if there is one, and a lower bound of the cost."""

    values: Floats | None
    bound: float


class HighsBackend:
    """HiGHS, with rows added to the live model and a starting solution."""

    def __init__(self, costs: Floats, matrix: Any, right: Floats, integers: int) -> None:
        import highspy

        self.highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self.integers, self.integral = integers, False
        self.ends = math.inf  # the processor time at which an integral run has to end
        self.highs.cbMipInterrupt += self._interrupt
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self.highs.setOptionValue(option, value)
        lp = highspy.HighsLp()
        lp.num_row_, lp.num_col_ = matrix.shape
        lp.col_cost_, lp.col_lower_ = costs, np.zeros(len(costs))
        # Rows keep columns below 1; bounds of their own would only hinder HiGHS's presolve.
        lp.col_upper_ = np.full(len(costs), highspy.kHighsInf)
        lp.row_lower_, lp.row_upper_ = right, right
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = matrix.indptr, matrix.indices
        lp.a_matrix_.value_ = matrix.data
        self.highs.passModel(lp)

    def add_row(self, columns: Ints, values: Floats, upper: float) -> None:
        """Add a row: the sum is at most `upper`."""
        self.highs.addRow(-np.inf, upper, len(columns), columns.astype(np.int32), values)

    def run(self, integral: bool, tolerance: float, start: Floats | None, clock: Clock) -> Solved:
        """Solve, with the first columns integral or not."""
        import highspy

        if integral and not self.integral:
            kinds = np.full(self.integers, highspy.HighsVarType.kInteger)
            self.highs.changeColsIntegrality(
                self.integers, np.arange(self.integers, dtype=np.int32), kinds
            )
            self.integral = True
        if integral:
            # HiGHS would complete the relaxation's solution by a search that no time limit ends.
            self.highs.clearSolver()
        self.highs.setOptionValue("mip_rel_gap", tolerance)
        self._limit(clock)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            self.highs.setSolution(solution)
        self.highs.run()
        status, info = self.highs.getModelStatus(), self.highs.getInfo()
        iterations = max(info.simplex_iteration_count, _ITERATIONS)
        work = self._per_iteration * iterations * (_INTEGRAL if integral else 1)
        clock.charge(min(work, max(2 * clock.left, 0.0)))
        if status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        ):
            raise NoAnswerError("no combination of strategies fits into memory")
        optimal = status == highspy.HighsModelStatus.kOptimal
        if not integral:
            if not optimal:
                return Solved(None, -np.inf)
            return Solved(self._values(), float(info.objective_function_value))
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Solved(self._values() if found else None, float(info.mip_dual_bound))

    @property
    def _per_iteration(self) -> float:
        """Seconds of work of an iteration."""
        return WORK.iteration + WORK.iteration_entry * float(self.highs.getNumNz())

    def _limit(self, clock: Clock) -> None:
        """Limit the next run, by iterations and nodes where work is counted."""
        wall = max(clock.guard_left, 0.0)
        if clock.root.counted:
            # The root of the search tree has no limit of iterations.
            self.ends = time.process_time() + min(wall / 2, 2 * clock.left)
            wall *= 10
            most = max(1, min(int(clock.left / self._per_iteration), 2**31 - 1))
            self.highs.setOptionValue("simplex_iteration_limit", most)
            self.highs.setOptionValue("mip_max_nodes", max(1, most // _ITERATIONS))
        # HiGHS counts the time of all runs of a model together.
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + wall)

    def _interrupt(self, event: Any) -> None:
        """End an integral run that takes too much processor time: HiGHS limits wall time alone."""
        if time.process_time() > self.ends:
            event.interrupt()

    def _values(self) -> Floats:
        return np.array(self.highs.getSolution().col_value)


class ScipyBackend:
    """HiGHS as SciPy brings it: every run starts from nothing, and only wall time ends it."""

    def __init__(self, costs: Floats, matrix: Any, right: Floats, integers: int) -> None:
        self.costs, self.integers = costs, integers
        self.rows: list[tuple[Any, Any, Any]] = [(matrix, right, right)]

    def add_row(self, columns: Ints, values: Floats, upper: float) -> None:
        """Add a row: the sum is at most `upper`."""
        import scipy.sparse

        own, shape = (values, (np.zeros_like(columns), columns)), (1, len(self.costs))
        self.rows.append((scipy.sparse.csr_matrix(own, shape=shape), -np.inf, upper))

    def run(self, integral: bool, tolerance: float, start: Floats | None, clock: Clock) -> Solved:
        """Solve, with the first columns integral or not."""
        import scipy.optimize

        kinds, seconds = np.zeros(len(self.costs)), min(clock.left, clock.guard_left)
        kinds[: self.integers] = integral
        found = scipy.optimize.milp(
            self.costs,
            integrality=kinds,
            bounds=scipy.optimize.Bounds(0.0, 1.0),
            constraints=[scipy.optimize.LinearConstraint(*row) for row in self.rows],
            options={"time_limit": seconds, "mip_rel_gap": tolerance},
        )
        clock.charge(seconds if found.status == 1 else 0.0)
        if found.status == 2:
            raise NoAnswerError("no combination of strategies fits into memory")
        bound = found.mip_dual_bound if integral else found.fun if found.status == 0 else None
        values = None if found.x is None else np.asarray(found.x)
        return Solved(values, -np.inf if bound is None else float(bound))


Backend = HighsBackend | ScipyBackend


def open_backend(costs: Floats, matrix: Any, right: Floats, integers: int) -> Backend:
    """A program: minimize costs, matrix @ columns = right, the first `integers` columns whole."""
    if importlib.util.find_spec("highspy") is not None:
        return HighsBackend(costs, matrix, right, integers)
    return ScipyBackend(costs, matrix, right, integers)


# Rows added after one solve; more are rarely needed, and fewer mean more solves.
_ROWS_AT_ONCE = 10


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

    def log(self) -> None:
        """A line of progress."""
        PROGRESS.debug("cost %s, at least %s", self.cost, self.bound)


NOTHING = Result(None, np.inf, -np.inf)


class LinearProgram:
    """The linear program of a problem, with the memory rows that were needed so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.first, self.column = problem.first, problem.column
        self.count = problem.strategies
        self.backend = self._build()
        self.times: set[int] = set()

    def _build(self) -> Backend:
        """Columns: s of each node, then e of each edge. Rows: one per node, then of each edge."""
        import scipy.sparse

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
        filled = np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))
        matrix = scipy.sparse.csr_matrix(filled, shape=(row, column))
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
        excess[excess <= ROUNDING * np.abs(memory.limit)] = 0.0
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
        live = memory.live(at)
        held = entries(memory.first[live], memory.sizes[live])
        usage = np.bincount(self.column[held], memory.usage[held], self.count)
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


def solve_exactly(problem: Problem, clock: Clock, tolerance: float = 1e-9) -> Result:
    """The best answer, proven up to `tolerance`, or the best one known when time runs out.

    Raises `NoAnswerError` where there is none.
    """
    if not problem.costs:
        if (problem.memory.limit < 0).any():
            raise NoAnswerError("the memory limit is below what every answer needs")
        return Result(np.zeros(0, dtype=np.int64), problem.constant, problem.constant)
    best = NOTHING
    loading = WORK.program_entry * (problem.strategies + 2 * problem.pairs)
    if loading > clock.left:
        return best
    program = LinearProgram(problem)
    clock.charge(loading)
    for integral in (False, True):
        while clock.left > 0:
            given = None if best.answer is None or not integral else program.start(best.answer)
            solved = program.backend.run(integral, tolerance, given, clock)
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
            best.log()
            if best.gap <= tolerance or not program.cut(solved.values):
                break
        if best.gap <= tolerance:
            break
    return best
