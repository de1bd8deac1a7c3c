"""The check: every equation of the user's program, on the values that the devices have.

The partitioned program is replayed. Each value of the user's program is put together of the
devices' tiles as it is computed; when the results of an equation of the user's are there, the
equation is run unpartitioned, on the operands as the devices have them, and the results compared.
So errors do not add up from one equation to the next, a fault is found where it happens, and
decisions (comparisons, routing, sorting) are compared for equal operands. If the arguments are
right and every equation is, the results are.

Loops are compared run by run: what a run starts with has to be what the run before ended with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.checking.bounds import bound, spread
from gshard.checking.links import Links, constants
from gshard.checking.manual import expected_in_region, is_manual
from gshard.checking.replaying.emitted import Emitted
from gshard.checking.replaying.lockstep import Event, Lockstep, Path, Value, runs_of
from gshard.checking.replaying.on_host import OnHost
from gshard.checking.replaying.tiles import plain
from gshard.checking.report import Difference, Report
from gshard.checking.scope import Scope, Seen
from gshard.checking.shadow import (
    Gap,
    Known,
    Parts,
    Shadow,
    compare,
    gap_to,
    resummed,
    taken,
)
from gshard.graph.regions import bodies, loop_bodies
from gshard.graph.source import source_of
from gshard.moving.seen import Held
from gshard.tensors.annotate import annotate_p

REWRITTEN = "rewritten as a part of other operators"
UNUSED = "not computed by any device"
UNKNOWN = "of operands that are not known"
FOLLOWS = "that depend on one that differs"
EFFECTS = "of operators with effects, which run once"


class Audit:
    """Compares a program's values while it is replayed."""

    def __init__(self, emitted: Emitted, report: Report, on_host: OnHost):
        self.emitted = emitted
        self._on_host = on_host
        self.report = report
        self.count = report.devices
        self.scopes: dict[tuple[Jaxpr, Path], Scope] = {}
        self.region: dict[Any, Jaxpr] = {}  # where in the user's program each variable belongs
        self.owner: dict[Jaxpr, JaxprEqn] = {}  # the loop that a body belongs to
        self.maker: dict[Any, JaxprEqn] = {}
        self._enter(emitted.flat.jaxpr)
        self.present: dict[Jaxpr, set[Any]] = {}  # the values that some device computes, by region
        depths = _depths(emitted.body.jaxpr, 0)
        for var, found in emitted.held.items():
            for value in [h.value for h in found if h.value in self.region]:
                jaxpr = self.region[value]
                if depths.get(var) == self._depth(jaxpr):
                    self.present.setdefault(jaxpr, set()).add(value)
        self.planned = {h.value for found in emitted.held.values() for h in found}
        self.links = Links(self)

    def _enter(self, jaxpr: Jaxpr) -> None:
        for var in (*jaxpr.constvars, *jaxpr.invars):
            self.region[var] = jaxpr
        for eqn in jaxpr.eqns:
            self.region |= dict.fromkeys(eqn.outvars, jaxpr)
            self.maker |= dict.fromkeys(eqn.outvars, eqn)
            for closed in loop_bodies(eqn):
                self.owner[closed.jaxpr] = eqn
                self._enter(closed.jaxpr)

    # ------------------------------------------------------------ events of the replay

    def event(self, event: Event) -> None:
        """Look at what an equation has made, or at what a body begins with."""
        if event.ends:
            depth = len(event.path)
            for inner in [s for s in self.scopes.values() if len(s.path) > depth]:
                if inner.path[:depth] == event.path and inner.path[depth][0] is event.eqn:
                    self._end(inner)
        for var, value in zip(event.variables, event.values, strict=True):
            for held in self.emitted.held.get(var, ()):
                scope = self._scope(held.value, event.path)
                if scope is not None and any(x is not None for x in value):
                    source = "" if event.eqn is None else source_of(event.eqn)
                    self._observe(scope, (held, value, source))
        for running in [s for s in self.scopes.values() if s.path == event.path]:
            self.advance(running)

    def _scope(self, value: Any, path: Path) -> Scope | None:
        """The run of a region that a value belongs to, if it is one that runs now."""
        jaxpr = self.region.get(value)
        if jaxpr is None or len(path) != self._depth(jaxpr):
            return None
        key = (jaxpr, path)
        if key not in self.scopes:
            for scope in [s for s in self.scopes.values() if _is_before(s, jaxpr, path)]:
                self._end(scope)
            self.scopes[key] = Scope(jaxpr, self.present.get(jaxpr, set()), path)
        return self.scopes[key]

    def _end(self, scope: Scope) -> None:
        self.links.ended(scope)
        del self.scopes[scope.jaxpr, scope.path]

    def _depth(self, jaxpr: Jaxpr) -> int:
        depth = 0
        while jaxpr in self.owner:
            jaxpr, depth = self.region[self.owner[jaxpr].outvars[0]], depth + 1
        return depth

    def _observe(self, scope: Scope, seen: Seen) -> None:
        var = seen[0].value
        if var in scope.shadows:
            self._again(scope, seen)
        elif var in scope.arguments:
            self._argument(scope, seen)
        else:
            scope.pending.setdefault(var, []).append(seen)

    def _argument(self, scope: Scope, seen: Seen) -> None:
        """What a body begins with: known when it is there; links compare it with its origin."""
        held, value, _ = seen
        var = held.value
        scope.shadows[var] = made = taken(value, held, var.aval)
        if isinstance(made, Parts):
            return
        gap = compare(value, held, plain(made.value), 0.0)  # copies are alike
        self.judge(scope, var, held, gap, "argument", follows=bool(self.report.differences))

    def _again(self, scope: Scope, seen: Seen) -> None:
        """A value that is known, under another sharding: a reduction rounds, nothing else does."""
        held, value, source = seen
        before = scope.shadows[held.value]
        if before is None or held.sharding.manual != isinstance(before, Parts):
            return
        gap = gap_to(value, held, before)
        follows = held.value in scope.wrong
        self.judge(scope, held.value, held, gap, held.moved or "result", source, follows)
        scope.shadows[held.value] = taken(value, held, held.value.aval)

    def finish(self, results: Sequence[Value]) -> None:
        """The program has ended: check what is left, and its results."""
        for scope in sorted(self.scopes.values(), key=lambda s: -len(s.path)):
            if scope.path:
                self._end(scope)
        jaxpr = self.emitted.flat.jaxpr
        top = self.scopes.get((jaxpr, ())) or Scope(jaxpr, set(), ())
        self.advance(top, to_the_end=True)
        for atom, value, crossing in zip(jaxpr.outvars, results, self.emitted.out_of, strict=True):
            known = top.read(atom)
            if known is not None:
                held = Held(atom, *crossing)
                gap = gap_to(value, held, known)
                self.judge(top, atom, held, gap, "end", follows=bool(self.report.differences))

    # ------------------------------------------------------------ equations of the user's program

    def advance(self, scope: Scope, to_the_end: bool = False) -> None:
        """Check the equations, in their order, as far as their results are there."""
        while scope.next < len(scope.jaxpr.eqns):
            eqn = scope.jaxpr.eqns[scope.next]
            waiting = [v for v in eqn.outvars if v in scope.observable and v not in scope.pending]
            if waiting and not to_the_end:
                return
            scope.next += 1
            self._check(scope, eqn)
            scope.forget(eqn.invars)

    def _read(self, scope: Scope, atom: Any) -> Known | None:
        """The value of an operand; an argument that a body does not hold itself, from outside."""
        if isinstance(atom, Literal) or atom in scope.shadows or atom not in scope.arguments:
            return scope.read(atom)
        eqn = self.owner.get(scope.jaxpr)
        if eqn is None:
            return None
        outside = self.scopes.get((self.region[eqn.outvars[0]], scope.path[:-1]))
        origin = dict(constants(eqn, scope.jaxpr)).get(atom)
        return None if outside is None or origin is None else self._read(outside, origin)

    def _check(self, scope: Scope, eqn: JaxprEqn) -> None:
        found = {v: scope.pending.pop(v, []) for v in eqn.outvars}
        operands = [self._read(scope, a) for a in eqn.invars]
        if loop_bodies(eqn) and self.links.check_loop(scope, eqn, operands, found):
            return
        known = [o for o in operands if o is not None]
        region = is_manual(eqn, known)
        if len(known) < len(operands) or eqn.effects or (region and loop_bodies(eqn)):
            for var in eqn.outvars:
                self.trust(scope, var, found[var], EFFECTS if eqn.effects else UNKNOWN)
            return
        if region:
            results = expected_in_region(eqn, known, self.count, self._expected)
        else:
            results = list(self._expected(eqn, [o for o in known if isinstance(o, Shadow)]))
        follows = any(not isinstance(a, Literal) and a in scope.wrong for a in eqn.invars)
        for var, result in zip(eqn.outvars, results, strict=True):
            self.settle(scope, var, found[var], result, follows)

    def _expected(self, eqn: JaxprEqn, known: Sequence[Shadow]) -> list[Shadow]:
        """The results of an equation on one device, with what rounding allows as their slack."""
        known = [resummed(o, self.count) for o in known]  # a sum may be reduced after the operator
        values = [o.value for o in known]
        results = [x if _is_key(x) else np.asarray(x) for x in self._evaluate(eqn, values)]
        limits: list[Any] = [bound(eqn, values, plain(r), self.count)[1] for r in results]
        if any(o.slack is not None for o in known):
            shown = [plain(r) for r in results]
            moved = spread(eqn, values, [o.slack for o in known], shown, self._evaluate)
            limits = [a + b for a, b in zip(limits, moved, strict=True)]
        slacks = [np.broadcast_to(x, plain(r).shape) for x, r in zip(limits, results, strict=True)]
        return [Shadow(r, s if s.any() else None) for r, s in zip(results, slacks, strict=True)]

    def _evaluate(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation on one device."""
        if eqn.primitive is annotate_p:
            return list(values)
        return self._on_host(eqn, values)

    def settle(
        self,
        scope: Scope,
        var: Any,
        found: Sequence[Seen],
        expected: Known,
        follows: bool = False,
    ) -> None:
        """Compare what devices have of a value with what it should be, and take it to be that."""
        if not found:
            self.report.not_compared[UNUSED if var in self.planned else REWRITTEN] += 1
            scope.shadows[var] = expected
            return
        (held, value, source), *more = found
        gap = gap_to(value, held, expected)
        self.judge(scope, var, held, gap, held.moved or "result", source, follows)
        scope.shadows[var] = taken(value, held, var.aval)
        for seen in more:
            self._again(scope, seen)

    def trust(self, scope: Scope, var: Any, found: Sequence[Seen], why: str) -> None:
        """Take a value as the devices have it, without a comparison."""
        self.report.not_compared[why] += 1
        scope.shadows[var] = taken(found[0][1], found[0][0], var.aval) if found else None

    def judge(
        self,
        scope: Scope,
        var: Any,
        held: Held,
        gap: Gap,
        what: str,
        source: str = "",
        follows: bool = False,
    ) -> None:
        """Count a comparison, and note a difference, unless it follows from an earlier one."""
        eqn = None if isinstance(var, Literal) else self.maker.get(var)
        name = "argument" if eqn is None else eqn.primitive.name
        if eqn is not None and not held.moved:
            source = source_of(eqn)
        if held.moved:
            name = f"reshard of {name}"
        self.report.compared += 1
        line = self.report.line(name, source)
        line.compared += 1
        line.worst = max(line.worst, gap.worst)
        if gap.worst <= 1:
            return
        line.different += 1
        scope.wrong.add(var)
        if follows:
            self.report.not_compared[FOLLOWS] += 1
            return
        self.report.differences.append(
            Difference(
                name, source, what, str(held.sharding), tuple(var.aval.shape),
                str(var.aval.dtype), runs_of(scope.path), gap.device, gap.index,
                gap.got, gap.expected, gap.bound, gap.elements,
            )
        )  # fmt: skip


def _is_before(scope: Scope, jaxpr: Jaxpr, path: Path) -> bool:
    """Whether a scope is an earlier run of the same region, in the same loop."""
    return scope.jaxpr is jaxpr and scope.path[:-1] == path[:-1] and scope.path != path


def _depths(jaxpr: Jaxpr, depth: int) -> dict[Any, int]:
    """The variables of a program, with the number of loops and branches around each."""
    found = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), depth)
    for eqn in jaxpr.eqns:
        found |= dict.fromkeys(eqn.outvars, depth)
        inside = depth + 1 if loop_bodies(eqn) else depth
        for body in bodies(eqn):
            found |= _depths(body, inside)
    return found


def _is_key(value: Any) -> bool:
    return bool(jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key))


@np.errstate(all="ignore")  # infinities and NaNs of the program are compared like other values
def check_program(emitted: Emitted, arguments: Sequence[Any]) -> Report:
    """Replay a program on these flat arguments, and compare every value of the user's."""
    machine = Lockstep(emitted.sizes)
    report = Report(emitted.name, machine.count)
    audit = Audit(emitted, report, machine.on_host)
    running = machine.run(emitted.body, emitted.entering(arguments))
    while True:
        try:
            event = next(running)
        except StopIteration as end:
            results = end.value
            break
        audit.event(event)
    audit.finish(results)
    return report
