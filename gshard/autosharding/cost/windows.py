"""Communication beside work: the time of a step where the two overlap, as forecasts count it.

A forecast overlaps within one body of a program (`forecast.time`): one unit computes and another
one sends. So a body, a window, takes as long as its work and as long as its communication, at
least: T >= work and T >= sent. For finding layouts, only communication that may be prefetched or
postponed is beside the work, that of weights and of their gradients; the rest is exposed.

With a weight for each window between 0 and 1, the larger of two numbers is not below their weighted
mean: for any weights the problem is one of costs of nodes and edges again, and its least cost is a
bound. The weights of the best bound are those at which work and communication are balanced.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr

from gshard.autosharding.budget import Clock
from gshard.autosharding.cost.model import MeshProblem
from gshard.autosharding.solver import solve
from gshard.autosharding.solver.ilp import Result
from gshard.autosharding.solver.problem import Bools, CostEdge, Floats, Ints, Problem
from gshard.graph.regions import loop_bodies

# The weight of work, at most: communication then decides between answers that work as long.
_MOST, _LEAST = 0.999, 0.02

# How often weights are changed, and the gap at which that ends.
_ROUNDS, _GAP = 8, 1e-3


@dataclasses.dataclass(frozen=True)
class _Part:
    """For each node or edge its window, which may be unknown (-1), and whether it is work, or
    communication that is exposed; what is neither is beside the work."""

    window: Ints
    work: Bools
    exposed: Bools

    def weights(self, of_work: Floats) -> Floats:
        """The weight of each cost. Where its window is unknown, the least that it may have."""
        sent = np.append(1 - of_work, (1 - of_work).min(initial=1.0))
        work = np.append(of_work, of_work.min(initial=1.0))
        return np.where(
            self.exposed, 1.0, np.where(self.work, work[self.window], sent[self.window])
        )


class OverlapWindows:
    """The windows of a model: which of its costs are work, and which communication of which body.

    For a bound (`optimistic`) nothing is exposed, and communication has a window only where it
    cannot be in another body.
    """

    def __init__(self, model: MeshProblem, jaxpr: Jaxpr, optimistic: bool) -> None:
        self.model, self.optimistic = model, optimistic
        self.places, self.entering = _places(jaxpr)
        self.windows = 1 + max(self.places.values(), default=0)
        self.tensors = {node: var for var, node in model.nodes.items()}
        self.tensors |= {form.node: var for var, form in model.forms.items()}
        weights = {getattr(v.aval, "shape", ()) for v in jaxpr.invars}
        self.weights = weights | {shape[1:] for shape in weights}  # a scan takes slices of them
        edges = model.problem.edges
        self.neighbours: list[list[int]] = [[] for _ in model.problem.costs]
        for edge in edges:
            self.neighbours[edge.first].append(edge.second)
            self.neighbours[edge.second].append(edge.first)
        works = {*model.operators, *model.nodes.values()}
        self.nodes = self._part([[n] for n in range(len(self.neighbours))], works)
        self.edges = self._part([[e.first, e.second] for e in edges], set())

    def _part(self, ends: list[list[int]], works: set[int]) -> _Part:
        work = np.array([e[0] in works and len(e) == 1 for e in ends], dtype=bool)
        window = np.array([self._window(e, w) for e, w in zip(ends, work, strict=True)], dtype=int)
        beside = np.array([self.optimistic or self._may_wait(e) for e in ends], dtype=bool)
        return _Part(window, work, ~work & ~beside)

    def _may_wait(self, nodes: list[int]) -> bool:
        """Whether communication of these nodes may be prefetched or postponed, by the shape."""
        shapes = [self.tensors[n].aval.shape for n in nodes if n in self.tensors]
        return any(shape in self.weights for shape in shapes)

    def _window(self, nodes: list[int], work: bool) -> int:
        """The window of a node or edge, -1 if it is unknown."""
        if work:
            return self._place(nodes[0])
        others = (n for node in nodes if self._place(node) < 0 for n in self.neighbours[node])
        near = [*nodes, *others]
        found = {self._place(n) for n in near if self._place(n) >= 0}
        if self.optimistic and any(self._may_leave(self.tensors.get(n)) for n in near):
            return -1
        return found.pop() if len(found) == 1 else -1 if self.optimistic else max(found, default=0)

    def _place(self, node: int) -> int:
        """The window of an operator or tensor; -1 of a node that is neither."""
        if node in self.model.operators:
            return self.places.get(self.model.operators[node], 0)
        return self.places.get(self.tensors[node], 0) if node in self.tensors else -1

    def _may_leave(self, var: Any) -> bool:
        """Whether a tensor may be moved, or summed, outside of the body that it is in."""
        return var is not None and (var in self.entering or var in self.model.postponed)

    def most(self) -> Floats:
        """The weights with which all windows work longer than they send."""
        return np.full(self.windows, _MOST)

    def weighted(self, of_work: Floats) -> Problem:
        """The problem with a weight for each window's work; the rest is its communication's."""
        problem, rounded = self.model.problem, np.floor if self.optimistic else np.rint
        of_nodes, of_edges = self.nodes.weights(of_work), self.edges.weights(of_work)
        costs = tuple(rounded(c * w) for c, w in zip(problem.costs, of_nodes, strict=True))
        edges = tuple(
            CostEdge(e.first, e.second, rounded(e.costs * w))
            for e, w in zip(problem.edges, of_edges, strict=True)
        )
        # Starts of operators are work of some window.
        constant = float(np.floor(problem.constant * of_work.min()))
        return dataclasses.replace(problem, costs=costs, edges=edges, constant=constant)

    def totals(self, answer: Ints) -> tuple[Floats, Floats, float]:
        """What an answer works and sends in each window, and what is exposed or always spent."""
        work, sent = np.zeros(self.windows + 1), np.zeros(self.windows + 1)
        exposed, problem = self.model.problem.constant, self.model.problem
        of_nodes = np.array([c[answer[n]] for n, c in enumerate(problem.costs)])
        of_edges = np.array([e.costs[answer[e.first], answer[e.second]] for e in problem.edges])
        for part, costs in ((self.nodes, of_nodes), (self.edges, of_edges)):
            beside = ~part.work & ~part.exposed
            np.add.at(work, part.window[part.work], costs[part.work])
            np.add.at(sent, part.window[beside], costs[beside])
            exposed += float(costs[part.exposed].sum())
        return work, sent, exposed

    def cost(self, answer: Ints) -> float:
        """The time of an answer: of each window the longer of its work and its communication."""
        work, sent, exposed = self.totals(answer)
        return exposed + float(np.maximum(work, sent).sum())


def solve_windows(windows: OverlapWindows, seconds: float, clock: Clock) -> tuple[Result, Problem]:
    """The best answer that is found in the time given, a bound of all, and the problem with the
    weights that gave the best bound.

    The weight of a window's work begins at the most, and is halved towards where the answer works
    as long as it sends. Raises `NoAnswerError` where nothing fits into memory.
    """
    until = clock.now() + seconds
    high, low = windows.most(), np.full(windows.windows, _LEAST)
    weights, best, bound, chosen = high.copy(), None, -math.inf, windows.model.problem
    cost = math.inf
    for number in range(_ROUNDS):
        left = until - clock.now()
        if number and (left <= 0 or cost - bound <= _GAP * cost):
            break
        problem = windows.weighted(weights)
        result = solve(problem, max(left, 0.1) / (2 if number + 1 < _ROUNDS else 1), clock=clock)
        if result.bound > bound:
            bound, chosen = result.bound, problem
        if result.answer is None:
            break
        if (own := windows.cost(result.answer)) < cost:
            best, cost = result.answer, own
        work, sent, _ = windows.totals(result.answer)
        works = work[:-1] >= sent[:-1]
        low, high = np.where(works, weights, low), np.where(works, high, weights)
        weights = (low + high) / 2
    return Result(best, cost, bound), chosen


def _places(jaxpr: Jaxpr) -> tuple[dict[Any, int], set[Any]]:
    """The window of each variable, and of each equation by its id; and the variables that enter a
    body. The bodies of one loop or branch are one window."""
    places: dict[Any, int] = {}
    entering: set[Any] = set()
    count = 0

    def enter(jaxpr: Jaxpr, number: int) -> None:
        nonlocal count
        ends = [*jaxpr.constvars, *jaxpr.invars]
        places.update(dict.fromkeys(ends, number))
        if number:
            entering.update(ends)
        for eqn in jaxpr.eqns:
            places[eqn] = number
            places.update(dict.fromkeys(eqn.outvars, number))
            if inner := loop_bodies(eqn):
                count += 1
                own = count
                for body in inner:
                    enter(body.jaxpr, own)

    enter(jaxpr, 0)
    return places, entering
