"""The memory of a program by liveness, operator by operator, bodies of loops included.

Counted as XLA does: arguments and results are live for the entire run, except that a donated
argument's buffer is reused by a result of its size; everything else is temporary. A loop's stacked
results are live from its start, its body's temporaries while it runs. Pointwise operators reuse the
buffer of an operand that is dead afterwards. Operators run in the program's order or depth first
from the results, whichever needs less: XLA chooses in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, Literal

from gshard.forecast.ops import LOOPS, size_of
from gshard.forecast.order import breadth_first, depth_first
from gshard.forecast.program import Body, DeviceOperator, body_of
from gshard.graph.regions import bodies, counts_of
from gshard.graph.source import source_of


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
    jaxpr: Jaxpr, donated: Sequence[int] = (), style: str = "gpu", slack: float = 1.0
) -> Memory:
    """The memory of a per-device program whose arguments at `donated` may be overwritten."""
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    arguments = sum(map(size_of, inputs))
    results = sum(map(size_of, jaxpr.outvars))
    given = _given_places(jaxpr, [inputs[i] for i in donated])
    reused = sum(size_of(jaxpr.outvars[i]) for i, _ in given)
    peak = _peak(jaxpr, style, given)
    temporary = round(slack * peak.bytes)
    held, along, lines = peak.held, peak.along, peak.lines
    return Memory(arguments, results, reused, temporary, peak.where, held, along, lines)


Scan = tuple[int, int]  # the number of constants and carries of a step
Places = tuple[tuple[int, Any], ...]  # results by index, each with the argument it overwrites


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
def _peak(jaxpr: Jaxpr, style: str, given: Places = (), scan: Scan | None = None) -> _Peak:
    """The temporaries of a body: breadth first on CPUs, else in the better of two orders."""
    body = body_of(jaxpr, style)
    leaving, sliced = _in_results(body, style, scan), _sliced(body, style, scan)
    if style == "cpu":
        order, aside = breadth_first(body), _kept_aside(body, given)
        elsewhere = leaving | _in_given_places(body, order, given, aside)
        return _simulate(order, style, [*aside, *sliced, *_stacks(body)], elsewhere)
    orders = [body.operators, depth_first(body)]
    return min((_simulate(o, style, sliced, leaving) for o in orders), key=lambda p: p.bytes)


def _sliced(body: Body, style: str, scan: Scan | None) -> list[Any]:
    """The slices that a step of a scan takes first, read by operators that are not fused."""
    if scan is None or style == "tpu":
        return []
    alone = {v for o in body.operators if not o.root.joins for v in o.reads}
    return [v for v in body.jaxpr.invars[sum(scan) :] if v in alone]


def _in_results(body: Body, style: str, scan: Scan | None) -> set[Any]:
    """Values that are computed in the buffers of results.

    What a step of a scan stacks is copied there, if the operator that makes it is not fused.
    """
    results = [None if isinstance(v, Literal) else body.stands_for(v) for v in body.outputs]
    if scan is None or style == "tpu":
        return set(results)
    alone = {v for o in body.operators if not o.root.joins for v in o.writes}
    return {*results[: scan[1]], *(v for v in results[scan[1] :] if v not in alone)}


def _stacks(body: Body) -> list[Any]:
    """The stacked results of loops; on CPUs their zeros are live from the start."""
    scans = [o for o in body.operators if o.root.name == "scan"]
    return [v for o in scans for v in o.writes[counts_of(o.root.eqn)[1] :]]


def _kept_aside(body: Body, given: Places) -> list[Any]:
    """Donated arguments that XLA for CPUs copies first, before it schedules.

    Those that an operator may read after their buffer is overwritten: one on which the overwriting
    operator does not depend.
    """
    makers = {v: o for o in body.operators for v in o.writes}
    readers: dict[Any, list[DeviceOperator]] = {}
    for operator in body.operators:
        for var in operator.reads:
            readers.setdefault(var, []).append(operator)
    found = []
    for number, argument in given:
        result = body.outputs[number]
        maker = None if isinstance(result, Literal) else makers.get(body.stands_for(result))
        if maker is None:
            continue
        before = _ancestors(maker, makers)
        if any(o not in before for o in readers.get(argument, ())):
            found.append(argument)
    return found


def _in_given_places(
    body: Body, order: Sequence[DeviceOperator], given: Places, aside: Sequence[Any]
) -> set[Any]:
    """Temporaries in the buffers of donated arguments, until a result is written there.

    The copies of `aside` are made first, one after the other, each possibly in the buffer of the
    previous one.
    """
    copied = {v: number for number, v in enumerate(aside, -len(aside))}
    made = {v: number for number, o in enumerate(order) for v in o.writes}
    last = {v: number for number, o in enumerate(order) for v in o.reads}
    leaving = {body.stands_for(v) for v in body.outputs if not isinstance(v, Literal)}
    places: list[tuple[int, int, int, list[tuple[int, int]]]] = []
    for number, argument in given:
        end = made.get(body.stands_for(body.outputs[number]))
        if end is not None:
            start = copied.get(argument, last.get(argument, -1)) + 1
            until = end if order[end].root.joins else end - 1
            places.append((size_of(argument), start, until, []))
    found = set()
    made = {**copied, **made}
    for var in sorted(
        (v for v in made if v in last and v not in leaving), key=lambda v: -size_of(v)
    ):
        first, end = made[var], last[var]
        for size, start, until, taken in places:
            fits = size_of(var) <= size and start <= first and end <= until
            if fits and all(end < a or b < first for a, b in taken):
                taken.append((first, end))
                found.add(var)
                break
    return found


def _ancestors(operator: DeviceOperator, makers: dict[Any, DeviceOperator]) -> set[DeviceOperator]:
    """An operator and all operators it depends on."""
    seen = {operator}
    waiting = [operator]
    while waiting:
        for var in waiting.pop().reads:
            maker = makers.get(var)
            if maker is not None and maker not in seen:
                seen.add(maker)
                waiting.append(maker)
    return seen


def _simulate(
    order: Sequence[DeviceOperator], style: str, early: Sequence[Any], elsewhere: Set[Any]
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
        inner = _inside(operator, style)
        new = [v for v in operator.writes if v not in elsewhere and v not in live]
        made = {v: size_of(v) for v in new}
        for var in operator.writes:
            makers[var] = operator
        reused = _written_over(operator, dying, made, live)
        during = now + sum(made.values()) - reused + inner.bytes
        along.append(during)
        if during > most:
            most, at = during, (operator, {**live, **made}, inner)
        for var, size in made.items():
            if var in last:
                live[var] = size
                now += size
        for var in dying:
            now -= live.pop(var)
    lines = tuple(source_of(operator.root.eqn) for operator in order)
    if at is None:
        return _Peak(0, "", (), tuple(along), lines)
    operator, present, inner = at
    held = [LiveValue(b, _short(v), _source(makers.get(v)), v) for v, b in present.items()]
    ranked = tuple(sorted([*held, *inner.held], key=lambda h: -h.bytes))
    return _Peak(most, inner.where or _source(operator), ranked, tuple(along), lines)


def _inside(operator: DeviceOperator, style: str) -> _Peak:
    """The temporaries of an operator's bodies while it runs, its stacked results left out."""
    if operator.root.name not in LOOPS:
        return _Peak(0, "", ())
    scan = counts_of(operator.root.eqn) if operator.root.name == "scan" else None
    peaks = [_peak(j, style, (), scan) for j in bodies(operator.root.eqn)]
    return max(peaks, key=lambda p: p.bytes)


_IN_PLACE = {"dynamic_update_slice", "select_and_scatter_add"}


def _written_over(
    operator: DeviceOperator, dying: list[Any], made: dict[Any, int], live: dict[Any, int]
) -> int:
    """Bytes of results that reuse the buffers of dead operands."""
    if not (operator.root.joins or operator.root.name in _IN_PLACE or _aliases(operator)):
        return 0
    free = sorted(live[v] for v in dying)
    reused = 0
    for size in sorted(made.values(), reverse=True):
        if size in free:
            free.remove(size)
            reused += size
    return reused


def _aliases(operator: DeviceOperator) -> bool:
    """Whether it is a kernel that writes results over its operands."""
    return bool(operator.root.eqn.params.get("input_output_aliases"))


def _source(operator: DeviceOperator | None) -> str:
    return source_of(operator.root.eqn) if operator else "unknown"


def _short(var: Any) -> str:
    return var.aval.str_short(short_dtypes=True)
