"""Sharding propagation: from a few annotated tensors to every tensor of the program (section 3.2).

The paper's iterative data-flow analysis (`spread`): a dim without a split takes one over from a
neighbour, a tensor that shares the dim through an operator. If neighbours disagree, these rules
decide, in this order:

1. Annotations are never overridden, and unsplit dims of an annotated tensor stay unsplit.
2. What it costs. Dims that are the same dim throughout the program (the batch, the model dim, all
   layers' hidden dims) form a group; where splits of several groups want the same tensors, the
   groups are ranked so that the program costs least, in bytes sent and in work, over all tensors
   that they tie together (`Flow.cost`). The split that ranks first spreads first, through all of
   the program. Without such a conflict, or where it gains nothing, rules 3 to 6 alone decide. Loop
   invariants (and what is computed elementwise from them) are gathered once, before the loop, if
   that costs less than communication in every iteration.
3. Operators that leave elements where they are (pointwise, transpose, broadcast, reshape, the
   borders of loops) pass splits on, both ways, before any other operator does.
4. Then other operators pass splits forwards, from operands to results; only when nothing moves
   forwards any more, backwards. After any step the analysis returns to rule 3.
5. Within an operator, batch dims of contractions come first; then the dim whose tensors are
   largest, so that the least has to be resharded; then the first in the operands' order.
6. A tensor takes over the part of a split that is compatible with its other splits: where tokens
   are along both axes of a mesh and experts have the second, the first; through an operator that
   changes the dim's size (slice, pad), only if there is a row for every tile.

Program order makes the result deterministic. Dims without a split are replicated.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from gshard.moving.costs import (
    GENERIC_COSTS,
    LATENCIES,
    MEMORY_LIMIT,
    CostModel,
    cost_model,
    use_cost_model,
)
from gshard.propagation.flow import Flow, OperatorTable
from gshard.propagation.spread import NO_GROUP, Candidate, DimGroups, Spread
from gshard.rules.base.uses import Uses
from gshard.tensors.sharding import Sharding, Split

_MOST = 6  # how many contested splits are ranked; more would take too long


@dataclass(frozen=True)
class Conflict:
    """Two splits that conflict on the same tensors: the one that spread first, and the other.

    `cost` is the cost of the program, and `instead` its cost if the other had spread first, in
    bytes that a device sends; work counts as the bytes that could be sent in the same time.
    """

    kept: str
    lost: str
    cost: float
    instead: float

    def __str__(self) -> str:
        times = self.instead / max(self.cost, 1.0)
        return f"{self.kept} takes precedence over {self.lost}, which costs {times:.3g} times that"


@dataclass(frozen=True, eq=False)
class Propagated:
    """A sharding for every variable, and the conflicts that were decided.

    `kinds` are the keys of equations (`rule.equation_key`), `uses` those of the values of the
    program and of each body in it.
    """

    shardings: Mapping[Any, Sharding]
    conflicts: tuple[Conflict, ...] = ()
    kinds: Mapping[JaxprEqn, int] = field(default_factory=dict)
    uses: Mapping[Jaxpr, Uses] = field(default_factory=dict)

    def note(self, eqn: JaxprEqn) -> str:
        """The shardings of an equation's results."""
        return "; ".join(str(self.shardings[v]) for v in eqn.outvars if v in self.shardings)


def propagate(
    closed: ClosedJaxpr,
    num_devices: int,
    given: Mapping[Any, Sharding] | None = None,
    memory_limit: int = MEMORY_LIMIT,
    inside: Mapping[Any, Sharding] | None = None,
    table: OperatorTable | None = None,
) -> Propagated:
    """A sharding for every variable of the program and of the bodies in it.

    `given` are the current shardings of arguments, as binding as annotations, except that a
    replicated one may be split, which sends nothing, unless that costs more later. Invariants of a
    loop that take at most `memory_limit` bytes in all may be gathered before it. Variables
    `inside` the program are held to their shardings, except those that a rewrite has removed. The
    `table` has what earlier propagations with the same devices and costs found of operators.
    """
    split = {var: sharding for var, sharding in (given or {}).items() if any(sharding.splits)}
    replicated = dict.fromkeys(var for var in given or () if var not in split)
    flow = Flow(closed.jaxpr, num_devices, memory_limit, {**(inside or {}), **split}, table)
    with use_cost_model(_for_many_collectives(cost_model())):
        spread, conflicts = _SplitSearch(flow).best({}, flow.constants, replicated)
    return Propagated(spread.shardings, conflicts, flow.kinds, flow.uses)


