"""Message passing: a lower bound of a problem without its memory limit, and good answers.

Messages move costs along the edges (sequential tree-reweighted message passing, Kolmogorov 2006):
whatever they are, the sum of what each node and each edge costs at least is a lower bound, and a
sweep over the nodes never lowers it. The memory limit enters as prices that the caller adds to the
costs of strategies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gshard.autosharding.memory import Floats, Ints
from gshard.autosharding.problem import Problem


class Messages:
    """Messages along the edges of a problem, in both directions."""

    def __init__(self, problem: Problem) -> None:
        count = len(problem.costs)
        self.problem = problem
        # into[e][0]: what edge e adds to the costs of its first node; into[e][1]: to the second.
        self.into: list[list[Floats]] = [
            [np.zeros(e.costs.shape[0]), np.zeros(e.costs.shape[1])] for e in problem.edges
        ]
        # Of each node: (edge, the node's side of it, the table by the node's strategies, other).
        self.later: list[list[tuple[int, int, Floats, int]]] = [[] for _ in range(count)]
        self.earlier: list[list[tuple[int, int, Floats, int]]] = [[] for _ in range(count)]
        for number, edge in enumerate(problem.edges):
            one = (number, 0, edge.costs, edge.second)
            two = (number, 1, np.ascontiguousarray(edge.costs.T), edge.first)
            forward = edge.first < edge.second
            (self.later if forward else self.earlier)[edge.first].append(one)
            (self.earlier if forward else self.later)[edge.second].append(two)

        degrees = zip(self.later, self.earlier, strict=True)
        self.shares = [1.0 / max(len(later), len(earlier), 1) for later, earlier in degrees]

    def sweep(self, costs: Sequence[Floats]) -> None:
        """Pass messages once to the end and once back."""
        nodes = range(len(costs))
        for order, ahead in ((nodes, self.later), (reversed(nodes), self.earlier)):
            for node in order:
                towards = ahead[node]
                if not towards:
                    continue
                belief = self.belief(costs, node) * self.shares[node]
                for edge, side, table, _ in towards:
                    sent = (belief - self.into[edge][side])[:, None] + table
                    message = sent.min(axis=0)
                    message -= message.min()
                    self.into[edge][1 - side] = message

    def belief(self, costs: Sequence[Floats], node: int) -> Floats:
        """What the strategies of a node cost, with what the messages bring to it."""
        total = costs[node].copy()
        for edge, side, _, _ in self.later[node]:
            total += self.into[edge][side]
        for edge, side, _, _ in self.earlier[node]:
            total += self.into[edge][side]
        return total

    def bound(self, costs: Sequence[Floats]) -> tuple[float, list[Floats]]:
        """A lower bound of the whole, and by how much each strategy exceeds it at least.

        Each node gives its edges to earlier nodes the shares that `sweep` has used last.
        """
        margins: list[Floats] = []
        total = 0.0
        for node in range(len(costs)):
            belief, share, into = self.belief(costs, node), self.shares[node], self.into
            margin = belief * (1.0 - share * len(self.earlier[node]))
            total += float(margin.min())
            margin -= margin.min()
            for edge, side, table, _ in self.earlier[node]:
                left = (table - into[edge][1 - side]).min(axis=1)
                left += share * belief - into[edge][side]
                total += float(left.min())
                margin += left - left.min()
            margins.append(margin)
        return total, margins

    def decode(self, costs: Sequence[Floats]) -> Ints:
        """An answer: each node in turn takes what is best given the nodes before it."""
        answer = np.zeros(len(costs), dtype=np.int64)
        for node in range(len(costs)):
            total = costs[node].copy()
            for edge, side, _, _ in self.later[node]:
                total += self.into[edge][side]
            for _, _, table, other in self.earlier[node]:
                total += table[:, answer[other]]
            answer[node] = int(total.argmin())
        return answer
