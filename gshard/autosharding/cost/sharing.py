"""What of its communication an operator pays for itself, and what others pay with it.

A value that several operators need in one form is moved once, and partial sums that are added are
summed once. Which operators will agree is not known before the layout is. The likely model has a
node for the form (`forms`), which pays once; for a bound the dearest form is paid (`dearest`). A
transposed value is moved before or after it is transposed: for a bound its readers are readers of
the value that it is a view of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from gshard.autosharding.cost.specs import NONE, MeshShape, specs_of
from gshard.autosharding.solver.problem import Ints
from gshard.forecast.ops import PRODUCTS
from gshard.propagation.flow import Edge, Flow


class Sharing:
    """The shares of all operators of a program."""

    def __init__(self, flow: Flow, optimistic: bool) -> None:
        self.flow = flow
        # Of what is transposed the value itself, and which of its dims each dim is.
        self.sources: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self.products: set[Any] = set()  # results of matrix products
        for edge in flow.edges if optimistic else ():
            if name_of(edge) in PRODUCTS:
                self.products.update(edge.atoms[1])
            if edge.eqn is not None and is_transpose(edge):
                (operand,), (result,) = edge.atoms
                source, dims = self.source(operand)
                order = edge.eqn.params["permutation"]
                self.sources[result] = source, tuple(dims[d] for d in order)
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

    def move(self, var: Any) -> float:
        """The part of a value that has to move for who reads it."""
        return self.flow.narrow.get(var, 1.0)

    def source(self, var: Any) -> tuple[Any, tuple[int, ...]]:
        """The value that a transposed one is a view of, and which of its dims each dim is."""
        return self.sources.get(var, (var, tuple(range(len(var.aval.shape)))))

    def columns(self, var: Any, mesh: MeshShape) -> Ints:
        """For each spec of the source of a value, the number of the value's own spec."""
        source, dims = self.source(var)
        position = {
            tuple(at if at == NONE else dims[at] for at in spec): number
            for number, spec in enumerate(specs_of(var.aval.shape, mesh))
        }
        specs = specs_of(source.aval.shape, mesh)
        return np.array([position[spec] for spec in specs], dtype=np.int64)

    def _postponed(self, var: Any, result: Any) -> None:
        size, after = (max(v.aval.size, 1) for v in (var, result))
        left = min(1.0, after / size) * self.smaller.get(result, 1.0)
        self.smaller[var] = min(left, self.smaller.get(var, 1.0))


def is_transpose(edge: Edge) -> bool:
    """Whether an operator makes another view of its operand."""
    literal = isinstance(edge.atoms[0][0], Literal) if edge.atoms[0] else True
    return edge.eqn is not None and edge.eqn.primitive is p.transpose_p and not literal


def name_of(edge: Edge) -> str:
    """The name of an operator; none for the border of a loop."""
    return "" if edge.eqn is None else edge.eqn.primitive.name
