"""Search, for problems that stay too large to be solved at once.

Prices on memory and messages along the edges give a bound and say which strategies look good. A
part of the strategies of all nodes (a kernel), or all strategies of some nodes (a neighbourhood),
is a smaller problem: it is presolved and solved exactly, again and again around the best answer.
Answers that are drawn within the limit take turns with that; what has gained more gets more time.
"""

from __future__ import annotations

import math

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.ilp import Progress, Result, solve_exactly
from gshard.autosharding.solver.presolve import ProblemGraph, presolve
from gshard.autosharding.solver.prices import Prices
from gshard.autosharding.solver.problem import Bools, Floats, Ints, NoAnswerError, Problem
from gshard.autosharding.solver.rounding import QUICK, USUAL, Effort, Rounding

# Pairs of strategies of the first kernel; HiGHS proves problems of this size within seconds.
_FIRST_PAIRS = 20_000

# Of the time that is left, the share that one kernel or neighbourhood may take.
_SHARE = 0.06

# Draws of all nodes before anything else.
_FIRST_DRAWS = 3

# Seconds of work of making and reducing a smaller problem.
_PER_NODE, _PER_PAIR = 2.5e-4, 6e-6


class Search:
    """The best answer so far, and how it is improved."""

    def __init__(
        self,
        problem: Problem,
        seconds: float,
        progress: Progress | None,
        clock: Clock,
        start: Ints | None,
    ) -> None:
        self.problem, self.progress, self.clock = problem, progress, clock
        self.until = clock.now() + seconds
        self.prices = Prices(problem)
        self.random = np.random.default_rng(0)
        self.rounding = Rounding(problem, self.prices, self.random, clock)
        self.rates = [1e-6, 1e-6]  # what draws and neighbourhoods gain, as shares a second
        self.best = Result(start, np.inf if start is None else problem.cost(start), -np.inf)
        self.neighbours: list[list[int]] = [[] for _ in problem.costs]
        for edge in problem.edges:
            self.neighbours[edge.first].append(edge.second)
            self.neighbours[edge.second].append(edge.first)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.until - self.clock.now()

    def run(self) -> Result:
        """Search until the best answer is proven or time runs out."""
        self._found(self.rounding.draw(self.best.answer, effort=QUICK))
        self.prices.ascend(self.left * 0.2, 400, clock=self.clock)
        self._found(None)
        for _ in range(_FIRST_DRAWS):
            self._draw(None, self._affordable())
        self._solve_kernels()
        size = 4_000
        while self.left > 0 and self.best.answer is not None and self.best.gap > 1e-9:
            draws, programs = self.rates
            share = min(max(draws / (draws + programs), 0.2), 0.8)
            began, before = self.clock.now(), self.best.cost
            if drawn := self.random.random() < share:
                self._draw(self._region())
            else:
                size = self._improve(size)
            self._rate(0 if drawn else 1, before, self.clock.now() - began)
        return self.best

    def _rate(self, kind: int, before: float, took: float) -> None:
        """Remember what a draw (0) or a neighbourhood (1) gained, by its time; the past fades."""
        gained = (before - self.best.cost) / max(abs(before), 1e-30)
        rate = gained / max(took, 1e-3) + 1e-9
        self.rates[kind] = 0.8 * self.rates[kind] + 0.2 * rate

    def _solve_kernels(self) -> None:
        """Solve growing kernels, as long as that is quick or nothing was found."""
        pairs = _FIRST_PAIRS
        while self.left > 0 and self.best.gap > 1e-9:
            began = self.clock.now()
            solved = self._solve_kernel(pairs)
            quick = self.clock.now() - began < 0.5 * _SHARE * max(self.left, 0.0)
            if self.best.answer is not None and not (solved and quick):
                break
            pairs *= 2 if quick else 1
            if not quick and self.best.answer is None:
                self.prices.ascend(self.left * 0.1, 50, clock=self.clock)
            if pairs > 4 * self.problem.pairs:
                break

    def _region(self) -> list[int] | None:
        """Nodes around one that was drawn, so many that a draw takes a small share of the time;
        None for all of them."""
        count, edges = len(self.neighbours), 0
        most = int(_SHARE / 3 * self.left / USUAL.work(1))
        size = math.exp(self.random.uniform(math.log(20), math.log(20 + 3 * count)))
        if size > count and self._affordable() is USUAL:
            return None
        queue = [int(self.random.integers(count))]
        seen = set(queue)
        chosen: list[int] = []
        while queue and len(chosen) < size and edges < most:
            node = queue.pop(int(self.random.integers(min(len(queue), 4))))
            chosen.append(node)
            for other in self.neighbours[node]:
                if other not in seen:
                    seen.add(other)
                    queue.append(other)
                else:
                    edges += 1
        return chosen

    def _affordable(self) -> Effort:
        """The effort for a draw of all nodes."""
        usual = USUAL.work(len(self.problem.edges)) <= _SHARE * self.left
        return USUAL if usual else QUICK

    def _draw(self, region: list[int] | None, effort: Effort = USUAL) -> None:
        """Draw answers within the limit; all nodes change where there is no region."""
        if self.left > 0 and self.best.gap > 1e-9:
            self._found(self.rounding.draw(self.best.answer, region, effort))

    def _found(self, answer: Ints | None) -> bool:
        """Take an answer if it is the best; whether it is."""
        cost = np.inf if answer is None else self.problem.cost(answer)
        better = cost < self.best.cost and self.problem.excess(answer) <= 0  # type: ignore[arg-type]
        if better:
            self.best = Result(answer, cost, self.best.bound)
        bound = min(max(self.best.bound, self.prices.bound), self.best.cost)
        self.best = Result(self.best.answer, self.best.cost, bound)
        if self.progress is not None:
            self.progress(self.best)
        return better

    def _solve(self, kept: list[Bools], seconds: float) -> tuple[bool, bool]:
        """Solve with only these strategies; whether it was solved, and gave a better answer."""
        network = ProblemGraph(self.problem)
        for node, strategies in enumerate(kept):
            network.keep(node, np.flatnonzero(strategies))
        part, back = network.result()
        self.clock.charge(_PER_NODE * len(part.costs) + _PER_PAIR * part.pairs)
        try:
            smaller = presolve(part)
            result = solve_exactly(smaller.problem, min(seconds, self.left), clock=self.clock)
        except NoAnswerError:
            return True, False
        if result.answer is None:
            return False, False
        better = self._found(back(smaller.back(result.answer)))
        return result.gap <= 1e-9, better

    def _solve_kernel(self, pairs: int) -> bool:
        """The strategies with the least margins, as many as give this number of pairs."""
        margins = self.prices.margins
        low, high = 0.0, max(float(m.max()) for m in margins)
        for _ in range(30):
            middle = (low + high) / 2
            if self._pairs([m <= middle for m in margins]) > pairs:
                high = middle
            else:
                low = middle
        kept = [m <= max(low, float(m.min())) for m in margins]
        for node, smallest in enumerate(self._smallest()):
            kept[node][smallest] = True
            if self.best.answer is not None:
                kept[node][self.best.answer[node]] = True
        solved, _ = self._solve(kept, _SHARE * self.left)
        return solved

    def _pairs(self, kept: list[Bools]) -> int:
        counts = [int(k.sum()) for k in kept]
        return sum(counts[e.first] * counts[e.second] for e in self.problem.edges)

    def _smallest(self) -> Ints:
        """Of each node the strategy that holds the least memory over all its time."""
        memory = self.problem.memory
        spans = np.repeat(memory.stop - memory.start, memory.sizes)
        total = np.bincount(self.prices.column, memory.usage * spans, int(self.prices.first[-1]))
        pieces = np.split(total, self.prices.first[1:-1])
        return np.array([int(piece.argmin()) for piece in pieces])

    def _improve(self, size: int) -> int:
        """Free a neighbourhood of about `size` pairs; returns the next size."""
        assert self.best.answer is not None
        kept = [np.zeros(len(c), dtype=bool) for c in self.problem.costs]
        for node, strategy in enumerate(self.best.answer):
            kept[node][strategy] = True
        if self.random.random() < 0.5:
            self._free_near(kept, size)
        else:
            self._free_cheap(kept, size)
        began = self.clock.now()
        solved, better = self._solve(kept, _SHARE * self.left)
        took = self.clock.now() - began
        if better:
            return size
        if solved and took < 0.02 * self.left:
            return min(int(size * 1.3), 4 * self.problem.pairs)
        return max(int(size * 0.8), 200) if not solved else size

    def _free_near(self, kept: list[Bools], size: int) -> None:
        """All strategies of a node that was drawn, and of nodes around it."""
        queue = [int(self.random.integers(len(kept)))]
        seen, pairs = set(queue), 0
        while queue and pairs < size:
            node = queue.pop(int(self.random.integers(min(len(queue), 4))))
            kept[node][:] = True
            for other in self.neighbours[node]:
                pairs += len(kept[node]) * int(kept[other].sum())
                if other not in seen:
                    seen.add(other)
                    queue.append(other)

    def _free_cheap(self, kept: list[Bools], size: int) -> None:
        """Everywhere, strategies that cost little more than the ones taken, with noise."""
        assert self.best.answer is not None
        regret: list[Floats] = []
        for node, costs in enumerate(self.prices.costs()):
            own = self.rounding.room.every[node]
            total = self.rounding.blocks.around(node, costs, own, self.best.answer)
            regret.append(np.minimum(self.prices.margins[node], total - total.min()))
        flat = np.concatenate(regret) * self.random.uniform(0.2, 1.8, int(self.prices.first[-1]))
        pieces = np.split(flat, self.prices.first[1:-1])
        low, high = 0.0, float(flat[np.isfinite(flat)].max())
        for _ in range(25):
            middle = (low + high) / 2
            if self._pairs([k | (p <= middle) for k, p in zip(kept, pieces, strict=True)]) > (
                size + len(self.problem.edges)
            ):
                high = middle
            else:
                low = middle
        for k, p in zip(kept, pieces, strict=True):
            k |= p <= low


def search(
    problem: Problem,
    seconds: float,
    progress: Progress | None = None,
    clock: Clock | None = None,
    start: Ints | None = None,
) -> Result:
    """A good answer within the time given, with a bound. `start` is an answer within the limit."""
    return Search(problem, seconds, progress, clock or Clock(seconds), start).run()
