"""The memory of a program by liveness, operator by operator, bodies of loops included.

Counted as XLA does: arguments and results are live for the entire run, except that a donated
argument's buffer is reused by a result of its size; everything else is temporary. A loop's stacked
results are live from its start, its body's temporaries while it runs. Pointwise operators reuse the
buffer of an operand that is dead afterwards. Operators run in the program's order or depth first
from the results, whichever needs less: XLA chooses in the same way.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, Literal

from gshard.forecast.compilers import Compiler, Places
from gshard.forecast.dataflow import Body, DeviceOperator
from gshard.tensors.tile import size_of


@dataclass(frozen=True)
class LiveValue:
    """A value that is live at the peak, and the user's line that made it."""

    bytes: int
    shape: str
    source: str
    value: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device. `peak` is what must fit."""

    arguments: int
    results: int
    donated: int
    temporary: int
    where: str  # the user's line at the peak
    held: tuple[LiveValue, ...]  # the temporaries live there, largest first
    along: tuple[int, ...]  # temporary bytes at every operator of the outermost program
    lines: tuple[str, ...] = ()  # the user's line of each of these operators

    @property
    def peak(self) -> int:
        """All together."""
        return self.arguments + self.results - self.donated + self.temporary


def memory_of(
    body: Body, compiler: Compiler, donated: Sequence[int] = (), slack: float = 1.0
) -> Memory:
    """The memory of a per-device program whose arguments at `donated` may be overwritten."""
    given = _given_places(body.jaxpr, [body.inputs[i] for i in donated])
    peak = _peak(body, compiler, given)
    results = body.jaxpr.outvars
    return Memory(
        arguments=sum(map(size_of, body.inputs)),
        results=sum(map(size_of, results)),
        donated=sum(size_of(results[i]) for i, _ in given),
        temporary=round(slack * peak.bytes),
        where=peak.where,
        held=peak.held,
        along=peak.along,
        lines=peak.lines,
    )


Scan = tuple[int, int]  # the number of constants and carries of a step


def _given_places(jaxpr: Jaxpr, donated: Sequence[Any]) -> Places:
    """Results that reuse the buffers of donated arguments of their type, as JAX pairs them."""
    free: dict[Any, list[Any]] = {}
    for var in donated:
        free.setdefault((var.aval.shape, var.aval.dtype), []).append(var)
    found = []
    for number, var in enumerate(jaxpr.outvars):
        fitting = free.get((var.aval.shape, var.aval.dtype))
        if fitting:
            found.append((number, fitting.pop(0)))
    return tuple(found)


@dataclass(frozen=True)
class _Peak:
    bytes: int
    where: str
    held: tuple[LiveValue, ...]
    along: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()


@functools.lru_cache(maxsize=512)
def _peak(body: Body, compiler: Compiler, given: Places = (), scan: Scan | None = None) -> _Peak:
    """The temporaries of a body, in the best of a compiler's orders."""
    steps = scan if compiler.copies_slices else None
    leaving, sliced = _in_results(body, steps), _sliced(body, steps)
    found = [
        _simulate(order, compiler, [*early, *sliced], leaving | elsewhere)
        for order, early, elsewhere in compiler.schedules(body, given)
    ]
    return min(found, key=lambda peak: peak.bytes)


def _sliced(body: Body, scan: Scan | None) -> list[Any]:
    """The slices that a step of a scan takes first, read by operators that are not fused."""
    if scan is None:
        return []
    alone = {v for o in body.operators if not o.root.joins for v in o.reads}
    return [v for v in body.jaxpr.invars[sum(scan) :] if v in alone]


def _in_results(body: Body, scan: Scan | None) -> set[Any]:
    """Values that are computed in the buffers of results.

    What a step of a scan stacks is copied there, if the operator that makes it is not fused.
    """
    results = [None if isinstance(v, Literal) else body.stands_for(v) for v in body.outputs]
    found = set(results)
    if scan is not None:
        alone = {v for o in body.operators if not o.root.joins for v in o.writes}
        found = {*results[: scan[1]], *(v for v in results[scan[1] :] if v not in alone)}
    later = set[Any]()
    for operator in reversed(body.operators):  # a loop updates what it carries in place
        carried = ((body.stands_for(old), new) for old, new in operator.carried if new in found)
        found |= {v for v, new in carried if size_of(v) == size_of(new)} - later
        later.update(operator.reads)
    return found


def _simulate(
    order: Sequence[DeviceOperator], compiler: Compiler, early: Sequence[Any], elsewhere: Set[Any]
) -> _Peak:
    """The live bytes at every operator; `early` values from the start, without `elsewhere`."""
    last: dict[Any, int] = {}
    for number, operator in enumerate(order):
        for var in operator.reads:
            last[var] = number
    makers: dict[Any, DeviceOperator] = {}
    live = {v: size_of(v) for v in early if v in last and v not in elsewhere}
    now, most, along = sum(live.values()), 0, []
    at: tuple[DeviceOperator, dict[Any, int], _Peak] | None = (
        None  # the peak, what is live, its body's
    )
    for number, operator in enumerate(order):
        dying = [v for v in operator.reads if last[v] == number and v in live]
        inner = _inside(operator, compiler)
        new = [v for v in operator.writes if v not in elsewhere and v not in live]
        made = {v: size_of(v) for v in new}
        for var in operator.writes:
            makers[var] = operator
        before, after = (
            Counter((size_of(v), compiler.keeps_shapes and v.aval.shape) for v in part)
            for part in (dying, new)
        )
        during = now + sum(made.values()) + inner.bytes
        during -= sum(n for n, *_ in (before & after).elements()) if operator.overwrites else 0
        along.append(during)
        if during > most:
            most, at = during, (operator, {**live, **made}, inner)
        for var, size in made.items():
            if var in last:
                live[var] = size
                now += size
        for var in dying:
            now -= live.pop(var)
    lines = tuple(operator.source for operator in order)
    if at is None:
        return _Peak(0, "", (), tuple(along), lines)
    operator, present, inner = at
    sources = {v: makers[v].source if v in makers else "unknown" for v in present}
    held = [
        LiveValue(b, v.aval.str_short(short_dtypes=True), sources[v], v) for v, b in present.items()
    ]
    ranked = tuple(sorted([*held, *inner.held], key=lambda h: -h.bytes))
    return _Peak(most, inner.where or operator.source, ranked, tuple(along), lines)


def _inside(operator: DeviceOperator, compiler: Compiler) -> _Peak:
    """The temporaries of an operator's bodies while it runs, its stacked results left out."""
    if operator.loop is None:
        return _Peak(0, "", ())
    peaks = [_peak(body, compiler, (), operator.loop.scan) for body in operator.loop.bodies]
    return max(peaks, key=lambda p: p.bytes)
