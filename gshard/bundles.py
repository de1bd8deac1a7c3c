"""Small collectives of one kind that wait for the same thing travel together.

Each collective takes some time to get going, whatever its size. Where the operands of several are
ready before the result of the first is needed, one collective takes them all (`moving/packed.py`):
19 small gradients are summed by one AllReduce. It must not cost more than it saves:

1. A value joins if to copy it into a common array takes no longer than to start a collective of
   its own (larger ones gain little, and compilers combine those without a copy).
2. A bundle grows up to what is sent in `LATENCIES` times the latency: so much memory it may hold
   for longer, and at most so long something else may wait for it.
3. No product, loop, sort or other collective waits for a bundle longer than it waited in the
   program's own order for the collective alone. Only elementwise work is put off, or done earlier.

AllReduce, AllGather and ReduceScatter are bundled, in the bodies of loops too. What the user wrote
in a manual region is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard._jax import copied
from gshard.evaluate import bind
from gshard.forecast.ops import APART, LOOPS, PRODUCTS, bodies_of, size_of
from gshard.moving.costs import LATENCIES, machine
from gshard.moving.packed import run_together
from gshard.source import ASKED_FOR, on_behalf_of, reason_of

_BUNDLED = {"psum", "pmax", "pmin", "all_gather", "reduce_scatter"}
_HEAVY = APART | PRODUCTS | LOOPS | _BUNDLED | {"psum_invariant", "all_to_all", "ppermute"}
_NEVER = 1 << 60


def evaluate_bundled(program: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a per-device program in which small collectives travel together."""
    jaxpr = program.jaxpr
    inputs = zip((*jaxpr.constvars, *jaxpr.invars), (*program.consts, *args), strict=True)
    return _Schedule(jaxpr, bundles_of(jaxpr)).run(dict(inputs))


# ---------------------------------------------------------------- what may travel together


@dataclass
class Bundle:
    """Collectives of one kind, and when they can run: from `ready` on, until it is `needed`.

    Times are numbers of heavy equations, in the program's order.
    """

    key: Any
    ready: int
    needed: int
    size: int
    members: list[JaxprEqn] = field(default_factory=list)

    def takes(self, other: Bundle, limit: float) -> bool:
        """Whether both can run as one."""
        together = max(self.ready, other.ready) <= min(self.needed, other.needed)
        return self.key == other.key and together and self.size + other.size <= limit

    def join(self, other: Bundle) -> None:
        """Take the other's members over."""
        self.ready, self.needed = max(self.ready, other.ready), min(self.needed, other.needed)
        self.size += other.size
        self.members += other.members


def bundles_of(jaxpr: Jaxpr) -> list[Bundle]:
    """The collectives of a program or body that run together: two or more in each bundle."""
    speeds = machine()
    largest = speeds.latency * speeds.memory_per_byte / 2  # it is read once and written once
    found: list[Bundle] = []
    for alone in _alone(jaxpr):
        if alone.size <= largest:
            limit = LATENCIES * speeds.latency
            joined = next((b for b in reversed(found) if b.takes(alone, limit)), None)
            if joined:
                joined.join(alone)
            else:
                found.append(alone)
    return [b for b in found if len(b.members) > 1]


def _alone(jaxpr: Jaxpr) -> list[Bundle]:
    """Every collective that could be bundled, by itself, in the program's order."""
    heavy = [eqn for eqn in jaxpr.eqns if _is_heavy(eqn)]
    number = {id(eqn): i for i, eqn in enumerate(heavy)}
    needed = dict.fromkeys((v for eqn in jaxpr.eqns for v in eqn.outvars), len(heavy))
    for eqn in reversed(jaxpr.eqns):
        first = number.get(id(eqn), min((needed[v] for v in eqn.outvars), default=_NEVER))
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and atom in needed:
                needed[atom] = min(needed[atom], first)
    ready: dict[Any, int] = {}
    found = []
    for eqn in jaxpr.eqns:
        start = max((ready.get(a, 0) for a in eqn.invars if not isinstance(a, Literal)), default=0)
        end = number[id(eqn)] + 1 if id(eqn) in number else start
        if eqn.primitive.name in _BUNDLED and _is_own(eqn) and size_of(eqn.outvars[0]):
            size = max(size_of(eqn.invars[0]), size_of(eqn.outvars[0]))
            alone = Bundle(_key(eqn), start, needed[eqn.outvars[0]], size, [eqn])
            found.append(alone)
            # Whenever it runs, in a bundle or not: what depends on it comes later.
            end = alone.needed + 1
        ready.update(dict.fromkeys(eqn.outvars, end))
    return found


