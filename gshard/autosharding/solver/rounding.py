"""Answers within the memory limit, from prices on memory.

With prices in place of the limit the best answer holds too much at some times and too little at
others, whatever the prices are, where single nodes hold a large share of the limit. So the prices
of each node are changed at random, and what the nodes then want is granted in a random order, as
far as memory goes. Each combination of what they are granted fits: the best one is found without
regard to memory. What stays spare is given out again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from gshard.autosharding.budget import Clock
from gshard.autosharding.solver.blocks import PER_EDGE, NodeEdges, Part
from gshard.autosharding.solver.prices import Prices
from gshard.autosharding.solver.problem import Floats, Ints, Problem
from gshard.autosharding.solver.room import Room

# By how much the prices of all nodes, and those of a node, are changed.
_SCALES = (0.3, 0.5, 0.8, 1.0, 1.3)
_LEAST, _MOST = 0.7, 1.4

# Seconds of work of a draw, beside those for each edge.
_PER_DRAW = 5e-3


@dataclasses.dataclass(frozen=True)
class Effort:
    """Passes over the nodes under prices, orders in which memory is granted, and for each of these
    the passes with what is granted and with what is spare then."""

    priced: int
    orders: int
    granted: int
    spare: int

    def work(self, edges: int) -> float:
        """Seconds of work of a draw that changes nodes with so many edges, at most."""
        return PER_EDGE * 2 * edges * (self.priced + self.orders * (self.granted + self.spare))


QUICK, USUAL = Effort(1, 1, 1, 1), Effort(6, 4, 2, 4)


class Rounding:
    """Draws answers within the limit of a problem."""

    def __init__(
        self, problem: Problem, prices: Prices, random: np.random.Generator, clock: Clock
    ) -> None:
        self.problem, self.prices, self.random, self.clock = problem, prices, random, clock
        self.blocks = NodeEdges(problem, random)
        self.room = Room(problem)
        self.nodes = list(range(len(problem.costs)))
        self.failures = 0  # draws that have found nothing, after which prices are higher
        self.all = self.blocks.part(self.nodes, self.room.least)

    def draw(
        self, best: Ints | None, free: Sequence[int] | None = None, effort: Effort = USUAL
    ) -> Ints | None:
        """The best of a few answers; None where none of them is within the limit.

        The nodes `free` change what they have in `best`; all nodes if they are not given.
        """
        self.clock.charge(_PER_DRAW)
        scale = float(self.random.choice(_SCALES))
        if best is None:
            scale *= 2.0**self.failures
        noise = self.random.uniform(_LEAST, _MOST, len(self.nodes))
        costs = self._priced(scale, noise)
        if best is None or free is None:
            wanted, part = self.prices.messages.decode(costs), self.all
        else:
            wanted, part = best, self.blocks.part(free, best)
        wanted = self._passes(effort.priced, costs, wanted, part, self.room.every)
        found, least = None, np.inf
        for _ in range(effort.orders):
            answer = self._granted(wanted, best, part, effort)
            if answer is not None and (cost := self.problem.cost(answer)) < least:
                found, least = answer, cost
        self.failures += found is None
        return found

    def _priced(self, scale: float, noise: Floats) -> list[Floats]:
        """Costs with prices of memory that are changed for each node."""
        every = zip(self.problem.costs, self.prices.costs(scale), noise, strict=True)
        return [cost + (priced - cost) * change for cost, priced, change in every]

    def _granted(self, wanted: Ints, best: Ints | None, part: Part, effort: Effort) -> Ints | None:
        """An answer near the one wanted, within the limit."""
        order = self.random.permutation(np.array(part.nodes, dtype=np.int64))
        base = (self.room.least if best is None else best).copy()
        base[order] = self.room.least[order]
        allowed = self.room.given(order, base, wanted)
        if allowed is None and best is not None:
            allowed = self.room.given(order, best, wanted)
        if allowed is None:
            fits = self.problem.excess(wanted) <= 0
            return self._spread(wanted, part, effort.spare) if fits else None
        answer = wanted.copy()
        for node in order.tolist():
            if answer[node] not in allowed[node]:
                own = self.blocks.around(node, self.problem.costs[node], allowed[node], answer)
                answer[node] = allowed[node][int(own.argmin())]
        answer = self._passes(effort.granted, self.problem.costs, answer, part, allowed)
        return self._spread(answer, part, effort.spare)

    def _spread(self, answer: Ints, part: Part, count: int) -> Ints:
        """An answer that costs no more, with memory that this one leaves."""
        for _ in range(count):
            order = self.random.permutation(np.array(part.nodes, dtype=np.int64))
            allowed = self.room.given(order, answer, None)
            if allowed is None:  # it exceeds the limit by the rounding of sums
                break
            before, answer = answer, self._passes(1, self.problem.costs, answer, part, allowed)
            if (before == answer).all():
                break
        return answer

    def _passes(
        self,
        count: int,
        costs: Sequence[Floats],
        answer: Ints,
        part: Part,
        allowed: Sequence[Ints],
    ) -> Ints:
        """The answer after so many passes, fewer where one changes nothing."""
        for _ in range(count):
            before, answer = answer, self.blocks.improve(costs, answer, part, allowed)
            self.clock.charge(part.work)
            if (before == answer).all():
                break
        return answer
