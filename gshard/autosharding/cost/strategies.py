"""The tables of an operator: its strategies, what each takes, and what its tensors have to move.

A strategy gives mesh axes to factors. Where a rule lists ways of its own (`Rule.ways`: slices,
sorts, windows, updates), what the cheapest of them sends between such tensors is a part of its
cost. For each tensor of the operator, a table has one row per strategy and one column per spec of
the tensor: the seconds that resharding the operand, or adding up the partial sums of the result,
takes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.autosharding.cost.lower_bound import transposes
from gshard.autosharding.cost.rates import LowerBoundRates, PartialSum, Rates
from gshard.autosharding.cost.sharing import name_of
from gshard.autosharding.cost.specs import (
    NONE,
    MeshShape,
    Spec,
    local_elements,
    sharding_of,
    specs_of,
)
from gshard.autosharding.cost.work import MemoryTraffic
from gshard.autosharding.solver.problem import FORBIDDEN, Floats
from gshard.forecast.hardware import Hardware
from gshard.forecast.ops import PRODUCTS, Op
from gshard.forecast.work import product_seconds
from gshard.moving.costs import MEMORY_LIMIT, use_cost_model
from gshard.propagation.flow import Edge
from gshard.rules.base.rule import RULES, Way
from gshard.rules.base.ways import operand_moves, price
from gshard.tensors.factors import Dim, Factors
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size

# Costs are counted in picoseconds: integers, so that equal sums are equal.
PICO = 1e12

Strategy = tuple[str | None, ...]  # for each mesh axis the factor that it cuts, if any
Shares = tuple[tuple[float, ...], tuple[float, ...]]  # of operands' moves, and of results' sums


@dataclasses.dataclass
class Priced:
    """An operator on one mesh: for each of its strategies what it costs, the bytes of its partial
    sums before they are added up, and the latency to reduce those that may be combined with others;
    and tables by strategies and specs: the costs of each of its tensors, and the latencies to
    gather each result again that is reduced."""

    costs: Floats
    waiting: Floats
    reducing: Floats
    gathering: list[Floats] = dataclasses.field(default_factory=list)
    tables: list[Floats | None] = dataclasses.field(default_factory=list)


class Tables:
    """Makes the tables of operators on one mesh."""

    def __init__(self, jaxpr: Jaxpr, mesh: MeshShape, hardware: Hardware, optimistic: bool) -> None:
        self.mesh, self.hardware, self.optimistic = mesh, hardware, optimistic
        self.alone = Rates(hardware, mesh)
        self.combined = Rates(hardware, mesh, combined=True)
        # XLA for CPUs combines all-reduces of any size.
        alone = hardware.compiler != "cpu"
        largest = hardware.cost_model.largest_combined if alone else math.inf
        self.least = LowerBoundRates(hardware, mesh, largest)
        self.least_combined = LowerBoundRates(hardware, mesh, math.inf)
        self.weights = {getattr(v.aval, "shape", ()) for v in jaxpr.invars}
        self.bandwidth = hardware.memory_bandwidth * hardware.efficiency.memory

    def moves(self, share: float = 1.0) -> Rates | LowerBoundRates:
        """What moves take, of values of which this share moves: what is smaller may be combined."""
        if not self.optimistic:
            return self.alone
        return self.least if share == 1.0 else self.least_combined

    def rounded(self, amounts: Any) -> Any:
        """Integers: of a bound they are not above the true ones."""
        return np.floor(amounts) if self.optimistic else np.rint(amounts)

    def of(self, edge: Edge, touches: MemoryTraffic, shares: Shares) -> Priced:
        """What an operator takes."""
        strategies = self._strategies(edge)
        work = [self._work(edge, s, touches) + self._inside(edge, s) for s in strategies]
        nothing = np.zeros(len(strategies))
        priced = Priced(np.array(work), nothing, nothing)
        for side, atoms in enumerate(edge.atoms):
            described = (edge.factors.operands, edge.factors.results)[side]
            for atom, dims, share in zip(atoms, described, shares[side], strict=True):
                if isinstance(atom, Literal):
                    continue
                made = [self._spec(s, dims) for s in strategies]
                if side:
                    partial = [self._partial(edge, s) for s in strategies]
                    self._into_result(priced, made, partial, atom, share, edge.runs)
                elif getattr(atom.aval, "shape", ()):
                    weight = share * edge.runs * PICO
                    table = self._into_operand(made, atom, self.moves(share), weight)
                    priced.tables.append(table)
                else:
                    priced.tables.append(None)
        priced.costs = self.rounded(priced.costs * edge.runs * PICO)
        priced.reducing = self.rounded(priced.reducing * edge.runs * PICO)
        priced.gathering = [self.rounded(t * edge.runs * PICO) for t in priced.gathering]
        return priced

    def _strategies(self, edge: Edge) -> list[Strategy]:
        """Mesh axes given to factors, where every tensor can express it."""
        factors = edge.factors
        named = dict.fromkeys(
            f for t in (*factors.operands, *factors.results) for d in t for f in d
        )
        replicated = () if self._may_split_all(edge) else factors.replicated
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

    def _may_split_all(self, edge: Edge) -> bool:
        """Whether a rule of its own may partition an operator along dims that factors keep.

        Only its ways have prices; a bound takes any rule of its own to do so for nothing.
        """
        rule = None if edge.eqn is None else RULES.get(edge.eqn.primitive)
        return rule is not None and bool(rule.ways or (self.optimistic and not rule.by_factors))

    def _inside(self, edge: Edge, strategy: Strategy) -> float:
        """Seconds of what an operator sends where its tensors are split like that (`Rule.ways`)."""
        rule = None if edge.eqn is None else RULES.get(edge.eqn.primitive)
        if rule is None or rule.ways is None or self.optimistic or not any(strategy):
            return 0.0
        operands, targets = (
            [
                sharding_of(self._spec(strategy, dims), len(atom.aval.shape), self.mesh)
                for atom, dims in zip(atoms, described, strict=True)
            ]
            for atoms, described in zip(
                edge.atoms, (edge.factors.operands, edge.factors.results), strict=True
            )
        )
        with use_cost_model(self.hardware.cost_model):
            ways = rule.ways(edge.eqn, operands, targets, MEMORY_LIMIT)
            sent = min(_sent(way, edge.eqn, operands, targets) for way in ways)
        return sent / self.hardware.sent_per_second

    def _is_major(self, factors: Factors, factor: str) -> bool:
        """Whether a factor comes first in every dim that has it, but for factors of size 1."""
        for tensor in (*factors.operands, *factors.results):
            for dim in tensor:
                if factor in dim and any(factors.sizes[f] > 1 for f in dim[: dim.index(factor)]):
                    return False
        return True

    def _work(self, edge: Edge, strategy: Strategy, touches: MemoryTraffic) -> float:
        """Seconds of the operator itself, on its part of the work: arithmetic or memory."""
        if edge.eqn is None or touches.repeated:
            return 0.0
        memory = 0.0 if touches.covered else self._touched(edge, strategy, touches)
        if name_of(edge) not in PRODUCTS:  # either may be of another fused operator
            return memory + self._computed(edge, strategy, touches)
        parts = float(
            np.prod([n for f, n in zip(strategy, self.mesh, strict=True) if f is not None])
        )
        op = Op(edge.eqn, (), (), joins=False)
        return max(product_seconds(op, self.hardware) / parts, memory)

    def _touched(self, edge: Edge, strategy: Strategy, touches: MemoryTraffic) -> float:
        """Seconds to read and write the memory that the operator touches."""

        def held(side: int, number: int) -> float:
            aval = edge.atoms[side][number].aval
            dims = (edge.factors.operands, edge.factors.results)[side][number]
            local = local_elements(aval.shape, self._spec(strategy, dims), self.mesh)
            return local * byte_size((), aval.dtype)

        most = math.inf
        if math.isfinite(touches.taken):
            most = touches.taken * sum(held(1, n) for n in range(len(edge.atoms[1])))
        total = sum(share * min(held(0, number), most) for number, share in touches.reads)
        total += sum(share * held(1, number) for number, share in touches.writes)
        return total / self.bandwidth

    def _computed(self, edge: Edge, strategy: Strategy, touches: MemoryTraffic) -> float:
        """Seconds of arithmetic: as many elements as the largest operand or result has."""
        if not touches.operations:
            return 0.0
        described = (*edge.factors.operands, *edge.factors.results)
        counts = [
            local_elements(atom.aval.shape, self._spec(strategy, dims), self.mesh)
            for atom, dims in zip((*edge.atoms[0], *edge.atoms[1]), described, strict=True)
            if getattr(atom.aval, "shape", ())
        ]
        return max(counts, default=1) * touches.operations / self.hardware.vector_rate

    def _spec(self, strategy: Strategy, dims: Sequence[Dim]) -> Spec:
        """How a tensor is cut where the factors are."""
        return tuple(
            next((d for d, names in enumerate(dims) if f is not None and f in names), NONE)
            for f in strategy
        )

    def _partial(self, edge: Edge, strategy: Strategy) -> tuple[int, ...]:
        """The mesh axes over which results are partial."""
        return tuple(axis for axis, f in enumerate(strategy) if f in edge.factors.reduced)

    def _into_operand(
        self, made: Sequence[Spec], atom: Any, rates: Rates | LowerBoundRates, weight: float
    ) -> Floats:
        """What it costs to bring a tensor from each of its specs to what a strategy reads."""
        shape, itemsize, position = self._specs(atom)
        moved = self.rounded(rates.reshards(shape, itemsize) * weight)
        never = np.full(len(position), FORBIDDEN)
        return np.array([moved[:, position[m]] if m in position else never for m in made])

    def transposed(self, edge: Edge, number: int, dims: Sequence[int] | None) -> Floats:
        """Seconds of the copies that come with exchanges of an operand (`exchanges`)."""
        shape, itemsize, position = self._specs(edge.atoms[0][number])
        made = [self._spec(s, edge.factors.operands[number]) for s in self._strategies(edge)]
        counts = np.array(
            [[transposes(shape, dims, own, m, self.mesh) for own in position] for m in made]
        )
        sizes = [[local_elements(shape, own, self.mesh) for own in position]]
        return self.rounded(2 * counts * sizes * itemsize * edge.runs / self.bandwidth * PICO)

    def _into_result(
        self,
        priced: Priced,
        made: Sequence[Spec],
        partial: Sequence[tuple[int, ...]],
        atom: Any,
        share: float,
        runs: int,
    ) -> None:
        """Add what it costs to reduce what each strategy makes to each of a tensor's specs; of a
        scalar, which has no node, to the strategy's own cost."""
        if not hasattr(atom.aval, "shape"):
            priced.tables.append(None)
            priced.gathering.append(np.zeros((len(made), 1)))
            return
        shape, itemsize, position = self._specs(atom)
        rates, reducing = self._sums(shape), np.zeros(len(made))
        gathering = np.zeros((len(made), len(position)))
        table, waiting = np.full((len(made), len(position)), FORBIDDEN), np.zeros(len(made))
        anywhere = (NONE, *range(len(shape)))
        for i, (here, over) in enumerate(zip(made, partial, strict=True)):
            left = PartialSum(shape, itemsize, here, over, share)
            ends = (anywhere if axis in over else (at,) for axis, at in enumerate(here))
            specs = [spec for spec in itertools.product(*ends) if spec in position]
            for spec in specs:
                table[i, position[spec]] = rates.sums(left, spec) * share
            if self.optimistic:
                reducing[i] = self.least.reducing(left)
            for spec in specs if reducing[i] else ():
                gathering[i, position[spec]] = self.least.gathering(self._several(over, spec))
            waiting[i] = itemsize * local_elements(shape, here, self.mesh) * bool(over)
        priced.reducing = np.maximum(priced.reducing, reducing)
        priced.gathering.append(gathering)
        if shape:
            priced.tables.append(self.rounded(table * runs * PICO))
            priced.waiting = priced.waiting + waiting
        else:
            priced.tables.append(None)
            if not self.optimistic:  # a bound leaves out a few bytes
                priced.costs = priced.costs + table[:, 0]

    def _several(self, axes: Sequence[int], spec: Spec) -> tuple[int, ...]:
        """Those of some axes, with several devices, along which a spec has copies."""
        return tuple(a for a in sorted(axes) if self.mesh[a] > 1 and spec[a] == NONE)

    def gathered(self, edge: Edge, number: int) -> Floats:
        """The latencies with which an operand is gathered for a bound, where that is small: by
        strategy and by the spec that it is gathered from."""
        shape, itemsize, position = self._specs(edge.atoms[0][number])
        dims = edge.factors.operands[number]
        wanted = np.array([self._spec(s, dims) for s in self._strategies(edge)])[:, None]
        own = np.array(list(position))[None]
        left = (own != NONE) & (wanted == NONE)
        cut = np.where(own == NONE, wanted, np.where(wanted == NONE, NONE, own)) != NONE
        sizes = math.prod(shape) * itemsize / np.where(cut, self.mesh, 1).prod(-1)
        found = np.zeros(left.shape[:2])
        for i, j in zip(*np.nonzero(left.any(-1) & (sizes <= self.least.largest)), strict=True):
            axes = np.flatnonzero(left[i, j]).tolist()
            found[i, j] = self.least.gathering(self._several(axes, (NONE,) * len(self.mesh)))
        return np.asarray(self.rounded(found * edge.runs * PICO))

    def _specs(self, atom: Any) -> tuple[tuple[int, ...], int, dict[Spec, int]]:
        """A tensor's shape, the size of an element, and the number of each of its specs."""
        shape = atom.aval.shape
        position = {spec: i for i, spec in enumerate(specs_of(shape, self.mesh))}
        return shape, byte_size((), atom.aval.dtype), position

    def _sums(self, shape: tuple[int, ...]) -> Rates | LowerBoundRates:
        """What sums take: those of gradients wait for nothing, so that they can be combined."""
        if self.optimistic:
            return self.least
        return self.combined if shape in self.weights else self.alone


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
