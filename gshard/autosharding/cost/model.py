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
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from gshard.autosharding.cost.forms import Form, Forms, reads_form
from gshard.autosharding.cost.lower_bound import GATHERING, REDUCING, Latencies, SharedMoves
from gshard.autosharding.cost.sharing import Sharing, is_transpose, name_of
from gshard.autosharding.cost.specs import MeshShape, Spec, local_elements, sharding_of, specs_of
from gshard.autosharding.cost.strategies import PICO, Priced, Tables
from gshard.autosharding.cost.work import FusedWork
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints, MemoryModel, Problem, unite
from gshard.autosharding.traced import border_ends, border_table, leaving_borders
from gshard.forecast.hardware import Hardware
from gshard.forecast.ops import PRODUCTS
from gshard.propagation.flow import Edge, Flow
from gshard.tensors.tile import Identity, byte_size

# Of two layouts that take as long, the one that holds less of its arguments is better: holding one
# counts as reading this part of it.
_HELD = 0.01


@dataclasses.dataclass
class MeshProblem:
    """The problem of a program on one mesh."""

    mesh: MeshShape
    problem: Problem
    arguments: list[int]  # the nodes of the arguments; -1 for scalars
    shapes: list[tuple[int, ...]]
    nodes: dict[Any, int]  # the nodes of all tensors
    forms: Mapping[Any, Form]  # those in which operators read tensors
    sizes: Callable[[Any], Floats]  # the bytes of a tensor by spec
    operators: dict[int, JaxprEqn]  # the equations of operators, by node

    def uncounted(self, answer: Ints) -> set[Any]:
        """Tensors whose copies break the memory limit of an answer, and are not counted in it."""
        memory = self.problem.memory
        free = memory.limit - memory.profile(answer)
        copies = []
        for var, form in self.forms.items():
            own, read = answer[self.nodes[var]], form.read[answer[form.node]]
            if not form.paired and own != read:
                copies.append((var, form, self.sizes(var)[read]))
                free[form.first : form.last + 1] -= copies[-1][2]
        return {v for v, form, _ in copies if (free[form.first : form.last + 1] < 0).any()}

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
    paired: Collection[Any] = (),
    donated: bool = False,
) -> MeshProblem:
    """The problem of a program on one mesh, with so many bytes on each device.

    `returned` are pairs of a result and an argument, by number: the result is the argument of the
    next call, and is resharded for it where the two differ, and takes its place if it is `donated`.
    `paired` are tensors whose copies count in the limit.
    """
    builder = _Builder(flat, mesh, hardware, limit, optimistic)
    builder.forms.paired = paired
    return builder.built(returned, donated)


@functools.lru_cache(maxsize=4)
def _read(
    flat: ClosedJaxpr, devices: int, hardware: Hardware, optimistic: bool
) -> tuple[Flow, FusedWork, Sharing]:
    """What is the same on all meshes."""
    flow = Flow(flat.jaxpr, devices)
    return flow, FusedWork(flat.jaxpr, hardware, devices, optimistic), Sharing(flow, optimistic)


