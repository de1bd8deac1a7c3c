"""The strategies of an operator and their prices: what each takes, and what its tensors move.

A strategy gives mesh axes to factors. Where a rule lists ways of its own (`Rule.ways`: slices,
sorts, windows, updates), what the cheapest of them sends between such tensors is a part of its
cost. For each tensor of the operator, a table has one row per strategy and one column per spec of
the tensor: the seconds that resharding the operand, or adding up the partial sums of the result,
takes.

The work of an equation is that of the operator that a compiler fuses it into: memory or arithmetic.
The forecast fuses the per-device program. Here the program itself is fused, by the same rules
(`forecast.program`): where no collective comes between two operators, the results are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive

from gshard.autosharding.cost import (
    NONE,
    Axes,
    MeshShape,
    PartialSum,
    Rates,
    Spec,
    local_elements,
    sharding_of,
    specs_of,
)
from gshard.autosharding.solver.problem import FORBIDDEN, Floats
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.dataflow import Body, DeviceOperator, Op, elements
from gshard.forecast.hardware import Hardware
from gshard.forecast.program import body_of
from gshard.forecast.work import (
    looks_up,
    moved_bytes,
    operations,
    product_seconds,
    updates,
    vector_flops,
)
from gshard.graph.kinds import KERNELS, PRODUCTS
from gshard.moving.costs import MEMORY_LIMIT, use_cost_model
from gshard.propagation.flow import Edge
from gshard.rules.base.rule import RULES, Rule, Way
from gshard.rules.base.ways import operand_moves, price
from gshard.tensors.factors import Dim, Factors
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size, size_of

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

    def __init__(self, subject: TracedProgram, hardware: Hardware, fused_on: int = 1) -> None:
        self.hardware, self.devices = hardware, subject.devices
        body, repeated = body_of(subject.flat.jaxpr, hardware.compiler, fused_on), subject.repeated
        self.starts = 0  # how many operators a device starts
        self.stored: set[Any] = set()  # what is written to memory
        self.copied: dict[Any, float] = defaultdict(float)  # times that a tensor is copied
        self._alias: dict[Any, Any] = {}
        self._reads: dict[Any, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self._writes: dict[Any, dict[int, float]] = defaultdict(dict)
        self._others: dict[Any, dict[str, Any]] = defaultdict(dict)  # of `MemoryTraffic`
        self._kept: set[Any] = set()  # equations that a compiler does not find to be equal
        self._collect(body)
        seen: set[DeviceOperator] = set()
        for operator, count, _ in body.walk():
            self.starts += count * (repeated.times if operator.root.eqn in repeated.eqns else 1)
            self.stored.update(operator.writes)
            self._kept.update(op.eqn for op in operator.members)
            if operator not in seen:  # loops may share a body
                seen.add(operator)
                self._add(operator)

    def of(self, eqn: JaxprEqn | None) -> MemoryTraffic:
        """The memory traffic of an equation."""
        reads, writes = (tuple(of.get(eqn, {}).items()) for of in (self._reads, self._writes))
        again = eqn is not None and eqn.primitive in PRODUCTS and eqn not in self._kept
        return MemoryTraffic(reads, writes, repeated=again, **self._others.get(eqn, {}))

    def root(self, var: Any) -> Any:
        """The stored value that a variable is another view of."""
        while var in self._alias:
            var = self._alias[var]
        return var

    def _collect(self, body: Body) -> None:
        self._alias.update(body.alias)
        for loop in filter(None, (operator.loop for operator in body.operators)):
            for inner in loop.bodies:
                self._collect(inner)

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
                self._others[op.eqn]["operations"] = operations(op, count // self.devices)
            return
        written = sum(map(size_of, operator.writes))
        in_place = updates(operator)
        for number, var in enumerate(operator.reads):
            self._read(operator, var, (2.0 if number else 0.0) if in_place else 1.0)
        for op in operator.members if looks_up(operator) else ():
            made = sum(map(size_of, op.writes))
            self._others[op.eqn]["taken"] = 2 * written / max(made, 1)
        for op in operator.members:
            for number, var in enumerate(op.writes):
                if var in operator.writes and not in_place:
                    self._writes[op.eqn][number] = 1.0
            if len(operator.members) > 1 and found & PRODUCTS:
                self._others[op.eqn]["covered"] = True

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


@functools.lru_cache(maxsize=4)
def _fused_work(subject: TracedProgram, hardware: Hardware, fused_on: int) -> FusedWork:
    """The work of a program, which is the same on all meshes."""
    return FusedWork(subject, hardware, fused_on)


# Costs are counted in picoseconds: integers, so that equal sums are equal.
PICO = 1e12

Strategy = tuple[str | None, ...]  # for each mesh axis the factor that it cuts, if any
Shares = tuple[tuple[float, ...], tuple[float, ...]]  # of operands' moves, and of results' sums


@dataclasses.dataclass(frozen=True)
class Priced:
    """An operator on one mesh: for each of its strategies what it costs, and the bytes of its
    partial sums before they are added up; and for each of its tensors a table by strategies and
    specs, None for scalars."""

    costs: Floats
    waiting: Floats
    tables: list[Floats | None]


class OperatorPrices:
    """Likely prices of operators on one mesh, for finding layouts."""

    def __init__(
        self, subject: TracedProgram, mesh: MeshShape, hardware: Hardware, fused_on: int = 1
    ) -> None:
        self.subject, self.mesh, self.hardware = subject, mesh, hardware
        self.work = _fused_work(subject, hardware, fused_on)
        self.alone = Rates(hardware, mesh)
        self.combined = Rates(hardware, mesh, combined=True)
        self.weights = {getattr(v.aval, "shape", ()) for v in subject.flat.jaxpr.invars}
        self.bandwidth = hardware.memory_bandwidth * hardware.efficiency.memory

    def moves(self, share: float = 1.0) -> Rates:
        """What moves take, of values of which this share moves."""
        return self.alone

    def moving(self, var: Any, share: float = 1.0, runs: int = 1) -> Floats:
        """What resharding a tensor costs, of which a share moves, from each spec to each other."""
        seconds = self.moves(share).reshards(var.aval.shape, byte_size((), var.aval.dtype))
        return np.asarray(self.rounded(seconds * (share * runs * PICO)))

    def sums(self, shape: tuple[int, ...]) -> Rates:
        """What sums take: those of gradients can be combined, since nothing waits for them."""
        return self.combined if shape in self.weights else self.alone

    def rounded(self, amounts: Any) -> Any:
        """Round to integers."""
        return np.rint(amounts)

    def reads_any_split(self, rule: Rule) -> bool:
        """Whether a rule of its own may partition an operator along dims that factors keep."""
        return rule.ways is not None

    def sent_inside(self, edge: Edge, strategy: Strategy) -> float:
        """Seconds of what an operator sends where its tensors are split like that (`Rule.ways`)."""
        rule = None if edge.eqn is None else RULES.get(edge.eqn.primitive)
        if rule is None or rule.ways is None or not any(strategy):
            return 0.0
        described = edge.factors.operands, edge.factors.results
        operands, targets = (
            [
                sharding_of(self.spec(strategy, dims), len(atom.aval.shape), self.mesh)
                for atom, dims in zip(atoms, tensors, strict=True)
            ]
            for atoms, tensors in zip(edge.atoms, described, strict=True)
        )
        with use_cost_model(self.hardware.cost_model):
            ways = rule.ways(edge.eqn, operands, targets, MEMORY_LIMIT)
            sent = min(_sent(way, edge.eqn, operands, targets) for way in ways)
        return sent / self.hardware.sent_per_second

    def of(self, edge: Edge, traffic: MemoryTraffic, shares: Shares) -> Priced:
        """What an operator takes, where it pays these shares of its moves and sums."""
        strategies = self.strategies(edge)
        costs = np.array([self._work(edge, s, traffic) for s in strategies])
        costs += [self.sent_inside(edge, s) for s in strategies]
        waiting, tables = np.zeros(len(strategies)), list[Floats | None]()
        for atom, dims, share in zip(edge.atoms[0], edge.factors.operands, shares[0], strict=True):
            if isinstance(atom, Literal):
                continue
            table = None
            if getattr(atom.aval, "shape", ()):
                made = [self.spec(s, dims) for s in strategies]
                table = self._into_operand(made, atom, share, edge.runs)
            tables.append(table)
        partial = [self.partial_axes(edge, s) for s in strategies]
        for atom, dims, share in zip(edge.atoms[1], edge.factors.results, shares[1], strict=True):
            made = [self.spec(s, dims) for s in strategies]
            table = None
            if hasattr(atom.aval, "shape"):
                table = self._into_result(made, partial, atom, share)
                if not atom.aval.shape:  # it has no node, so that the strategy pays for its sum
                    costs, table = costs + table[:, 0], None
                else:
                    table = self.rounded(table * edge.runs * PICO)
                    waiting += self._held(made, partial, atom)
            tables.append(table)
        return Priced(self.rounded(costs * edge.runs * PICO), waiting, tables)

    def strategies(self, edge: Edge) -> list[Strategy]:
        """Mesh axes given to factors, where every tensor can express it."""
        factors = edge.factors
        named = dict.fromkeys(
            f for t in (*factors.operands, *factors.results) for d in t for f in d
        )
        rule = None if edge.eqn is None else RULES.get(edge.eqn.primitive)
        any_split = rule is not None and self.reads_any_split(rule)
        replicated = () if any_split else factors.replicated
        free = [f for f in named if f not in replicated and self._is_major(factors, f)]
        found = []
        for choice in itertools.product((None, *free), repeat=len(self.mesh)):
            tiles: dict[str, int] = {}
            for factor, size in zip(choice, self.mesh, strict=True):
                if factor is not None:
                    tiles[factor] = tiles.get(factor, 1) * size
            if all(factors.sizes[f] >= n for f, n in tiles.items()) and _apart(factors, tiles):
                found.append(choice)
        return found

    def _is_major(self, factors: Factors, factor: str) -> bool:
        """Whether a factor comes first in every dim that has it, but for factors of size 1."""
        for tensor in (*factors.operands, *factors.results):
            for dim in tensor:
                if factor in dim and any(factors.sizes[f] > 1 for f in dim[: dim.index(factor)]):
                    return False
        return True

    def _work(self, edge: Edge, strategy: Strategy, traffic: MemoryTraffic) -> float:
        """Seconds of the operator itself, on its part of the work: arithmetic or memory."""
        if edge.eqn is None or traffic.repeated:
            return 0.0
        described = edge.factors.operands, edge.factors.results

        def local(side: int, number: int) -> int:
            """The elements of a tile of an operand or result."""
            shape = getattr(edge.atoms[side][number].aval, "shape", ())
            return local_elements(shape, self.spec(strategy, described[side][number]), self.mesh)

        def held(side: int, number: int) -> int:
            return local(side, number) * byte_size((), edge.atoms[side][number].aval.dtype)

        results, most = range(len(edge.atoms[1])), math.inf
        if math.isfinite(traffic.taken):
            most = traffic.taken * sum(held(1, n) for n in results)
        touched = sum(share * min(held(0, n), most) for n, share in traffic.reads)
        touched += sum(share * held(1, n) for n, share in traffic.writes)
        memory = 0.0 if traffic.covered else touched / self.bandwidth
        if primitive_of(edge) in PRODUCTS:
            parts = math.prod(n for f, n in zip(strategy, self.mesh, strict=True) if f is not None)
            op = Op(edge.eqn, (), (), joins=False)
            return max(product_seconds(op, self.hardware) / parts, memory)
        if not traffic.operations:
            return memory
        # As many elements as the largest has; either may be of another fused operator.
        most = max(
            (local(side, n) for side in (0, 1) for n in range(len(edge.atoms[side]))), default=1
        )
        return memory + most * traffic.operations / self.hardware.vector_rate

    def spec(self, strategy: Strategy, dims: Sequence[Dim]) -> Spec:
        """How a tensor is cut where the factors are."""
        return tuple(
            next((d for d, names in enumerate(dims) if f is not None and f in names), NONE)
            for f in strategy
        )

    def partial_axes(self, edge: Edge, strategy: Strategy) -> tuple[int, ...]:
        """The mesh axes over which results are partial."""
        return tuple(axis for axis, f in enumerate(strategy) if f in edge.factors.reduced)

    def _into_operand(self, made: Sequence[Spec], atom: Any, share: float, runs: int) -> Floats:
        """What it costs to bring a tensor from each of its specs to what a strategy reads."""
        moved, (_, _, position) = self.moving(atom, share, runs), self.specs(atom)
        never = np.full(len(position), FORBIDDEN)
        return np.array([moved[:, position[m]] if m in position else never for m in made])

    def _into_result(
        self, made: Sequence[Spec], partial: Sequence[Axes], atom: Any, share: float
    ) -> Floats:
        """Seconds to reduce what each strategy makes to each of a tensor's specs."""
        shape, itemsize, position = self.specs(atom)
        table, rates = np.full((len(made), len(position)), FORBIDDEN), self.sums(shape)
        for i, (here, over) in enumerate(zip(made, partial, strict=True)):
            left = PartialSum(shape, itemsize, here, over, share)
            for spec in left.reduced_specs():
                if spec in position:
                    table[i, position[spec]] = rates.sums(left, spec) * share
        return table

    def _held(self, made: Sequence[Spec], partial: Sequence[Axes], atom: Any) -> Floats:
        """The bytes of the partial sums of a result, by strategy."""
        shape, itemsize, _ = self.specs(atom)
        sizes = [itemsize * local_elements(shape, here, self.mesh) for here in made]
        return np.where([len(over) > 0 for over in partial], sizes, 0).astype(np.float64)

    def specs(self, atom: Any) -> tuple[tuple[int, ...], int, dict[Spec, int]]:
        """A tensor's shape, the size of an element, and the number of each of its specs."""
        shape = atom.aval.shape
        position = {spec: i for i, spec in enumerate(specs_of(shape, self.mesh))}
        return shape, byte_size((), atom.aval.dtype), position


def _sent(
    way: Way, eqn: JaxprEqn, operands: Sequence[Sharding], targets: Sequence[Sharding]
) -> float:
    """The cost of a way without its work, and without sums, which the tables of results have."""
    if any(result.unreduced for result in way.results):
        moves = operand_moves(way, eqn, operands)
        return way.sent + sum(cost for _, _, cost in moves)
    return price(way, eqn, operands, targets) - way.work


def _apart(factors: Factors, tiles: dict[str, int]) -> bool:
    """Whether no dim has two of the factors that are split."""
    tensors = (*factors.operands, *factors.results)
    return all(sum(f in tiles for f in dim) <= 1 for tensor in tensors for dim in tensor)


def primitive_of(edge: Edge) -> Primitive | None:
    """The primitive of an operator; none for the border of a loop."""
    return None if edge.eqn is None else edge.eqn.primitive
