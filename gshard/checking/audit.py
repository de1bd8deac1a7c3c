"""The check: every value of the user's program compared with the devices' tiles of it, exactly.

Both programs run on numbers for which addition is associative (`exact`): the user's as it is, and
the partitioned one for all devices in lockstep. Whenever devices have a value of the user's
program, their tiles are compared with it. The user's program runs as far as is asked for.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard._jax import prng_impl
from gshard.checking.exact.meanings import written_out
from gshard.checking.exact.number import (
    EXACT_SUM,
    UNKNOWN,
    Exact,
    Value,
    constant,
    drawn,
    forget,
    is_float,
)
from gshard.checking.exact.operators import local
from gshard.checking.exact.pointwise import Ties
from gshard.checking.lockstep import Emitted, Event, Lockstep, Numbers, Path, ended, runs_of
from gshard.checking.report import Difference, Report
from gshard.checking.tiles import Gap, Tiling, adopted, gap_between, logical
from gshard.graph.regions import at_every_level, bodies, loop_bodies
from gshard.graph.source import source_of
from gshard.moving.available import Held
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding

EXACT = Numbers(constant, local, written_out)
REWRITTEN = "rewritten as a part of other operators"
UNUSED = "not computed by any device"
ELSEWHERE = "of runs that the unpartitioned program does not have"


class Logical:
    """The user's program: its values, run as far as they are asked for.

    `asked` says how often the devices have each variable, in a run of its body. A value is kept
    until then.
    """

    def __init__(self, emitted: Emitted, arguments: Sequence[Value], asked: Mapping[Any, int]):
        user = emitted.unpartitioned
        ordered = user.replace(jaxpr=_in_order(user.jaxpr, tuple(asked)))
        self._running: Any = Lockstep(emitted.sizes, EXACT).run(ordered, arguments)
        self._asked = asked
        self._known: dict[tuple[Any, tuple[int, ...]], list[Value]] = {}
        self.results: list[Value] = []

    def value(self, var: Any, path: Path) -> Value | None:
        """What a variable is in one of the runs of its region; None if there is no such run."""
        key = var, _numbers(path)
        while key not in self._known and self._advanced():
            pass
        kept = self._known.get(key, [None])
        value = kept.pop()
        if not kept:
            self._known.pop(key, None)
        return value

    def finish(self) -> list[Value]:
        """Run to the end: the results."""
        while self._advanced():
            pass
        return self.results

    def _advanced(self) -> bool:
        try:
            event = next(self._running)
        except StopIteration as end:
            self.results = end.value or self.results
            return False
        numbers = _numbers(event.path)
        for n, (var, value) in enumerate(zip(event.variables, event.values, strict=True)):
            if var in self._asked:
                self._known[var, numbers] = [value] * self._asked[var]
                event.values[n] = _compared(value)
        return True


@at_every_level
def _in_order(jaxpr: Jaxpr, asked: Sequence[Any]) -> Jaxpr:
    """A program in the order in which devices have its values, without what nobody needs.

    So few values wait for the devices that have them much later, or for those that had them before.
    """
    never = len(asked) + 1
    first = dict.fromkeys((v for v in jaxpr.outvars if not isinstance(v, Literal)), len(asked))
    first |= {var: number for number, var in enumerate(asked)}
    when = []  # an operator runs no later than those that read its results
    for eqn in reversed(jaxpr.eqns):
        inside = [v for body in bodies(eqn) for v in _variables(body)]
        when.append(min((first.get(v, never) for v in (*eqn.outvars, *inside)), default=never))
        reads = [a for a in eqn.invars if not isinstance(a, Literal)]
        first |= {a: min(when[-1], first.get(a, never)) for a in reads}
    ordered = sorted(zip(reversed(when), jaxpr.eqns, strict=True), key=lambda each: each[0])
    return jaxpr.replace(eqns=[eqn for number, eqn in ordered if number < never])


def _numbers(path: Path) -> tuple[int, ...]:
    return tuple(number for _, number in path)


def _compared(value: Value) -> Value:
    """A value that was compared: what follows begins anew."""
    return replace(value, sum_bits=EXACT_SUM) if isinstance(value, Exact) else value


class Audit:
    """Compares a program's values while it runs."""

    def __init__(self, emitted: Emitted, report: Report, arguments: Sequence[Value]):
        self.emitted, self.report = emitted, report
        of_user = _variables(emitted.flat.jaxpr, lambda eqn: [c.jaxpr for c in loop_bodies(eqn)])
        self.depth = {var: depth for var, (depth, _) in of_user.items()}
        self.maker = {var: eqn for var, (_, eqn) in of_user.items() if eqn is not None}
        asked = [
            (self._is_late(h, eqn, depth), h.value)
            for var, (depth, eqn) in _variables(emitted.body.jaxpr).items()
            for h in emitted.held.get(var, ())
            if self.depth.get(h.value) == depth
        ]
        in_order = sorted(asked, key=lambda each: each[0])
        self.compared: set[Any] = set()
        self.late: list[tuple[Held, Value, Event]] = []
        self.logical = Logical(emitted, arguments, Counter(var for _, var in in_order))

    def event(self, event: Event) -> None:
        """Look at what an equation has made, or at what a body begins with."""
        for n, var in enumerate(event.variables):
            for held in self.emitted.held.get(var, ()):
                if self.depth.get(held.value) != len(event.path):
                    continue
                if self._is_late(held, event.eqn, len(event.path)):
                    self.late.append((held, event.values[n], event))
                    continue
                wanted = self.logical.value(held.value, event.path)
                event.values[n] = self.look(held, event.values[n], wanted, event)

    def _is_late(self, held: Held, eqn: JaxprEqn | None, depth: int) -> bool:
        """Whether devices have an argument that is another value too, such as what a loop returns
        of it as it is: that is compared when the user's program has come there by itself."""
        return eqn is None and not depth and held.value in self.maker

    def finish(self, results: Sequence[Value]) -> None:
        """Compare the results, and count what was never compared."""
        outvars, end = self.emitted.flat.jaxpr.outvars, Event(None, (), [], (), ())
        pairs = zip(results, self.logical.finish(), strict=True)
        for held, got, event in self.late:
            self.look(held, got, self.logical.value(held.value, ()), event)
        for atom, crossing, (got, wanted) in zip(outvars, self.emitted.out_of, pairs, strict=True):
            self.look(Held(atom, *crossing), got, wanted, end, "end")
        planned = {h.value for found in self.emitted.held.values() for h in found}
        for var in set(self.maker) - self.compared:
            self.report.not_compared[UNUSED if var in planned else REWRITTEN] += 1

    def look(self, held: Held, got: Value, wanted: Value, event: Event, what: str = "") -> Value:
        """Compare a value with what it should be; what it is taken to be from here on."""
        # One array may be the tile of two values, as of a reshape whose tiles have one element.
        of_another = not held.sharding.manual and held.shape != held.value.aval.shape
        if wanted is None or of_another:
            self.report.not_compared[ELSEWHERE] += 1
            return got
        tiling = Tiling(held.sharding, held.shape)
        gap = gap_between(got, wanted, tiling, event.active, held.value.aval.dtype)
        self.judge(held, gap, event, what or held.moved or "result")
        if np.all(event.active):
            got = adopted(got, wanted, tiling, gap)
        forget()  # both programs have made it
        return _compared(got)

    def judge(self, held: Held, gap: Gap, event: Event, what: str) -> None:
        """Count a comparison, and note a difference."""
        var, report = held.value, self.report
        eqn = None if isinstance(var, Literal) else self.maker.get(var)
        around = event.path[-1][0] if event.path else None
        argument = f"argument of {around.primitive.name}" if around else "argument"
        name = argument if eqn is None else eqn.primitive.name
        name = f"reshard of {name}" if held.moved else name
        at = event.eqn or around if eqn is None or held.moved else eqn
        source = "" if at is None else source_of(at)
        self.compared.add(None if isinstance(var, Literal) else var)
        line = report.line(name, source)
        line.compared += 1
        line.rounded += not gap.proved
        report.degree = max(report.degree, gap.degree)
        if not gap.elements:
            return
        line.different += 1
        aval, sharding = var.aval, str(held.sharding)
        of = (name, source, what, sharding, tuple(aval.shape), str(aval.dtype), runs_of(event.path))
        report.differences.append(Difference(*of, *gap.first, gap.elements, gap.why))


