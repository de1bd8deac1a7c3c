"""Products beside transfers: barriers that make a compiler start a transfer before a product.

A compiler that orders a program by its memory finishes a transfer as soon as its result can be
rearranged, and computes products when their results are needed. Where a product does not depend on
a transfer, two barriers put it beside it: the product depends on what is sent, and what reads the
transfer's result depends on the product. Such are the products of another piece, and in
the backward pass gradients of weights, which only the optimizer needs.

XLA for GPUs runs collectives one after the other: a second one that started before the product
would end the first. Transfers that could start meanwhile depend on the product too.

XLA removes operands of a barrier whose results are not used. So a barrier has the first element of
a value as its operand, which leaves the value's layout in memory open, and all these elements are
used at the end, in a condition that is never true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.forecast.ops import PRODUCTS, product_of
from gshard.graph import Graph, at_every_level, renamed
from gshard.graph.evaluate import equations_of
from gshard.graph.schedule import Dependence
from gshard.moving.collectives import CollectiveNode
from gshard.moving.costs import cost_model
from gshard.moving.nodes import node_of
from gshard.planning.improve.combine import is_heavy
from gshard.planning.improve.gain import multiplication
from gshard.planning.improve.gain import transfer as time_of

_EPILOGUE = {"max", "convert_element_type", "reshape", "transpose"}
_MOST = 2  # products for one transfer, so that some are left for others
_NEAR = 24  # products before a transfer, or behind it, among which some are chosen

Place = tuple[int, ...]  # in the order of the program: (3,), (3, 1, 5), (4,)


@dataclass(frozen=True, eq=False)
class Hidden:
    """A transfer, the products that run meanwhile, and other transfers that wait for these.

    `ends` are the products, or what a product computes of its result as it writes it.
    """

    transfer: JaxprEqn
    products: Sequence[JaxprEqn]
    ends: Sequence[JaxprEqn]
    delayed: Sequence[JaxprEqn] = ()


@at_every_level
def hide(program: Jaxpr) -> Jaxpr:
    """The plan, in which all nodes are collectives, with products put beside transfers."""
    choosing = _Choosing(Graph.of(program))
    for transfer in list(choosing.transfers):
        choosing.hide(transfer)
    if not choosing.found:
        return program
    eqns, outvars = _with_barriers(choosing)
    return program.replace(eqns=eqns, outvars=outvars)


class _Choosing:
    """Chooses products for one transfer after the other; each product hides one at most.

    `place` is the new order. Equations only move to later places, with all that depend on them.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.place: dict[JaxprEqn, Place] = {e: (n,) for e, n in graph.numbers.items()}
        self.transfers = [e for e in graph.eqns if _sends(e)]
        self.products = [e for e in graph.eqns if _multiplies(e)]
        marked = [e for e in graph.eqns if _multiplies(e) or _sends(e)]
        self.depends = Dependence([(e, e.invars, e.outvars) for e in graph.eqns], marked)
        self.found: list[Hidden] = []
        self.fixed: set[JaxprEqn] = set()  # transfers and products that were chosen

    def hide(self, transfer: JaxprEqn) -> None:
        """Find products that neither need a transfer nor are needed by another one."""
        if time_of(transfer) <= cost_model().latency or not self._is_waited_for(transfer):
            return
        found = self._behind(transfer) or self._before(transfer)
        if found is not None:
            self.found.append(found)
            self.fixed |= {transfer, *found.products}

    def _is_waited_for(self, transfer: JaxprEqn) -> bool:
        """Whether one of the next products depends on it: else any schedule hides it."""
        return any(
            self.depends.needs(a, transfer)
            for e in self._near(self.place[transfer])
            for a in e.invars
        )

    def _near(self, begin: Place, end: Place | None = None) -> list[JaxprEqn]:
        """The next products from one place to another."""
        inside = [e for e in self.products if self.place[e] > begin]
        inside = [e for e in inside if end is None or self.place[e] < end]
        return sorted(inside, key=self.place.__getitem__)[:_NEAR]

    def _behind(self, transfer: JaxprEqn) -> Hidden | None:
        """Products between a transfer and the first heavy equation that reads its result."""
        begin, place = self.place[transfer], self.place
        readers, used = self._readers(transfer)
        waiting: dict[JaxprEqn, list[JaxprEqn]] = {}  # other transfers, with their readers
        limit = used
        for other in self.transfers:
            if begin < place[other] < limit and other not in self.fixed:
                waiting[other], first = self._readers(other)
                limit = min(limit, first)
        near = [e for e in self._near(begin, limit) if place[self._end(e)] < limit]
        chosen = self._enough(transfer, near)
        if not chosen:
            return None
        ends = [self._end(e) for e in chosen]
        last = max(place[e] for e in ends)
        delayed = [e for e in waiting if place[e] < last]
        for eqn in {*readers, *delayed, *(r for e in delayed for r in waiting[e])}:
            if place[eqn] < last:
                place[eqn] = (*last, 1, *place[eqn])
        return Hidden(transfer, chosen, ends, delayed)

    def _before(self, transfer: JaxprEqn) -> Hidden | None:
        """Products before a transfer that nothing up to it needs."""
        here, (value,), place = self.place[transfer], transfer.invars, self.place
        before = sorted((e for e in self.products if place[e] < here), key=place.__getitem__)
        free: dict[JaxprEqn, list[JaxprEqn]] = {}
        for product in before[-_NEAR:]:
            if not self.depends.needs(value, product):
                after = self._downstream(product, lambda e: place[e] <= here)
                if not any(_multiplies(e) or e in self.fixed for e in after):
                    free[product] = after
        chosen = self._enough(transfer, list(free)[::-1])[::-1]
        if not chosen:
            return None
        ends = [e if (e := self._end(p)) in free[p] else p for p in chosen]
        for eqn in {e for product in chosen for e in (product, *free[product])}:
            place[eqn] = (*here, 1, *place[eqn])
        return Hidden(transfer, chosen, ends)

    def _enough(self, transfer: JaxprEqn, near: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """The first products that take as long as a transfer, or as many as it may have."""
        chosen: list[JaxprEqn] = []
        time = time_of(transfer)
        for product in near:
            if len(chosen) == _MOST or time <= 0:
                break
            if product not in self.fixed:
                chosen.append(product)
                time -= multiplication(product)
        return chosen

    def _end(self, product: JaxprEqn) -> JaxprEqn:
        """A product, or the relu behind it that it computes too."""
        end, graph = product, self.graph
        while graph.uses(end.outvars[0]) == 1 and (users := graph.users(end.outvars[0])):
            (user,) = users
            alone = sum(not isinstance(a, Literal) for a in user.invars) == 1
            if not alone or user.primitive.name not in _EPILOGUE:
                break
            end = user
        return end

    def _readers(self, transfer: JaxprEqn) -> tuple[list[JaxprEqn], Place]:
        """What is fused with others and depends on a transfer, and the first place that is not."""
        light = self._downstream(transfer, lambda e: not is_heavy(e))
        users = (u for e in (transfer, *light) for v in e.outvars for u in self.graph.users(v))
        heavy = [self.place[u] for u in users if is_heavy(u)]
        return light, min(heavy, default=(len(self.graph.eqns),))

    def _downstream(self, source: JaxprEqn, kept: Callable[[JaxprEqn], bool]) -> list[JaxprEqn]:
        """The equations that depend on another one by those that are `kept`."""
        found: dict[JaxprEqn, None] = {}
        waiting = [source]
        while waiting:
            for user in (u for v in waiting.pop().outvars for u in self.graph.users(v)):
                if user not in found and kept(user):
                    found[user] = None
                    waiting.append(user)
        return list(found)


def _multiplies(eqn: JaxprEqn) -> bool:
    """Whether it is a product of matrices: with a vector it becomes a reduction, and is fused."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    found = product_of(eqn)
    return min(found.rows, found.columns) > 1


def _sends(eqn: JaxprEqn) -> bool:
    single = len(eqn.invars) == len(eqn.outvars) == 1
    return single and isinstance(node_of(eqn), CollectiveNode)


# ---------------------------------------------------------------- the new program


def _with_barriers(choosing: _Choosing) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and results of the program.

    Every barrier goes forward in the new order: barriers cannot wait for each other.
    """
    graph, place = choosing.graph, choosing.place
    held = {product: h.transfer for h in choosing.found for product in h.products}
    last = {max(h.ends, key=place.__getitem__): h for h in choosing.found}
    names: dict[Any, Any] = {}
    written: list[JaxprEqn] = []
    seen: list[Any] = []  # elements of what barriers waited for

    def barrier(waiting: Sequence[Any], others: Sequence[Any], like: JaxprEqn) -> list[Any]:
        """Variables that are those of `waiting` once `others` are there too."""
        count = len(waiting)

        def late(*values: Array) -> list[Array]:
            elements = map(_first_element, values[count:])
            return lax.optimization_barrier([*values[:count], *elements])

        operands = [names.get(v, v) for v in (*waiting, *others)]
        equations, results = equations_of(late, operands, like=like)
        written.extend(equations)
        seen.extend(results[count:])
        return results[:count]

    for eqn in sorted(graph.eqns, key=place.__getitem__):
        now = renamed(eqn, names) if names else eqn
        if eqn in held:
            number = _last_operand(choosing, eqn)
            (late,) = barrier([eqn.invars[number]], held[eqn].invars, eqn)
            operands = [late if i == number else a for i, a in enumerate(now.invars)]
            now = now.replace(invars=operands)
        written.append(now)
        if eqn in last:
            h = last[eqn]
            waiting = [*h.transfer.outvars, *(e.invars[0] for e in h.delayed)]
            done = [v for end in h.ends for v in end.outvars]
            names |= zip(waiting, barrier(waiting, done, h.transfer), strict=True)
    results = [a if isinstance(a, Literal) else names.get(a, a) for a in graph.results]
    values = [a for a in results if not isinstance(a, Literal)]
    smallest = min(values, key=lambda a: a.aval.size)
    equations, (same,) = equations_of(_unless_below_all, [smallest, *seen])
    return [*written, *equations], [same if a is smallest else a for a in results]


def _first_element(value: Array) -> Array:
    return lax.slice(value, (0,) * value.ndim, (1,) * value.ndim)


def _unless_below_all(value: Array, *elements: Array) -> Array:
    """The value: no element is below the least number there is, which a compiler does not use."""
    numbers = jnp.stack([element.ravel()[0].astype(jnp.float32) for element in elements])
    return jnp.where(jnp.any(numbers < -jnp.inf), jnp.zeros_like(value), value)


def _last_operand(choosing: _Choosing, product: JaxprEqn) -> int:
    """The number of the operand that depends on most: slices of weights are read in place."""
    counts = [choosing.depends.count(a) for a in product.invars]
    return counts.index(max(counts))
