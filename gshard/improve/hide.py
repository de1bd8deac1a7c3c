"""Products beside transfers: barriers that make a compiler start a transfer before a product.

A compiler that orders a program by its memory finishes a transfer as soon as its result can be
rearranged, and computes products when their results are needed. Where a product does not depend on
a transfer, two barriers put it beside it: the product waits until what is sent is there, and what
reads the transfer's result waits for the product. Such are the products of another piece, and in
the backward pass gradients of weights, which only the optimizer needs. Nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, new_jaxpr_eqn

from gshard._jax import Var, optimization_barrier_p
from gshard.forecast.ops import APART, PRODUCTS
from gshard.forecast.work import product_of
from gshard.graph import LOOPS, Graph, bodies, map_bodies, renamed
from gshard.graph.schedule import Dependence
from gshard.improve.gain import multiplication
from gshard.moving.collectives import CollectiveNode, CollectivePermute
from gshard.moving.costs import machine
from gshard.moving.nodes import node_of

_EPILOGUE = {"max", "convert_element_type", "reshape", "transpose"}
_MOST = 2  # products for one transfer, so that some are left for others
_NEAR = 24  # products before a transfer, or behind it, among which some are chosen


@dataclass(frozen=True, eq=False)
class Hidden:
    """A transfer, products that run meanwhile, and equations that have to wait for the last.

    `ends` are the products, or what a product computes of its result as it writes it.
    """

    transfer: JaxprEqn
    products: Sequence[JaxprEqn]
    ends: Sequence[JaxprEqn]
    behind: frozenset[JaxprEqn]
    moved: bool  # the products are from before the transfer


def hide(program: Jaxpr) -> Jaxpr:
    """The plan, in which all nodes are collectives, with products put beside transfers."""
    eqns = [
        map_bodies(eqn, lambda body: body.replace(jaxpr=hide(body.jaxpr)))
        if eqn.primitive in LOOPS
        else eqn
        for eqn in program.eqns
    ]
    graph = Graph(eqns, program.outvars)
    choosing = _Choosing(graph)
    for transfer in choosing.transfers():
        choosing.hide(transfer)
    if not choosing.found:
        return program.replace(eqns=eqns)
    eqns, outvars = _with_barriers(graph, choosing.found)
    return program.replace(eqns=eqns, outvars=outvars)


class _Choosing:
    """Chooses products for one transfer after the other; each product hides one at most."""

    def __init__(self, graph: Graph):
        self.graph = graph
        steps = [(e, e.invars, e.outvars) for e in graph.eqns]
        marked = [e for e in graph.eqns if _multiplies(e) or _sends(e)]
        self.depends = Dependence(steps, marked)
        self.products = [e for e in marked if _multiplies(e)]
        self.found: list[Hidden] = []
        self.fixed: set[JaxprEqn] = set()  # transfers and products that were chosen
        self.moved: set[JaxprEqn] = set()  # what waits for them

    def transfers(self) -> list[JaxprEqn]:
        """Those that take longer than to start them, the longest first."""
        times = {e: _time(e) for e in self.graph.eqns if _sends(e)}
        return sorted((e for e in times if times[e] > machine().latency), key=lambda e: -times[e])

    def hide(self, transfer: JaxprEqn) -> None:
        """Find products that need not wait for a transfer, and that nothing else waits for."""
        if transfer in self.moved or not self._is_waited_for(transfer):
            return
        found = self._behind(transfer) or self._before(transfer)
        if found is not None:
            self.found.append(found)
            self.fixed |= {transfer, *found.products}
            self.moved |= found.behind

    def _is_waited_for(self, transfer: JaxprEqn) -> bool:
        """Whether one of the next products depends on it: else any schedule hides it."""
        number = self.graph.numbers[transfer]
        near = [e for e in self.products if self.graph.numbers[e] > number][:_NEAR]
        return any(self.depends.needs(a, transfer) for e in near for a in e.invars)

    def _behind(self, transfer: JaxprEqn) -> Hidden | None:
        """Products between a transfer and the first heavy equation that reads its result."""
        numbers = self.graph.numbers
        light, used = self._readers(transfer)
        near = [e for e in self.products if numbers[transfer] < numbers[e] < used][:_NEAR]
        near = [e for e in near if numbers[self._end(e)] < used]
        chosen = self._enough(transfer, near)
        if not chosen:
            return None
        ends = [self._end(e) for e in chosen]
        last = max(numbers[e] for e in ends)
        behind = frozenset(e for e in light if numbers[e] < last)
        if behind & (self.moved | self.fixed):
            return None
        return Hidden(transfer, chosen, ends, behind, moved=False)

    def _before(self, transfer: JaxprEqn) -> Hidden | None:
        """Products before a transfer that nothing up to it needs."""
        numbers, (value,) = self.graph.numbers, transfer.invars
        number = numbers[transfer]
        near = [e for e in self.products if numbers[e] < number][-_NEAR:]
        free: dict[JaxprEqn, list[JaxprEqn]] = {}
        for product in near:
            if not self.depends.needs(value, product):
                after = _after(self.graph, product, number)
                if not any(_multiplies(e) or e in self.fixed | self.moved for e in after):
                    free[product] = after
        chosen = self._enough(transfer, list(free)[::-1])[::-1]
        if not chosen:
            return None
        ends = [e if (e := self._end(p)) in free[p] else p for p in chosen]
        behind = frozenset(e for product in chosen for e in free[product])
        return Hidden(transfer, chosen, ends, behind, moved=True)

    def _end(self, product: JaxprEqn) -> JaxprEqn:
        """A product, or the relu behind it that it computes too."""
        end, graph = product, self.graph
        while graph.uses(end.outvars[0]) == 1 and (users := graph.users(end.outvars[0])):
            (user,) = users
            alone = sum(not isinstance(a, Literal) for a in user.invars) == 1
            if not alone or not _is_light(user) or user.primitive.name not in _EPILOGUE:
                break
            end = user
        return end

    def _enough(self, transfer: JaxprEqn, near: Sequence[JaxprEqn]) -> list[JaxprEqn]:
        """The first products that take as long as a transfer, or as many as it may have."""
        chosen: list[JaxprEqn] = []
        time = _time(transfer)
        for product in near:
            if len(chosen) == _MOST or time <= 0:
                break
            if product not in self.fixed | self.moved:
                chosen.append(product)
                time -= multiplication(product)
        return chosen

    def _readers(self, transfer: JaxprEqn) -> tuple[list[JaxprEqn], int]:
        """What is fused with others and depends on a transfer, and the first that is not."""
        light: dict[JaxprEqn, None] = {}
        first, waiting = len(self.graph.eqns), [transfer]
        while waiting:
            for user in (u for v in waiting.pop().outvars for u in self.graph.users(v)):
                if not _is_light(user):
                    first = min(first, self.graph.numbers[user])
                elif user not in light:
                    light[user] = None
                    waiting.append(user)
        return list(light), first


def _multiplies(eqn: JaxprEqn) -> bool:
    """Whether it is a product of matrices: with a vector it becomes a reduction, and is fused."""
    if eqn.primitive.name not in PRODUCTS:
        return False
    found = product_of(eqn)
    return min(found.rows, found.columns) > 1


def _sends(eqn: JaxprEqn) -> bool:
    single = len(eqn.invars) == len(eqn.outvars) == 1
    return single and isinstance(node_of(eqn), CollectiveNode | CollectivePermute)


def _time(transfer: JaxprEqn) -> float:
    """In bytes that could be sent meanwhile, as everywhere in plans."""
    node, aval = node_of(transfer), transfer.invars[0].aval
    assert node is not None
    return float(node.sent(tuple(aval.shape), aval.dtype)) * machine().distance


def _is_light(eqn: JaxprEqn) -> bool:
    """Whether it is fused with others, and can wait."""
    name = eqn.primitive.name
    heavy = name in APART or name in PRODUCTS or node_of(eqn) is not None
    return not heavy and not eqn.effects and not bodies(eqn)


def _after(graph: Graph, product: JaxprEqn, number: int) -> list[JaxprEqn]:
    """The equations up to `number` that depend on a product."""
    found: dict[JaxprEqn, None] = {}
    waiting = [product]
    while waiting:
        for user in (u for v in waiting.pop().outvars for u in graph.users(v)):
            if graph.numbers[user] <= number and user not in found:
                found[user] = None
                waiting.append(user)
    return list(found)


# ---------------------------------------------------------------- the new program


def _with_barriers(graph: Graph, found: Sequence[Hidden]) -> tuple[list[JaxprEqn], list[Any]]:
    """The equations and results of the program.

    Equations only move to a later place, with all that depend on them, and every barrier goes
    forward in that order: barriers cannot wait for each other.
    """
    place = _places(graph, found)
    held = {product: h.transfer for h in found for product in h.products}
    last = {max(h.ends, key=place.__getitem__): h for h in found}
    names: dict[Any, Any] = {}
    written: list[JaxprEqn] = []
    for eqn in sorted(graph.eqns, key=place.__getitem__):
        now = renamed(eqn, names) if names else eqn
        if eqn in held:
            (sent,) = held[eqn].invars
            number = _last_operand(graph, eqn)
            operands = [now.invars[number], names.get(sent, sent)]
            late = [Var(a.aval) for a in operands]
            written.append(_barrier(operands, late, eqn))
            now = now.replace(
                invars=[late[0] if i == number else a for i, a in enumerate(now.invars)]
            )
        written.append(now)
        if eqn in last:
            h = last[eqn]
            done = [*h.transfer.outvars, *(v for end in h.ends for v in end.outvars)]
            names |= {v: Var(v.aval) for v in done}
            written.append(_barrier(done, [names[v] for v in done], h.transfer))
    return written, [a if isinstance(a, Literal) else names.get(a, a) for a in graph.results]


def _places(graph: Graph, found: Sequence[Hidden]) -> dict[JaxprEqn, tuple[int, int, int]]:
    """The new order: products from before a transfer behind it, and what waits behind the last."""
    numbers = graph.numbers
    place = {eqn: (number, 0, number) for eqn, number in numbers.items()}
    for h in found:
        at = numbers[h.transfer] if h.moved else max(numbers[e] for e in h.ends)
        place |= {e: (at, 2, numbers[e]) for e in h.behind}
        if h.moved:
            place |= {e: (at, 1, numbers[e]) for e in (*h.products, *_between(graph, h))}
    return place


def _between(graph: Graph, h: Hidden) -> list[JaxprEqn]:
    """From products to what they compute of their results."""
    found: list[JaxprEqn] = []
    for product, end in zip(h.products, h.ends, strict=True):
        step = product
        while step is not end:
            (step,) = graph.users(step.outvars[0])
            found.append(step)
    return found


def _last_operand(graph: Graph, product: JaxprEqn) -> int:
    """The number of the operand that is computed last."""
    makers = [graph.maker(a) for a in product.invars]
    numbers = [-1 if m is None else graph.numbers[m] for m in makers]
    return numbers.index(max(numbers))


def _barrier(operands: Sequence[Any], results: Sequence[Any], like: JaxprEqn) -> JaxprEqn:
    info, ctx = like.source_info, like.ctx
    return new_jaxpr_eqn(operands, results, optimization_barrier_p, {}, set(), info, ctx)