def _variables(
    jaxpr: Jaxpr, inner: Callable[[JaxprEqn], Sequence[Jaxpr]] = bodies, depth: int = 0
) -> dict[Any, tuple[int, JaxprEqn | None]]:
    """The variables of a program: the number of loops and branches around each, and the equation
    that makes it."""
    found: dict[Any, Any] = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), (depth, None))
    for eqn in jaxpr.eqns:
        found |= dict.fromkeys(eqn.outvars, (depth, eqn))
        for body in inner(eqn):
            found |= _variables(body, inner, depth + bool(loop_bodies(eqn)))
    return found


DRAWS = 3  # points, at most, where decisions by floats are too near a tie


def at_values(emitted: Emitted, arguments: Sequence[Any]) -> Iterator[list[Value]]:
    """The user's arguments, with random elements of the field."""
    for rng in map(np.random.default_rng, itertools.count()):
        yield [drawn(logical(x), rng) for x in (*emitted.consts, *arguments)]


def at_random(emitted: Emitted, given: Sequence[Any] = ()) -> Iterator[list[Value]]:
    """Random numbers of the arguments' types; constants that the function closes over stay.

    Integers are taken from what is `given`, where that has arrays of their shapes.
    """
    variables = emitted.flat.jaxpr.invars
    for rng in map(np.random.default_rng, itertools.count()):
        own = [drawn(logical(x), rng) for x in emitted.consts]
        yield own + [_random(v.aval, x, rng) for v, x in itertools.zip_longest(variables, given)]


