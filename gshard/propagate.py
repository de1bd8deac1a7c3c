"""Sharding propagation: from a few annotated tensors to every tensor of the program (section 3.2).

The paper's iterative data-flow analysis. A dim without a split takes one over from a neighbour: a
tensor that shares the dim through an operator. Once taken, a split stays, so the analysis ends.
What decides when neighbours disagree, in this order:

1. Annotations are never overridden, and unsplit dims of an annotated tensor stay unsplit.
2. Operators that leave elements where they are (pointwise, transpose, broadcast, reshape, the
   borders of loops) pass splits on, both ways, before any other operator does.
3. Then other operators pass splits forwards, from operands to results; only when nothing moves
   forwards any more, backwards. After any step the analysis returns to rule 2.
4. Within an operator, batch dims of contractions come first; then the dim whose tensors are
   largest, so that the least has to be resharded; then the first in the operands' order.
5. A split is taken over only if it can stand beside the tensor's other splits; through an operator
   that changes the dim's size (slice, pad), only if there is a row for every tile.

Program order makes the result deterministic. Dims that nobody splits are whole.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard.annotate import annotate_p
from gshard.factors import Dim, Factor, Factors, compose, decompose
from gshard.manual import to_auto_p
from gshard.rules import RULES
from gshard.rules.control import bodies, links
from gshard.rules.manual import MAKES_MANUAL
from gshard.sharding import Sharding, Split, compatible
from gshard.source import source_of
from gshard.tile import itemsize_of

_OPERANDS, _RESULTS = 0, 1
_BACKWARDS = 2  # the last of the passes


@dataclass
class _Edge:
    """An operator, or the border of a loop, that relates the dims of its variables."""

    factors: Factors
    atoms: tuple[list[Any], list[Any]]
    level: int
    place: int = 0
    queued: set[int] = field(default_factory=set)

    def tensors(self, sides: Sequence[int]) -> Iterator[tuple[Any, tuple[Dim, ...]]]:
        for side in sides:
            dims = (self.factors.operands, self.factors.results)[side]
            for atom, names in zip(self.atoms[side], dims, strict=True):
                if not isinstance(atom, Literal) and any(names):
                    yield atom, names


def propagate(
    closed: ClosedJaxpr, num_devices: int, given: Mapping[Any, Sharding] | None = None
) -> dict[Any, Sharding]:
    """A sharding for every variable of the program and of the bodies in it.

    `given` are the shardings of arguments that lie somewhere already: as binding as annotations.
    """
    state = _State(num_devices)
    state.add(closed.jaxpr)
    for var, sharding in (given or {}).items():
        state.splits[var] = list(sharding.splits)
        state.closed[var] = set(range(sharding.rank))
    state.settle()
    return state.shardings()


class _State:
    def __init__(self, num_devices: int):
        self.num_devices = num_devices
        self.splits: dict[Any, list[Split | None]] = {}
        self.closed: dict[Any, set[int]] = defaultdict(set)  # dims that may not be split any more
        self.manual: set[Any] = set()  # variables of manual regions
        self.edges: list[_Edge] = []
        self.touching: dict[Any, list[_Edge]] = defaultdict(list)
        self.waiting: list[list[int]] = [[], [], []]

    def add(self, jaxpr: Jaxpr) -> None:
        for var in [*jaxpr.constvars, *jaxpr.invars]:
            self.declare(var)
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                self.declare(var)
            if eqn.primitive is annotate_p:
                self.annotate(eqn)
            if bodies(eqn):
                self.add_bodies(eqn)
            elif eqn.primitive is to_auto_p:
                self.annotate(eqn)
            elif self.is_manual(eqn):
                self.manual.update(eqn.outvars)
            elif eqn.primitive in RULES:
                rule = RULES[eqn.primitive]
                factors = rule.factors(eqn)
                self.connect(_Edge(factors, (list(eqn.invars), list(eqn.outvars)), rule.level))

    def add_bodies(self, eqn: JaxprEqn) -> None:
        """The programs inside a loop or branch, and what joins them to the outside."""
        joined = [
            (a, b, more)
            for a, b, more in links(eqn)
            if not isinstance(a, Literal) and not isinstance(b, Literal)
        ]
        before = -1
        while before != len(self.manual):  # a carried value may turn out to be manual at the end
            before = len(self.manual)
            edges = len(self.edges)
            for a, b, _ in joined:
                if a in self.manual or b in self.manual:
                    self.manual |= {a, b}
            for body in bodies(eqn):
                self.add(body.jaxpr)
            if before != len(self.manual):
                self.forget(edges)
        for a, b, more in joined:
            if a not in self.manual:
                self.link(a, b, more)

    def forget(self, count: int) -> None:
        """Take back all edges but the first `count`."""
        for edge in self.edges[count:]:
            for atom in edge.atoms[0] + edge.atoms[1]:
                if not isinstance(atom, Literal):
                    self.touching[atom].remove(edge)
        del self.edges[count:]

    def is_manual(self, eqn: JaxprEqn) -> bool:
        """Whether an operator stands in a manual region: one manual operand is enough."""
        return eqn.primitive in MAKES_MANUAL or not self.manual.isdisjoint(
            a for a in eqn.invars if not isinstance(a, Literal)
        )

    def declare(self, var: Any) -> None:
        self.splits[var] = [None] * len(getattr(var.aval, "shape", ()))

    def annotate(self, eqn: JaxprEqn) -> None:
        annotation = eqn.params["annotation"]
        if eqn.primitive is annotate_p and self.is_manual(eqn):
            raise ValueError(
                f"{source_of(eqn)}: {annotation} conflicts with the manual region that the tensor "
                "is in, where every device has its own; leave it with "
                "manual_to_auto_spmd_partition first"
            )
        try:
            sharding = annotation.resolve(self.num_devices)
        except ValueError as error:
            raise ValueError(f"{source_of(eqn)}: {error}") from None
        (var,) = eqn.outvars
        self.splits[var] = list(sharding.splits)
        self.closed[var] = set(range(sharding.rank)) - set(annotation.open_dims)

    def link(self, a: Any, b: Any, more: int) -> None:
        names = [f"d{i}" for i in range(len(b.aval.shape))]
        sizes = dict(zip(names, b.aval.shape, strict=True))
        inside: tuple[Dim, ...] = tuple((n,) for n in names)
        outside: tuple[Dim, ...] = ((),) * more + inside
        self.connect(_Edge(Factors((outside,), (inside,), sizes), ([a], [b]), level=0))

    def connect(self, edge: _Edge) -> None:
        edge.place = len(self.edges)
        self.edges.append(edge)
        for atom in edge.atoms[0] + edge.atoms[1]:
            if not isinstance(atom, Literal):
                self.touching[atom].append(edge)

    def settle(self) -> None:
        """Rules 2 and 3 of the module's docstring, until nothing changes."""
        both = (_OPERANDS, _RESULTS)
        passes = [(both, both), ((_OPERANDS,), (_RESULTS,)), (both, both)]
        for edge in self.edges:
            self.revisit(edge)
        while any(self.waiting):
            number = next(i for i, queue in enumerate(self.waiting) if queue)
            place = heapq.heappop(self.waiting[number])
            edge = self.edges[-place if number == _BACKWARDS else place]
            edge.queued.discard(number)
            self.pass_on(edge, *passes[number])

    def revisit(self, edge: _Edge) -> None:
        """Queue an operator: in program order for passes that go forwards, else from the end."""
        for number in range(edge.level, len(self.waiting)):
            if number not in edge.queued:
                edge.queued.add(number)
                place = -edge.place if number == _BACKWARDS else edge.place
                heapq.heappush(self.waiting[number], place)

    def pass_on(self, edge: _Edge, sources: Sequence[int], sinks: Sequence[int]) -> None:
        """Rules 4 and 5: give open dims of an operator's tensors the splits of the others."""
        wanted = self.preferences(edge, sources)
        order = {factor: i for i, factor in enumerate(wanted)}
        for atom, names in edge.tensors(sinks):
            dims = [d for d, dim in enumerate(names) if dim and dim[0] in wanted]
            for dim in sorted(dims, key=lambda d: order[names[d][0]]):
                if self.splits[atom][dim] is not None or dim in self.closed[atom]:
                    continue
                split = compose(names[dim], wanted, edge.factors.sizes)
                if split and not edge.factors.resized.isdisjoint(names[dim]):
                    split = split if split.tiles <= atom.aval.shape[dim] else None
                if split and self.fits(atom, dim, split):
                    self.splits[atom][dim] = split
                    for other in self.touching[atom]:
                        self.revisit(other)

    def preferences(self, edge: _Edge, sources: Sequence[int]) -> dict[Factor, Split]:
        """For each factor the split that most of its tensors' bytes already have."""
        votes: dict[Factor, dict[Split, float]] = {}
        for atom, names in edge.tensors(sources):
            weight = math.prod(atom.aval.shape) * itemsize_of(atom.aval.dtype)
            for dim, split in zip(names, self.splits[atom], strict=True):
                for factor, part in decompose(split, dim, edge.factors.sizes).items():
                    if factor not in edge.factors.whole:
                        tally = votes.setdefault(factor, {})
                        tally[part] = tally.get(part, 0) + weight
        favourite = {f: max(tally, key=lambda s: tally[s]) for f, tally in votes.items()}
        order = sorted(
            favourite,
            key=lambda f: (f not in edge.factors.priority, -votes[f][favourite[f]]),
        )
        return {f: favourite[f] for f in order}

    def fits(self, atom: Any, dim: int, split: Split) -> bool:
        others = self.splits[atom][:dim] + self.splits[atom][dim + 1 :]
        return compatible((*[s for s in others if s], split))

    def shardings(self) -> dict[Any, Sharding]:
        return {
            v: Sharding(tuple(s), self.num_devices, v in self.manual)
            for v, s in self.splits.items()
        }
