"""How much memory a program needs: what is live, operator by operator, bodies of loops included.

Counted as XLA does: arguments stand for the whole run, results too, except that a donated argument
gives its place to a result of its size; what comes and goes in between is temporary. A loop's
stacked results are there from its start, its body's own temporaries while it runs. Pointwise
operators write over an operand that nobody needs any more. Operators run in the program's order or
depth first from the results, whichever needs less: XLA chooses likewise.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, Literal

from gshard.forecast.program import LOOPS, Body, Operator, bodies_of, body_of, size_of
from gshard.source import source_of


@dataclass(frozen=True)
class Held:
    """A value that is live at the peak, and the user's line that made it."""

    bytes: int
    shape: str
    source: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `peak` is what must fit."""

    arguments: int
    results: int
    donated: int
    temporary: int
    where: str  # the user's line at the peak
    held: tuple[Held, ...]  # what is live there besides arguments and results, the largest first
    along: tuple[int, ...]  # temporary bytes at every operator of the outermost program

    @property
    def peak(self) -> int:
        """All together."""
        return self.arguments + self.results - self.donated + self.temporary


def memory_of(
    jaxpr: Jaxpr, donated: Sequence[int] = (), style: str = "gpu", slack: float = 1.0
) -> Memory:
    """The memory of a per-device program whose arguments at `donated` may be overwritten."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    arguments = sum(map(size_of, inputs))
    outputs = list(jaxpr.outvars)
    results = sum(size_of(v) for v in outputs)
    free = sorted(size_of(inputs[i]) for i in donated)
    reused = 0
    for size in sorted((size_of(v) for v in outputs), reverse=True):
        if size in free:
            free.remove(size)
            reused += size
    peak = _peak(jaxpr, style)
    temporary = round(slack * peak.bytes)
    return Memory(arguments, results, reused, temporary, peak.where, peak.held, peak.along)


@dataclass(frozen=True)
class _Peak:
    bytes: int
    where: str
    held: tuple[Held, ...]
    along: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def _peak(jaxpr: Jaxpr, style: str) -> _Peak:
    """The temporaries of a body, under the better of two orders."""
    body = body_of(jaxpr, style)
    orders = [body.operators, _depth_first(body)]
    return min((_simulate(body, order, style) for order in orders), key=lambda p: p.bytes)


def _simulate(body: Body, order: Sequence[Operator], style: str) -> _Peak:
    leaving = {body.stands_for(v) for v in body.outputs if not isinstance(v, Literal)}
    last: dict[Any, int] = {}
    for number, operator in enumerate(order):
        for var in operator.reads:
            last[var] = number
    makers: dict[Any, Operator] = {}
    live: dict[Any, int] = {}
    now, best, along = 0, _Peak(0, "", (), ()), []
    for number, operator in enumerate(order):
        dying = [v for v in operator.reads if last[v] == number and v in live and v not in leaving]
        inner = _inside(operator, style)
        made = {v: size_of(v) for v in operator.writes if v not in leaving}
        for var in operator.writes:
            makers[var] = operator
        reused = _written_over(operator, dying, made, live)
        during = now + sum(made.values()) - reused + inner.bytes
        during += _copied(operator) if style == "cpu" else 0
        along.append(during)
        if during > best.bytes:
            held = [Held(b, _short(v), source_of(makers[v].root.eqn)) for v, b in live.items()]
            held += [Held(b, _short(v), source_of(operator.root.eqn)) for v, b in made.items()]
            ranked = sorted([*held, *inner.held], key=lambda h: -h.bytes)
            where = inner.where or source_of(operator.root.eqn)
            best = _Peak(during, where, tuple(ranked), ())
        for var, size in made.items():
            if var in last:
                live[var] = size
                now += size
        for var in dying:
            now -= live.pop(var)
    return _Peak(best.bytes, best.where, best.held, tuple(along))


def _inside(operator: Operator, style: str) -> _Peak:
    """The temporaries of an operator's bodies while it runs, its stacked results left out."""
    if operator.root.name not in LOOPS:
        return _Peak(0, "", (), ())
    return max((_peak(j, style) for j in bodies_of(operator.root.eqn)), key=lambda p: p.bytes)


def _copied(operator: Operator) -> int:
    """Operands that a matrix product on CPUs copies first: their batch dims do not lead."""
    if operator.root.name != "dot_general":
        return 0
    contracted, batch = operator.root.eqn.params["dimension_numbers"]
    total = 0
    for var, summed, kept in zip(operator.root.eqn.invars, contracted, batch, strict=True):
        dims = [d for d in range(len(var.aval.shape)) if d not in kept]
        roles = [d in summed for d in dims]
        blocks = sum(a != b for a, b in itertools.pairwise(roles)) + 1
        if tuple(kept) != tuple(range(len(kept))) or blocks > 2:
            total += size_of(var)
    return total


def _written_over(
    operator: Operator, dying: list[Any], made: dict[Any, int], live: dict[Any, int]
) -> int:
    """Bytes of results that take the place of operands that are not needed any more."""
    if not operator.root.joins and operator.root.name != "dynamic_update_slice":
        return 0
    free = sorted(live[v] for v in dying)
    reused = 0
    for size in sorted(made.values(), reverse=True):
        if size in free:
            free.remove(size)
            reused += size
    return reused


def _depth_first(body: Body) -> list[Operator]:
    """Operators ordered so that each result is finished before the next is begun."""
    makers = {v: operator for operator in body.operators for v in operator.writes}
    place = {id(o): i for i, o in enumerate(body.operators)}
    done: set[int] = set()
    order: list[Operator] = []
    goals = [body.stands_for(v) for v in body.outputs if not isinstance(v, Literal)]
    goals += [v for operator in body.operators for v in operator.writes]
    for goal in goals:
        stack = [makers[goal]] if goal in makers else []
        while stack:
            operator = stack[-1]
            if id(operator) in done:
                stack.pop()
                continue
            needed = {id(makers[v]): makers[v] for v in operator.reads if v in makers}
            waiting = [o for o in needed.values() if id(o) not in done]
            if waiting:
                stack.append(min(waiting, key=lambda o: place[id(o)]))
                continue
            stack.pop()
            done.add(id(operator))
            order.append(operator)
    return order


def _short(var: Any) -> str:
    return var.aval.str_short(short_dtypes=True)