def _for_many_collectives(of: CostModel) -> CostModel:
    """The cost model for estimates that count small collectives one by one.

    They will be combined (`planning.improve.combine`), so that each has only a fraction of the
    latency, as in a full combination.
    """
    return replace(of, latency=min(of.latency, GENERIC_COSTS.latency) / LATENCIES)


Settled = tuple[Spread, tuple[Conflict, ...]]  # the final splits, and the decisions behind them
Held = dict[Any, None]  # variables that take no split


@dataclass(frozen=True, eq=False)
class _SplitSearch:
    """The cheapest splits of a program. What they cost is found out only if there is a choice."""

    flow: Flow

    @functools.cached_property
    def dims(self) -> DimGroups:
        """The dims that belong together."""
        return _grouped(self.flow)

    def best(self, held: Held, *choices: Held) -> Settled:
        """The cheaper of two, for each of some sets of variables: these are split, or held too."""
        if not choices:
            return self.settled(held)
        *others, last = choices
        found = self.best(held, *others)
        if any(any(found[0].splits[var]) for var in last):
            other = self.best({**held, **last}, *others)
            this, that = (self.flow.cost(spread.shardings) for spread, _ in (found, other))
            found = other if that.is_less_than(this) else found
        return found

    def settled(self, held: Held) -> Settled:
        """The final splits, and the conflicts that were decided."""
        spread = Spread.of(self.flow, held=held)
        if not spread.blocked:
            return spread, ()
        return _cheapest(self.flow, self.dims.without(held), spread)


def _cheapest(flow: Flow, dims: DimGroups, spread: Spread) -> Settled:
    """If splits conflict: the best of the flow by rules 3 to 6 alone and of ranked ones.

    Each of the contested splits spreads first once; then they are ranked by what that costs.
    """
    contested = _contested(spread, dims)
    if len(contested) < 2:
        return spread, ()
    best, least, order = spread, flow.cost(spread.shardings), list[Candidate]()
    costs: dict[Candidate, float] = {}

    def try_out(ranking: list[Candidate]) -> float:
        nonlocal best, least, order
        ranked = Spread.of(flow, dims, ranking, spread.held)
        total = flow.cost(ranked.shardings)
        if total.is_less_than(least) if not order else total.cost < least.cost:
            best, least, order = ranked, total, ranking
        return total.cost

    for first in contested:
        costs[first] = try_out([first, *(c for c in contested if c is not first)])
    ranking = sorted(contested, key=costs.__getitem__)
    if ranking[1:] != [c for c in contested if c is not ranking[0]]:
        costs[ranking[0]] = min(costs[ranking[0]], try_out(ranking))
    # Without a ranking that is cheaper, the flow may have found one of them by itself.
    order = order or (ranking if costs[ranking[0]] == least.cost else [])
    if not order:
        return best, ()
    kept, *others = order
    return best, tuple(
        Conflict(dims.described(flow, kept), dims.described(flow, lost), costs[kept], costs[lost])
        for lost in others
        if costs[lost] > costs[kept]
    )


# ---------------------------------------------------------------- dims that belong together


