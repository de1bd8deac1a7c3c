"""A lower bound: prices that no lowered program undercuts, and the model of a program with them.

Wherever a lowered program may share, combine, postpone or avoid communication, the least that can
be left of it is charged, and only arguments are known to hold memory.

- Operators that need a tensor in the same form share one move, and a form may be made from another
  one on the way. Whatever a program shares, it pays for the most expensive move of a tensor.
- A value may be moved along several mesh axes with one collective or with one after the other, in
  any order. Small collectives can be combined: their latencies are left out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from gshard.autosharding.cost import (
    NONE,
    Axes,
    MeshShape,
    PartialSum,
    Rates,
    Spec,
    specs_of,
    tiles_of,
)
from gshard.autosharding.cost.model import MOST_SPECS, Holding, ModelBuilder
from gshard.autosharding.cost.strategies import OperatorPrices, Shares, Strategy, primitive_of
from gshard.autosharding.solver.problem import FORBIDDEN, Bools, Floats, Ints
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.collective import collective_terms
from gshard.forecast.hardware import Hardware
from gshard.graph.kinds import PRODUCTS
from gshard.propagation.flow import Edge
from gshard.rules.base.rule import Rule

_LARGE = 1 << 40  # bytes for which latency is nothing


class LowerBoundRates(Rates):
    """The least latencies, and the fewest seconds per byte.

    A collective of more than `largest` bytes, or one that exchanges, has a latency of its own;
    others may be combined. With no such limit (infinite), nothing has one.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, largest: float) -> None:
        super().__init__(hardware, mesh)
        self.largest = largest

    @functools.cache  # noqa: B019  (one per mesh, for as long as it is looked at)
    def reshards(self, shape: tuple[int, ...], itemsize: int) -> Floats:
        """Seconds from each spec of a tensor to each other one.

        Cut first, which sends nothing; then move axes between dims; then gather. Or gather all that
        moves.
        """
        specs = np.array(specs_of(shape, self.mesh)).reshape(-1, len(self.mesh))
        source, target = np.broadcast_arrays(specs[:, None], specs[None])
        cut = np.where(source == NONE, target, source) != NONE
        held = math.prod(shape) * itemsize / np.where(cut, self.mesh, 1).prod(-1)
        moved = (source != NONE) & (target != NONE) & (source != target)
        gathered = (source != NONE) & (target == NONE)
        exchanged = self._exchanges(source, target, moved, held) + self._gathers(gathered, held)
        return np.minimum(exchanged, self._gathers(moved | gathered, held))

    def sums(self, partial: PartialSum, spec: Spec) -> float:
        """Seconds to add up partial results for a spec: to scatter them over all axes and to gather
        them again over those that the spec does not use. Small ones pay no latency here."""
        tiles = math.prod(tiles_of(partial.made, self.mesh, len(partial.shape)))
        size = partial.itemsize * math.prod(partial.shape) / tiles
        every = tuple(a for a in sorted(partial.axes) if self.mesh[a] > 1)
        kept = tuple(a for a in every if spec[a] == NONE)
        left = size / math.prod(self.mesh[a] for a in every if a not in kept)
        kind = "all_reduce" if kept == every else "reduce_scatter"
        seconds = self._least(kind, every, np.array(size), partial.share)
        return float(seconds + self._least("all_gather", kept, np.array(left), 0.0))

    def _least(self, kind: str, axes: Axes, sizes: Floats, share: float = 1.0) -> Floats:
        """The least seconds to move something along some axes, in any number of steps; without the
        latencies of those that may be combined with others.

        `sizes` are of the largest step: of the operand, or of what is gathered, of which a `share`
        is sent. A ReduceScatter leaves a part to the next step, and so does, in the reverse order,
        an AllGather, which costs as much per byte of its result.
        """
        if not axes:
            return np.zeros(sizes.shape)
        exchanged = kind == "all_to_all"
        apart = (share * sizes > (0.0 if exchanged else self.largest)) & math.isfinite(self.largest)
        found = []
        for step in _parts(axes):
            left = sizes if exchanged else sizes / math.prod(self.mesh[a] for a in step)
            later = self._least(kind, tuple(a for a in axes if a not in step), left, share)
            _, per_byte = self.terms(kind if exchanged else "reduce_scatter", step, _LARGE)
            found.append(self.terms(kind, step, 1)[0] * apart + per_byte * sizes + later)
        return np.min(found, axis=0)

    def _exchanges(self, source: Floats, target: Floats, moved: Bools, held: Floats) -> Floats:
        """Moves of axes from dim to dim: those between the same dims may be one, and all of them
        may be one permutation of tiles."""
        total, count = np.zeros(held.shape), np.zeros(held.shape)
        for axes in self._subsets():
            first = axes[0]
            alike = moved & (source == source[..., first : first + 1])
            alike &= target == target[..., first : first + 1]
            inside = np.isin(np.arange(len(self.mesh)), axes)
            together = (alike == inside).all(-1)
            total += np.where(together, self._least("all_to_all", axes, held), 0.0)
            count += together * len(axes)
        slope, latency = self._permuting
        return np.where(count > 1, np.minimum(total, held * slope + latency), total)

    def _gathers(self, gathered: Bools, held: Floats) -> Floats:
        """Gathers along some axes of tiles that hold so many bytes each."""
        total = np.zeros(held.shape)
        for axes in self._subsets():
            chosen = (gathered == np.isin(np.arange(len(self.mesh)), axes)).all(-1)
            result = held * math.prod(self.mesh[a] for a in axes)
            total += np.where(chosen, self._least("all_gather", axes, result), 0.0)
        return total

    def _subsets(self) -> Iterator[Axes]:
        """All sets of axes with several devices, but the empty one."""
        return _parts([axis for axis, size in enumerate(self.mesh) if size > 1])

    @functools.cached_property
    def _permuting(self) -> tuple[float, float]:
        """Seconds per byte, and latency, of a permutation between neighbours along some axis."""
        efficiency, found = self.hardware.efficiency, []
        for axis in (axis for axis, size in enumerate(self.mesh) if size > 1):
            after = np.roll(self.ids, -1, axis)
            pairs = tuple(zip(self.ids.ravel().tolist(), after.ravel().tolist(), strict=True))
            sent, waited = collective_terms(
                self.topology, "collective_permute", _LARGE, pairs=pairs
            )
            found.append((sent / efficiency.links / _LARGE, waited + efficiency.operator_seconds))
        slopes, latencies = zip(*found, strict=True) if found else ((0.0,), (0.0,))
        return min(slopes), min(latencies)


