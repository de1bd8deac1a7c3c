"""Message passing: a lower bound of a problem without its memory limit, and good answers.

Messages move costs along the edges (sequential tree-reweighted message passing, Kolmogorov 2006):
whatever they are, the sum of what each node and each edge costs at least is a lower bound, and a
sweep over the nodes never lowers it. The memory limit enters as prices that the caller adds to the
costs of strategies.

Nodes come in the order of their degrees, those with the most edges first. Nodes of a level have no
edges between them, and there are few levels, so that the messages of a level are computed together.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from gshard.autosharding.solver.problem import Bools, CostEdge, Floats, Ints, Problem


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Messages from nodes of one level, with tables of about the same size.

    Positions are those of strategies in all costs (`sender`, `receiver`) and of messages into the
    two ends (`back`, `ahead`). Tables are padded: what is missing at the sender's side is at the
    last position, what is there at the receiver's is marked in `there`.
    """

    tables: Floats
    sender: Ints
    back: Ints
    share: Floats
    there: Bools
    receiver: Ints
    ahead: Ints
    node: Ints  # that receives


class Messages:
    """Messages along the edges of a problem, in both directions."""

    def __init__(self, problem: Problem) -> None:
        self.first = np.concatenate([[0], np.cumsum([len(c) for c in problem.costs])])
        self.size = int(self.first[-1])
        sides = [size for edge in problem.edges for size in edge.costs.shape]
        # offsets[2 e]: where the message to the first node of edge e begins; 2 e + 1: the second.
        self.offsets = np.concatenate([[0], np.cumsum(sides)]).astype(np.int64)
        self.into = np.zeros(int(self.offsets[-1]) + 1)
        self.level = _levels(problem)
        counts = np.zeros((len(problem.costs), 2), dtype=np.int64)  # of earlier, of later nodes
        for edge in problem.edges:
            later = int(self.level[edge.first] < self.level[edge.second])
            counts[edge.first, later] += 1
            counts[edge.second, 1 - later] += 1
        self.share = 1.0 / np.maximum(counts.max(axis=1, initial=0), 1)
        self.rest = np.repeat(1.0 - self.share * counts[:, 0], np.diff(self.first))
        last = int(self.level.max(initial=0)) + 1
        self.later: list[list[_Batch]] = [[] for _ in range(last)]
        self.earlier: list[list[_Batch]] = [[] for _ in range(last)]
        self._collect(problem)
        self.nodes = self._by_size(last)
        ends = [node for edge in problem.edges for node in _ends(edge)]
        owner = [np.arange(self.first[node], self.first[node + 1]) for node in ends]
        self.owner = np.concatenate([*owner, np.zeros(0, dtype=np.int64)])
        toward = [self.level[e.first] < self.level[e.second] for e in problem.edges]
        of_later = np.array([v for t in toward for v in (t, not t)], dtype=bool)
        self.from_later = np.repeat(of_later, sides)

    def _collect(self, problem: Problem) -> None:
        """Gather the messages of each level in batches."""
        groups: dict[tuple[bool, int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for number, edge in enumerate(problem.edges):
            for side, (node, other) in enumerate((_ends(edge), _ends(edge)[::-1])):
                later = bool(self.level[node] < self.level[other])
                sizes = (_rounded(edge.costs.shape[side]), _rounded(edge.costs.shape[1 - side]))
                groups[later, int(self.level[node]), *sizes].append((number, side))
        for (later, level, rows, columns), members in sorted(groups.items()):
            batch = self._batch(problem, members, rows, columns)
            (self.later if later else self.earlier)[level].append(batch)

    def _batch(
        self, problem: Problem, members: list[tuple[int, int]], rows: int, columns: int
    ) -> _Batch:
        count = len(members)
        tables = np.full((count, rows, columns), np.inf)
        sender = np.full((count, rows), self.size)
        back = np.full((count, rows), len(self.into) - 1)
        there = np.zeros((count, columns), dtype=bool)
        receiver, ahead, nodes, others = [], [], [], []
        for at, (number, side) in enumerate(members):
            edge = problem.edges[number]
            node, other = _ends(edge) if side == 0 else _ends(edge)[::-1]
            table = edge.costs if side == 0 else edge.costs.T
            own, far = table.shape
            tables[at, :own, :far] = table
            tables[at, own:, :far] = 0.0  # the sender's cost is infinite there
            sender[at, :own] = self.first[node] + np.arange(own)
            back[at, :own] = self.offsets[2 * number + side] + np.arange(own)
            there[at, :far] = True
            receiver.append(self.first[other] + np.arange(far))
            ahead.append(self.offsets[2 * number + 1 - side] + np.arange(far))
            nodes.append(node)
            others.append(other)
        share = self.share[nodes][:, None]
        flat = np.concatenate(receiver), np.concatenate(ahead)
        return _Batch(tables, sender, back, share, there, *flat, np.array(others))

    def _by_size(self, levels: int) -> list[list[tuple[Ints, Ints]]]:
        """Of each level, nodes with equally many strategies, and the positions of these."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, size in enumerate(np.diff(self.first)):
            groups[int(self.level[node]), int(size)].append(node)
        found: list[list[tuple[Ints, Ints]]] = [[] for _ in range(levels)]
        for (level, size), members in sorted(groups.items()):
            nodes = np.array(members)
            found[level].append((nodes, self.first[nodes][:, None] + np.arange(size)))
        return found

    def sweep(self, costs: Sequence[Floats]) -> None:
        """Pass messages once to the end and once back."""
        belief = self._beliefs(costs)
        for levels in (self.later, reversed(self.earlier)):
            for batches in levels:
                for batch in batches:
                    sent = belief[batch.sender] * batch.share - self.into[batch.back]
                    message = (sent[:, :, None] + batch.tables).min(axis=1)
                    message -= message.min(axis=1, keepdims=True)
                    new = message[batch.there]
                    np.add.at(belief, batch.receiver, new - self.into[batch.ahead])
                    self.into[batch.ahead] = new

    def _beliefs(self, costs: Sequence[Floats]) -> Floats:
        """What strategies cost, with what the messages bring to them; infinite after the last."""
        total = np.concatenate([*costs, np.full(1, np.inf)])
        total[:-1] += np.bincount(self.owner, self.into[:-1], self.size)
        return total

    def bound(self, costs: Sequence[Floats]) -> tuple[float, list[Floats]]:
        """A lower bound of the whole, and by how much each strategy exceeds it at least.

        Each node gives its edges to earlier nodes the shares that `sweep` has used last.
        """
        belief = self._beliefs(costs)
        margin = np.append(belief[:-1] * self.rest, 0.0)
        lowest = np.minimum.reduceat(margin, self.first[:-1])
        if len(costs):  # the last node's strategies are followed by the padding
            lowest[-1] = margin[self.first[-2] : self.size].min()
        margin[:-1] -= np.repeat(lowest, np.diff(self.first))
        total = float(lowest.sum())
        for batch in (batch for batches in self.earlier for batch in batches):
            far = np.zeros(batch.there.shape)
            far[batch.there] = self.into[batch.ahead]
            left = (batch.tables - far[:, None, :]).min(axis=2)
            left += batch.share * belief[batch.sender] - self.into[batch.back]
            least = left.min(axis=1, keepdims=True)
            total += float(least.sum())
            np.add.at(margin, batch.sender, np.where(batch.sender < self.size, left - least, 0.0))
        return total, np.split(margin[:-1], self.first[1:-1])

    def decode(self, costs: Sequence[Floats]) -> Ints:
        """An answer: each node in turn takes what is best given the nodes before it."""
        total = np.concatenate([*costs, np.zeros(1)])
        kept = np.where(self.from_later, self.into[:-1], 0.0)
        total[:-1] += np.bincount(self.owner, kept, self.size)
        answer = np.zeros(len(costs), dtype=np.int64)
        for batches, groups in zip(self.earlier, self.nodes, strict=True):
            for batch in batches:
                taken = answer[batch.node][:, None, None]
                np.add.at(total, batch.sender, np.take_along_axis(batch.tables, taken, 2)[:, :, 0])
            for nodes, positions in groups:
                answer[nodes] = total[positions].argmin(axis=1)
        return answer


def _ends(edge: CostEdge) -> tuple[int, int]:
    return edge.first, edge.second


def _rounded(size: int) -> int:
    """A size of which there are few, not much larger."""
    step = 1 << max(math.ceil(math.log2(max(size, 1))) - 2, 0)
    return -(-size // step) * step


def _levels(problem: Problem) -> Ints:
    """Of each node a level above those of the neighbours that come before it."""
    neighbours: list[list[int]] = [[] for _ in problem.costs]
    for edge in problem.edges:
        neighbours[edge.first].append(edge.second)
        neighbours[edge.second].append(edge.first)
    order = sorted(range(len(neighbours)), key=lambda node: (-len(neighbours[node]), node))
    level = np.full(len(neighbours), -1)
    for node in order:
        level[node] = max((level[other] for other in neighbours[node]), default=-1) + 1
    return level
