"""The data-flow analysis of propagation: unsplit dims take over the splits of neighbours.

Neighbours are tensors that share a dim through an operator, or across the border of a loop. A
split that was taken over stays, so the analysis terminates; program order makes it deterministic.
`propagate` decides which splits spread first.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.graph.regions import Loop
from gshard.graph.source import source_of
from gshard.moving.costs import MEMORY_LIMIT
from gshard.rules import RULES
from gshard.rules.base.rule import equation_key, factors_of, rowwise
from gshard.rules.base.uses import NOTHING, Uses, leaving, may_stay_unreduced
from gshard.rules.manual import MAKES_MANUAL
from gshard.tensors.annotate import annotate_p
from gshard.tensors.factors import Dim, Factor, Factors, compose, decompose
from gshard.tensors.manual import to_auto_p
from gshard.tensors.sharding import Sharding, Split, fitting_part
from gshard.tensors.tile import byte_size

_OPERANDS, _RESULTS = 0, 1
_BOTH = (_OPERANDS, _RESULTS)
_PASSES = [(_BOTH, _BOTH), ((_OPERANDS,), (_RESULTS,)), (_BOTH, _BOTH)]
_BACKWARDS = 2  # the last of the passes

Node = tuple[Any, int]  # a variable and one of its dims
Tensor = tuple[Any, tuple[Dim, ...], int]  # a variable, the factors of its dims, and its bytes
Stage = tuple[int | None, Split]  # of one group of dims, or of all
DimGroups = Mapping[Any, Sequence[int]]  # for every variable, the groups that its dims belong to


@dataclass(eq=False)
class Edge:
    """An operator, or the border of a loop, that relates the dims of its variables."""

    factors: Factors
    atoms: tuple[list[Any], list[Any]]
    level: int
    eqn: JaxprEqn | None
    runs: int  # how often it runs: the trip counts of the loops around it
    kind: Any = None  # equal for operators that are alike
    place: int = 0
    queued: set[int] = field(default_factory=set)
    sides: tuple[list[Tensor], list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        described = (self.factors.operands, self.factors.results)
        self.sides = ([], [])
        for side, atoms, dims in zip(self.sides, self.atoms, described, strict=True):
            for atom, names in zip(atoms, dims, strict=True):
                if any(names) and not isinstance(atom, Literal):
                    side.append((atom, names, byte_size(atom.aval.shape, atom.aval.dtype)))


class Flow:
    """A program as tensors and the edges between them, through which splits spread."""

    def __init__(self, num_devices: int, memory_limit: int = MEMORY_LIMIT):
        self.num_devices = num_devices
        self.memory_limit = memory_limit  # bytes of a loop's constants that may be gathered for it
        self.constants: dict[Any, None] = {}  # loop invariants, inside the loop
        self.given: dict[Any, list[Split | None]] = {}  # the splits of annotations
        self.annotations: dict[Any, JaxprEqn] = {}  # the equations that annotate variables
        self.closed: dict[Any, set[int]] = defaultdict(set)  # dims that must stay unsplit
        self.runs: dict[Any, int] = {}  # how often each variable is made
        self.uses: dict[Jaxpr, Uses] = {}  # of the values of each program
        self.shares: dict[Any, float] = {}  # of unreduced values in the cost of their sum
        self.narrow: dict[Any, float] = {}  # the parts of values that have to move for them
        self.manual: set[Any] = set()  # variables of manual regions
        self.edges: list[Edge] = []
        self.kinds: dict[JaxprEqn, int] = {}  # the keys of equations
        self.touching: dict[Any, list[Edge]] = defaultdict(list)

    # ------------------------------------------------------------ the program

    def add(self, jaxpr: Jaxpr, runs: int = 1, sums: Mapping[int, float] = NOTHING) -> None:
        """Add a program that runs `runs` times; some results may leave it unreduced (`sums`)."""
        uses = self.uses.setdefault(jaxpr, Uses(jaxpr))
        self.shares |= may_stay_unreduced(uses, sums)
        self.narrow |= uses.narrow
        for var in [*jaxpr.constvars, *jaxpr.invars]:
            self.declare(var, runs)
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                self.declare(var, runs)
            if eqn.primitive is annotate_p:
                self.annotate(eqn)
            if loop := Loop.of(eqn):
                self.add_bodies(loop, runs)
            elif eqn.primitive is to_auto_p:
                self.annotate(eqn)
            elif self.is_manual(eqn):
                self.manual.update(eqn.outvars)
            elif eqn.primitive in RULES:
                rule, kind = RULES[eqn.primitive], equation_key(eqn)
                if kind is not None:
                    self.kinds[eqn] = kind
                factors, atoms = factors_of(rule, eqn, kind), (eqn.invars, eqn.outvars)
                self.connect(Edge(factors, atoms, rule.level, eqn, runs, kind))

    def add_bodies(self, loop: Loop, runs: int) -> None:
        """Add the bodies of a loop or branch, and their links to the outside."""
        sums = leaving(loop, self.shares)
        before = -1
        while before != len(self.manual):  # a carried value may turn out to be manual at the end
            before, edges = len(self.manual), len(self.edges)
            for a, b, _ in loop.links:
                if a in self.manual or b in self.manual:
                    self.manual |= {a, b}
            for body in loop.bodies:
                self.add(body.jaxpr, runs * loop.runs, sums)
            if loop.decided_by in self.manual:  # each device takes a branch, or ends, by itself
                self.manual.update(loop.eqn.outvars)
            if before != len(self.manual):
                self.forget(edges)
        fixed = self.same_in_every_run(loop)
        if sum(byte_size(v.aval.shape, v.aval.dtype) for v in fixed) <= self.memory_limit:
            self.constants.update(dict.fromkeys(fixed))
        for a, b, more in loop.links:
            if a not in self.manual:
                self.link(a, b, more)

    def same_in_every_run(self, loop: Loop) -> list[Any]:
        """The loop invariants: a loop's constants, and what is computed elementwise from them."""
        found = {v: None for v in loop.invariants if v not in self.manual}
        for inner in [e for body in loop.bodies for e in body.jaxpr.eqns] if found else []:
            made_of = [a for a in inner.invars if not isinstance(a, Literal)]
            if made_of and all(a in found for a in made_of) and self.is_pointwise(inner):
                found.update(dict.fromkeys(inner.outvars))
        return list(found)

    def is_pointwise(self, eqn: JaxprEqn) -> bool:
        """Whether elements stay where they are, and are not copied."""
        size = max((math.prod(a.aval.shape) for a in eqn.invars), default=0)
        rule = None if eqn.primitive is annotate_p else RULES.get(eqn.primitive)
        small = all(math.prod(v.aval.shape) <= size for v in eqn.outvars)
        return rule is not None and rule.level == 0 and small

    def forget(self, count: int) -> None:
        """Remove all edges but the first `count`."""
        for edge in self.edges[count:]:
            for atom in edge.atoms[0] + edge.atoms[1]:
                if not isinstance(atom, Literal):
                    self.touching[atom].remove(edge)
        del self.edges[count:]

    def is_manual(self, eqn: JaxprEqn) -> bool:
        """Whether an operator is in a manual region: it has a manual operand."""
        if eqn.primitive in MAKES_MANUAL:
            return True
        return bool(self.manual) and not self.manual.isdisjoint(
            a for a in eqn.invars if not isinstance(a, Literal)
        )

    def declare(self, var: Any, runs: int) -> None:
        """Add a variable without splits."""
        self.given[var] = [None] * len(getattr(var.aval, "shape", ()))
        self.runs[var] = runs

    def annotate(self, eqn: JaxprEqn) -> None:
        """Fix the result of an annotation to its sharding."""
        annotation = eqn.params["annotation"]
        if eqn.primitive is annotate_p and self.is_manual(eqn):
            raise ValueError(
                f"{source_of(eqn)}: {annotation} conflicts with the manual region that the tensor "
                "is in, where every device has its own value; convert it with "
                "manual_to_auto_spmd_partition first"
            )
        try:
            sharding = annotation.resolve(self.num_devices)
        except ValueError as error:
            raise ValueError(f"{source_of(eqn)}: {error}") from None
        (var,) = eqn.outvars
        self.annotations[var] = eqn
        self.fix(var, sharding, set(annotation.open_dims))

    def fix(self, var: Any, sharding: Sharding, open_dims: set[int] | None = None) -> None:
        """Fix a variable to a sharding, except for some dims."""
        self.given[var] = list(sharding.splits)
        self.closed[var] = set(range(sharding.rank)) - (open_dims or set())

    def link(self, a: Any, b: Any, more: int) -> None:
        """Link variables inside and outside a loop; `a` has `more` leading dims."""
        names = [f"d{i}" for i in range(len(b.aval.shape))]
        sizes = dict(zip(names, b.aval.shape, strict=True))
        inside: tuple[Dim, ...] = tuple((n,) for n in names)
        outside: tuple[Dim, ...] = ((),) * more + inside
        runs = min(self.runs[a], self.runs[b])
        self.connect(Edge(Factors((outside,), (inside,), sizes), ([a], [b]), 0, None, runs))

    def connect(self, edge: Edge) -> None:
        """Add an edge at the end of the program."""
        edge.place = len(self.edges)
        edge.kind = edge if edge.kind is None else edge.kind
        self.edges.append(edge)
        for atom in edge.atoms[0] + edge.atoms[1]:
            if not isinstance(atom, Literal):
                self.touching[atom].append(edge)

    # ------------------------------------------------------------ the flow

    def spread(
        self, groups: DimGroups, first: Sequence[tuple[int, Split]] = (), sealed: bool = False
    ) -> Spread:
        """Spread the given splits: ragged ones, those of the groups `first` in order, then all.

        If loops are `sealed`, their invariants are replicated inside: they are gathered before.
        """
        spread = Spread(self, groups, sealed)
        rows = {(None, s): 0 for v in self.annotations for s in self.given[v] if s and s.ragged}
        for stage in (*rows, *first):
            spread.settle(stage)
        spread.settle(None)
        return spread


