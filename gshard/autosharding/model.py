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
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from gshard.autosharding.memory import Floats, Ints, Memory
from gshard.autosharding.problem import FORBIDDEN, Problem, unite
from gshard.autosharding.sharing import Sharing
from gshard.autosharding.specs import MeshShape, Spec, local_elements, sharding_of, specs_of
from gshard.autosharding.tables import PICO, Tables, name_of
from gshard.autosharding.touched import Touched
from gshard.forecast.hardware import Hardware
from gshard.forecast.ops import PRODUCTS
from gshard.propagation.flow import Edge, Flow
from gshard.tensors.factors import Factors
from gshard.tensors.tile import byte_size

# Of two layouts that take as long, the one that holds less of its arguments is better: holding one
# counts as reading this part of it.
_HELD = 0.01


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
    return _Builder(flat, mesh, hardware, optimistic).built(limit, returned)


@functools.lru_cache(maxsize=4)
def _read(
    flat: ClosedJaxpr, devices: int, compiler: str, optimistic: bool
) -> tuple[Flow, Touched, Sharing]:
    """What is the same on all meshes."""
    flow = Flow(devices)
    flow.add(flat.jaxpr)
    return flow, Touched(flat.jaxpr, compiler, optimistic), Sharing(flow, optimistic)


class _Builder:
    def __init__(self, flat: ClosedJaxpr, mesh: MeshShape, hardware: Hardware, optimistic: bool):
        self.flat, self.mesh, self.hardware, self.optimistic = flat, mesh, hardware, optimistic
        self.tables = Tables(flat.jaxpr, mesh, hardware, optimistic)
        self.flow, self.touched, self.sharing = _read(
            flat, math.prod(mesh), hardware.compiler, optimistic
        )
        self.costs: list[Floats] = []
        self.edges: list[tuple[int, int, Floats]] = []
        self.nodes: dict[Any, int] = {}  # of tensors
        self.known: dict[Any, Any] = {}  # tables of operators that are alike
        self.made: dict[Any, int] = {}
        self.used: dict[Any, int] = {}

    def _kind(self, edge: Edge) -> Any:
        """All that the costs of an operator depend on."""
        atoms = [a for side in edge.atoms for a in side if not isinstance(a, Literal)]
        shapes = tuple((a.aval.shape, byte_size((), a.aval.dtype)) for a in atoms)
        # The flow keeps the factors of operators, so that their id stays theirs.
        described = id(edge.factors) if edge.eqn is not None else _described(edge.factors)
        touches, shares = self.touched.of(edge.eqn), self.sharing.of(edge)
        return described, shapes, edge.runs, name_of(edge), touches, shares

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
        products = sum(e.runs for e in self.flow.edges if name_of(e) in PRODUCTS)
        starts = products if self.optimistic else self.touched.starts  # products stay apart
        constant = float(
            self.tables.rounded((starts * reached.operator_seconds + reached.step_seconds) * PICO)
        )
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
            seconds = np.array(self._local_bytes(var)) * times / self.tables.bandwidth
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
            table = self.tables.moves.reshards(
                argument.aval.shape, byte_size((), argument.aval.dtype)
            )
            self.edges.append((first, second, self.tables.rounded(table * PICO)))

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
        kind = self._kind(edge)
        if kind not in self.known:
            self.known[kind] = self.tables.of(edge, *kind[-2:])
        costs, tables = self.known[kind]
        own = len(self.costs)
        self.costs.append(costs)
        for node, table in zip(nodes, tables, strict=True):
            if node >= 0 and table is not None:
                self.edges.append((own, node, table))


def _described(factors: Factors) -> Any:
    return factors.operands, factors.results, tuple(factors.sizes.items())
