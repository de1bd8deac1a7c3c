"""The work of each equation of a program once a compiler has fused it: memory or arithmetic.

The forecast fuses the per-device program. Here the program itself is fused, by the same rules
(`forecast.program`): where no collective comes between two operators, the results are the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.forecast.dataflow import DeviceOperator
from gshard.forecast.hardware import Hardware
from gshard.forecast.ops import elements, size_of
from gshard.forecast.program import body_of, walk
from gshard.forecast.work import looks_up, moved_bytes, operations, updates, vector_flops
from gshard.graph.kinds import KERNELS, PRODUCTS

Parts = tuple[tuple[int, float], ...]  # numbers of operands or results, and the share touched


@dataclasses.dataclass(frozen=True)
class MemoryTraffic:
    """What one equation reads and writes in one run, as shares of its operands and results, and
    operations for each element where the arithmetic of the operator takes longer than these."""

    reads: Parts = ()
    writes: Parts = ()
    # A gather reads at most this multiple of its result.
    taken: float = math.inf
    operations: float = 0.0
    covered: bool = False  # fused with a matrix product, whose arithmetic may hide it
    repeated: bool = False  # equal to another equation, of which the compiler keeps one


class FusedWork:
    """The memory traffic of every equation, and of tensors that loops copy. What is fused is the
    program itself, or the most that its part on one of `fused_on` devices may be."""

    def __init__(self, jaxpr: Jaxpr, hardware: Hardware, devices: int, fused_on: int = 1) -> None:
        self.hardware, self.devices, self.fused_on = hardware, devices, fused_on
        self.starts = 0  # how many operators a device starts
        self.stored: set[Any] = set()  # what is written to memory
        self.copied: dict[Any, float] = defaultdict(float)  # times that a tensor is copied
        self._alias: dict[Any, Any] = {}
        self._reads: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._writes: dict[Any, dict[int, float]] = defaultdict(dict)
        self._taken: dict[Any, float] = {}
        self._operations: dict[Any, float] = {}
        self._covered: set[Any] = set()
        self._kept: set[Any] = set()  # equations that a compiler does not find to be equal
        self._collect(jaxpr)
        seen: set[DeviceOperator] = set()
        for operator, count, _ in walk(jaxpr, hardware.compiler, self.fused_on):
            self.starts += count
            self.stored.update(operator.writes)
            self._kept.update(op.eqn for op in operator.members)
            if operator not in seen:  # loops may share a body
                seen.add(operator)
                self._add(operator)

    def of(self, eqn: JaxprEqn | None) -> MemoryTraffic:
        """The memory traffic of an equation."""
        reads, writes = self._reads.get(eqn, {}), self._writes.get(eqn, {})
        return MemoryTraffic(
            tuple(reads.items()),
            tuple(writes.items()),
            self._taken.get(eqn, math.inf),
            self._operations.get(eqn, 0.0),
            eqn in self._covered,
            eqn is not None and eqn.primitive in PRODUCTS and eqn not in self._kept,
        )

    def root(self, var: Any) -> Any:
        """The stored value that a variable is another view of."""
        while var in self._alias:
            var = self._alias[var]
        return var

    def _collect(self, jaxpr: Jaxpr) -> None:
        body = body_of(jaxpr, self.hardware.compiler, self.fused_on)
        self._alias.update(body.alias)
        for operator in body.operators:
            for inner in operator.loop.bodies if operator.loop else ():
                self._collect(inner.jaxpr)

    def _add(self, operator: DeviceOperator) -> None:
        root, found = operator.root, {op.primitive for op in operator.members}
        if root.primitive in KERNELS:
            return
        if root.added:  # a copy that the compiler makes
            for var in operator.reads:
                self.copied[var] += 2.0
            return
        if not found & PRODUCTS and self._computes(operator):
            for op in operator.members:  # once, even if several operators recompute it
                count = max(map(elements, (*op.reads, *op.writes)), default=0)
                self._operations[op.eqn] = operations(op, count // self.devices)
            return
        written = sum(map(size_of, operator.writes))
        in_place = updates(operator)
        for number, var in enumerate(operator.reads):
            self._read(operator, var, (2.0 if number else 0.0) if in_place else 1.0)
        for op in operator.members if looks_up(operator) else ():
            made = sum(map(size_of, op.writes))
            self._taken[op.eqn] = 2 * written / max(made, 1)
        for op in operator.members:
            for number, var in enumerate(op.writes):
                if var in operator.writes and not in_place:
                    self._writes[op.eqn][number] = 1.0
            if len(operator.members) > 1 and found & PRODUCTS:
                self._covered.add(op.eqn)

    def _computes(self, operator: DeviceOperator) -> bool:
        """Whether the arithmetic of an operator takes longer than what it reads and writes."""
        bandwidth = self.hardware.memory_bandwidth * self.hardware.efficiency.memory
        arithmetic = vector_flops(operator) / self.hardware.vector_rate
        return arithmetic > moved_bytes(operator) / bandwidth

    def _read(self, operator: DeviceOperator, var: Any, share: float) -> None:
        """Count a read where a member of the operator has the value as an operand."""
        for op in operator.members:
            for number, atom in enumerate(op.eqn.invars):
                if not hasattr(atom, "val") and self.root(atom) is var:
                    self._reads[op.eqn][number] += share  # several fusions may share it
                    return
        self.copied[var] += share
