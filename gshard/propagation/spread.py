"""The data-flow analysis of propagation: unsplit dims take over the splits of neighbours.

A split that was taken over stays, so the analysis terminates; program order makes it deterministic.
`propagate` decides which splits spread first.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import JaxprEqn

from gshard.graph.source import source_of
from gshard.propagation.flow import Edge, Flow
from gshard.rules.base.rule import RULES, factors_of
from gshard.tensors.factors import Factor, compose, decompose
from gshard.tensors.sharding import Sharding, Split, fitting_part

_FORWARDS, _BACKWARDS = 1, 2  # passes; in all others, operators of level 0 pass on both ways

Node = tuple[Any, int]  # a variable and one of its dims
Stage = tuple[int | None, Split]  # of one group of dims, or of all
Candidate = tuple[int, Split]  # a group of dims, and a split that annotations give some of them
NO_GROUP = -1  # that of dims that no annotation mentions


@dataclass(frozen=True)
class DimGroups:
    """The groups of all dims, and the splits that annotations give to dims of a group."""

    of: Mapping[Any, Sequence[int]] = field(default_factory=dict)
    # And the first tensor that has such a split
    candidates: Mapping[Candidate, tuple[Any, int]] = field(default_factory=dict)
    edges: dict[int, set[int]] = field(default_factory=dict)  # places, by group
    between: dict[int, set[Node]] = field(default_factory=dict)  # on the way from a group's source

    def described(self, flow: Flow, candidate: Candidate) -> str:
        """A candidate in terms of the first annotation that asks for it, or of a tensor."""
        var, dim = self.candidates[candidate]
        makers = [e.eqn for e in flow.touching[var] if e.eqn and var in e.atoms[1]]
        makers = [flow.annotations[var]] if var in flow.annotations else makers
        where = f" ({source_of(makers[0])})" if makers else ""
        _, split = candidate
        return f"dim {dim} by {split.tiles} of {var.aval.str_short(short_dtypes=True)}{where}"

    def connect(self, flow: Flow, group: int, source: int) -> None:
        """Let a group have the splits of another, along the tensors before those that it is of.

        Not through operators that change the number of rows: their tiles are of other rows.
        """
        found = self.between.setdefault(group, set())
        near = [v for n in self.edges[group] for v in flow.edges[n].variables]
        while near:
            own = self.of[var := near.pop()]
            if source not in own or group in own or var in flow.closed:
                continue
            makers = [e for e in flow.touching[var] if var in e.atoms[1]]
            dim = own.index(source)
            resized = any(e.factors.resized.intersection(e.names_of(var)[dim]) for e in makers)
            if (var, dim) not in found and not resized:
                found.add((var, dim))
                self.edges[group].update(e.place for e in makers)
                near += [a for e in makers for a in e.variables if a is not var]

    def without(self, held: Collection[Any]) -> DimGroups:
        """The same, with variables that take no split in no group."""
        none = {var: (NO_GROUP,) * len(self.of[var]) for var in held}
        return replace(self, of={**self.of, **none})


class Spread:
    """The state of the analysis; passes are numbered in the order of `propagate`'s rules."""

    def __init__(self, flow: Flow, groups: DimGroups, held: Collection[Any]):
        self.flow = flow
        self.groups = groups
        self.held = held
        self.splits = dict(flow.given)
        self.open: dict[Any, Sequence[int]] = {**flow.open, **dict.fromkeys(held, ())}
        self.split = {v for v in flow.closed if any(self.splits[v])}
        self.queues: list[list[int]] = [[], [], []]
        self.queued = [0] * len(flow.edges)  # for each edge, a bit for every queue that it is in
        self.stage: Stage | None = None

    @staticmethod
    def of(
        flow: Flow,
        groups: DimGroups = DimGroups(),
        first: Sequence[Candidate] = (),
        held: Collection[Any] = (),
    ) -> Spread:
        """Spread the given splits: ragged ones, those of the groups `first` in order, then all.

        The variables `held` take no split.
        """
        spread = Spread(flow, groups, held)
        rows = {(None, s): 0 for v in flow.annotations for s in flow.given[v] if s and s.ragged}
        for stage in (*rows, *first):
            spread.settle(stage)
        spread.settle(None)
        return spread

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
            self.queued[edge.place] &= ~(1 << number)
            self.pass_on(edge, number == _FORWARDS)

    def revisit(self, edges: Iterable[Edge]) -> None:
        """Queue operators: in program order for passes that go forwards, else from the end.

        Operators of level 0 pass splits both ways at once, and need not do so again backwards.
        """
        group = self.stage[0] if self.stage else None
        among = None if group is None else self.groups.edges[group]
        for edge in edges:
            if among is not None and edge.place not in among:  # it has no dim of the stage's group
                continue
            if not self.has_room(edge):  # and never again: room only shrinks
                continue
            queued = self.queued[edge.place]
            for number in (edge.level, edge.level + 1):
                if not queued >> number & 1:
                    queued |= 1 << number
                    place = -edge.place if number == _BACKWARDS else edge.place
                    heapq.heappush(self.queues[number], place)
            self.queued[edge.place] = queued

    def has_room(self, edge: Edge) -> bool:
        """Whether a variable of an operator could take a split over."""
        return any(map(self.open.__getitem__, edge.variables))

    def pass_on(self, edge: Edge, forwards: bool) -> None:
        """Propagate splits between the tensors of an operator."""
        if not self.has_room(edge):
            return
        variables, stage = edge.variables, self.stage
        for position, dim, split in self.offers(edge, forwards, [self.open[v] for v in variables]):
            var = variables[position]
            if dim not in self.open[var]:  # it is another operand too, and has taken a split there
                continue
            if stage is None or (split is stage[1] and self.is_of(stage, var, dim)):
                self.take(var, dim, split)

    def is_of(self, stage: Stage, var: Any, dim: int) -> bool:
        """Whether a stage is about a dim: one of its group, or one on the way from its source."""
        if stage[0] is None or self.groups.of[var][dim] == stage[0]:
            return True
        return (var, dim) in self.groups.between.get(stage[0], ())

    def take(self, var: Any, dim: int, split: Split) -> None:
        """Split a dim, as far as that is compatible with the other splits of the tensor."""
        splits = self.splits[var]
        part = fitting_part(tuple([s for s in splits if s]), split)
        if part:
            self.splits[var] = (*splits[:dim], part, *splits[dim + 1 :])
            self.split.add(var)
            self.open[var] = self.flow.open_dims(var, self.splits[var])
            self.revisit(self.flow.touching[var])

    def offers(
        self, edge: Edge, forwards: bool, dims: Sequence[Sequence[int]]
    ) -> Sequence[tuple[int, int, Split]]:
        """The splits that neighbours offer to these dims of each variable of an operator.

        Forwards, results are offered those of operands. Computed once for operators that are alike.
        """
        splits = [self.splits[v] for v in edge.variables]
        key = (edge.kind, forwards, *splits, *dims)
        found = self.flow.table.offers.get(key)
        if found is None:
            found = self.flow.table.offers[key] = list(_offers(edge, forwards, splits, dims))
        return found

    @functools.cached_property
    def shardings(self) -> dict[Any, Sharding]:
        """A sharding for every variable."""
        count, manual = self.flow.num_devices, self.flow.manual
        known = {splits: Sharding(splits, count) for splits in {*self.splits.values()}}
        return {
            v: Sharding(s, count, True) if v in manual else known[s] for v, s in self.splits.items()
        }

    @functools.cached_property
    def blocked(self) -> dict[Node, Split]:
        """The dims that were offered a neighbour's split and could not take it."""
        found: dict[Node, Split] = {}
        for edge in self.flow.edges:
            for position, dim, split in self.offers(edge, False, edge.dims.numbers):
                var = edge.variables[position]
                closed = var in self.held or dim in self.flow.closed.get(var, ())
                if self.splits[var][dim] is not split and not closed:
                    found.setdefault((var, dim), split)
        return found


