"""What of its communication an operator pays for itself, and what others pay with it.

A value that several operators need in one form is moved once, and partial sums that are added are
summed once. Which operators will agree is not known before the layout is. The likely model has a
node for the form (`forms`), which pays once; for a bound the dearest form is paid (`dearest`), or,
where a value is transposed and moves serve both, the least that each reader may pay.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend.core import Literal
from jax.extend.core import primitives as p

from gshard.propagation.flow import Edge, Flow


class Sharing:
    """The shares of all operators of a program."""

    def __init__(self, flow: Flow, optimistic: bool) -> None:
        self.flow, self.optimistic = flow, optimistic
        self.source: dict[Any, Any] = {}  # of what is transposed
        self.uses: Counter[Any] = Counter()
        for edge in flow.edges:
            operands = [a for a in edge.atoms[0] if not isinstance(a, Literal)]
            if edge.eqn is not None and edge.eqn.primitive is p.transpose_p and operands:
                self.source[edge.eqn.outvars[0]] = self._source(operands[0])
                continue  # who reads the result counts
            if edge.eqn is None:  # the border of a loop, which a value crosses either way
                operands += edge.atoms[1]
            for atom in operands:
                self.uses[self._source(atom)] += 1
        self.turned = set(self.source.values())
        self.smaller: dict[Any, float] = {}  # share of an unreduced value that is reduced
        for edge in reversed(flow.edges) if optimistic else ():
            for atom in edge.atoms[0]:
                if not isinstance(atom, Literal) and atom in flow.shares and edge.atoms[1]:
                    self._postponed(atom, edge.atoms[1][0])

    def of(self, edge: Edge) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The part of each operand's move, and of each result's sum, that an operator pays."""
        operands = tuple(1.0 if isinstance(a, Literal) else self.move(a) for a in edge.atoms[0])
        results = tuple(
            self.flow.shares.get(a, 1.0) * self.smaller.get(a, 1.0) for a in edge.atoms[1]
        )
        return operands, results

    def _source(self, var: Any) -> Any:
        return self.source.get(var, var)

    def move(self, var: Any) -> float:
        """The part of the move of a value that one who reads it pays."""
        narrow = self.flow.narrow.get(var, 1.0)
        shared = self.optimistic and self.is_turned(var)
        return narrow / max(self.uses[self._source(var)], 1) if shared else narrow

    def is_turned(self, var: Any) -> bool:
        """Whether a value is a transposed one, or is transposed: its moves serve both."""
        return self._source(var) in self.turned

    def _postponed(self, var: Any, result: Any) -> None:
        size, after = (max(v.aval.size, 1) for v in (var, result))
        left = min(1.0, after / size) * self.smaller.get(result, 1.0)
        self.smaller[var] = min(left, self.smaller.get(var, 1.0))