def _random(aval: Any, given: Any, rng: np.random.Generator) -> Value:
    if is_float(aval.dtype):
        f = rng.normal(size=aval.shape)
        paired = jnp.issubdtype(aval.dtype, jnp.complexfloating)
        return drawn(f + 1j * rng.normal(size=aval.shape) if paired else f, rng)
    if hasattr(given, "__array__") and given.shape == aval.shape:
        return constant(logical(given))
    if is_key_type(aval.dtype):
        key = jax.random.key(rng.integers(2**31), impl=prng_impl(aval.dtype).name)
        return constant(jax.random.split(key, aval.shape) if aval.shape else key)
    # Rows that are looked up should exist; a scalar may be where a slice begins.
    most = 2 if aval.dtype == bool else 4 if aval.shape else 2 ** rng.integers(8)
    return constant(rng.integers(0, most, aval.shape).astype(aval.dtype))


@np.errstate(all="ignore")  # infinities and NaNs of the program are values like others
def check_program(emitted: Emitted, points: Iterator[Sequence[Value]]) -> Report:
    """Run both programs on one of the points, and compare every value of the user's."""
    ties = 0
    for arguments in itertools.islice(points, DRAWS):
        report = Report(emitted.name, emitted.count, near_ties=ties)
        Ties.count = 0
        audit = Audit(emitted, report, arguments)
        running = Lockstep(emitted.sizes, EXACT).run(emitted.body, emitted.entering(arguments))
        audit.finish(ended(running, audit.event))
        if report.ok or not Ties.count:
            break
        ties += Ties.count
    return report


def _unproved(value: Any) -> Value:
    known = constant(logical(value))
    return replace(known, sum_bits=UNKNOWN) if isinstance(known, Exact) else known


@np.errstate(all="ignore")
def check_results(
    name: str, flat: ClosedJaxpr, arguments: Sequence[Any], results: Sequence[Any], count: int
) -> Report:
    """Compare results that were computed elsewhere with those of the user's program, in 64 bits."""
    types = [v.aval for v in flat.jaxpr.outvars]
    out_of = [(Sharding.replicated(t.ndim, count), tuple(t.shape)) for t in types]
    emitted = Emitted(name, flat, {"devices": count}, (), out_of, (), {}, flat)
    report = Report(name, count)
    audit = Audit(emitted, report, list(map(_unproved, (*flat.consts, *arguments))))
    audit.finish(list(map(_unproved, results)))
    report.not_compared.clear()
    return report