def _key(eqn: JaxprEqn) -> Any:
    """Equal for collectives that differ in their operands alone."""
    of_operand = ("all_gather_dimension", "scatter_dimension")
    params = tuple((k, v) for k, v in sorted(eqn.params.items()) if k not in of_operand)
    return eqn.primitive.name, eqn.invars[0].aval.dtype, str(params)


def _is_own(eqn: JaxprEqn) -> bool:
    """Whether the partitioner made a collective, and not the user."""
    reason = reason_of(eqn)
    return bool(reason) and not reason.startswith(ASKED_FOR)


def _is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation takes long, or may not change places with others."""
    if eqn.primitive.name in _HEAVY or eqn.effects:
        return True
    return any(_is_heavy(e) for body in bodies_of(eqn) for e in body.eqns)


# ---------------------------------------------------------------- the program with bundles in it


class _Schedule:
    """Runs a program: heavy equations in their order, others when what they read is there."""

    def __init__(self, jaxpr: Jaxpr, bundles: Sequence[Bundle]):
        self.jaxpr = jaxpr
        self.bundle_of = {id(eqn): b for b in bundles for eqn in b.members}
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.env: dict[Any, Any] = {}
        self.done: set[int] = set()

    def run(self, env: dict[Any, Any]) -> list[Any]:
        """The results, given the values of the inputs."""
        self.env = env
        for eqn in self.jaxpr.eqns:
            bundle = self.bundle_of.get(id(eqn))
            if (bundle and eqn is bundle.members[-1]) or (not bundle and _is_heavy(eqn)):
                self.force(eqn)
            elif not bundle and not self.missing(eqn):
                self.perform(eqn)
        for eqn in self.jaxpr.eqns:
            self.force(eqn)
        return [self.read(a) for a in self.jaxpr.outvars]

    def read(self, atom: Any) -> Any:
        """The value of an operand."""
        return atom.val if isinstance(atom, Literal) else self.env[atom]

    def missing(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equations that make what this one, or its bundle, reads, and have not run."""
        bundle = self.bundle_of.get(id(eqn))
        atoms = [a for e in (bundle.members if bundle else [eqn]) for a in e.invars]
        return [self.maker[a] for a in atoms if not isinstance(a, Literal) and a not in self.env]

    def force(self, goal: JaxprEqn) -> None:
        """Run an equation, and first all that it waits for."""
        stack = [goal]
        opened: set[int] = set()
        while stack:
            eqn = stack[-1]
            waiting = [] if id(eqn) in self.done else self.missing(eqn)
            if waiting:
                assert id(eqn) not in opened, "values that wait for each other in one bundle"
                opened.add(id(eqn))
                stack += reversed(waiting)
            else:
                stack.pop()
                self.perform(eqn)

    def perform(self, eqn: JaxprEqn) -> None:
        """Run an equation, or its bundle, of which all operands are there."""
        if id(eqn) in self.done:
            return
        bundle = self.bundle_of.get(id(eqn))
        if bundle:
            values = [self.read(e.invars[0]) for e in bundle.members]
            for e, result in zip(bundle.members, run_together(bundle.members, values), strict=True):
                self.env[e.outvars[0]] = result
                self.done.add(id(e))
            return
        values, changed = [self.read(a) for a in eqn.invars], _bundled_bodies(eqn)
        results: Sequence[Any] | None = None if changed else copied(eqn, values)
        if results is None:
            with on_behalf_of(eqn):
                results = bind(eqn, values, **changed)
        self.env.update(zip(eqn.outvars, results, strict=True))
        self.done.add(id(eqn))


def _bundled_bodies(eqn: JaxprEqn) -> dict[str, Any]:
    """The programs in a loop or branch that change, by the names of the parameters."""
    if eqn.primitive.name not in LOOPS:
        return {}
    changed: dict[str, Any] = {}
    for name, param in eqn.params.items():
        programs = param if isinstance(param, tuple) else (param,)
        if programs and all(isinstance(b, ClosedJaxpr) for b in programs):
            new = tuple(map(_bundled, programs))
            if any(a is not b for a, b in zip(new, programs, strict=True)):
                changed[name] = new if isinstance(param, tuple) else new[0]
    return changed


def _bundled(program: ClosedJaxpr) -> ClosedJaxpr:
    """A body in which small collectives travel together; the same one if there are none."""
    if not has_bundles(program.jaxpr):
        return program
    types = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False))
        for a in program.in_avals
    ]
    return jax.make_jaxpr(lambda *args: evaluate_bundled(program, args))(*types)


def has_bundles(jaxpr: Jaxpr) -> bool:
    """Whether anything in a program, or in a body in it, is to travel together."""
    inside = [b for eqn in jaxpr.eqns if eqn.primitive.name in LOOPS for b in bodies_of(eqn)]
    return bool(bundles_of(jaxpr)) or any(map(has_bundles, inside))
