"""Communication in pieces or in rings, so that a part is sent while another is multiplied.

AllToAll, experts, AllToAll: the products need what is sent, so that nothing hides either transfer.
Of four pieces, all but the first and the last are sent beside products. Chains of nodes and
products (`chains`) are cut where that is faster than copies and latencies make it slower (`gain`).
A value that leaves one chain in the pieces that another wants is never joined. A gather and its
products, or a product and its scatter, can also be a ring of permutes (`rings`): the better of the
two is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard._jax import Var
from gshard.graph import Graph, at_every_level, in_order
from gshard.graph.evaluate import equations_of
from gshard.graph.schedule import Dependence
from gshard.moving.costs import cost_model
from gshard.planning.improve.chains import Chain, Chains, is_product, is_sending
from gshard.planning.improve.cuts import Cut, on_pieces
from gshard.planning.improve.gain import exposed, gain, gain_of_ring
from gshard.planning.improve.rings import Ring, rings

_COUNTS = (4, 2)  # of pieces
_LEVELS_BEFORE = 4  # products and nodes from the beginning of a chain to a node in it
Pieces = dict[tuple[Any, Cut, int], list[Any]]  # the variables of a value's pieces


@at_every_level
def overlap(plan: Jaxpr, always: bool = False) -> Jaxpr:
    """The plan with communication in pieces where that is faster, or `always` where it can be."""
    if not (always or cost_model().overlaps) or not any(map(is_sending, plan.eqns)):
        return plan
    graph = Graph.of(plan)
    chosen = _chosen(graph, always)
    return plan.replace(eqns=_rewritten(graph, chosen)) if chosen else plan


def overlap_all(plan: Jaxpr) -> Jaxpr:
    """The plan with all communication in pieces that can be, faster or not."""
    return overlap(plan, always=True)


overlap_all.__name__ = overlap.__name__  # one pass in dumps


def _chosen(graph: Graph, always: bool) -> list[Chain | Ring]:
    """Chains and rings without common members, those that gain most first."""
    marked = [e for e in graph.eqns if is_product(e) or is_sending(e)]
    steps = [(e, e.invars, e.outvars) for e in graph.eqns]
    order, exposure = Dependence(steps, marked), exposed(steps)
    latency = 0.0 if always else cost_model().latency  # small tensors are cut like large ones
    by_ring = {ring: gain_of_ring(ring, exposure, latency) for ring in rings(graph, order)}
    ranked: list[tuple[float, Sequence[Chain | Ring]]] = [(v, [r]) for r, v in by_ring.items()]
    better = {ring.node: value for ring, value in by_ring.items() if value > 0}
    for count in _COUNTS:
        chains = Chains(graph, order, count)
        for first in order.marked if always else _worthwhile(order, exposure):
            for chain in chains.starting(first):
                for together in _groups(graph, chain, chains):
                    value = gain(graph, together, exposure, latency)
                    instead = sum(better.get(e, 0.0) for c in together for e in c.nodes)
                    if not instead or value > instead:
                        ranked.append((value, together))
    ranked.sort(key=lambda pair: -pair[0])
    chosen: list[Chain | Ring] = []
    taken: set[JaxprEqn] = set()
    for value, parts in ranked:
        members = {eqn for part in parts for eqn in part.members}
        if (value > 0 or always) and not members & taken:
            chosen += parts
            taken |= members
    return chosen


def _worthwhile(order: Dependence[JaxprEqn], exposure: Mapping[JaxprEqn, float]) -> list[JaxprEqn]:
    """Nodes that nothing hides and that take longer than to start them, and products before them.

    These are where chains begin.
    """
    found: dict[JaxprEqn, None] = {}
    for node, time in exposure.items():
        if time > cost_model().latency:
            here = order.place[node]
            near = order.marked[max(here - _LEVELS_BEFORE, 0) : here]
            found |= dict.fromkeys(
                e for e in near if is_product(e) and order.needs(node.outvars[0], e)
            )
            found[node] = None
    return list(found)


def _groups(graph: Graph, chain: Chain, chains: Chains) -> Iterator[list[Chain]]:
    """A chain by itself, and with those that read its values in the same pieces."""
    yield [chain]
    leaving = {(v, chain.cuts[v]) for v in chain.leaving(graph)}
    taken, together = set(chain.members), [chain]
    order = chains.order
    readers = {u for v, _ in leaving for u in graph.users(v) if u in order.place}
    for reader in readers - set(chain.members):
        here = order.place[reader]
        for first in order.marked[max(here - _LEVELS_BEFORE, 0) : here]:
            for other in chains.starting(first) if is_sending(first) else ():
                reads = {(atom, cut) for _, atom, cut in other.given()}
                if reads & leaving and not taken & set(other.members):
                    together.append(other)
                    taken |= set(other.members)
    if len(together) > 1:
        yield together


def _rewritten(graph: Graph, chosen: Sequence[Chain | Ring]) -> list[JaxprEqn]:
    """The program with chains replaced by their pieces, and rings by their steps."""
    part_of = {eqn: part for part in chosen for eqn in part.members}
    made: Pieces = {}
    first = {next(iter(part.members)) for part in chosen}
    eqns: list[JaxprEqn] = []
    for eqn in graph.eqns:
        part = part_of.get(eqn)
        if part is None:
            eqns.append(eqn)
        elif eqn in first:
            eqns += _Writing(graph, part, made).eqns if isinstance(part, Chain) else _steps(part)
    return in_order(eqns)


def _steps(ring: Ring) -> list[JaxprEqn]:
    """The equations of a ring: transfers are at the line of its node, all else at its product's."""
    found, _ = equations_of(ring.run, ring.operands, ring.results, like=ring.products[0])
    info = {"ctx": ring.node.ctx, "source_info": ring.node.source_info}
    return [e.replace(**info) if is_sending(e) else e for e in found]