def _offers(
    edge: Edge,
    forwards: bool,
    splits: Sequence[Sequence[Split | None]],
    dims: Sequence[Sequence[int]],
) -> Iterator[tuple[int, int, Split]]:
    """For some dims of the variables at each position, the splits that they are offered."""
    operands, names = edge.dims.operands, edge.dims.names
    wanted = _preferences(edge, splits[:operands] if forwards else splits)
    order = {factor: number for number, factor in enumerate(wanted)}
    for position in range(operands if forwards else 0, len(splits)):
        own = names[position]
        named = [d for d in dims[position] if own[d] and own[d][0] in wanted]
        for dim in sorted(named, key=lambda d: order[own[d][0]]):
            split = compose(own[dim], wanted, edge.factors.sizes)
            if split and not edge.factors.resized.isdisjoint(own[dim]):
                rows = edge.variables[position].aval.shape[dim]
                split = split if split.tiles <= rows else None
            if split:
                yield position, dim, split


def _preferences(edge: Edge, splits: Sequence[Sequence[Split | None]]) -> dict[Factor, Split]:
    """For each factor the split that most of its tensors' bytes already have."""
    votes: dict[Factor, dict[Split, float]] = {}
    instead: dict[Factor, dict[Split, float]] = {}  # of factors that nothing else splits
    factors, eqn = edge.factors, edge.eqn
    for names, weight, own in zip(edge.dims.names, edge.dims.weights, splits, strict=False):
        for dim, split in zip(names, own, strict=True):
            if split is None or not dim:
                continue
            for factor, part in decompose(split, dim, factors.sizes).items():
                for taker in factors.taken_over(factor, part)[:1]:
                    if not part.ragged or (eqn and rowwise(eqn, factor)):
                        tally = (votes if taker == factor else instead).setdefault(taker, {})
                        tally[part] = tally.get(part, 0) + weight
    votes = instead | votes
    favourite = {f: max(tally, key=tally.__getitem__) for f, tally in votes.items()}
    order = sorted(favourite, key=lambda f: (f not in factors.priority, -votes[f][favourite[f]]))
    return {f: favourite[f] for f in order}


def rowwise(eqn: JaxprEqn, factor: Factor) -> bool:
    """Whether each row of the results along `factor` depends on that row of the operands only.

    Such an operator runs on any rows in any order, so also on tiles that are ragged. A rule with
    ways of its own whose factors do not say which are `ordered` may tell all rows apart.
    """
    rule = RULES.get(eqn.primitive)
    if rule is None:
        return False
    factors = factors_of(rule, eqn)
    ordered = factors.sizes if factors.ordered is None and not rule.by_factors else factors.ordered
    if factor in {*factors.reduced, *factors.replicated, *factors.resized, *(ordered or ())}:
        return False
    tensors = [[d for d in t if factor in d] for t in (*factors.operands, *factors.results)]
    in_results = any(factor in d for t in factors.results for d in t)
    return in_results and all(found in ([], [(factor,)]) for found in tensors)