class Spread:
    """The state of the analysis; passes are numbered in the order of `propagate`'s rules."""

    def __init__(self, flow: Flow, groups: DimGroups, sealed: bool):
        self.flow = flow
        self.groups = groups
        self.sealed = sealed
        self.splits = {v: tuple(s) for v, s in flow.given.items()}
        self.wanted: dict[Any, dict[Factor, Split]] = {}  # preferences, by operators that are alike
        self.agreed: dict[Any, bool] = {}  # whether all had the preferred splits
        self.open = {v: self.open_dims(v) for v in flow.given}
        self.split = {v for v, splits in self.splits.items() if any(splits)}
        self.queues: list[list[int]] = [[], [], []]
        self.stage: Stage | None = None

    def open_dims(self, var: Any) -> Sequence[int]:
        """The dims that may still take a split: none if every device has a tile of its own."""
        if self.sealed and var in self.flow.constants:
            return ()
        splits, closed = self.splits[var], self.flow.closed.get(var, ())
        if not closed and not any(splits):  # as nearly all are at first
            return range(len(splits))
        if 2 * math.prod(s.tiles for s in splits if s) > self.flow.num_devices:
            return ()
        return tuple(d for d, s in enumerate(splits) if s is None and d not in closed)

    def settle(self, stage: Stage | None) -> None:
        """Propagate to a fixed point; in a stage, only one split of one group of dims."""
        self.stage = stage
        edges = self.flow.edges
        split = (var for var in self.split if stage is None or stage[1] in self.splits[var])
        # In any order: the queues are sorted.
        self.revisit({edge for var in split for edge in self.flow.touching[var]})
        first, second, third = self.queues
        while first or second or third:
            number = 0 if first else 1 if second else 2
            place = heapq.heappop(self.queues[number])
            edge = edges[-place if number == _BACKWARDS else place]
            edge.queued.discard(number)
            sources, sinks = _PASSES[number]
            if self.has_room(edge, sinks):
                self.pass_on(edge, sources, sinks)

    def revisit(self, edges: Iterable[Edge]) -> None:
        """Queue operators: in program order for passes that go forwards, else from the end."""
        for edge in edges:
            if not self.has_room(edge, _BOTH):  # and never again: room only shrinks
                continue
            for number in range(edge.level, len(self.queues)):
                if number not in edge.queued:
                    edge.queued.add(number)
                    place = -edge.place if number == _BACKWARDS else edge.place
                    heapq.heappush(self.queues[number], place)

    def has_room(self, edge: Edge, sinks: Sequence[int]) -> bool:
        """Whether any dim of an operator's tensors could take a split over."""
        stage = self.stage
        for side in sinks:
            for atom, names, _ in edge.sides[side]:
                for dim in self.open[atom]:
                    if names[dim] and (not stage or self.is_of(stage, atom, dim)):
                        return True
        return False

    def is_of(self, stage: Stage, atom: Any, dim: int) -> bool:
        """Whether a stage is about a dim."""
        return stage[0] is None or self.groups[atom][dim] == stage[0]

    def pass_on(self, edge: Edge, sources: Sequence[int], sinks: Sequence[int]) -> None:
        """Propagate splits between the tensors of an operator."""
        wanted = self.preferences(edge, sources)
        order = {factor: i for i, factor in enumerate(wanted)}
        for side in sinks:
            for atom, names, _ in edge.sides[side]:
                dims = [d for d in self.open[atom] if names[d] and names[d][0] in wanted]
                if len(dims) > 1:
                    dims.sort(key=lambda d: order[names[d][0]])
                for dim in dims:
                    if self.stage and not self.is_of(self.stage, atom, dim):
                        continue
                    split = offered(edge, atom, dim, names[dim], wanted)
                    if split and self.stage and split is not self.stage[1]:
                        continue
                    if split and (split := self.fitting(atom, dim, split)):
                        splits = self.splits[atom]
                        self.splits[atom] = (*splits[:dim], split, *splits[dim + 1 :])
                        self.split.add(atom)
                        self.open[atom] = self.open_dims(atom)
                        self.revisit(self.flow.touching[atom])

    def fitting(self, atom: Any, dim: int, split: Split) -> Split | None:
        """The part of a split that is compatible with the other splits of a tensor."""
        others = self.splits[atom][:dim] + self.splits[atom][dim + 1 :]
        return fitting_part(tuple([s for s in others if s]), split)

    def known(self, edge: Edge, sources: Sequence[int]) -> Any:
        """Everything that an operator's preferences depend on."""
        splits = [self.splits[atom] for side in sources for atom, _, _ in edge.sides[side]]
        return (edge.kind, len(sources), *splits)

    def preferences(self, edge: Edge, sources: Sequence[int]) -> dict[Factor, Split]:
        """For each factor the split that most of its tensors' bytes already have."""
        key = self.known(edge, sources)
        if key not in self.wanted:
            self.wanted[key] = self.favourites(edge, sources)
        return self.wanted[key]

    def favourites(self, edge: Edge, sources: Sequence[int]) -> dict[Factor, Split]:
        """The preferences themselves, from the votes of the tensors."""
        votes: dict[Factor, dict[Split, float]] = {}
        instead: dict[Factor, dict[Split, float]] = {}  # of factors that nothing else splits
        factors, eqn = edge.factors, edge.eqn
        for side in sources:
            for atom, names, weight in edge.sides[side]:
                for dim, split in zip(names, self.splits[atom], strict=True):
                    if split is None or not dim:
                        continue
                    for factor, part in decompose(split, dim, factors.sizes).items():
                        taker = factors.taken_over(factor, part)
                        if taker and (not part.ragged or (eqn and rowwise(eqn, factor))):
                            tally = (votes if taker == factor else instead).setdefault(taker, {})
                            tally[part] = tally.get(part, 0) + weight
        votes = instead | votes
        favourite = {f: max(tally, key=tally.__getitem__) for f, tally in votes.items()}
        if len(favourite) < 2:
            return favourite
        order = sorted(
            favourite, key=lambda f: (f not in factors.priority, -votes[f][favourite[f]])
        )
        return {f: favourite[f] for f in order}

    @functools.cached_property
    def shardings(self) -> dict[Any, Sharding]:
        """A sharding for every variable."""
        flow, splits = self.flow, self.splits.items()
        return {v: Sharding(s, flow.num_devices, v in flow.manual) for v, s in splits}

    @functools.cached_property
    def blocked(self) -> dict[Node, Split]:
        """The dims that were offered a neighbour's split and could not take it."""
        found: dict[Node, Split] = {}
        for edge in self.flow.edges:
            key = self.known(edge, _BOTH)
            if self.agreed.get(key):
                continue
            unmet = self.unmet(edge)
            self.agreed[key] = not unmet
            for atom, dim, split in unmet:
                sealed = self.sealed and atom in self.flow.constants
                if dim not in self.flow.closed.get(atom, ()) and not sealed:
                    found.setdefault((atom, dim), split)
        return found

    def unmet(self, edge: Edge) -> list[tuple[Any, int, Split]]:
        """The dims of an operator's tensors that are not split like the majority."""
        wanted, found = self.preferences(edge, _BOTH), []
        for atom, names, _ in edge.sides[0] + edge.sides[1] if wanted else ():
            for dim, name in enumerate(names):
                if name and name[0] in wanted:
                    split = offered(edge, atom, dim, name, wanted)
                    if split and self.splits[atom][dim] is not split:
                        found.append((atom, dim, split))
        return found


def offered(
    edge: Edge, atom: Any, dim: int, name: Dim, wanted: Mapping[Factor, Split]
) -> Split | None:
    """The split that a dim is offered when its factors are to be split as `wanted`."""
    split = compose(name, wanted, edge.factors.sizes)
    if split and edge.factors.resized and not edge.factors.resized.isdisjoint(name):
        return split if split.tiles <= atom.aval.shape[dim] else None
    return split