def _parts(axes: Sequence[int]) -> Iterator[Axes]:
    """The sets of some of these axes, but the empty one."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


class LowerBoundPrices(OperatorPrices):
    """Prices of operators that no lowered program undercuts."""

    def __init__(self, subject: TracedProgram, mesh: MeshShape, hardware: Hardware) -> None:
        super().__init__(subject, mesh, hardware, fused_on=subject.devices)
        alone = hardware.compiler != "cpu"  # XLA for CPUs combines all-reduces of any size
        largest = hardware.cost_model.largest_combined if alone else math.inf
        self.least = LowerBoundRates(hardware, mesh, largest)
        self.least_combined = LowerBoundRates(hardware, mesh, math.inf)

    def moves(self, share: float = 1.0) -> LowerBoundRates:
        """What moves take, of values of which this share moves: what is smaller may be combined."""
        return self.least if share == 1.0 else self.least_combined

    def sums(self, shape: tuple[int, ...]) -> LowerBoundRates:
        """What sums take, without the latencies of small ones."""
        return self.least

    def rounded(self, amounts: Any) -> Any:
        """Round down to integers."""
        return np.floor(amounts)

    def reads_any_split(self, rule: Rule) -> bool:
        """Any rule of its own is taken to partition an operator along all dims, for free."""
        return rule.ways is not None or not rule.by_factors

    def sent_inside(self, edge: Edge, strategy: Strategy) -> float:
        """Nothing."""
        return 0.0


class LowerBoundBuilder(ModelBuilder):
    """The problem whose least cost is a lower bound of the forecasts of all layouts over a mesh,
    where equations that are `repeated` are sharded like those they represent. What may be shared is
    paid once."""

    prices: LowerBoundPrices
    slices_stay = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.reads: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)  # readers, their moves
        self.smaller: dict[Any, float] = {}  # share of an unreduced value that is reduced
        for edge in reversed(self.flow.edges):
            for atom in edge.atoms[0]:
                if not isinstance(atom, Literal) and atom in self.flow.shares and edge.atoms[1]:
                    self._postpone(atom, edge.atoms[1][0])

    def operator_prices(self, subject: TracedProgram) -> LowerBoundPrices:
        """Prices that no lowered program undercuts."""
        return LowerBoundPrices(subject, self.mesh, self.hardware)

    def _postpone(self, var: Any, result: Any) -> None:
        size, after = (max(v.aval.size, 1) for v in (var, result))
        left = min(1.0, after / size) * self.smaller.get(result, 1.0)
        self.smaller[var] = min(left, self.smaller.get(var, 1.0))

    def add_argument(self, var: Any) -> None:
        """An argument costs nothing by itself."""

    def starts(self) -> int:
        """Products stay apart; anything else may be fused."""
        made = (e for e in self.flow.edges if primitive_of(e) in PRODUCTS)
        return sum(e.runs for e in made if not self.work.of(e.eqn).repeated)

    def shares(self, edge: Edge) -> Shares:
        """Partial sums are reduced in their smallest form."""
        operands, results = super().shares(edge)
        smaller = (self.smaller.get(a, 1.0) for a in edge.atoms[1])
        return operands, tuple(own * s for own, s in zip(results, smaller, strict=True))

    def holdings(self, length: int) -> list[Holding]:
        """Arguments alone."""
        arguments = (var for var in self.jaxpr.invars if var in self.nodes)
        sizes = {var: self.local_bytes(var) * self.flow.runs[var] for var in arguments}
        return [(self.nodes[var], 0, length, size) for var, size in sizes.items()]

    def add_operand(self, edge: Edge, number: int, reader: int, table: Floats) -> None:
        """A read; there are no copies."""
        self.add_read(edge.atoms[0][number], reader, table)

    def add_read(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor: all of them pay together for the most expensive move."""
        self.reads[var].append((reader, table))

    def finish(self) -> None:
        """Add the moves of all tensors, when all readers are known: those of a tensor with several
        readers as a node, whose strategies are a spec and the most that a move from it costs."""
        for var, readers in self.reads.items():
            tensor, reads = self.nodes[var], readers
            moving = any((np.isfinite(table) & (table > 0)).any() for _, table in readers)
            if len(readers) > 1 and moving:
                if len(self.costs[tensor]) > MOST_SPECS:
                    # All may need the same form: each pays its part of what it moves.
                    reads = [(reader, np.floor(t / len(readers))) for reader, t in readers]
                else:
                    own, level = _levels([table for _, table in readers])
                    taken = np.arange(len(self.costs[tensor]))[:, None] == own
                    self.edges.append((len(self.costs), tensor, np.where(taken.T, 0.0, FORBIDDEN)))
                    reads = [(r, np.where(t[:, own] <= level, 0.0, FORBIDDEN)) for r, t in readers]
                    tensor = len(self.costs)
                    self.costs.append(level)
            self.edges += [(reader, tensor, table) for reader, table in reads]


def _levels(tables: list[Floats]) -> tuple[Ints, Floats]:
    """Pairs of a spec and of what a move from it may cost; less than every reader's cheapest move
    is not among them."""
    own, level = [], []
    for spec in range(tables[0].shape[1]):
        columns = [table[:, spec] for table in tables]
        least = max(float(c.min()) for c in columns)
        found = np.unique(np.concatenate(columns))
        found = found[(found >= least) & (found < FORBIDDEN)]
        own += [spec] * len(found)
        level += found.tolist()
    return np.array(own, dtype=np.int64), np.array(level)
