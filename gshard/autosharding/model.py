"""A traced program as an optimization problem: the one file that reads programs.

Nodes are tensors, whose strategies are specs, and operators, whose strategies give mesh axes to
factors. An operator decides how it wants its operands, which are resharded for it, and what its
results are; a reduced factor that is split leaves partial sums, which are added up in full or only
where the result is to be held.
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
from gshard.autosharding.specs import NONE, MeshShape, Spec, local_elements, sharding_of, specs_of
from gshard.forecast.hardware import Hardware
from gshard.forecast.ops import PRODUCTS, Op
from gshard.forecast.work import is_exact, product_flops
from gshard.propagation.flow import Edge, Flow
from gshard.tensors.factors import Dim, Factors
from gshard.tensors.tile import byte_size

# Costs are counted in picoseconds: whole numbers, so that equal sums are equal.
PICO = 1e12

# A tensor that is used this many operators after it was made is stored; one that is used at once
# is mostly joined with its user.
_STORED_AFTER = 12

# The share of the results of operators on single elements that is written to memory: compilers
# join most of them with their neighbours.
_JOINED = 0.25


@dataclasses.dataclass
class Model:
    """The problem of a program on one mesh."""

    mesh: MeshShape
    problem: Problem
    arguments: list[int]  # the nodes of the arguments; -1 for scalars
    shapes: list[tuple[int, ...]]

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
) -> Model:
    """The problem of a program on one mesh, with so many bytes on each device.

    `returned` are pairs of a result and an argument, by number: the result is the argument of the
    next call, and is resharded for it where the two differ.
    """
    flow = Flow(int(np.prod(mesh)))
    flow.add(flat.jaxpr)
    return _Builder(flow, flat, mesh, hardware).built(limit, returned)


class _Builder:
    def __init__(self, flow: Flow, flat: ClosedJaxpr, mesh: MeshShape, hardware: Hardware):
        self.flow, self.flat, self.mesh, self.hardware = flow, flat, mesh, hardware
        self.rates = Rates(hardware, mesh)
        self.costs: list[Floats] = []
        self.edges: list[tuple[int, int, Floats]] = []
        self.nodes: dict[Any, int] = {}  # of tensors
        self.known: dict[Any, Any] = {}  # tables of operators that are alike
        self.made: dict[Any, int] = {}
        self.used: dict[Any, int] = {}
        self.large: set[Any] = set()  # stored in any case: arguments, results, and of products

    def built(self, limit: float, returned: Sequence[tuple[int, int]]) -> Model:
        """The finished problem."""
        arguments = list(self.flat.jaxpr.invars)
        for var in arguments:
            self.made[var] = 0
            self._argument(var)
        for edge in self.flow.edges:
            self._operator(edge)
        for var in self.flow.said:
            self._fix(var)
        for result, argument in returned:
            self._tie(self.flat.jaxpr.outvars[result], arguments[argument])
        last = len(self.flow.edges) + 1
        for var in [*arguments, *self.flat.jaxpr.outvars]:
            if not isinstance(var, Literal):
                self.used[var] = last
                self.large.add(var)
        holdings = []
        for var, node in self.nodes.items():
            start, stop = self.made.get(var, 0), self.used.get(var, 0) + 1
            if stop - start > _STORED_AFTER or var in self.large:
                shape, size = var.aval.shape, var.aval.dtype.itemsize
                usage = [
                    float(local_elements(shape, spec, self.mesh) * size)
                    for spec in specs_of(shape, self.mesh)
                ]
                holdings.append((node, start, min(stop, last + 1), usage))
        memory = Memory.of(holdings, np.full(last + 1, float(limit)))
        edges = unite(self.edges, self.costs)
        nodes = [self.nodes.get(var, -1) for var in arguments]
        shapes = [getattr(var.aval, "shape", ()) for var in arguments]
        return Model(self.mesh, Problem(tuple(self.costs), tuple(edges), memory), nodes, shapes)

    def _node(self, var: Any) -> int:
        """The node of a tensor; -1 for scalars, which have no dims to split."""
        shape = getattr(var.aval, "shape", ())
        if not shape or not hasattr(var.aval, "dtype") or not hasattr(var.aval.dtype, "itemsize"):
            return -1
        if var not in self.nodes:
            self.nodes[var] = len(self.costs)
            self.costs.append(np.zeros(len(specs_of(shape, self.mesh))))
        return self.nodes[var]

    def _argument(self, var: Any) -> None:
        """An argument is read once: less where it is cut."""
        node = self._node(var)
        if node >= 0:
            shape, size = var.aval.shape, byte_size((), var.aval.dtype)
            rate = self.hardware.memory_bandwidth * self.hardware.reached.memory
            local = [local_elements(shape, s, self.mesh) for s in specs_of(shape, self.mesh)]
            self.costs[node] = np.rint(np.array(local) * size / rate * PICO)

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
            table = self.rates.reshards(argument.aval.shape, byte_size((), argument.aval.dtype))
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
        key = (id(edge.factors), shapes, edge.runs, _name(edge))
        if key not in self.known:  # the factors are kept, so that their id stays theirs
            self.known[key] = (edge.factors, *self._tables(edge))
        _, costs, tables = self.known[key]
        own = len(self.costs)
        self.costs.append(costs)
        if _name(edge) in PRODUCTS:
            self.large.update(results)
        for node, table in zip(nodes, tables, strict=True):
            if node >= 0 and table is not None:
                self.edges.append((own, node, table))

    def _tables(self, edge: Edge) -> tuple[Floats, list[Floats | None]]:
        """Costs of an operator's strategies, and a table for each of its tensors."""
        strategies = self._strategies(edge)
        costs = np.array([self._work(edge, s) for s in strategies])
        tables: list[Floats | None] = []
        for side, atoms in enumerate(edge.atoms):
            described = (edge.factors.operands, edge.factors.results)[side]
            for atom, dims in zip(atoms, described, strict=True):
                if isinstance(atom, Literal):
                    continue
                shape = getattr(atom.aval, "shape", ())
                if not shape:
                    tables.append(None)
                    if side:
                        costs += [self._scalar_sum(edge, s, atom) for s in strategies]
                elif side:
                    tables.append(self._into_result(edge, strategies, atom, dims))
                else:
                    tables.append(self._into_operand(edge, strategies, atom, dims))
        return np.rint(costs * edge.runs * PICO), tables

    def _strategies(self, edge: Edge) -> list[tuple[str | None, ...]]:
        """Mesh axes given to factors, where every tensor can express it."""
        factors = edge.factors
        named = dict.fromkeys(
            f for t in (*factors.operands, *factors.results) for d in t for f in d
        )
        free = [f for f in named if f not in factors.whole and self._is_major(factors, f)]
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

    def _work(self, edge: Edge, strategy: tuple[str | None, ...]) -> float:
        """Seconds of the operator itself, on its part of the work."""
        if edge.eqn is None:
            return 0.0
        parts = float(
            np.prod([n for f, n in zip(strategy, self.mesh, strict=True) if f is not None])
        )
        reached = self.hardware.reached
        if _name(edge) in PRODUCTS:
            op = Op(edge.eqn, (), (), joins=False)
            rate = self.hardware.rate(edge.eqn.invars[0].aval.dtype, is_exact(op))
            return product_flops(op) / (rate * reached.products) / parts
        results = sum(byte_size(v.aval.shape, v.aval.dtype) for v in edge.eqn.outvars)
        stored = _JOINED if edge.level == 0 else 1.0
        return stored * results / (self.hardware.memory_bandwidth * reached.memory) / parts

    def _spec(self, strategy: tuple[str | None, ...], dims: Sequence[Dim]) -> Spec:
        """How a tensor is cut where the factors are."""
        return tuple(
            next((d for d, names in enumerate(dims) if f is not None and f in names), NONE)
            for f in strategy
        )

    def _partial(self, edge: Edge, strategy: tuple[str | None, ...]) -> list[int]:
        """The mesh axes over which results are partial."""
        return [axis for axis, f in enumerate(strategy) if f in edge.factors.reduced]

    def _into_operand(self, edge: Edge, strategies: Any, atom: Any, dims: Sequence[Dim]) -> Floats:
        shape, itemsize = atom.aval.shape, byte_size((), atom.aval.dtype)
        specs = specs_of(shape, self.mesh)
        position = {spec: i for i, spec in enumerate(specs)}
        moved = np.rint(self.rates.reshards(shape, itemsize) * edge.runs * PICO)
        rows = []
        for strategy in strategies:
            at = position.get(self._spec(strategy, dims))
            rows.append(np.full(len(specs), FORBIDDEN) if at is None else moved[:, at])
        return np.array(rows)

    def _into_result(self, edge: Edge, strategies: Any, atom: Any, dims: Sequence[Dim]) -> Floats:
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
                    table[i, j] = np.rint(seconds * edge.runs * PICO)
        return table

    def _summed(
        self, shape: tuple[int, ...], itemsize: int, made: Spec, spec: Spec, partial: list[int]
    ) -> float:
        """Seconds to add partial results up, first where the sum is cut on the way."""
        now, total = made, 0.0
        for axis in sorted(partial, key=lambda axis: spec[axis] == NONE):
            size = local_elements(shape, now, self.mesh) * itemsize
            kind = "all_reduce" if spec[axis] == NONE else "reduce_scatter"
            total += self.rates.seconds(kind, axis, size)
            now = (*now[:axis], spec[axis], *now[axis + 1 :])
        return total

    def _scalar_sum(self, edge: Edge, strategy: tuple[str | None, ...], atom: Any) -> float:
        size = byte_size((), atom.aval.dtype)
        partial = self._partial(edge, strategy)
        return sum(self.rates.seconds("all_reduce", axis, size) for axis in partial)


def _name(edge: Edge) -> str:
    return "" if edge.eqn is None else edge.eqn.primitive.name


def _apart(factors: Factors, tiles: dict[str, int]) -> bool:
    """Whether no dim has two of the factors that are split."""
    tensors = (*factors.operands, *factors.results)
    return all(sum(f in tiles for f in dim) <= 1 for tensor in tensors for dim in tensor)