def _grouped(flow: Flow) -> DimGroups:
    """Dims connected by operators form classes; classes with the same annotations form a group.

    So the hidden dims of all layers are one group, though no operator connects them. Two dims of
    one tensor are never of one class: of all pairs of rows, either row may be split, and the class
    that is kept apart may have the splits of the one that it would be joined to, its source.
    """
    classes = _Classes(flow.given)
    for edge in reversed(flow.edges):  # so that classes part at the tensor that both rows are of
        seen: dict[str, int] = {}
        for atom, names in zip(edge.variables, edge.dims.names, strict=True):
            for dim, name in enumerate(names):
                if name and name[0] not in edge.factors.replicated:
                    node = classes.first[atom] + dim
                    classes.join(seen.setdefault(name[0], node), node)
    numbers: dict[Split, int] = {}
    anchors: dict[int, dict[Any, tuple[Split, Any, int]]] = {}
    for var in flow.closed:
        for dim, split in enumerate(flow.given[var]):
            if split:
                number = numbers.setdefault(split, len(numbers))
                found = anchors.setdefault(classes.root(classes.first[var] + dim), {})
                found.setdefault((number, var.aval.shape, dim), (split, var, dim))
    parted, count, source = list(classes.parted()), 0, dict[int, int]()
    while count < (count := len(anchors)):
        for node, other, (var, dim) in parted:
            if node in anchors and other not in anchors:
                source[other] = node
                anchors[other] = {
                    (*key, var.aval.shape, dim): (split, var, dim)
                    for key, (split, _, _) in anchors[node].items()
                }
    by_anchors: dict[Any, int] = {}
    group_of: dict[int, int] = {}
    candidates: dict[Candidate, tuple[Any, int]] = {}
    of_group: dict[int, set[Any]] = {}  # tensors
    for node in sorted(anchors):
        tensors, known = classes.members[node].keys(), frozenset(anchors[node])
        for again in itertools.count():
            group = by_anchors.setdefault((known, again), len(by_anchors))
            if tensors.isdisjoint(of_group.setdefault(group, set())):
                break
        group_of[node] = group
        of_group[group] |= tensors
        for split, var, dim in anchors[node].values():
            candidates.setdefault((group, split), (var, dim))
    of = {
        var: tuple([group_of.get(classes.root(first + d), NO_GROUP) for d in range(len(splits))])
        for (var, first), splits in zip(classes.first.items(), flow.given.values(), strict=True)
    }
    edges: dict[int, set[int]] = {}
    for edge in flow.edges:
        for group in {group for var in edge.variables for group in of[var]}:
            edges.setdefault(group, set()).add(edge.place)
    groups = DimGroups(of, candidates, edges)
    for other, node in source.items():
        groups.connect(flow, group_of[other], group_of[node])
    return groups


class _Classes:
    """Dims that operators connect, numbered, with at most one dim of a tensor in each class."""

    def __init__(self, tensors: Mapping[Any, Sequence[Any]]):
        self.first: dict[Any, int] = {}  # the number of a tensor's first dim
        self.members: list[dict[Any, int]] = []  # of a class: tensors, and which dim of each
        for var, dims in tensors.items():
            self.first[var] = len(self.members)
            self.members += [{var: dim} for dim in range(len(dims))]
        self.parent = list(range(len(self.members)))
        self.apart: list[tuple[int, int, Any]] = []  # dims that are connected and of two classes

    def root(self, node: int) -> int:
        """The number of a class."""
        parent = self.parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def join(self, one: int, other: int) -> None:
        """Make one class of those of two dims, unless a tensor has a dim in either."""
        one, other = self.root(one), self.root(other)
        if one == other:
            return
        few, many = sorted((self.members[one], self.members[other]), key=len)
        both = next((var for var in few if var in many), None)
        if both is not None:
            self.apart.append((one, other, both))
            return
        low, high = min(one, other), max(one, other)
        self.parent[high] = low
        self.members[low], self.members[high] = many, {}
        many |= few

    def parted(self) -> Iterator[tuple[int, int, tuple[Any, int]]]:
        """Pairs of classes that were kept apart, both ways, and the second's dim of a tensor."""
        for one, other, var in reversed(self.apart):
            a, b = self.root(one), self.root(other)
            yield a, b, (var, self.members[b][var])
            yield b, a, (var, self.members[a][var])


def _contested(spread: Spread, dims: DimGroups) -> list[Candidate]:
    """The splits that were refused on a tensor, and the splits that the tensor had."""
    groups: dict[int, None] = {}
    for var, dim in spread.blocked:
        groups[dims.of[var][dim]] = None
        had = zip(dims.of[var], spread.splits[var], strict=True)
        groups |= dict.fromkeys(group for group, split in had if split)
    found = [c for c in dims.candidates if c[0] in groups]
    return found[:_MOST]
