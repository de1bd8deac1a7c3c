"""A traced program as an optimization problem: the one file that reads programs.

Nodes are tensors, whose strategies are specs, and operators, whose strategies give mesh axes to
factors. An operator decides how it wants its operands, which are resharded for it, and what its
results are; a reduced factor that is split leaves partial sums, which are added up in full or only
where the result is to be held.

A tensor may be resharded once for several operators, a weight for both passes: they share a copy.
Where copies break the memory limit (`MeshProblem.uncounted`), they are counted as long as they are
read: then a strategy is a pair, of the tensor's spec and the copy's, since a copy that is the
tensor itself takes nothing. That makes problems larger, so that it is done only then.

Prices are likely ones, for finding layouts; `lower_bound` overrides them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.autosharding.cost import NONE, MeshShape, local_elements, sharding_of, specs_of
from gshard.autosharding.cost.strategies import PICO, OperatorPrices, Priced, Shares, primitive_of
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints, MemoryModel, Problem, unite
from gshard.autosharding.traced import TracedProgram, border_ends, border_table, leaving_borders
from gshard.forecast.hardware import Hardware
from gshard.propagation.flow import Edge
from gshard.tensors.tile import byte_size

# Between two layouts that take as long, the one that holds less of its arguments is better: holding
# an argument counts as reading this part of it.
_HELD = 0.01

Holding = tuple[int, int, int, Floats]  # node, start, stop, bytes by strategy

# A tensor is large if all of it takes this share of the memory limit.
_LARGE = 1 / 200

# Specs of a tensor up to which all pairs of them are strategies.
MOST_SPECS = 16


@dataclasses.dataclass
class SharedCopy:
    """A copy of a tensor for its readers: the specs of the two by strategy, and when it is read."""

    own: Ints
    read: Ints
    paired: bool  # whether strategies are pairs, so that the copy is counted
    node: int
    first: int
    last: int = 0

    def table(self, by_spec: Floats) -> Floats:
        """The table of an operator with a column for each strategy; `by_spec` has one for each
        spec. Where the copy counts, it is what the operator reads: nothing is sent after it."""
        table = by_spec[:, self.read]
        closed = self.paired and by_spec.shape[1] <= MOST_SPECS
        return np.where(table > 0, FORBIDDEN, table) if closed else table

    def held(self, sizes: Floats) -> Floats:
        """The bytes of the copy by strategy, where the sizes of the tensor are by spec."""
        return np.where(self.own == self.read, 0.0, sizes[self.read])


def reads_copy(edge: Edge) -> bool:
    """Whether an operator reads a copy of its operands: pointwise ones take them as they are."""
    return edge.level > 0 or (edge.eqn is not None and edge.eqn.primitive is p.transpose_p)


def _pairs(shape: tuple[int, ...], mesh: MeshShape) -> tuple[Ints, Ints]:
    """Specs and copies: all of them, or where these are many the tensor itself and what is gathered
    from it along some axes."""
    specs = np.array(specs_of(shape, mesh)).reshape(-1, len(mesh))
    gathered = ((specs[:, None] == specs) | (specs == NONE)).all(axis=2)
    own, read = np.nonzero(gathered | (len(specs) <= MOST_SPECS))
    return own, read


@dataclasses.dataclass
class MeshProblem:
    """The problem of a program on one mesh."""

    mesh: MeshShape
    problem: Problem
    nodes: dict[Any, int]  # the nodes of all tensors
    copies: Mapping[Any, SharedCopy]  # of tensors, that several operators read
    sizes: Callable[[Any], Floats]  # the bytes of a tensor by spec
    operators: dict[int, JaxprEqn]  # the equations of operators, by node
    like: Mapping[Any, Any]  # tensors that have the node of another one

    def uncounted(self, answer: Ints) -> set[Any]:
        """Tensors whose copies break the memory limit of an answer, and are not counted in it."""
        free = self.problem.memory.limit - self.problem.memory.profile(answer)
        copies = []
        for var, copy in self.copies.items():
            own, read = answer[self.nodes[var]], copy.read[answer[copy.node]]
            if not copy.paired and own != read:
                copies.append((var, copy, self.sizes(var)[read]))
                free[copy.first : copy.last + 1] -= copies[-1][2]
        return {v for v, copy, _ in copies if (free[copy.first : copy.last + 1] < 0).any()}


class ModelBuilder:
    """Builds the problem of a program on one mesh from the prices of its operators.

    Each device has `limit` bytes. A result that is the next call's argument is resharded for it,
    and takes its place if it is `donated`. `paired` are tensors whose copies count in the limit.
    """

    slices_stay = True  # a scan takes and stacks slices as they are: what moves is the slice

    def __init__(
        self,
        subject: TracedProgram,
        mesh: MeshShape,
        hardware: Hardware,
        limit: float,
        paired: Collection[Any] = (),
        donated: bool = False,
    ) -> None:
        self.subject, self.mesh, self.hardware = subject, mesh, hardware
        self.limit, self.donated, self.repeated = limit, donated, subject.repeated
        self.prices = self.operator_prices(subject)
        self.work = self.prices.work
        self.jaxpr, self.flow = subject.flat.jaxpr, subject.flow
        self.paired = paired
        self.readers: Counter[Any] = Counter()  # operators that read a copy of a tensor
        for edge in filter(reads_copy, self.flow.edges):
            self.readers.update({a for a in edge.atoms[0] if not isinstance(a, Literal)})
        self.copies: dict[Any, SharedCopy] = {}
        self.outwards = leaving_borders(self.jaxpr)
        self.costs: list[Floats] = []
        self.edges: list[tuple[int, int, Floats]] = []
        self.nodes: dict[Any, int] = {}  # of tensors
        self.known: dict[Any, Priced] = {}  # operators that are alike
        self.operators: dict[int, JaxprEqn] = {}
        self.states: dict[Any, Any] = {}  # the arguments of the next step that results are
        self.waiting: list[tuple[int, int, Floats]] = []  # partial sums, by operator and place
        self.made, self.used = dict[Any, int](), dict[Any, int]()  # the first and the last place

    def operator_prices(self, subject: TracedProgram) -> OperatorPrices:
        """The prices of the program's operators."""
        return OperatorPrices(subject, self.mesh, self.hardware)

    def built(self) -> MeshProblem:
        """The finished problem."""
        arguments, results = self.jaxpr.invars, self.jaxpr.outvars
        for var in arguments:
            self.made[var] = 0
            if self._node(var) >= 0:
                self.add_argument(var)
        for edge in self.flow.edges:
            if edge.eqn is None:
                self._border(edge)
            else:
                self._operator(edge)
        for var, times in self.work.copied.items():
            self._copied(var, times)
        for var in self.flow.annotations:
            self._fix(var)
        for result, argument in self.subject.returned:
            self._tie(results[result], arguments[argument])
        self.finish()
        edges = unite(self.edges, self.costs)
        efficiency = self.hardware.efficiency
        starting = self.starts() * efficiency.operator_seconds + efficiency.step_seconds
        constant = float(self.prices.rounded(starting * PICO))
        length = len(self.flow.edges) + 2
        memory = MemoryModel.of(self.holdings(length), np.full(length, float(self.limit)))
        return MeshProblem(
            self.mesh,
            Problem(tuple(self.costs), tuple(edges), memory, constant),
            self.nodes,
            self.copies,
            self.local_bytes,
            self.operators,
            self.repeated.like,
        )

    def add_argument(self, var: Any) -> None:
        """What an argument costs by itself."""
        self._copied(var, _HELD)

    def finish(self) -> None:
        """Add what needs all operators."""

    def starts(self) -> int:
        """How many operators a device starts."""
        return self.work.starts

    def shares(self, edge: Edge) -> Shares:
        """The part of each operand's move, and of each result's sum, that an operator pays."""
        operands = tuple(1.0 if isinstance(a, Literal) else self.moved(a) for a in edge.atoms[0])
        return operands, tuple(self.flow.shares.get(a, 1.0) for a in edge.atoms[1])

    def moved(self, var: Any) -> float:
        """The part of a value that has to move for who reads it."""
        return self.flow.narrow.get(var, 1.0)

    def holdings(self, length: int) -> list[Holding]:
        """What is held: arguments and results for the entire step, other values while in use; and
        of what moves the other end too, copies while they are read and sums until they are taken.
        """
        leaving = {v for v in self.jaxpr.outvars if not isinstance(v, Literal)}
        arguments = set(self.jaxpr.invars)
        slack = self.hardware.efficiency.slack  # of temporaries
        found: list[Holding] = []
        for var, node in self.nodes.items():
            sizes = self.local_bytes(var)
            if var in self.states and var not in arguments:
                if not self.donated:  # it is returned as its argument is sharded
                    sizes = sizes * self.flow.runs[self.states[var]]
                    found.append((self.nodes[self.states[var]], 0, length, sizes))
            elif var in arguments or var in leaving:
                found.append((node, 0, length, sizes * self.flow.runs[var]))
            elif var in self.work.stored:
                start, stop = self.made.get(var, 0), self.used.get(var, 0) + 1
                times = slack * self._layers(start, stop - 1)
                found.append((node, start, min(stop, length), times * sizes))
        for var, copy in self.copies.items():
            if copy.paired:
                held = slack * copy.held(self.local_bytes(var))
                held *= self._layers(copy.first, copy.last)
                found.append((copy.node, copy.first, copy.last + 1, held))
        return found + [(node, at, at + 1, slack * held) for node, at, held in self.waiting]

    def _layers(self, first: int, last: int) -> int:
        """How many layers hold a value like one that is live between these places at a time: all
        that its last reader represents, if other layers run in between."""
        places = self.flow.edges[max(first - 1, 0) : last]
        between = any(edge.eqn not in self.repeated.eqns for edge in places)
        return self.repeated.times if between and places[-1].eqn in self.repeated.eqns else 1

    def local_bytes(self, var: Any) -> Floats:
        """The bytes of a tile of a tensor, by spec."""
        shape, size = var.aval.shape, byte_size((), var.aval.dtype)
        specs = specs_of(shape, self.mesh)
        return np.array([float(local_elements(shape, s, self.mesh) * size) for s in specs])

    def _node(self, var: Any) -> int:
        """The node of a tensor; -1 for scalars, which have no dims to split."""
        shape = getattr(var.aval, "shape", ())
        if not shape or not hasattr(var.aval, "dtype") or not hasattr(var.aval.dtype, "itemsize"):
            return -1
        if var not in self.nodes:
            own = self.repeated.like.get(var, var)
            if own not in self.nodes:
                self.nodes[own] = len(self.costs)
                self.costs.append(np.zeros(len(specs_of(shape, self.mesh))))
            self.nodes[var] = self.nodes[own]
        return self.nodes[var]

    def _copied(self, var: Any, times: float) -> None:
        """A tensor that a loop copies, or that is read by what has no operator here."""
        if var in self.nodes:
            seconds = self.local_bytes(var) * times / self.prices.bandwidth
            runs = self.flow.runs.get(var, 1)
            self.costs[self.nodes[var]] += self.prices.rounded(seconds * runs * PICO)

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
            self.states[result] = argument
            table = self.prices.moving(argument, runs=self.flow.runs[argument])
            self.add_read(result, second, table.T)

    def _border(self, edge: Edge) -> None:
        """The two ends of a value at a loop's border; what a scan stacks is held from its start."""
        source, target = border_ends(edge, self.outwards)
        place = edge.place + 1
        self.made.setdefault(target, self.made.get(source, place))
        for var in (source, target):
            self.used[var] = max(self.used.get(var, 0), place)
        first, second = self._node(source), self._node(target)
        if first >= 0 and second >= 0 and first != second:
            outer = edge.atoms[0][0]
            moved = self.prices.moving(outer, self.moved(source), edge.runs)
            table = border_table(edge, source, self.mesh, moved, self.slices_stay)
            self.add_read(source, second, table.T)

    def _operator(self, edge: Edge) -> None:
        place = edge.place + 1
        operands, results = edge.atoms
        for atom in results:
            self.made.setdefault(atom, place)
        read = [n for n, a in enumerate(operands) if not isinstance(a, Literal)]
        tensors = [*(operands[n] for n in read), *results]
        for atom in tensors:
            self.used[atom] = max(self.used.get(atom, 0), place)
        nodes = [self._node(a) for a in tensors]
        if all(node < 0 for node in nodes):
            return
        shapes = tuple((a.aval.shape, byte_size((), a.aval.dtype)) for a in tensors)
        traffic, shares = self.work.of(edge.eqn), self.shares(edge)
        kind = id(edge.factors), shapes, edge.runs, primitive_of(edge), traffic, shares
        if kind not in self.known:  # all that the costs of an operator depend on
            self.known[kind] = self.prices.of(edge, traffic, shares)
        priced = self.known[kind]
        own = len(self.costs)
        self.costs.append(priced.costs)
        if edge.eqn is not None:
            self.operators[own] = edge.eqn
        if self._is_large(priced.waiting.max()):
            self.waiting.append((own, place, priced.waiting))
        for number, (node, table) in enumerate(zip(nodes, priced.tables, strict=True)):
            if node >= 0 and table is not None:
                if number < len(read):
                    self.add_operand(edge, read[number], own, table)
                else:
                    self.edges.append((own, node, table))

    def add_operand(self, edge: Edge, number: int, reader: int, table: Floats) -> None:
        """An operator that reads a tensor itself, or a copy that it shares with others."""
        var = edge.atoms[0][number]
        size = byte_size(var.aval.shape, var.aval.dtype)
        if not reads_copy(edge) or (self.readers[var] < 2 and not self._is_large(size)):
            self.add_read(var, reader, table)
            return
        if var not in self.copies:
            self._add_copy(var, edge.place + 1)
        copy = self.copies[var]
        copy.last = edge.place + 1
        self.edges.append((reader, copy.node, copy.table(table)))

    def _is_large(self, size: float) -> bool:
        """Whether so many bytes count in the memory limit."""
        return size > _LARGE * self.limit

    def add_read(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor."""
        self.edges.append((reader, self.nodes[var], table))

    def _add_copy(self, var: Any, place: int) -> None:
        """A copy of a tensor, first read at this place: its node, and its edge to the tensor."""
        table = self.prices.moving(var, self.moved(var), self.flow.runs.get(var, 1))
        own = read = np.arange(len(table))
        if paired := var in self.paired:
            own, read = _pairs(var.aval.shape, self.mesh)
            taken = np.arange(len(table))[:, None] == own
            table = np.where(taken, table[own, read], FORBIDDEN)
        self.copies[var] = SharedCopy(own, read, paired, len(self.costs), place)
        self.edges.append((self.nodes[var], len(self.costs), table))
        self.costs.append(np.zeros(len(read)))
