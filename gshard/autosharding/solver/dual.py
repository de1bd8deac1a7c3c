"""A lower bound of a problem by messages along its edges and prices on memory.

With a price for each byte at each time in place of the limit, a problem has costs of nodes and
edges alone. Messages move costs along the edges (sequential tree-reweighted message passing,
Kolmogorov 2006): whatever they are, the sum of what each node and each edge costs at least is a
lower bound, and a sweep over the nodes never lowers it. Prices rise where the best answer exceeds
the limit and fall where it does not (a subgradient step).

Nodes come in the order of their degrees, those with the most edges first. Nodes of a level have no
edges between them, and there are few levels, so that the messages of a level are computed together.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gshard.autosharding.budget import WORK, Clock
from gshard.autosharding.solver.problem import Floats, Ints, Problem


@dataclasses.dataclass(frozen=True)
class _MessageBatch:
    """Messages from nodes of one level, with tables of one size. Positions are those of strategies
    in all costs (`sender`, `receiver`), and of messages into the two ends (`back`, `ahead`)."""

    tables: Floats
    sender: Ints
    back: Ints
    share: Floats
    receiver: Ints
    ahead: Ints
    nodes: tuple[Ints, Ints]  # that send, and that receive


class Messages:
    """Messages along the edges of a problem, in both directions."""

    def __init__(self, problem: Problem) -> None:
        self.first, self.size = problem.first, problem.strategies
        self.level = _levels(problem)
        counts = np.zeros((len(problem.costs), 2), dtype=np.int64)  # of earlier, of later nodes
        groups: dict[tuple[int, ...], list[tuple[int, int, Floats, int, int]]] = defaultdict(list)
        length = 0  # of all messages
        for edge in problem.edges:
            ends = length, length + len(edge.costs)  # where the messages to its two nodes begin
            length += sum(edge.costs.shape)
            for node, other, table, back, ahead in (
                (edge.first, edge.second, edge.costs, *ends),
                (edge.second, edge.first, edge.costs.T, *ends[::-1]),
            ):
                later = int(self.level[node] < self.level[other])
                counts[node, later] += 1
                key = (later, int(self.level[node]) * (1 if later else -1), *table.shape)
                groups[key].append((node, other, table, back, ahead))
        self.into = np.zeros(length)
        self.share = 1.0 / np.maximum(counts.max(axis=1, initial=0), 1)
        self.rest = np.repeat(1.0 - self.share * counts[:, 0], np.diff(self.first))
        self.owner = np.zeros(length, dtype=np.int64)  # the strategy that a message is into
        self.from_later = np.zeros(length, dtype=bool)
        self.later, self.earlier = (
            [self._batch(members) for key, members in sorted(groups.items()) if key[0] == later]
            for later in (1, 0)
        )
        for batch in (*self.later, *self.earlier):
            self.owner[batch.back] = batch.sender
        for batch in self.later:
            self.from_later[batch.back] = True

    def _batch(self, members: Sequence[tuple[int, int, Floats, int, int]]) -> _MessageBatch:
        node, other, tables, back, ahead = zip(*members, strict=True)
        rows, columns = map(np.arange, tables[0].shape)
        own, far = np.array(node), np.array(other)
        return _MessageBatch(
            np.array(tables),
            self.first[own][:, None] + rows,
            np.array(back)[:, None] + rows,
            self.share[own][:, None],
            self.first[far][:, None] + columns,
            np.array(ahead)[:, None] + columns,
            (own, far),
        )

    def sweep(self, costs: Sequence[Floats]) -> None:
        """Pass messages once to the end and once back."""
        belief = self._beliefs(costs)
        for batch in (*self.later, *self.earlier):
            sent = belief[batch.sender] * batch.share - self.into[batch.back]
            message = (sent[:, :, None] + batch.tables).min(axis=1)
            message -= message.min(axis=1, keepdims=True)
            np.add.at(belief, batch.receiver, message - self.into[batch.ahead])
            self.into[batch.ahead] = message

    def _beliefs(self, costs: Sequence[Floats]) -> Floats:
        """What strategies cost, with what the messages bring to them."""
        return np.concatenate(costs) + np.bincount(self.owner, self.into, self.size)

    def bound(self, costs: Sequence[Floats]) -> tuple[float, list[Floats]]:
        """A lower bound of the whole, and by how much each strategy exceeds it at least.

        Each node gives its edges to earlier nodes the shares that `sweep` has used last.
        """
        belief = self._beliefs(costs)
        margin = belief * self.rest
        lowest = np.minimum.reduceat(margin, self.first[:-1])
        margin -= np.repeat(lowest, np.diff(self.first))
        total = float(lowest.sum())
        for batch in self.earlier:
            left = (batch.tables - self.into[batch.ahead][:, None, :]).min(axis=2)
            left += batch.share * belief[batch.sender] - self.into[batch.back]
            least = left.min(axis=1, keepdims=True)
            total += float(least.sum())
            np.add.at(margin, batch.sender, left - least)
        return total, np.split(margin, self.first[1:-1])

    def decode(self, costs: Sequence[Floats]) -> Ints:
        """An answer: each node in turn takes what is best given the nodes before it."""
        kept = np.where(self.from_later, self.into, 0.0)
        total = np.concatenate(costs) + np.bincount(self.owner, kept, self.size)
        answer = np.zeros(len(costs), dtype=np.int64)
        by_level: dict[int, list[_MessageBatch]] = defaultdict(list)
        for batch in self.earlier:
            by_level[int(self.level[batch.nodes[0][0]])].append(batch)
        for level in range(int(self.level.max(initial=-1)) + 1):
            for batch in by_level[level]:
                taken = answer[batch.nodes[1]][:, None, None]
                np.add.at(total, batch.sender, np.take_along_axis(batch.tables, taken, 2)[:, :, 0])
            for node in np.flatnonzero(self.level == level):
                answer[node] = total[self.first[node] : self.first[node + 1]].argmin()
        return answer


def _levels(problem: Problem) -> Ints:
    """For each node a level above those of the neighbours that come before it."""
    neighbours = problem.tables
    order = sorted(range(len(neighbours)), key=lambda node: (-len(neighbours[node]), node))
    level = np.full(len(neighbours), -1)
    for node in order:
        level[node] = max((level[other] for other in neighbours[node]), default=-1) + 1
    return level


class Prices:
    """Prices and messages of a problem, the best bound so far, and the margins that gave it."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.messages = problem, Messages(problem)
        self.prices = self.best_prices = np.zeros(len(problem.memory.limit))
        self.trend = np.zeros(len(problem.memory.limit))
        self.step, self.misses, self.bound = 1.0, 0, -np.inf
        self.margins: list[Floats] = [np.zeros(len(c)) for c in problem.costs]

    def costs(self, scale: float = 1.0) -> list[Floats]:
        """The costs of strategies with the price of the memory that they hold."""
        memory = self.problem.memory
        until = np.concatenate([[0.0], np.cumsum(self.prices * scale)])
        paid = memory.usage * np.repeat(until[memory.stop] - until[memory.start], memory.sizes)
        by_strategy = np.bincount(self.problem.column, paid, self.problem.strategies)
        pieces = np.split(by_strategy, self.problem.first[1:-1])
        return [c + p for c, p in zip(self.problem.costs, pieces, strict=True)]

    def ascend(self, clock: Clock, steps: int) -> None:
        """Improve the bound, and the margins with it."""
        pairs = self.problem.pairs
        work = WORK.sweep + WORK.sweep_edge * len(self.problem.edges) + WORK.sweep_pair * pairs
        for _ in range(steps):
            if clock.left <= 0 or self.step < 1e-5:
                break
            costs = self.costs()
            for _ in range(2):
                self.messages.sweep(costs)
            self._move(costs)
            clock.charge(3 * work)
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
