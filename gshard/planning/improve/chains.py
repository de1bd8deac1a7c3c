"""Chains: communication and the products next to it, which can run in pieces together.

A chain begins with a node or a product, follows one dim of its result through operators that leave
the pieces independent, and ends with the node behind the products, or with the products. Such are
dispatch, experts and combine; a gather and the product of what is gathered; a product and its
ReduceScatter.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from gshard.forecast.ops import PRODUCTS
from gshard.graph import Graph, needed_for
from gshard.graph.schedule import Dependence
from gshard.moving.nodes import node_bytes, node_of
from gshard.planning.improve.cuts import Cut, Cuts, cuts_of
from gshard.rules.base.rule import RULES

_LEVELS = 3  # products one behind the other: the two of a feed-forward layer, and its gradient's

BEFORE, MULTIPLIED, SENT = range(3)  # where a value is in its chain


@dataclass(eq=False)
class Chain:
    """Equations that run in `count` pieces, in the order of the program.

    `cuts` has those of the values that they make, `given` those of each member's operands.
    """

    count: int
    members: dict[JaxprEqn, Cuts] = field(default_factory=dict)
    cuts: dict[Any, Cut] = field(default_factory=dict)

    @property
    def nodes(self) -> list[JaxprEqn]:
        """The members that communicate."""
        return [eqn for eqn in self.members if is_sending(eqn)]

    @property
    def products(self) -> list[JaxprEqn]:
        """The members that multiply matrices."""
        return [eqn for eqn in self.members if is_product(eqn)]

    @property
    def leading(self) -> list[JaxprEqn]:
        """The node that the chain begins with, if it does, after the members that it needs."""
        members = list(self.members)
        before = members[: members.index(self.nodes[0])]
        return [] if any(map(is_product, before)) else [*before, self.nodes[0]]

    def given(self) -> Iterator[tuple[JaxprEqn, Any, Cut]]:
        """The operands from outside that are cut, each with the member that reads it."""
        for eqn, cuts in self.members.items():
            for atom, cut in zip(eqn.invars, cuts.operands, strict=True):
                if cut is not None and not isinstance(atom, Literal) and atom not in self.cuts:
                    yield eqn, atom, cut

    def leaving(self, graph: Graph) -> Iterator[Any]:
        """The values that others read, or that are results."""
        results = {v for v in graph.results if not isinstance(v, Literal)}
        for var in self.cuts:
            if var in results or any(u not in self.members for u in graph.users(var)):
                yield var


def is_product(eqn: JaxprEqn) -> bool:
    """Whether it multiplies matrices."""
    return eqn.primitive.name in PRODUCTS


def is_sending(eqn: JaxprEqn) -> bool:
    """Whether it is a node that sends something."""
    return node_bytes(eqn) > 0


class Chains:
    """All chains of a program that can run in `count` pieces, by the equation that begins them."""

    def __init__(self, graph: Graph, order: Dependence[JaxprEqn], count: int):
        self.graph = graph
        self.order = order
        self.count = count
        self._from: dict[JaxprEqn, list[Chain]] = {}

    def starting(self, first: JaxprEqn) -> list[Chain]:
        """The chains that begin with a product or a node that sends something."""
        if first not in self._from:
            cuts = dict.fromkeys(_first_cuts(first, self.count))
            self._from[first] = [chain for cut in cuts for chain in self._grown(first, cut)]
        return self._from[first]

    def _grown(self, first: JaxprEqn, cut: Cut) -> Iterator[Chain]:
        """The chains whose first result has this cut: up to the last nodes, or the first products.

        Each has a node in front of products or behind them.
        """
        graph, chain = self.graph, Chain(self.count)
        cuts = cuts_of(first, {first.outvars[0]: cut}, self.count)
        if cuts is None:
            return
        stage: dict[Any, tuple[int, int]] = {}  # of each value: its place, and products before it
        _join(chain, stage, first, cuts)
        queue = [(graph.numbers[u], u) for u in graph.users(first.outvars[0])]
        heapq.heapify(queue)
        tried = {first}
        while queue:
            _, eqn = heapq.heappop(queue)
            if eqn in tried:
                continue
            tried.add(eqn)
            atoms = [a for a in eqn.invars if not isinstance(a, Literal)]
            inside = [a for a in atoms if a in chain.cuts]
            place, levels = max(stage[a] for a in inside)
            full = place == SENT or (levels >= _LEVELS and is_product(eqn))
            # What depends on the chain by other ways has to wait for all of its pieces.
            if full or any(self.order.needs(a, first) for a in atoms if a not in chain.cuts):
                continue
            found = cuts_of(eqn, chain.cuts, self.count)
            if found is None:
                continue
            _join(chain, stage, eqn, found, place, levels)
            for var in eqn.outvars:
                for user in graph.users(var):
                    heapq.heappush(queue, (graph.numbers[user], user))
        last = [e for e in chain.nodes if stage[e.outvars[0]][0] == SENT]
        nearest = [e for e in chain.products if stage[e.outvars[0]][1] == 1]
        for ends in (last, nearest):
            built = _absorbed(graph, _trimmed(graph, chain, ends))
            if built.nodes and built.products:
                yield built


def _first_cuts(eqn: JaxprEqn, count: int) -> Iterator[Cut]:
    """The cuts of an equation's result: each dim, and for a node those of its operand."""
    for dim in range(eqn.outvars[0].aval.ndim):
        yield Cut(dim)
        if node_of(eqn) is not None:
            found = cuts_of(eqn, {eqn.invars[0]: Cut(dim)}, count)
            if found is not None:
                yield found.results[0]


