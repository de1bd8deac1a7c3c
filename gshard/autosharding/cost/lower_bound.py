"""A lower bound: prices that no lowered program undercuts, and the model of a program with them.

Wherever a lowered program may share, combine, postpone or avoid communication, the least that can
be left of it is charged, and only arguments are known to hold memory.

- Operators that need a tensor in the same form share one move, and a form may be made from another
  one on the way. Whatever a program shares, it pays for the most expensive move of a tensor.
- A transposed value is moved before or after it is transposed: its readers are readers of the value
  that it is a view of.
- Small collectives can be combined: their latencies are left out.
- An AllToAll between two matrix products comes with copies (`transposes`). Pointwise operators
  would make them on the way, at no cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.extend.core import primitives as p

from gshard.autosharding.cost import NONE, MeshShape, Spec, local_elements, specs_of, transposes
from gshard.autosharding.cost.copies import MOST_SPECS
from gshard.autosharding.cost.model import Holding, MeshProblem, ModelBuilder
from gshard.autosharding.cost.rates import Axes, LowerBoundRates
from gshard.autosharding.cost.strategies import PICO, OperatorPrices, Shares, Strategy, primitive_of
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints
from gshard.autosharding.traced import ONCE, Repeated
from gshard.forecast.hardware import Hardware
from gshard.graph.kinds import PRODUCTS
from gshard.propagation.flow import Edge
from gshard.rules.base.rule import Rule


def build_lower_bound(
    flat: ClosedJaxpr,
    mesh: MeshShape,
    hardware: Hardware,
    limit: float,
    returned: Sequence[tuple[int, int]] = (),
    repeated: Repeated = ONCE,
) -> MeshProblem:
    """The problem whose least cost is a lower bound of the forecasts of all layouts over a mesh,
    where equations that are `repeated` are sharded like those they represent."""
    prices = LowerBoundPrices(flat.jaxpr, mesh, hardware)
    return LowerBoundBuilder(flat, prices, limit, math.prod(mesh), repeated).built(returned)


class LowerBoundPrices(OperatorPrices):
    """Prices of operators that no lowered program undercuts."""

    def __init__(self, jaxpr: Jaxpr, mesh: MeshShape, hardware: Hardware) -> None:
        super().__init__(jaxpr, mesh, hardware)
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

    def into_result(
        self, made: Sequence[Spec], partial: Sequence[Axes], atom: Any, share: float
    ) -> Floats:
        """Seconds to reduce a tensor; the few bytes of a scalar are left out."""
        if atom.aval.shape:
            return super().into_result(made, partial, atom, share)
        return np.zeros((len(made), 1))

    def transposed(self, edge: Edge, number: int, dims: Sequence[int] | None) -> Floats:
        """Seconds of the copies that come with exchanges of an operand (`transposes`)."""
        shape, itemsize, position = self.specs(edge.atoms[0][number])
        made = [self.spec(s, edge.factors.operands[number]) for s in self.strategies(edge)]
        counts = np.array(
            [[transposes(shape, dims, own, m, self.mesh) for own in position] for m in made]
        )
        sizes = [[local_elements(shape, own, self.mesh) for own in position]]
        return self.rounded(2 * counts * sizes * itemsize * edge.runs / self.bandwidth * PICO)


class LowerBoundBuilder(ModelBuilder):
    """The model of a program with these prices: what may be shared is paid once."""

    prices: LowerBoundPrices
    slices_stay = False

    def __init__(
        self,
        flat: ClosedJaxpr,
        prices: LowerBoundPrices,
        limit: float,
        fused_on: int,
        repeated: Repeated = ONCE,
    ) -> None:
        super().__init__(flat, prices, limit, fused_on=fused_on, repeated=repeated)
        self.readers: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)  # and their moves
        # For a transposed value the value itself, and which of its dims each dim is.
        self.sources: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        self.products: set[Any] = set()  # results of matrix products
        for edge in self.flow.edges:
            if primitive_of(edge) in PRODUCTS:
                self.products.update(edge.atoms[1])
            if edge.eqn is not None and is_transpose(edge):
                (operand,), (result,) = edge.atoms
                source, dims = self.source(operand)
                order = edge.eqn.params["permutation"]
                self.sources[result] = source, tuple(dims[d] for d in order)
        self.smaller: dict[Any, float] = {}  # share of an unreduced value that is reduced
        for edge in reversed(self.flow.edges):
            for atom in edge.atoms[0]:
                if not isinstance(atom, Literal) and atom in self.flow.shares and edge.atoms[1]:
                    self._postpone(atom, edge.atoms[1][0])

    def _postpone(self, var: Any, result: Any) -> None:
        size, after = (max(v.aval.size, 1) for v in (var, result))
        left = min(1.0, after / size) * self.smaller.get(result, 1.0)
        self.smaller[var] = min(left, self.smaller.get(var, 1.0))

    def source(self, var: Any) -> tuple[Any, tuple[int, ...]]:
        """The value that a transposed one is a view of, and which of its dims each dim is."""
        return self.sources.get(var, (var, tuple(range(len(var.aval.shape)))))

    def columns(self, var: Any) -> Ints:
        """For each spec of the source of a value, the number of the value's own spec."""
        source, dims = self.source(var)
        position = {
            tuple(at if at == NONE else dims[at] for at in spec): number
            for number, spec in enumerate(specs_of(var.aval.shape, self.mesh))
        }
        specs = specs_of(source.aval.shape, self.mesh)
        return np.array([position[spec] for spec in specs], dtype=np.int64)

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
        arguments = (var for var in self.flat.jaxpr.invars if var in self.nodes)
        sizes = {var: self.local_bytes(var) * self.flow.runs[var] for var in arguments}
        return [(self.nodes[var], 0, length, size) for var, size in sizes.items()]

    def add_operand(self, edge: Edge, number: int, reader: int, table: Floats) -> None:
        """A read, with the copies of exchanges between products on GPUs."""
        if is_transpose(edge):
            return  # who reads the result counts
        var = edge.atoms[0][number]
        source, dims = self.source(var)
        between = source in self.products and primitive_of(edge) in PRODUCTS
        if self.hardware.compiler == "gpu" and between:
            view = None if var is source else dims
            table = table + self.prices.transposed(edge, number, view)
        self.add_read(var, reader, table)

    def add_read(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor: all of them pay together for the most expensive move."""
        source, _ = self.source(var)
        self.readers[source].append((reader, table[:, self.columns(var)]))

    def finish(self) -> None:
        """Add the moves of all tensors, when all readers are known: those of a tensor with several
        readers as a node, whose strategies are a spec and the most that a move from it costs."""
        for var, readers in self.readers.items():
            tensor, reads = self.nodes[var], readers
            if len(readers) > 1 and not all(_is_free(table) for _, table in readers):
                if len(self.costs[tensor]) > MOST_SPECS:
                    reads = [(reader, _shared(table, len(readers))) for reader, table in readers]
                else:
                    own, level = _levels([table for _, table in readers])
                    taken = np.arange(len(self.costs[tensor]))[:, None] == own
                    self.edges.append((len(self.costs), tensor, np.where(taken.T, 0.0, FORBIDDEN)))
                    reads = [(r, np.where(t[:, own] <= level, 0.0, FORBIDDEN)) for r, t in readers]
                    tensor = len(self.costs)
                    self.costs.append(level)
            self.edges += [(reader, tensor, table) for reader, table in reads]


def is_transpose(edge: Edge) -> bool:
    """Whether an operator makes another view of its operand."""
    literal = isinstance(edge.atoms[0][0], Literal) if edge.atoms[0] else True
    return edge.eqn is not None and edge.eqn.primitive is p.transpose_p and not literal


def _is_free(table: Floats) -> bool:
    """Whether a reader moves nothing."""
    return bool(((table == 0.0) | (table >= FORBIDDEN)).all())


def _shared(table: Floats, readers: int) -> Floats:
    """What one of so many readers pays at least: all may need the same form."""
    return np.where(table >= FORBIDDEN, table, np.floor(table / readers))


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
