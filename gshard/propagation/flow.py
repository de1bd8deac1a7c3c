"""A program as propagation sees it: tensors, and the edges that relate their dims.

Neighbours are tensors that share a dim through an operator, or across the border of a loop. Splits
spread along the edges (`spread`), and the price of every edge under some shardings is that of the
cheapest way to run its operator (`rules.base.ways`).
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph.regions import Loop
from gshard.graph.source import source_of
from gshard.moving.costs import MEMORY_LIMIT
from gshard.moving.plan import reshard_cost
from gshard.rules import RULES
from gshard.rules.base.rule import Shares, equation_key, factors_of
from gshard.rules.base.uses import NOTHING, Delayed, Uses, leaving
from gshard.rules.base.ways import least, operand_moves, results_cost, ways_of
from gshard.tensors.annotate import annotate_p
from gshard.tensors.factors import Dim, Factors
from gshard.tensors.manual import MAKES_MANUAL, to_auto_p
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import byte_size


class Dims(NamedTuple):
    """The dims of an operator's tensors with factors, the operands before the results.

    Equal operators share them.
    """

    positions: tuple[int, ...]  # among all operands and results
    names: tuple[tuple[Dim, ...], ...]
    numbers: tuple[range, ...]
    weights: tuple[int, ...]  # bytes
    operands: int  # how many of them are operands

    @staticmethod
    def of(factors: Factors, operands: Sequence[Any], results: Sequence[Any]) -> Dims:
        """The dims of the operands and results; literals are left out."""
        tensors = zip((*operands, *results), (*factors.operands, *factors.results), strict=True)
        found = [
            (position, names, byte_size(atom.aval.shape, atom.aval.dtype))
            for position, (atom, names) in enumerate(tensors)
            if any(names) and not isinstance(atom, Literal)
        ]
        positions, names, weights = zip(*found, strict=True) if found else ((), (), ())
        numbers = tuple(range(len(own)) for own in names)
        return Dims(positions, names, numbers, weights, sum(i < len(operands) for i in positions))


@dataclass(eq=False, slots=True)
class Edge:
    """An operator, or the border of a loop, that relates the dims of its variables."""

    place: int  # in the program
    factors: Factors
    atoms: tuple[list[Any], list[Any]]
    level: int
    eqn: JaxprEqn | None
    runs: int  # how often it runs: the trip counts of the loops around it
    dims: Dims
    kind: Any = None  # equal for operators that are alike
    variables: tuple[Any, ...] = ()  # those that `dims` describes
    named: tuple[Any, ...] = ()  # all of them

    def __post_init__(self) -> None:
        self.kind = self if self.kind is None else self.kind
        atoms = self.atoms[0] + self.atoms[1]
        self.variables = tuple([atoms[i] for i in self.dims.positions])
        self.named = tuple([a for a in atoms if not isinstance(a, Literal)])

    def names_of(self, var: Any) -> tuple[Dim, ...]:
        """The factors of the dims of one of its `variables`."""
        return self.dims.names[self.variables.index(var)]


class EdgeCost(NamedTuple):
    """What an operator costs when it runs once."""

    work: float
    sent: float  # by itself, and for its results
    moves: Sequence[tuple[int, Sharding, float]]  # of operands: number, target, cost


class ProgramCost(NamedTuple):
    """What a program costs."""

    cost: float
    sent: float  # without the work

    def is_less_than(self, other: ProgramCost) -> bool:
        """Whether it is cheaper by more than a hundredth of what is sent, or else sends less.

        The work, most of which is the same, is far more: a hundredth of it hides what is sent.
        """
        margin = max(self.sent, other.sent) / 100
        if abs(self.cost - other.cost) <= margin:
            return self.sent < other.sent - margin
        return self.cost < other.cost


@dataclass(eq=False)
class OperatorTable:
    """What is known of operators that are alike, for all propagations of a lowering.

    By their keys: the dims, the splits that they pass on (`spread`), numbers that are equal where
    equal shardings cost the same, and by these numbers and shardings the costs.
    """

    dims: dict[Any, Dims] = field(default_factory=dict)
    offers: dict[Any, Any] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    costs: dict[Any, EdgeCost] = field(default_factory=dict)


class Flow:
    """A program as tensors and the edges between them, through which splits spread."""

    def __init__(
        self,
        jaxpr: Jaxpr,
        num_devices: int,
        memory_limit: int = MEMORY_LIMIT,
        fixed: Mapping[Any, Sharding] = NOTHING,
        table: OperatorTable | None = None,
    ):
        self.table = table or OperatorTable()
        self.num_devices = num_devices
        self.memory_limit = memory_limit  # bytes of a loop's constants that may be gathered for it
        self.invariants: dict[JaxprEqn, list[Any]] = {}  # of loops, inside them
        self.given: dict[Any, tuple[Split | None, ...]] = {}  # the splits of annotations
        self.annotations: dict[Any, JaxprEqn] = {}  # the equations that annotate variables
        self.closed: dict[Any, set[int]] = defaultdict(set)  # dims that must stay unsplit
        self.runs: dict[Any, int] = {}  # how often each variable is made
        self.manual: set[Any] = set()  # variables of manual regions
        self.edges: list[Edge] = []
        self.kinds: dict[JaxprEqn, int] = {}  # the keys of equations
        self.loops: dict[Jaxpr, Loop | None] = {jaxpr: None}  # and the bodies of its loops
        known = -1
        while known != len(self.manual):  # what a loop begins with may turn out to be manual, too
            known, self.edges = len(self.manual), []
            self._add(jaxpr)
        for var, sharding in fixed.items():
            if var in self.given and var not in self.manual:  # a rewrite may have removed it
                self.given[var], self.closed[var] = sharding.splits, set(range(sharding.rank))
        if not self.manual.isdisjoint(v for v in jaxpr.outvars if not isinstance(v, Literal)):
            raise ValueError(
                "the function returns a value of a manual region; convert it with "
                "manual_to_auto_spmd_partition, which says which part of the result each device has"
            )

    @functools.cached_property
    def touching(self) -> dict[Any, list[Edge]]:
        """The edges of each variable."""
        found = defaultdict(list)
        for edge in self.edges:
            for atom in edge.atoms[0] + edge.atoms[1]:
                if not isinstance(atom, Literal):
                    found[atom].append(edge)
        return found

    def open_dims(self, var: Any, splits: Sequence[Split | None]) -> Sequence[int]:
        """The dims that may still take a split: none if every device has a tile of its own."""
        closed = self.closed.get(var, ())
        if 2 * math.prod([s.tiles for s in splits if s]) > self.num_devices:
            return ()
        return tuple([d for d, s in enumerate(splits) if s is None and d not in closed])

    @functools.cached_property
    def open(self) -> dict[Any, Sequence[int]]:
        """These dims of each variable at first."""
        closed = {v: self.open_dims(v, self.given[v]) for v in self.closed}
        return {v: range(len(splits)) for v, splits in self.given.items()} | closed

    @functools.cached_property
    def constants(self) -> dict[Any, None]:
        """The invariants of loops that fit into memory."""
        every = self.invariants.values()
        sizes = [sum(byte_size(v.aval.shape, v.aval.dtype) for v in own) for own in every]
        fitting = [own for own, n in zip(every, sizes, strict=True) if n <= self.memory_limit]
        return {v: None for own in fitting for v in own}

    @functools.cached_property
    def uses(self) -> dict[Jaxpr, Uses]:
        """How the values of the program and of each body are used."""
        return {jaxpr: Uses(jaxpr) for jaxpr in self.loops}

    @functools.cached_property
    def shares(self) -> dict[Any, float]:
        """The shares of unreduced values in the cost of their sum."""
        found: dict[Any, float] = {}
        for jaxpr, loop in self.loops.items():
            sums = leaving(loop, found) if loop else NOTHING
            found |= dict(Delayed(self.uses[jaxpr], sums))
        return found

    @functools.cached_property
    def narrow(self) -> dict[Any, float]:
        """The parts of values that have to move for them."""
        return {var: part for uses in self.uses.values() for var, part in uses.narrow.items()}

    # ------------------------------------------------------------ what shardings cost

    def cost(
        self, shardings: Mapping[Any, Sharding], edges: Sequence[Edge] | None = None
    ) -> ProgramCost:
        """The bytes that a device sends, and the time of its work as bytes, times trip counts.

        A value that several operators need under one sharding, or transposed, is moved once, and
        partial sums that are added are reduced once. Equal operators are priced once.
        """
        work, total, costs, priced = 0.0, 0.0, self.table.costs, self.priced
        moved: set[tuple[Any, Sharding]] = set()
        for edge in self.edges if edges is None else edges:
            key = (priced[edge], *map(shardings.__getitem__, edge.named))
            cost = costs.get(key)
            if cost is None:
                cost = costs[key] = self._cost(edge, shardings)
            work += cost.work * edge.runs
            spent = cost.sent
            for i, target, sent in cost.moves:
                value, dims = self.sources.get(var := edge.atoms[0][i], (var, None))
                form = (value, target if dims is None else target.project(dims))
                spent += 0.0 if form in moved else sent
                moved.add(form)
            total += spent * edge.runs
        return ProgramCost(work + total, total)

    @functools.cached_property
    def priced(self) -> dict[Edge, int]:
        """A number of every edge, equal where equal shardings cost the same."""
        numbers = self.table.numbers
        return {e: numbers.setdefault((e.kind, *self.shared(e)), len(numbers)) for e in self.edges}

    def shared(self, edge: Edge) -> tuple[float, tuple[float, ...]]:
        """The part of its sum that an edge pays, and the part of each operand that it moves."""
        operands, narrow = edge.atoms[0], self.narrow
        parts = [1.0 if isinstance(a, Literal) else narrow.get(a, 1.0) for a in operands]
        return min([self.shares.get(v, 1.0) for v in edge.atoms[1]], default=1.0), tuple(parts)

    @functools.cached_property
    def sources(self) -> dict[Any, tuple[Any, tuple[int, ...]]]:
        """The variables that others are transposes of, or have dims of one row more than.

        And for every dim of them the dim there.
        """
        found: dict[Any, tuple[Any, tuple[int, ...]]] = {}
        for eqn in [edge.eqn for edge in self.edges if edge.eqn is not None]:
            if eqn.primitive is p.transpose_p:
                order = [*map(eqn.params["permutation"].index, range(eqn.outvars[0].aval.ndim))]
            elif eqn.primitive is p.broadcast_in_dim_p:
                order = list(eqn.params["broadcast_dimensions"])
            else:
                continue
            var, out = eqn.invars[0], eqn.outvars[0]
            if not isinstance(var, Literal) and var.aval.size == out.aval.size:
                value, dims = found.get(var) or (var, range(len(order)))
                found[out] = value, tuple([order[d] for d in dims])
        return found

    def _cost(self, edge: Edge, known: Mapping[Any, Sharding]) -> EdgeCost:
        shardings, targets = (
            [
                Sharding.replicated(len(a.aval.shape), self.num_devices)
                if isinstance(a, Literal)
                else known[a]
                for a in side
            ]
            for side in edge.atoms
        )
        (of_sum, narrow), eqn = self.shared(edge), edge.eqn
        if eqn is None:  # the border of a loop
            (outside,), (inside,), aval = shardings, targets, edge.atoms[0][0].aval
            more = (None,) * (outside.rank - inside.rank)
            wanted = Sharding((*more, *inside.splits), inside.num_devices)
            cost = reshard_cost(outside, wanted, aval.shape, aval.dtype, narrow[0])
            return EdgeCost(0.0, cost, ())
        if not targets:
            return EdgeCost(0.0, 0.0, ())
        count = len(shardings)
        shares = Shares(of_sum, (1.0,) * count, narrow, (frozenset(),) * count)
        ways = ways_of(RULES[eqn.primitive], eqn, shardings, targets, self.memory_limit)
        way = least(ways, eqn, shardings, targets, shares)
        moves = [move for move in operand_moves(way, eqn, shardings, shares) if move[2]]
        return EdgeCost(way.work, way.sent + results_cost(way, eqn, targets, shares), moves)

    # ------------------------------------------------------------ the program

    def _add(self, jaxpr: Jaxpr, runs: int = 1) -> None:
        """Add a program, or a body of a loop, that runs `runs` times."""
        for var in [*jaxpr.constvars, *jaxpr.invars]:
            self.declare(var, runs)
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                self.declare(var, runs)
            if inner := Loop.of(eqn):
                self.add_bodies(inner, runs)
                continue
            if eqn.primitive in (annotate_p, to_auto_p):
                self.annotate(eqn)
            elif self.is_manual(eqn):
                self.manual.update(eqn.outvars)
                continue
            if eqn.primitive in RULES:
                rule, kind = RULES[eqn.primitive], equation_key(eqn)
                factors, atoms = factors_of(rule, eqn, kind), (eqn.invars, eqn.outvars)
                dims = self.table.dims.get(kind) or Dims.of(factors, *atoms)
                if kind is not None:
                    self.kinds[eqn], self.table.dims[kind] = kind, dims
                place = len(self.edges)
                self.edges.append(Edge(place, factors, atoms, rule.level, eqn, runs, dims, kind))

    def add_bodies(self, loop: Loop, runs: int) -> None:
        """Add the bodies of a loop or branch, and their links to the outside."""
        before = -1
        while before != len(self.manual):  # a carried value may turn out to be manual at the end
            before, edges = len(self.manual), len(self.edges)
            for a, b, _ in loop.links:
                if a in self.manual or b in self.manual:
                    self.manual |= {a, b}
            for body in loop.bodies:
                self.loops[body.jaxpr] = loop
                self._add(body.jaxpr, runs * loop.runs)
            if loop.decided_by in self.manual:  # each device takes a branch, or ends, by itself
                self.manual.update(loop.eqn.outvars)
            if before != len(self.manual):
                del self.edges[edges:]
        self.invariants[loop.eqn] = self.same_in_every_run(loop)
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

    def is_manual(self, eqn: JaxprEqn) -> bool:
        """Whether an operator is in a manual region: it has a manual operand."""
        if eqn.primitive in MAKES_MANUAL:
            return True
        return bool(self.manual) and not self.manual.isdisjoint(
            a for a in eqn.invars if not isinstance(a, Literal)
        )

    def declare(self, var: Any, runs: int) -> None:
        """Add a variable without splits."""
        self.given[var] = (None,) * len(getattr(var.aval, "shape", ()))
        self.runs[var] = runs

    def annotate(self, eqn: JaxprEqn) -> None:
        """Fix the result of an annotation to its sharding."""
        annotation = eqn.params["annotation"]
        if eqn.primitive is annotate_p and self.is_manual(eqn):
            where = source_of(eqn)
            raise ValueError(
                f"{where}: {str(annotation).removeprefix(f'{where}: ')} conflicts with the manual "
                "region that the tensor is in, where every device has its own value; convert it "
                "with manual_to_auto_spmd_partition first"
            )
        (var,) = eqn.outvars
        self.annotations[var] = eqn
        self.given[var] = annotation.sharding.splits
        self.closed[var] = set(range(len(self.given[var]))) - set(annotation.open_dims)

    def link(self, a: Any, b: Any, more: int) -> None:
        """Link variables inside and outside a loop; `a` has `more` leading dims."""
        names = [f"d{i}" for i in range(len(b.aval.shape))]
        sizes = dict(zip(names, b.aval.shape, strict=True))
        inside: tuple[Dim, ...] = tuple((n,) for n in names)
        outside: tuple[Dim, ...] = ((),) * more + inside
        runs = min(self.runs[a], self.runs[b])
        factors, atoms = Factors((outside,), (inside,), sizes), ([a], [b])
        dims, kind = Dims.of(factors, *atoms), (more, b.aval.shape, b.aval.dtype)
        self.edges.append(Edge(len(self.edges), factors, atoms, 0, None, runs, dims, kind))
