"""The memory that each equation of a program reads and writes, once a compiler has fused it.

The forecast fuses the per-device program. Here the program itself is fused, by the same rules
(`forecast.program`): where no collective comes between two operators, the results are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.forecast.kernels import KERNEL
from gshard.forecast.ops import LOOPS, PRODUCTS, Op, size_of
from gshard.forecast.program import Operator, body_of, walk
from gshard.graph.regions import bodies

_LOOKUPS = {"gather", "dynamic_slice", "slice"}
_UPDATES = {"dynamic_update_slice", "scatter", "scatter-add", "scatter_add"}

Parts = tuple[tuple[int, float], ...]  # numbers of operands or results, and the share touched


@dataclasses.dataclass(frozen=True)
class Touches:
    """What one equation reads and writes in one run, as shares of its operands and results."""

    reads: Parts = ()
    writes: Parts = ()
    covered: bool = False  # fused with a matrix product, whose arithmetic may hide it


class Touched:
    """The touches of every equation, and of tensors that loops copy."""

    def __init__(self, jaxpr: Jaxpr, style: str, devices: int, optimistic: bool = False) -> None:
        self.devices, self.optimistic = devices, optimistic
        self.starts = 0  # how many operators a device starts
        self.stored: set[Any] = set()  # what is written to memory
        self.copied: dict[Any, float] = defaultdict(float)  # times that a tensor is copied
        self._alias: dict[Any, Any] = {}
        self._reads: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._writes: dict[int, dict[int, float]] = defaultdict(dict)
        self._covered: set[int] = set()
        self._collect(jaxpr, style)
        seen: set[Operator] = set()
        for operator, count, _ in walk(jaxpr, style):
            self.starts += count
            self.stored.update(operator.writes)
            if operator not in seen:  # loops may share a body
                seen.add(operator)
                self._add(operator)

    def of(self, eqn: JaxprEqn | None) -> Touches:
        """The touches of an equation."""
        key = id(eqn)
        reads, writes = self._reads.get(key, {}), self._writes.get(key, {})
        return Touches(tuple(reads.items()), tuple(writes.items()), key in self._covered)

    def root(self, var: Any) -> Any:
        """The stored value that a variable is another view of."""
        while var in self._alias:
            var = self._alias[var]
        return var

    def _collect(self, jaxpr: Jaxpr, style: str) -> None:
        body = body_of(jaxpr, style)
        self._alias.update(body.alias)
        for operator in body.operators:
            if operator.root.name in LOOPS:
                for inner in bodies(operator.root.eqn):
                    self._collect(inner, style)

    def _add(self, operator: Operator) -> None:
        root, names = operator.root, {op.name for op in operator.members}
        if root.name == KERNEL:
            return
        if root.added:  # a copy that the compiler makes
            for var in operator.reads:
                self.copied[var] += 2.0
            return
        written = sum(map(size_of, operator.writes))
        updates = root.name in _UPDATES
        # A reduction that is fused with who reads it reads nothing by itself.
        fused = self.optimistic and root.reduces and _may_reduce_rows(root, self.devices)
        reads = () if fused else operator.reads
        for number, var in enumerate(reads):
            share = 1.0
            if names & _LOOKUPS:
                share = min(1.0, 2 * written / max(size_of(var), 1))
            elif updates:
                share = 2.0 if number else 0.0
            self._read(operator, var, share)
        for op in operator.members:
            for number, var in enumerate(op.writes):
                if var in operator.writes and not updates:
                    self._writes[id(op.eqn)][number] = 1.0
            if len(operator.members) > 1 and names & PRODUCTS:
                self._covered.add(id(op.eqn))

    def _read(self, operator: Operator, var: Any, share: float) -> None:
        """Count a read where a member of the operator has the value as an operand."""
        for op in operator.members:
            for number, atom in enumerate(op.eqn.invars):
                if not hasattr(atom, "val") and self.root(atom) is var:
                    self._reads[id(op.eqn)][number] += share  # several fusions may share it
                    return
        self.copied[var] += share


def _may_reduce_rows(op: Op, devices: int) -> bool:
    """Whether its part on a device may reduce the last dim alone, and be fused with who reads it.

    Of the other dims that it reduces, each device may have a single row.
    """
    if len(op.reads) != 1:
        return False
    shape, axes = op.reads[0].aval.shape, op.eqn.params.get("axes", ())
    last = len(shape) - 1
    return last in axes and math.prod(shape[a] for a in axes if a != last) <= devices
