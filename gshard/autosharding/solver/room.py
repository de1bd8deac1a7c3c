"""Which strategies of a node fit into the memory that other nodes leave."""

from __future__ import annotations

import dataclasses

import numpy as np

from gshard.autosharding.solver.presolve import by_node, profile_of
from gshard.autosharding.solver.problem import Floats, Ints, Problem


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a node holds: from `times[k]` on, up to the next one or `end`, strategy s holds
    `usage[k, s]` bytes."""

    times: Ints
    end: int
    usage: Floats

    def least(self) -> int:
        """The strategy that holds the least, added up over time."""
        lengths = np.diff(np.append(self.times, self.end)).astype(np.float64)
        return int((lengths @ self.usage).argmin())

    def room(self, spare: Floats) -> Floats:
        """The fewest spare bytes of each of the node's intervals."""
        return np.minimum.reduceat(spare[: self.end], self.times)

    def take(self, spare: Floats, amounts: Floats) -> None:
        """Take an amount of each interval off the spare bytes."""
        lengths = np.diff(np.append(self.times, self.end))
        spare[self.times[0] : self.end] -= np.repeat(amounts, lengths)


class Room:
    """What the nodes of a problem hold, and how spare memory is given to them."""

    def __init__(self, problem: Problem) -> None:
        self.memory = problem.memory
        self.every: list[Ints] = [np.arange(len(costs)) for costs in problem.costs]
        self.held: dict[int, Holding] = {}
        for node, holdings in enumerate(by_node(problem.memory, len(problem.costs))):
            if holdings:
                times, usage = profile_of(problem.memory, holdings)
                self.held[node] = Holding(times[:-1], int(times[-1]), usage[:-1])
        least = [self.held[i].least() if i in self.held else 0 for i in range(len(self.every))]
        self.least = np.array(least, dtype=np.int64)

    def spare(self, answer: Ints) -> Floats:
        """The bytes at each time that an answer leaves."""
        spare: Floats = self.memory.limit - self.memory.profile(answer)
        return spare

    def given(self, order: Ints, base: Ints, wanted: Ints | None) -> list[Ints] | None:
        """The strategies that each node of `order` may take, so that any combination of them is
        within the limit while all other nodes stay at `base`; None where `base` exceeds it.

        The nodes get what `base` leaves one after the other, up to what they hold under `wanted`.
        """
        spare, allowed = self.spare(base), list(self.every)
        if spare.min(initial=0.0) < 0.0:
            return None
        for node in order.tolist():
            held = self.held.get(node)
            if held is None:
                continue
            usage, now = held.usage, held.usage[:, base[node]]
            fits = (usage - now[:, None] <= held.room(spare)[:, None]).all(axis=0)
            if wanted is not None:
                modest = fits & (usage <= usage[:, [wanted[node]]]).all(axis=0)
                fits = modest if modest.any() else fits
            allowed[node] = np.flatnonzero(fits)
            held.take(spare, usage[:, allowed[node]].max(axis=1) - now)
        return allowed
