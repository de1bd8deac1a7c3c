"""The parts of a lower bound: shared moves, shared latencies, and the copies of exchanges.

Operators that need a tensor in the same form share one move, and a form may be made from another
one on the way. Whatever a lowered program shares, it pays for the most expensive move of a tensor.

Small collectives of a loop's body can be combined into one, but not with those of another body.
Every iteration pays at least one latency if it reduces anything, and one more if it gathers
anything: an AllReduce does both, for the latencies of both.

An AllToAll sends and receives pieces that are contiguous. What a matrix product wrote is transposed
for it unless the dim that is to be split comes first, and what arrives is transposed for the
product that reads it unless the dim that was split does. A program's own transpose between the two
products replaces one of these. Pointwise operators would do the same on the way, at no cost.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from gshard.autosharding.cost.specs import NONE, MeshShape, Spec, local_shape
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints
from gshard.graph.regions import bodies
from gshard.propagation.flow import Edge

# Specs of a tensor up to which its moves have a node; of more, each reader pays an equal share.
_MOST_SHARED_SPECS = 16


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
            if len(costs[nodes[var]]) > _MOST_SHARED_SPECS:
                edges += [(r, nodes[var], _shared(t, len(readers))) for r, t in readers]
                continue
            own, level = _levels([table for _, table in readers])
            node = len(costs)
            costs.append(level)
            taken = np.arange(len(costs[nodes[var]]))[:, None] == own
            edges.append((nodes[var], node, np.where(taken, 0.0, FORBIDDEN)))
            for reader, table in readers:
                allowed = table[:, own] <= level
                edges.append((reader, node, np.where(allowed, 0.0, FORBIDDEN)))


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


REDUCING, GATHERING = "reducing", "gathering"

# Specs of a tensor up to which its gathers have a node: those over one axis. With more the solver
# does not finish in time.
_MOST_GATHERED_SPECS = 8

# The share of a step that the latencies of a body take, to be counted: they make problems harder.
_COUNTED = 2e-4


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
            node = len(costs)
            costs.append(np.zeros(len(own)))
            taken = np.arange(len(costs[nodes[var]]))[:, None] == own
            edges.append((nodes[var], node, np.where(taken, 0.0, FORBIDDEN)))
            for reader, table in readers:
                paid = table[:, own] <= levels[level]
                edges.append((reader, node, np.where(paid, 0.0, FORBIDDEN)))
            self.needs[body, runs, GATHERING].append((node, levels[level]))
        for needs in self.needs.values():
            levels = np.unique(np.concatenate([[0.0], *(found for _, found in needs)]))
            if levels[-1] < least:
                continue
            node = len(costs)
            costs.append(levels)
            for other, found in needs:
                paid = found[:, None] <= levels
                edges.append((other, node, np.where(paid, 0.0, FORBIDDEN)))


def transposes(
    shape: tuple[int, ...], dims: Sequence[int] | None, here: Spec, there: Spec, mesh: MeshShape
) -> int:
    """How often the tiles of a tensor are copied to get it from one spec to another.

    `dims` are given of a tensor that is transposed from what a product wrote: the dims of that one.
    Several axes that move between the same dims are one exchange.
    """
    ends = zip(here, there, mesh, strict=True)
    changed = {(own, other) for own, other, size in ends if size > 1 and own != other}
    if len(changed) != 1 or NONE in (found := changed.pop()):
        return 0
    given, taken = found
    sent, received = local_shape(shape, here, mesh), local_shape(shape, there, mesh)
    written = range(len(shape)) if dims is None else dims
    leads = math.prod(n for n, d in zip(sent, written, strict=True) if d < written[taken]) == 1
    stays = math.prod(received[:given]) == 1
    if dims is None:
        return (not leads) + (not stays)
    return int(not (leads or stays))