def _join(
    chain: Chain, stage: dict[Any, Any], eqn: JaxprEqn, cuts: Cuts, place: int = 0, levels: int = 0
) -> None:
    """Add a member behind values at `place` that are `levels` products from the beginning."""
    if is_product(eqn):
        place, levels = MULTIPLIED, levels + 1
    elif is_sending(eqn) and place == MULTIPLIED:
        place = SENT
    chain.members[eqn] = cuts
    for var, cut in zip(eqn.outvars, cuts.results, strict=True):
        chain.cuts[var] = cut
        stage[var] = (place, levels)


def _trimmed(graph: Graph, chain: Chain, ends: list[JaxprEqn]) -> Chain:
    """What leads to `ends`, and the products of values on the way."""
    kept = set(needed_for([v for eqn in ends for v in eqn.outvars], list(chain.members)))
    for eqn in chain.products:
        if all(m in kept for m in map(graph.maker, eqn.invars) if m in chain.members):
            kept.add(eqn)
    members = {e: c for e, c in chain.members.items() if e in kept}
    return Chain(chain.count, members, {v: chain.cuts[v] for e in members for v in e.outvars})


def _absorbed(graph: Graph, chain: Chain) -> Chain:
    """The chain with pointwise equations whose results only members read: it is cut before them."""
    queue = list(chain.given())
    while queue:
        _, atom, cut = queue.pop()
        maker = graph.maker(atom)
        if maker is None or maker in chain.members or not is_light(maker):
            continue
        readers = [(u, chain.members.get(u)) for u in graph.users(atom)]
        inside = all(cuts for _, cuts in readers) and not any(atom is r for r in graph.results)
        reads = [zip(u.invars, cuts.operands, strict=True) for u, cuts in readers if cuts]
        alike = all(c == cut for pairs in reads for a, c in pairs if a is atom)
        cuts = cuts_of(maker, {atom: cut}, chain.count) if inside and alike else None
        if cuts is None:
            continue
        chain.members[maker] = cuts
        chain.cuts[atom] = cut
        queue += [g for g in chain.given() if g[0] is maker]
    in_order = sorted(chain.members, key=graph.numbers.__getitem__)
    return Chain(chain.count, {eqn: chain.members[eqn] for eqn in in_order}, chain.cuts)


def is_light(eqn: JaxprEqn) -> bool:
    """Whether it is fused with its consumers: pointwise, or a change of the order of dims."""
    name = eqn.primitive.name
    moves = name in ("transpose", "reshape", "broadcast_in_dim", "squeeze")
    rule = RULES.get(eqn.primitive)
    return len(eqn.outvars) == 1 and (moves or (rule is not None and rule.elementwise))