class _Builder:
    def __init__(
        self,
        flat: ClosedJaxpr,
        mesh: MeshShape,
        hardware: Hardware,
        limit: float,
        optimistic: bool,
    ) -> None:
        self.flat, self.mesh, self.hardware = flat, mesh, hardware
        self.limit, self.optimistic = limit, optimistic
        self.tables = Tables(flat.jaxpr, mesh, hardware, optimistic)
        self.flow, self.touched, self.sharing = _read(flat, math.prod(mesh), hardware, optimistic)
        self.forms = Forms(self.flow, mesh, limit)
        self.outwards = leaving_borders(flat)
        self.costs: list[Floats] = []
        self.edges: list[tuple[int, int, Floats]] = []
        self.nodes: dict[Any, int] = {}  # of tensors
        self.known: dict[Any, Priced] = {}  # operators that are alike
        self.operators: dict[int, JaxprEqn] = {}
        self.states: dict[Any, Any] = {}  # the arguments of the next step that results are
        self.donated = False  # whether these take the place of this step's
        self.waiting: list[tuple[int, int, Floats]] = []  # partial sums, by operator and place
        self.dearest, self.latencies = SharedMoves(), Latencies(flat.jaxpr)
        self.made: dict[Any, int] = {}
        self.used: dict[Any, int] = {}

    def _kind(self, edge: Edge) -> Any:
        """All that the costs of an operator depend on."""
        atoms = [a for side in edge.atoms for a in side if not isinstance(a, Literal)]
        shapes = tuple((a.aval.shape, byte_size((), a.aval.dtype)) for a in atoms)
        touches, shares = self.touched.of(edge.eqn), self.sharing.of(edge)
        return Identity(edge.factors), shapes, edge.runs, name_of(edge), touches, shares

    def built(self, returned: Sequence[tuple[int, int]], donated: bool) -> MeshProblem:
        """The finished problem."""
        arguments = list(self.flat.jaxpr.invars)
        for var in arguments:
            self.made[var] = 0
            if self._node(var) >= 0 and not self.optimistic:
                self._copied(var, _HELD)
        for edge in self.flow.edges:
            if edge.eqn is None:
                self._border(edge)
            else:
                self._operator(edge)
        for var, times in self.touched.copied.items():
            self._copied(var, times)
        for var in self.flow.annotations:
            self._fix(var)
        self.donated = donated
        for result, argument in returned:
            self._tie(self.flat.jaxpr.outvars[result], arguments[argument])
        self.dearest.write(self.nodes, self.costs, self.edges)
        self.latencies.write(self.nodes, self.costs, self.edges)
        edges = unite(self.edges, self.costs)
        nodes = [self.nodes.get(var, -1) for var in arguments]
        shapes = [getattr(var.aval, "shape", ()) for var in arguments]
        efficiency = self.hardware.efficiency
        made = (e for e in self.flow.edges if name_of(e) in PRODUCTS)
        products = sum(e.runs for e in made if not self.touched.of(e.eqn).repeated)
        starts = products if self.optimistic else self.touched.starts  # products stay apart
        constant = float(
            self.tables.rounded(
                (starts * efficiency.operator_seconds + efficiency.step_seconds) * PICO
            )
        )
        problem = Problem(tuple(self.costs), tuple(edges), self._memory(), constant)
        return MeshProblem(
            self.mesh,
            problem,
            nodes,
            shapes,
            self.nodes,
            self.forms.found,
            self._local_bytes,
            self.operators,
        )

    def _memory(self) -> MemoryModel:
        """What is held: arguments and results for the entire step, other values while in use; and
        of what moves the other end too, copies while they are read and sums until they are taken.
        """
        last = len(self.flow.edges) + 1
        leaving = {v for v in self.flat.jaxpr.outvars if not isinstance(v, Literal)}
        arguments = set(self.flat.jaxpr.invars)
        slack = 1.0 if self.optimistic else self.hardware.efficiency.slack  # of temporaries
        holdings: list[tuple[int, int, int, Floats]] = []
        for var, node in self.nodes.items():
            sizes = self._local_bytes(var)
            if var in arguments:
                holdings.append((node, 0, last + 1, sizes))
            elif var in self.states and not self.optimistic:
                if not self.donated:  # it is returned as its argument is sharded
                    holdings.append((self.nodes[self.states[var]], 0, last + 1, sizes))
            elif var in leaving and not self.optimistic:
                holdings.append((node, 0, last + 1, sizes))
            elif not self.optimistic and var in self.touched.stored:
                start, stop = self.made.get(var, 0), self.used.get(var, 0) + 1
                holdings.append((node, start, min(stop, last + 1), slack * sizes))
        for var, form in self.forms.found.items():
            if form.paired:
                held = slack * form.held(self._local_bytes(var))
                holdings.append((form.node, form.first, form.last + 1, held))
        holdings += [(node, place, place + 1, slack * held) for node, place, held in self.waiting]
        return MemoryModel.of(holdings, np.full(last + 1, float(self.limit)))

    def _local_bytes(self, var: Any) -> Floats:
        shape, size = var.aval.shape, byte_size((), var.aval.dtype)
        specs = specs_of(shape, self.mesh)
        return np.array([float(local_elements(shape, s, self.mesh) * size) for s in specs])

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
            seconds = self._local_bytes(var) * times / self.tables.bandwidth
            runs = self.flow.runs.get(var, 1)
            self.costs[self.nodes[var]] += self.tables.rounded(seconds * runs * PICO)

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
            size = byte_size((), argument.aval.dtype)
            table = self.tables.moves().reshards(argument.aval.shape, size)
            self._add_read(result, second, self.tables.rounded(table * PICO).T)

    def _border(self, edge: Edge) -> None:
        """The two ends of a value at the border of a loop; what a scan stacks is held from its
        start."""
        source, target = border_ends(edge, self.outwards)
        place = edge.place + 1
        self.made.setdefault(target, self.made.get(source, place))
        for var in (source, target):
            self.used[var] = max(self.used.get(var, 0), place)
        first, second = self._node(source), self._node(target)
        if first >= 0 and second >= 0 and first != second:
            outer = edge.atoms[0][0]
            share, size = self.sharing.move(source), byte_size((), outer.aval.dtype)
            moved = self.tables.moves(share).reshards(outer.aval.shape, size)
            moved = self.tables.rounded(moved * share * edge.runs * PICO)
            table = border_table(edge, source, self.mesh, moved, self.optimistic)
            self._add_read(source, second, table.T)

    def _operator(self, edge: Edge) -> None:
        place = edge.place + 1
        operands, results = edge.atoms
        tensors = [a for a in (*operands, *results) if not isinstance(a, Literal)]
        nodes = [self._node(a) for a in tensors]
        read = [n for n, a in enumerate(operands) if not isinstance(a, Literal)]
        for atom in results:
            self.made.setdefault(atom, place)
        for atom in tensors:
            self.used[atom] = max(self.used.get(atom, 0), place)
        if all(node < 0 for node in nodes):
            return
        kind = self._kind(edge)
        if kind not in self.known:
            self.known[kind] = self.tables.of(edge, *kind[-2:])
        priced = self.known[kind]
        own = len(self.costs)
        self.costs.append(priced.costs)
        self.latencies.add(edge, own, REDUCING, priced.reducing)
        if edge.eqn is not None:
            self.operators[own] = edge.eqn
        for atom, needed in zip(results, priced.gathering, strict=True):
            if self.nodes.get(atom, -1) >= 0:
                self.latencies.add_read(edge, atom, own, needed)
            else:
                self.latencies.add(edge, own, GATHERING, needed[:, 0])
        if self.forms.is_large(priced.waiting.max()) and not self.optimistic:
            self.waiting.append((own, place, priced.waiting))
        for number, (node, table) in enumerate(zip(nodes, priced.tables, strict=True)):
            if node < 0 or table is None:
                continue
            if number >= len(tensors) - len(results):
                self.edges.append((own, node, table))
            elif self.optimistic and is_transpose(edge):
                continue  # who reads the result counts
            elif self.optimistic:
                table = table + self._transposed(edge, read[number])
                self._add_read(tensors[number], own, table)
                self._add_gathers(edge, read[number], own)
            else:
                end = self._read(tensors[number], table, place, reads_form(edge))
                self.edges.append((own, *end))

    def _read(self, var: Any, table: Floats, place: int, moved: bool) -> tuple[int, Floats]:
        """The node of what an operator reads or makes, and its table for it."""
        form = self.forms.of(var, place) if moved else None
        if form is None:
            return self.nodes[var], table
        if form.node < 0:
            form.node = len(self.costs)
            self._add_form(var, form)
        return form.node, form.table(table)

    def _transposed(self, edge: Edge, number: int) -> Floats | float:
        """Seconds of the copies that exchanges of an operand add, between products on GPUs."""
        var = edge.atoms[0][number]
        source, dims = self.sharing.source(var)
        between = source in self.sharing.products and name_of(edge) in PRODUCTS
        if self.hardware.compiler != "gpu" or not between:
            return 0.0
        return self.tables.transposed(edge, number, None if var is source else dims)

    def _add_read(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor: for a bound, all of them pay together what is dearest."""
        if self.optimistic:
            source, _ = self.sharing.source(var)
            columns = self.sharing.columns(var, self.mesh)
            self.dearest.add(source, reader, table[:, columns])
        else:
            self.edges.append((reader, self.nodes[var], table))

    def _add_gathers(self, edge: Edge, number: int, reader: int) -> None:
        """The latencies of small gathers of an operand that is made in the same body. One that can
        be computed from narrower values need not be gathered."""
        var = edge.atoms[0][number]
        source, _ = self.sharing.source(var)
        if self.latencies.is_near(source, edge.eqn) and self.sharing.move(var) == 1.0:
            columns = self.sharing.columns(var, self.mesh)
            table = self.tables.gathered(edge, number)[:, columns]
            self.latencies.add_read(edge, source, reader, table)

    def _add_form(self, var: Any, form: Form) -> None:
        """The node of a form, and its edge to the tensor."""
        shape = var.aval.shape
        table = self.tables.moves().reshards(shape, byte_size((), var.aval.dtype))
        weight = self.flow.narrow.get(var, 1.0) * self.flow.runs.get(var, 1) * PICO
        table = self.tables.rounded(table * weight)
        self.costs.append(np.zeros(len(form.read)))
        if form.paired:
            taken = np.arange(len(table))[:, None] == form.own
            table = np.where(taken, table[form.own, form.read], FORBIDDEN)
        self.edges.append((self.nodes[var], form.node, table))
