"""The data-flow analysis of propagation: unsplit dims take over the splits of neighbours.

A split that was taken over stays, so the analysis terminates; program order makes it deterministic.
`propagate` decides which splits spread first.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gshard.propagation.flow import Edge, Flow
from gshard.rules.base.rule import rowwise
from gshard.tensors.factors import Dim, Factor, compose, decompose
from gshard.tensors.sharding import Sharding, Split, fitting_part

_OPERANDS, _RESULTS = 0, 1
_BOTH = (_OPERANDS, _RESULTS)
_PASSES = [(_BOTH, _BOTH), ((_OPERANDS,), (_RESULTS,)), (_BOTH, _BOTH)]
_BACKWARDS = 2  # the last of the passes

Node = tuple[Any, int]  # a variable and one of its dims
Stage = tuple[int | None, Split]  # of one group of dims, or of all
DimGroups = Mapping[Any, Sequence[int]]  # for every variable, the groups that its dims belong to


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
        self.queued = [0] * len(flow.edges)  # for each edge, a bit for every queue that it is in
        self.stage: Stage | None = None

    @staticmethod
    def of(
        flow: Flow,
        groups: DimGroups,
        first: Sequence[tuple[int, Split]] = (),
        sealed: bool = False,
    ) -> Spread:
        """Spread the given splits: ragged ones, those of the groups `first` in order, then all.

        If loops are `sealed`, their invariants are replicated inside: they are gathered before.
        """
        spread = Spread(flow, groups, sealed)
        rows = {(None, s): 0 for v in flow.annotations for s in flow.given[v] if s and s.ragged}
        for stage in (*rows, *first):
            spread.settle(stage)
        spread.settle(None)
        return spread

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
            self.queued[edge.place] &= ~(1 << number)
            sources, sinks = _PASSES[number]
            if self.has_room(edge, sinks):
                self.pass_on(edge, sources, sinks)

    def revisit(self, edges: Iterable[Edge]) -> None:
        """Queue operators: in program order for passes that go forwards, else from the end."""
        for edge in edges:
            if not self.has_room(edge, _BOTH):  # and never again: room only shrinks
                continue
            queued = self.queued[edge.place]
            for number in range(edge.level, len(self.queues)):
                if not queued >> number & 1:
                    queued |= 1 << number
                    place = -edge.place if number == _BACKWARDS else edge.place
                    heapq.heappush(self.queues[number], place)
            self.queued[edge.place] = queued

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
