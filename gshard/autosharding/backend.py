"""The mixed-integer solvers: HiGHS through `highspy`, or through SciPy where that is missing."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import time
from typing import Any, Protocol

import numpy as np

from gshard.autosharding.clock import Clock
from gshard.autosharding.memory import Floats, Ints

# Seconds of work of an iteration of the simplex method: for itself, and for each entry of the
# matrix. The number of iterations that a node of the search tree takes, roughly.
_PER_ITERATION, _PER_ENTRY = 5e-5, 1e-9
_LEAST_ITERATIONS, _ITERATIONS_OF_NODE = 100, 100
_INTEGRAL = 8  # times the work, for iterations of an integral program
_MOST = 2**31 - 1

Matrix = tuple[Ints, Ints, Floats]


@dataclasses.dataclass(frozen=True)
class Solved:
    """What a run ended with: a solution if there is one, and a lower bound of the cost."""

    values: Floats | None
    bound: float
    infeasible: bool = False


class Backend(Protocol):
    """A linear program over columns from 0 to 1, to which rows can be added."""

    def add_row(self, columns: Ints, values: Floats, upper: float) -> None:
        """Add a row: the sum is at most `upper`."""

    def run(
        self,
        integral: bool,
        seconds: float,
        tolerance: float,
        start: Floats | None,
        clock: Clock,
    ) -> Solved:
        """Solve, with the first columns integral or not."""


def open_backend(costs: Floats, matrix: Matrix, right: Floats, integers: int) -> Backend:
    """A program: minimize costs, matrix @ columns = right, the first `integers` columns whole."""
    if importlib.util.find_spec("highspy") is not None:
        return HighsBackend(costs, matrix, right, integers)
    return ScipyBackend(costs, matrix, right, integers)


class HighsBackend:
    """HiGHS, with rows added to the live model and a starting solution."""

    def __init__(self, costs: Floats, matrix: Matrix, right: Floats, integers: int) -> None:
        import highspy
        import scipy.sparse

        self.highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        self.integers, self.integral = integers, False
        self.ends = math.inf  # the processor time at which an integral run has to end
        self.highs.cbMipInterrupt += self._interrupt
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self.highs.setOptionValue(option, value)
        rows, columns, values = matrix
        shape = len(right), len(costs)
        by_row = scipy.sparse.csr_matrix((values, (rows, columns)), shape=shape)
        lp = highspy.HighsLp()
        lp.num_row_, lp.num_col_ = shape
        lp.col_cost_, lp.col_lower_ = costs, np.zeros(shape[1])
        # Rows keep columns below 1; bounds of their own would only hinder HiGHS's presolve.
        lp.col_upper_ = np.full(shape[1], highspy.kHighsInf)
        lp.row_lower_, lp.row_upper_ = right, right
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_, lp.a_matrix_.index_ = by_row.indptr, by_row.indices
        lp.a_matrix_.value_ = by_row.data
        self.highs.passModel(lp)

    def add_row(self, columns: Ints, values: Floats, upper: float) -> None:
        """Add a row: the sum is at most `upper`."""
        self.highs.addRow(-np.inf, upper, len(columns), columns.astype(np.int32), values)

    def run(
        self,
        integral: bool,
        seconds: float,
        tolerance: float,
        start: Floats | None,
        clock: Clock,
    ) -> Solved:
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
        self._limit(seconds, clock)
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start)
            self.highs.setSolution(solution)
        self.highs.run()
        status, info = self.highs.getModelStatus(), self.highs.getInfo()
        iterations = max(info.simplex_iteration_count, _LEAST_ITERATIONS)
        clock.charge(self._per_iteration * iterations * (_INTEGRAL if integral else 1))
        if status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        ):
            return Solved(None, -np.inf, infeasible=True)
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
        return _PER_ITERATION + _PER_ENTRY * float(self.highs.getNumNz())

    def _limit(self, seconds: float, clock: Clock) -> None:
        """Limit the next run, by iterations and nodes where work is counted."""
        wall = seconds
        if clock.counted is not None:
            guard = max(clock.guard_left, 0.0) / 2
            self.ends, wall = time.process_time() + guard, max(clock.wall - time.monotonic(), 0.0)
            most = max(1, min(int(seconds / self._per_iteration), _MOST))
            self.highs.setOptionValue("simplex_iteration_limit", most)
            self.highs.setOptionValue("mip_max_nodes", max(1, most // _ITERATIONS_OF_NODE))
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

    def __init__(self, costs: Floats, matrix: Matrix, right: Floats, integers: int) -> None:
        import scipy.sparse

        rows, columns, values = matrix
        shape = len(right), len(costs)
        self.costs, self.integers, self.right = costs, integers, right
        self.matrix = scipy.sparse.csr_matrix((values, (rows, columns)), shape=shape)
        self.added: list[tuple[Any, float]] = []

    def add_row(self, columns: Ints, values: Floats, upper: float) -> None:
        """Add a row: the sum is at most `upper`."""
        import scipy.sparse

        row = scipy.sparse.csr_matrix(
            (values, (np.zeros_like(columns), columns)), shape=(1, len(self.costs))
        )
        self.added.append((row, upper))

    def run(
        self,
        integral: bool,
        seconds: float,
        tolerance: float,
        start: Floats | None,
        clock: Clock,
    ) -> Solved:
        """Solve, with the first columns integral or not."""
        import scipy.optimize

        constraints = [scipy.optimize.LinearConstraint(self.matrix, self.right, self.right)]
        if self.added:
            rows = scipy.sparse.vstack([row for row, _ in self.added])
            uppers = np.array([upper for _, upper in self.added])
            constraints.append(scipy.optimize.LinearConstraint(rows, -np.inf, uppers))
        kinds = np.zeros(len(self.costs))
        kinds[: self.integers] = integral
        found = scipy.optimize.milp(
            self.costs,
            integrality=kinds,
            bounds=scipy.optimize.Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": min(seconds, clock.guard_left), "mip_rel_gap": tolerance},
        )
        clock.charge(seconds if found.status == 1 else 0.0)
        if found.status == 2:
            return Solved(None, -np.inf, infeasible=True)
        bound = found.mip_dual_bound if integral else found.fun if found.status == 0 else None
        values = None if found.x is None else np.asarray(found.x)
        return Solved(values, -np.inf if bound is None else float(bound))
