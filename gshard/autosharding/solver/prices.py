"""Prices on memory: a bound of the whole problem, and which strategies are worth a look.

With a price for each byte at each time in place of the limit, the problem falls apart into costs of
nodes and edges, which message passing bounds. Prices rise where the answer exceeds the limit and
fall where it does not (a subgradient step).
"""

from __future__ import annotations

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.messages import Messages
from gshard.autosharding.solver.problem import Floats, Ints, Problem

# Seconds of work of a sweep.
_PER_SWEEP, _PER_EDGE, _PER_PAIR = 5e-3, 3e-6, 1e-8


class Prices:
    """Prices and messages of a problem, the best bound so far, and the margins that gave it."""

    def __init__(self, problem: Problem) -> None:
        memory = problem.memory
        self.problem = problem
        self.first = np.concatenate([[0], np.cumsum([len(c) for c in problem.costs])])
        within = np.arange(len(memory.usage)) - np.repeat(memory.first[:-1], memory.sizes)
        self.column = np.repeat(self.first[memory.node], memory.sizes) + within
        self.messages = Messages(problem)
        self.prices = np.zeros(len(memory.limit))
        self.best_prices = self.prices
        self.trend = np.zeros(len(memory.limit))
        self.step = 1.0
        self.misses = 0
        self.bound = -np.inf
        self.margins: list[Floats] = [np.zeros(len(c)) for c in problem.costs]

    def costs(self, scale: float = 1.0) -> list[Floats]:
        """The costs of strategies with the price of the memory that they hold."""
        memory = self.problem.memory
        until = np.concatenate([[0.0], np.cumsum(self.prices * scale)])
        of_holding = until[memory.stop] - until[memory.start]
        paid = memory.usage * np.repeat(of_holding, memory.sizes)
        of_strategy = np.bincount(self.column, paid, int(self.first[-1]))
        pieces = np.split(of_strategy, self.first[1:-1])
        return [c + p for c, p in zip(self.problem.costs, pieces, strict=True)]

    def ascend(
        self, seconds: float, steps: int, sweeps: int = 2, clock: Clock | None = None
    ) -> None:
        """Improve the bound, and the margins with it."""
        clock = Clock(seconds) if clock is None else clock
        until = clock.now() + seconds
        work = _PER_SWEEP + _PER_EDGE * len(self.problem.edges) + _PER_PAIR * self.problem.pairs
        for _ in range(steps):
            if clock.now() > until or self.step < 1e-5:
                break
            costs = self.costs()
            for _ in range(sweeps):
                self.messages.sweep(costs)
            self._move(costs)
            clock.charge((sweeps + 1) * work)
        self.prices = self.best_prices

    def _move(self, costs: list[Floats]) -> None:
        """Step towards a bound that is higher by the share `step`; from the best prices anew, with
        shorter steps, where that has failed a few times."""
        limit = np.maximum(self.problem.memory.limit, 1e-30)
        bound, margins = self.messages.bound(costs)
        bound += self.problem.constant - float(self.prices @ self.problem.memory.limit)
        if bound > self.bound:
            self.misses = 0 if bound > self.bound + 0.1 * self.step * abs(bound) else self.misses
            self.bound, self.margins, self.best_prices = bound, margins, self.prices
        else:
            self.misses += 1
        if self.misses > 8:
            self.step, self.misses = self.step * 0.6, 0
            self.prices, self.trend = self.best_prices, self.trend * 0.0
            return
        usage = self.problem.memory.profile(self.messages.decode(costs))
        self.trend = 0.7 * self.trend + 0.3 * np.minimum(usage / limit - 1.0, 3.0)
        move = np.where((self.trend > 0) | (self.prices > 0), self.trend, 0.0)
        length = float(move @ move)
        if length > 0:
            scale = self.step * max(abs(bound), abs(self.bound)) / length
            self.prices = np.maximum(0.0, self.prices + scale * move / limit)

    def decode(self, scale: float) -> Ints:
        """An answer under prices that are this much higher."""
        return self.messages.decode(self.costs(scale))