class _Writing:
    """Writes the equations of a chain in pieces."""

    def __init__(self, graph: Graph, chain: Chain, made: Pieces):
        self.graph = graph
        self.chain = chain
        self.made = made  # by chains before
        self.eqns: list[JaxprEqn] = []
        for var, cut in chain.cuts.items():
            self.new_pieces(var, cut)
        early = chain.leading
        self.write_all(early[:-1])
        if early:
            self.start_together(early[-1])
        self.write_all([eqn for eqn in chain.members if eqn not in early])
        for var in chain.leaving(graph):
            self.join(var)

    def new_pieces(self, var: Any, cut: Cut) -> list[Any]:
        """Variables for the pieces of a value."""
        count = self.chain.count
        aval = var.aval.update(shape=cut.shape(var.aval.shape, count))
        self.made[var, cut, count] = [Var(aval) for _ in range(count)]
        return self.made[var, cut, count]

    def write_all(self, eqns: Sequence[JaxprEqn]) -> None:
        """All pieces of some members, one piece after the other."""
        for number in range(self.chain.count):
            for eqn in eqns:
                self.write(eqn, number)

    def start_together(self, eqn: JaxprEqn) -> None:
        """A node that others wait for: the operands of all pieces are made first.

        Else a compiler that saves memory makes one only when the piece before it is finished, and
        then nothing runs while it is sent.
        """
        parts = [self.operand(eqn, 0, number) for number in range(self.chain.count)]
        ready = [Var(v.aval) for v in parts]
        self.trace(lambda *xs: jax.lax.optimization_barrier(xs), parts, ready, eqn)
        for number, part in enumerate(ready):
            self.write(eqn, number, part)

    def write(self, eqn: JaxprEqn, number: int, operand: Any = None) -> None:
        """One piece of a member; its first operand may be given."""
        cuts, count = self.chain.members[eqn], self.chain.count
        values = [self.operand(eqn, i, number) for i in range(len(eqn.invars))]
        values = values if operand is None else [operand, *values[1:]]
        pairs = zip(eqn.outvars, cuts.results, strict=True)
        results = [self.made[v, cut, count][number] for v, cut in pairs]
        self.trace(lambda *xs: on_pieces(eqn, cuts, xs, count), values, results, eqn)

    def operand(self, eqn: JaxprEqn, number: int, piece: int) -> Any:
        """An operand of one piece of a member: a piece too if it is cut."""
        atom, cut = eqn.invars[number], self.chain.members[eqn].operands[number]
        count = self.chain.count
        if cut is None:
            return atom
        if isinstance(atom, Literal):
            assert not np.shape(atom.val), "arrays are not literals"
            return atom
        if (atom, cut, count) not in self.made:
            for i, var in enumerate(self.new_pieces(atom, cut)):
                self.trace(lambda x, i=i: [cut.piece(x, i, count)], [atom], [var], eqn)
        return self.made[atom, cut, count][piece]

    def join(self, var: Any) -> None:
        """A value of which others read all."""
        cut, eqn = self.chain.cuts[var], self.graph.maker(var)
        pieces = self.made[var, cut, self.chain.count]
        self.trace(lambda *xs: [cut.joined(xs)], pieces, [var], eqn)

    def trace(self, fn: Any, operands: Sequence[Any], results: Sequence[Any], like: Any) -> None:
        """Add the equations of a function, with the line and the scope of an equation."""
        self.eqns += equations_of(fn, operands, results, like)[0]
