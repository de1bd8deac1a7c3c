"""A lower bound: prices that no lowered program undercuts, and the model of a program with them.

Wherever a lowered program may share, combine, postpone or avoid communication, the least that can
be left of it is charged, and only arguments are known to hold memory.

- Operators that need a tensor in the same form share one move, and a form may be made from another
  one on the way. Whatever a program shares, it pays for the most expensive move of a tensor.
- A transposed value is moved before or after it is transposed: its readers are readers of the value
  that it is a view of.
- Small collectives of a loop's body can be combined into one, but not with those of another body.
  Every iteration pays at least one latency if it reduces anything, and one more if it gathers
  anything: an AllReduce does both, for the latencies of both.
- An AllToAll between two matrix products comes with copies (`transposes`). Pointwise operators
  would make them on the way, at no cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.autosharding.cost import NONE, MeshShape, Spec, local_elements, specs_of, transposes
from gshard.autosharding.cost.copies import MOST_SPECS
from gshard.autosharding.cost.model import Holding, MeshProblem, ModelBuilder
from gshard.autosharding.cost.rates import Axes, LowerBoundRates, PartialSum
from gshard.autosharding.cost.strategies import PICO, OperatorPrices, Shares, Strategy, primitive_of
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints
from gshard.autosharding.traced import ONCE, Repeated
from gshard.forecast.hardware import Hardware
from gshard.graph.kinds import PRODUCTS
from gshard.graph.regions import bodies
from gshard.propagation.flow import Edge
from gshard.rules.base.rule import Rule

REDUCING, GATHERING = "reducing", "gathering"

# Specs of a tensor up to which its gathers have a node: those over one axis. With more the solver
# does not finish in time.
_MOST_GATHERED_SPECS = 8

# The share of a step that the latencies of a body take, to be counted: they make problems harder.
_COUNTED = 2e-4


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

    def latencies(self, edge: Edge, shares: Shares) -> tuple[Floats, list[Floats]]:
        """The latency to reduce the small results of an operator, by strategy, and tables of the
        latencies to gather each result again that is reduced, by strategies and specs."""
        strategies = self.strategies(edge)
        reducing, gathering = np.zeros(len(strategies)), []
        for atom, dims, share in zip(edge.atoms[1], edge.factors.results, shares[1], strict=True):
            if not hasattr(atom.aval, "shape"):
                gathering.append(np.zeros((len(strategies), 1)))
                continue
            shape, itemsize, position = self.specs(atom)
            needed = np.zeros((len(strategies), len(position)))
            for i, strategy in enumerate(strategies):
                over = self.partial_axes(edge, strategy)
                left = PartialSum(shape, itemsize, self.spec(strategy, dims), over, share)
                specs = [spec for spec in left.reduced_specs() if spec in position]
                if not (own := self.least.reducing(left)):
                    continue
                reducing[i] = max(reducing[i], own)
                for spec in specs:
                    needed[i, position[spec]] = self.least.gathering(self._copied_axes(over, spec))
            gathering.append(self.rounded(needed * edge.runs * PICO))
        return self.rounded(reducing * edge.runs * PICO), gathering

    def _copied_axes(self, axes: Sequence[int], spec: Spec) -> Axes:
        """The axes with several devices along which a spec has copies."""
        return tuple(a for a in sorted(axes) if self.mesh[a] > 1 and spec[a] == NONE)

    def gathered(self, edge: Edge, number: int) -> Floats:
        """The latencies with which an operand is gathered, where that is small: by strategy and by
        the spec that it is gathered from."""
        shape, itemsize, position = self.specs(edge.atoms[0][number])
        dims = edge.factors.operands[number]
        wanted = np.array([self.spec(s, dims) for s in self.strategies(edge)])[:, None]
        own = np.array(list(position))[None]
        left = (own != NONE) & (wanted == NONE)
        cut = np.where(own == NONE, wanted, np.where(wanted == NONE, NONE, own)) != NONE
        sizes = math.prod(shape) * itemsize / np.where(cut, self.mesh, 1).prod(-1)
        found, nowhere = np.zeros(left.shape[:2]), (NONE,) * len(self.mesh)
        for i, j in zip(*np.nonzero(left.any(-1) & (sizes <= self.least.largest)), strict=True):
            axes = np.flatnonzero(left[i, j]).tolist()
            found[i, j] = self.least.gathering(self._copied_axes(axes, nowhere))
        return np.asarray(self.rounded(found * edge.runs * PICO))

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
        self.shared, self.latencies = SharedMoves(), Latencies(flat.jaxpr)
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

    def add_operator(self, edge: Edge, node: int, shares: Shares) -> None:
        """The latencies of an operator's small sums."""
        reducing, gathering = self.prices.latencies(edge, shares)
        self.latencies.add(edge, node, REDUCING, reducing)
        for atom, needed in zip(edge.atoms[1], gathering, strict=True):
            if self.nodes.get(atom, -1) >= 0:
                self.latencies.add_read(edge, atom, node, needed)
            else:
                self.latencies.add(edge, node, GATHERING, needed[:, 0])

    def add_operand(self, edge: Edge, number: int, reader: int, table: Floats) -> None:
        """A read, with the copies of exchanges between products on GPUs, and the latency of small
        gathers of an operand that is made in the same body. One that can be computed from narrower
        values need not be gathered."""
        if is_transpose(edge):
            return  # who reads the result counts
        var = edge.atoms[0][number]
        source, dims = self.source(var)
        between = source in self.products and primitive_of(edge) in PRODUCTS
        if self.hardware.compiler == "gpu" and between:
            view = None if var is source else dims
            table = table + self.prices.transposed(edge, number, view)
        self.add_read(var, reader, table)
        if self.latencies.is_near(source, edge.eqn) and self.moved(var) == 1.0:
            gathered = self.prices.gathered(edge, number)[:, self.columns(var)]
            self.latencies.add_read(edge, source, reader, gathered)

    def add_read(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor: all of them pay together for the most expensive move."""
        source, _ = self.source(var)
        self.shared.add(source, reader, table[:, self.columns(var)])

    def finish(self) -> None:
        """Add shared moves and latencies, when all readers are known."""
        self.shared.write(self.nodes, self.costs, self.edges)
        self.latencies.write(self.nodes, self.costs, self.edges)


def is_transpose(edge: Edge) -> bool:
    """Whether an operator makes another view of its operand."""
    literal = isinstance(edge.atoms[0][0], Literal) if edge.atoms[0] else True
    return edge.eqn is not None and edge.eqn.primitive is p.transpose_p and not literal


@dataclasses.dataclass
class SharedMoves:
    """The moves of tensors, by who reads them: tables of a reader's strategies and the tensor's
    specs."""

    readers: dict[Any, list[tuple[int, Floats]]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor, and what moving the tensor for it alone would cost."""
        self.readers[var].append((reader, table))

    def write(
        self, nodes: dict[Any, int], costs: list[Floats], edges: list[tuple[int, int, Floats]]
    ) -> None:
        """Add the moves of all tensors to a problem: those of a tensor with several readers as a
        node, whose strategies are a spec of the tensor and the most that a move from it costs."""
        for var, readers in self.readers.items():
            if len(readers) == 1 or all(_is_free(table) for _, table in readers):
                edges += [(reader, nodes[var], table) for reader, table in readers]
                continue
            if len(costs[nodes[var]]) > MOST_SPECS:
                edges += [(r, nodes[var], _shared(t, len(readers))) for r, t in readers]
                continue
            own, level = _levels([table for _, table in readers])
            _add_levels(nodes[var], readers, own, level, costs, edges)
            costs[-1] = level


def _add_levels(
    tensor: int,
    readers: Sequence[tuple[int, Floats]],
    own: Ints,
    level: Floats,
    costs: list[Floats],
    edges: list[tuple[int, int, Floats]],
) -> None:
    """A node that costs nothing: a strategy is a spec of the tensor and what no reader exceeds."""
    taken = np.arange(len(costs[tensor]))[:, None] == own
    edges.append((tensor, len(costs), np.where(taken, 0.0, FORBIDDEN)))
    for reader, table in readers:
        edges.append((reader, len(costs), np.where(table[:, own] <= level, 0.0, FORBIDDEN)))
    costs.append(np.zeros(len(own)))


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


class Latencies:
    """The small collectives of each body: nodes, and the latency that each strategy needs."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.body: dict[Any, Jaxpr] = {}  # of its equations, and of variables that are made in it
        self.needs: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)
        self.reads: dict[Any, list[tuple[int, Floats]]] = defaultdict(list)
        self._enter(jaxpr)

    def _enter(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            self.body.update(dict.fromkeys([eqn, *eqn.outvars], jaxpr))
            for inner in bodies(eqn):
                self._enter(inner)

    def is_near(self, var: Any, eqn: JaxprEqn | None) -> bool:
        """Whether a value is made in the body of an equation."""
        return var in self.body and self.body[var] is self.body.get(eqn)

    def add(self, edge: Edge, node: int, kind: str, latencies: Floats) -> None:
        """An operator, and for each of its strategies the latency of all its runs."""
        if latencies.any():
            self.needs[self.body[edge.eqn], edge.runs, kind].append((node, latencies))

    def add_read(self, edge: Edge, var: Any, reader: int, table: Floats) -> None:
        """An operator that reads a value of its body: the latencies by strategies and specs."""
        if table.any() and table.shape[1] <= _MOST_GATHERED_SPECS and self.is_near(var, edge.eqn):
            self.reads[self.body[edge.eqn], edge.runs, var].append((reader, table))

    def write(
        self, nodes: dict[Any, int], costs: list[Floats], edges: list[tuple[int, int, Floats]]
    ) -> None:
        """Add a node for each body and kind: its strategies are latencies, and nothing in it needs
        a longer one. What a tensor needs is a node too: a spec, and the longest of its gathers."""
        least = _COUNTED * sum(float(c.min()) for c in costs)
        for (body, runs, var), readers in self.reads.items():
            levels = np.unique(np.concatenate([[0.0], *(table.ravel() for _, table in readers)]))
            if levels[-1] < least:
                continue
            own, level = np.indices((readers[0][1].shape[1], len(levels))).reshape(2, -1)
            _add_levels(nodes[var], readers, own, levels[level], costs, edges)
            self.needs[body, runs, GATHERING].append((len(costs) - 1, levels[level]))
        for needs in self.needs.values():
            levels = np.unique(np.concatenate([[0.0], *(found for _, found in needs)]))
            if levels[-1] < least:
                continue
            node = len(costs)
            costs.append(levels)
            for other, found in needs:
                paid = found[:, None] <= levels
                edges.append((other, node, np.where(paid, 0.0, FORBIDDEN)))
