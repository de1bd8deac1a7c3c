"""A traced program as an optimization problem: the one file that reads programs.

Nodes are tensors, whose strategies are specs, and operators, whose strategies give mesh axes to
factors. An operator decides how it wants its operands, which are resharded for it, and what its
results are; a reduced factor that is split leaves partial sums, which are added up in full or only
where the result is to be held.

There are two ways to price a program. The likely one is for finding layouts. The optimistic one
is for bounds: wherever a lowered program may share, combine, postpone or avoid communication, the
least that can be left of it is charged (`Sharing`), and only arguments are known to hold memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from gshard.autosharding.memory import Floats, Ints, Memory
from gshard.autosharding.problem import FORBIDDEN, Problem, unite
from gshard.autosharding.rates import Rates
from gshard.autosharding.sharing import Sharing
from gshard.autosharding.specs import NONE, MeshShape, Spec, local_elements, sharding_of, specs_of
from gshard.autosharding.touched import Touched, Touches
from gshard.forecast.hardware import Hardware
from gshard.forecast.ops import PRODUCTS, Op
from gshard.forecast.work import is_exact, product_flops
from gshard.operators.rule import RULES
from gshard.propagation.flow import Edge, Flow
from gshard.tensors.factors import Dim, Factors
from gshard.tensors.tile import byte_size

# Costs are counted in picoseconds: whole numbers, so that equal sums are equal.
PICO = 1e12

# Of two layouts that take as long, the one that holds less of its arguments is better: holding one
# counts as reading this part of it.
_HELD = 0.01

Strategy = tuple[str | None, ...]  # for each mesh axis the factor that it cuts, if any


@dataclasses.dataclass
class Model:
    """The problem of a program on one mesh."""

    mesh: MeshShape
    problem: Problem
    arguments: list[int]  # the nodes of the arguments; -1 for scalars
    shapes: list[tuple[int, ...]]
    nodes: dict[Any, int]  # the nodes of all tensors

    def specs(self, answer: Ints) -> list[Spec | None]:
        """The specs of the arguments that an answer chooses."""
        return [
            None if node < 0 else specs_of(shape, self.mesh)[answer[node]]
            for node, shape in zip(self.arguments, self.shapes, strict=True)
        ]


def build(
    flat: ClosedJaxpr,
    mesh: MeshShape,
    hardware: Hardware,
    limit: float,
    returned: Sequence[tuple[int, int]] = (),
    optimistic: bool = False,
) -> Model:
    """The problem of a program on one mesh, with so many bytes on each device.

    `returned` are pairs of a result and an argument, by number: the result is the argument of the
    next call, and is resharded for it where the two differ.
    """
    flow = Flow(int(np.prod(mesh)))
    flow.add(flat.jaxpr)
    return _Builder(flow, flat, mesh, hardware, optimistic).built(limit, returned)


class _Builder:
    def __init__(
        self, flow: Flow, flat: ClosedJaxpr, mesh: MeshShape, hardware: Hardware, optimistic: bool
    ):
        self.flow, self.flat, self.mesh, self.hardware = flow, flat, mesh, hardware
        self.optimistic = optimistic
        self.alone = Rates(hardware, mesh)
        self.combined = Rates(hardware, mesh, combined=True)
        self.moves = self.combined if optimistic else self.alone
        self.weights = {getattr(v.aval, "shape", ()) for v in flat.jaxpr.invars}
        self.touched = Touched(flat.jaxpr, hardware.compiler, optimistic)
        self.sharing = Sharing(flow, optimistic)
        self.bandwidth = hardware.memory_bandwidth * hardware.reached.memory
        self.costs: list[Floats] = []
        self.edges: list[tuple[int, int, Floats]] = []
        self.nodes: dict[Any, int] = {}  # of tensors
        self.known: dict[Any, Any] = {}  # tables of operators that are alike
        self.made: dict[Any, int] = {}
        self.used: dict[Any, int] = {}

    def built(self, limit: float, returned: Sequence[tuple[int, int]]) -> Model:
        """The finished problem."""
        arguments = list(self.flat.jaxpr.invars)
        for var in arguments:
            self.made[var] = 0
            if self._node(var) >= 0 and not self.optimistic:
                self._copied(var, _HELD)
        for edge in self.flow.edges:
            self._operator(edge)
        for var, times in self.touched.copied.items():
            self._copied(var, times)
        for var in self.flow.said:
            self._fix(var)
        for result, argument in () if self.optimistic else returned:
            self._tie(self.flat.jaxpr.outvars[result], arguments[argument])
        edges = unite(self.edges, self.costs)
        nodes = [self.nodes.get(var, -1) for var in arguments]
        shapes = [getattr(var.aval, "shape", ()) for var in arguments]
        reached = self.hardware.reached
        products = sum(e.runs for e in self.flow.edges if _name(e) in PRODUCTS)
        starts = products if self.optimistic else self.touched.starts  # products stay apart
        constant = float(np.rint((starts * reached.operator_seconds + reached.step_seconds) * PICO))
        problem = Problem(tuple(self.costs), tuple(edges), self._memory(limit), constant)
        return Model(self.mesh, problem, nodes, shapes, self.nodes)

    def _memory(self, limit: float) -> Memory:
        """What is held: arguments and results for the whole step, other values while in use."""
        last = len(self.flow.edges) + 1
        leaving = {v for v in self.flat.jaxpr.outvars if not isinstance(v, Literal)}
        arguments = set(self.flat.jaxpr.invars)
        holdings = []
        for var, node in self.nodes.items():
            start, stop = self.made.get(var, 0), self.used.get(var, 0) + 1
            if var in leaving or var in arguments:
                stop = last + 1
            elif self.optimistic or var not in self.touched.stored:
                continue
            if self.optimistic and var not in arguments:
                continue
            usage = [float(b) for b in self._local_bytes(var)]
            holdings.append((node, start, min(stop, last + 1), usage))
        return Memory.of(holdings, np.full(last + 1, float(limit)))

    def _local_bytes(self, var: Any) -> list[int]:
        shape, size = var.aval.shape, byte_size((), var.aval.dtype)
        return [local_elements(shape, s, self.mesh) * size for s in specs_of(shape, self.mesh)]

    def _node(self, var: Any) -> int:
        """The node of a tensor; -1 for scalars, which have no dims to split."""
        shape = getattr(var.aval, "shape", ())
        if not shape or not hasattr(var.aval, "dtype") or not hasattr(var.aval.dtype, "itemsize"):
            return -1
        if var not in self.nodes:
            self.nodes[var] = len(self.costs)
            self.costs.append(np.zeros(len(specs_of(shape, self.mesh))))
        return self.nodes[var]

    def _copied(self, var: Any, times: float) -> None:
        """A tensor that a loop copies, or that is read by what has no operator here."""
        if var in self.nodes:
            seconds = np.array(self._local_bytes(var)) * times / self.bandwidth
            runs = self.flow.runs.get(var, 1)
            self.costs[self.nodes[var]] += np.rint(seconds * runs * PICO)

    def _fix(self, var: Any) -> None:
        """A tensor with an annotation keeps it, where this mesh can express it."""
        node = self.nodes.get(var, -1)
        if node < 0:
            return
        given, closed = self.flow.given[var], self.flow.closed.get(var, set())
        allowed = []
        for spec in specs_of(var.aval.shape, self.mesh):
            splits = sharding_of(spec, len(given), self.mesh).splits
            allowed.append(all(splits[dim] is given[dim] for dim in closed))
        if any(allowed):
            self.costs[node] = np.where(allowed, self.costs[node], FORBIDDEN)

    def _tie(self, result: Any, argument: Any) -> None:
        if isinstance(result, Literal) or result is argument:
            return
        first, second = self._node(result), self._node(argument)
        if first >= 0 and second >= 0:
            table = self.moves.reshards(argument.aval.shape, byte_size((), argument.aval.dtype))
            self.edges.append((first, second, np.rint(table * PICO)))

    def _operator(self, edge: Edge) -> None:
        place = edge.place + 1
        operands, results = edge.atoms
        tensors = [a for a in (*operands, *results) if not isinstance(a, Literal)]
        nodes = [self._node(a) for a in tensors]
        for atom in results:
            self.made.setdefault(atom, place)
        for atom in tensors:
            self.used[atom] = max(self.used.get(atom, 0), place)
        if all(node < 0 for node in nodes):
            return
        shapes = tuple((a.aval.shape, byte_size((), a.aval.dtype)) for a in tensors)
        touches = self.touched.of(edge.eqn)
        shares = self.sharing.of(edge)
        key = (id(edge.factors), shapes, edge.runs, _name(edge), touches, shares)
        if key not in self.known:  # the factors are kept, so that their id stays theirs
            self.known[key] = (edge.factors, *self._tables(edge, touches, shares))
        _, costs, tables = self.known[key]
        own = len(self.costs)
        self.costs.append(costs)
        for node, table in zip(nodes, tables, strict=True):
            if node >= 0 and table is not None:
                self.edges.append((own, node, table))

    def _tables(
        self, edge: Edge, touches: Touches, shares: tuple[tuple[float, ...], tuple[float, ...]]
    ) -> tuple[Floats, list[Floats | None]]:
        """Costs of an operator's strategies, and a table for each of its tensors."""
        strategies = self._strategies(edge)
        costs = np.array([self._work(edge, s, touches) for s in strategies])
        tables: list[Floats | None] = []
        for side, atoms in enumerate(edge.atoms):
            described = (edge.factors.operands, edge.factors.results)[side]
            for atom, dims, share in zip(atoms, described, shares[side], strict=True):
                if isinstance(atom, Literal):
                    continue
                shape = getattr(atom.aval, "shape", ())
                if not shape:
                    tables.append(None)
                    if side:
                        costs += [share * self._scalar_sum(edge, s, atom) for s in strategies]
                elif side:
                    tables.append(self._into_result(edge, strategies, atom, dims, share))
                else:
                    tables.append(self._into_operand(edge, strategies, atom, dims, share))
        return np.rint(costs * edge.runs * PICO), tables

    def _strategies(self, edge: Edge) -> list[Strategy]:
        """Mesh axes given to factors, where every tensor can express it."""
        factors = edge.factors
        named = dict.fromkeys(
            f for t in (*factors.operands, *factors.results) for d in t for f in d
        )
        whole = () if self._may_split_all(edge) else factors.whole
        free = [f for f in named if f not in whole and self._is_major(factors, f)]
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
        """Whether a rule of its own may partition an operator along dims that factors keep."""
        rule = None if edge.eqn is None else RULES.get(edge.eqn.primitive)
        return self.optimistic and rule is not None and rule.partition is not None

    def _is_major(self, factors: Factors, factor: str) -> bool:
        """Whether a factor comes first in every dim that has it, but for factors of size 1."""
        for tensor in (*factors.operands, *factors.results):
            for dim in tensor:
                if factor in dim and any(factors.sizes[f] > 1 for f in dim[: dim.index(factor)]):
                    return False
        return True

    def _work(self, edge: Edge, strategy: Strategy, touches: Touches) -> float:
        """Seconds of the operator itself, on its part of the work: arithmetic or memory."""
        if edge.eqn is None:
            return 0.0
        memory = 0.0 if touches.covered else self._touched(edge, strategy, touches)
        if _name(edge) not in PRODUCTS:
            return memory
        parts = float(
            np.prod([n for f, n in zip(strategy, self.mesh, strict=True) if f is not None])
        )
        op = Op(edge.eqn, (), (), joins=False)
        rate = self.hardware.rate(edge.eqn.invars[0].aval.dtype, is_exact(op))
        seconds = product_flops(op) / (rate * self.hardware.reached.products) / parts
        return max(seconds, memory)

    def _touched(self, edge: Edge, strategy: Strategy, touches: Touches) -> float:
        """Seconds to read and write the memory that the operator touches."""
        total = 0.0
        for atoms, described, parts in zip(
            edge.atoms,
            (edge.factors.operands, edge.factors.results),
            (touches.reads, touches.writes),
            strict=True,
        ):
            for number, share in parts:
                shape, dtype = atoms[number].aval.shape, atoms[number].aval.dtype
                spec = self._spec(strategy, described[number])
                total += share * local_elements(shape, spec, self.mesh) * byte_size((), dtype)
        return total / self.bandwidth

    def _spec(self, strategy: Strategy, dims: Sequence[Dim]) -> Spec:
        """How a tensor is cut where the factors are."""
        return tuple(
            next((d for d, names in enumerate(dims) if f is not None and f in names), NONE)
            for f in strategy
        )

    def _partial(self, edge: Edge, strategy: Strategy) -> list[int]:
        """The mesh axes over which results are partial."""
        return [axis for axis, f in enumerate(strategy) if f in edge.factors.reduced]

    def _into_operand(
        self,
        edge: Edge,
        strategies: Sequence[Strategy],
        atom: Any,
        dims: Sequence[Dim],
        share: float,
    ) -> Floats:
        shape, itemsize = atom.aval.shape, byte_size((), atom.aval.dtype)
        specs = specs_of(shape, self.mesh)
        position = {spec: i for i, spec in enumerate(specs)}
        moved = np.rint(self.moves.reshards(shape, itemsize) * (share * edge.runs * PICO))
        rows = []
        for strategy in strategies:
            at = position.get(self._spec(strategy, dims))
            rows.append(np.full(len(specs), FORBIDDEN) if at is None else moved[:, at])
        return np.array(rows)

    def _into_result(
        self,
        edge: Edge,
        strategies: Sequence[Strategy],
        atom: Any,
        dims: Sequence[Dim],
        share: float,
    ) -> Floats:
        shape, itemsize = atom.aval.shape, byte_size((), atom.aval.dtype)
        specs = specs_of(shape, self.mesh)
        table = np.full((len(strategies), len(specs)), FORBIDDEN)
        for i, strategy in enumerate(strategies):
            made, partial = self._spec(strategy, dims), self._partial(edge, strategy)
            for j, spec in enumerate(specs):
                if all(
                    a == b or axis in partial
                    for axis, (a, b) in enumerate(zip(made, spec, strict=True))
                ):
                    seconds = self._summed(shape, itemsize, made, spec, partial)
                    table[i, j] = np.rint(seconds * share * edge.runs * PICO)
        return table

    def _summed(
        self, shape: tuple[int, ...], itemsize: int, made: Spec, spec: Spec, partial: list[int]
    ) -> float:
        """Seconds to add partial results up, first where the sum is cut on the way."""
        now, total, sums = made, 0.0, self._sums(shape)
        for axis in sorted(partial, key=lambda axis: spec[axis] == NONE):
            size = local_elements(shape, now, self.mesh) * itemsize
            kind = "all_reduce" if spec[axis] == NONE else "reduce_scatter"
            total += sums.seconds(kind, axis, size)
            now = (*now[:axis], spec[axis], *now[axis + 1 :])
        return total

    def _scalar_sum(self, edge: Edge, strategy: Strategy, atom: Any) -> float:
        size = byte_size((), atom.aval.dtype)
        partial, sums = self._partial(edge, strategy), self._sums(())
        return sum(sums.seconds("all_reduce", axis, size) for axis in partial)

    def _sums(self, shape: tuple[int, ...]) -> Rates:
        """What sums take: those of gradients wait for nothing, so that they can be combined."""
        return self.combined if self.optimistic or shape in self.weights else self.alone


def _name(edge: Edge) -> str:
    return "" if edge.eqn is None else edge.eqn.primitive.name


def _apart(factors: Factors, tiles: dict[str, int]) -> bool:
    """Whether no dim has two of the factors that are split."""
    tensors = (*factors.operands, *factors.results)
    return all(sum(f in tiles for f in dim) <= 1 for tensor in tensors for dim in tensor)
