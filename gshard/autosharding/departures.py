"""What propagation finds, priced by the model, and where it departs from an answer at a cost.

Lowering a program to see what an annotation is worth takes long. The model prices the shardings
that propagation finds in a fraction of that: tensors are given, operators choose again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from gshard.autosharding.cost.model import MeshProblem
from gshard.autosharding.cost.specs import MeshShape, sharding_of, specs_of
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.solver.problem import Floats, Ints
from gshard.tensors.sharding import Sharding

# How often operators choose again, each with its neighbours as they are.
_SWEEPS = 8

# A cost above all that is allowed.
_FORBIDDEN = 1e18


@dataclasses.dataclass(frozen=True)
class Departed:
    """Shardings that differ from those of an answer, priced.

    `seconds` is what they cost more, `too_much` the bytes above the memory limit that the answer
    meets; `worse` has, by node, the share of the one that is nearby, or of the other.
    """

    seconds: float
    too_much: float
    tensors: tuple[Any, ...]
    worse: Floats


class Departures:
    """Prices other shardings than those of an answer."""

    def __init__(self, model: MeshProblem, answer: Ints) -> None:
        self.model, self.answer = model, answer
        problem = model.problem
        self.neighbours: list[list[tuple[int, Floats]]] = [[] for _ in problem.costs]
        for edge in problem.edges:
            table = np.where(np.isfinite(edge.costs), edge.costs, _FORBIDDEN)
            self.neighbours[edge.first].append((edge.second, table))
            self.neighbours[edge.second].append((edge.first, table.T))
        tensors = set(model.nodes.values())
        self.operators = [node for node in range(len(problem.costs)) if node not in tensors]
        self.best = self._nearby(answer)

    def priced(self, found: Mapping[Any, Sharding]) -> Departed:
        """What these shardings cost more than the answer."""
        answer, different = self.answer.copy(), []
        for var, node in self.model.nodes.items():
            numbers = _numbers(var.aval.shape, self.model.mesh)
            number = numbers.get(found[var]) if var in found else None
            if number is not None and number != answer[node]:
                different.append(var)
                answer[node] = number
        self._choose_operators(answer)
        worse = self._nearby(answer) - self.best
        too_much = self.model.problem.excess(answer)
        seconds = float(worse.sum()) / PICO
        if too_much > 0:
            worse = self._held(answer)
        return Departed(seconds, too_much, tuple(different), worse)

    def around(self, variables: Iterable[Any]) -> set[int]:
        """The nodes of some tensors, and those next to them."""
        own = {self.model.nodes[var] for var in variables if var in self.model.nodes}
        return own.union(*({node for node, _ in self.neighbours[each]} for each in own))

    def _choose_operators(self, answer: Ints) -> None:
        """Let operators, and forms in which they read, choose again; `answer` is changed."""
        costs, changed = self.model.problem.costs, set(range(len(answer)))
        for _ in range(_SWEEPS):
            now: set[int] = set()
            for node in self.operators:
                if node in changed:
                    total = costs[node]
                    for other, table in self.neighbours[node]:
                        total = total + table[:, answer[other]]
                    least = int(total.argmin())
                    if total[least] < total[answer[node]]:
                        answer[node] = least
                        now.update(other for other, _ in self.neighbours[node])
            changed = now.union(*({o for o, _ in self.neighbours[node]} for node in now))
            if not changed:
                break

    def _nearby(self, answer: Ints) -> Floats:
        """The cost of each node, with half of that of its edges."""
        found = np.zeros(len(answer))
        for node, own in enumerate(self.model.problem.costs):
            edges = sum(_paid(t, answer[node], answer[other]) for other, t in self.neighbours[node])
            found[node] = own[answer[node]] + edges / 2
        return found

    def _held(self, answer: Ints) -> Floats:
        """The bytes that each node holds at the worst time, more than in the best answer."""
        memory = self.model.problem.memory
        time = int(np.argmax(memory.profile(answer) - memory.limit))
        live = np.flatnonzero((memory.start <= time) & (time < memory.stop))
        nodes, first = memory.node[live], memory.first[live]
        more = memory.usage[first + answer[nodes]] - memory.usage[first + self.answer[nodes]]
        held: Floats = np.bincount(nodes, more, len(answer)).astype(np.float64)
        return held


def _paid(table: Floats, first: int, second: int) -> float:
    """The cost of a pair; of one that is forbidden that of the dearest allowed one, since a lowered
    program has a way for it."""
    cost = float(table[first, second])
    return cost if cost < _FORBIDDEN else float(table[table < _FORBIDDEN].max(initial=0.0))


@functools.lru_cache(maxsize=4096)
def _numbers(shape: tuple[int, ...], mesh: MeshShape) -> dict[Sharding, int]:
    """The strategies of a tensor by its sharding."""
    specs = specs_of(shape, mesh)
    return {sharding_of(spec, len(shape), mesh): n for n, spec in reversed([*enumerate(specs)])}
