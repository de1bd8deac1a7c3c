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
in a manual region is left as it is. Equations are put into another order, and stay what they are:
only what a bundle adds is traced.

Between processes on CPUs (Gloo) these three go round in rings, and every step wakes another
process: an AllReduce of 8 devices takes as long as four AllToAlls, however small it is. There they
are made of AllToAlls, bundled or not: in as many bytes, or, for few numbers, in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import Mesh

from gshard._jax import shard_map_p
from gshard.forecast.ops import APART, LOOPS, PRODUCTS, bodies_of, size_of
from gshard.meshes import AnyMesh
from gshard.moving.costs import EXCHANGED, LATENCIES, machine
from gshard.moving.packed import can_be_exchanged, run_together
from gshard.reason import NO_REASON
from gshard.source import reason_of

_BUNDLED = {"psum", "pmax", "pmin", "all_gather", "reduce_scatter"}
_HEAVY = APART | PRODUCTS | LOOPS | _BUNDLED | {"psum_invariant", "all_to_all", "ppermute"}
_LIGHT = {
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "div", "exp", "integer_pow",
    "max", "mul", "neg", "reduce_sum", "reshape", "rsqrt", "select_n", "slice", "sqrt", "squeeze",
    "sub", "tanh", "transpose",
}  # fmt: skip
_NEVER = 1 << 60


# ---------------------------------------------------------------- what may travel together


@dataclass(eq=False)
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
    if not any(eqn.primitive.name in _BUNDLED for eqn in jaxpr.eqns):
        return []
    number = {eqn: i for i, eqn in enumerate(filter(_is_heavy, jaxpr.eqns))}
    needed = dict.fromkeys((v for eqn in jaxpr.eqns for v in eqn.outvars), len(number))
    for eqn in reversed(jaxpr.eqns):
        first = number.get(eqn, _NEVER)
        if first is _NEVER:
            first = min([needed[v] for v in eqn.outvars], default=_NEVER)
        elif _may_move(eqn):  # it can run as late as before what needs it
            first = max(first, needed[eqn.outvars[0]] - 1)
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and needed.get(atom, -1) > first:
                needed[atom] = first
    ready: dict[Any, int] = {}
    found = []
    for eqn in jaxpr.eqns:
        start = 0
        for atom in eqn.invars:
            if not isinstance(atom, Literal) and ready.get(atom, 0) > start:
                start = ready[atom]
        end = number[eqn] + 1 if eqn in number else start
        if _may_move(eqn):
            alone = Bundle(_key(eqn), start, needed[eqn.outvars[0]], _size(eqn), [eqn])
            found.append(alone)
            # Whenever it runs, in a bundle or not: what depends on it comes later.
            end = alone.needed + 1
        for var in eqn.outvars:
            ready[var] = end
    return found


def _key(eqn: JaxprEqn) -> Any:
    """Equal for collectives that differ in their operands alone."""
    of_operand = ("all_gather_dimension", "scatter_dimension")
    params = tuple((k, v) for k, v in sorted(eqn.params.items()) if k not in of_operand)
    return eqn.primitive.name, eqn.invars[0].aval.dtype, str(params)


def _may_move(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective that the partitioner made, and not the user."""
    if eqn.primitive.name not in _BUNDLED or not size_of(eqn.outvars[0]):
        return False
    reason = reason_of(eqn)
    return reason != NO_REASON and not reason.is_asked


def _size(eqn: JaxprEqn) -> int:
    """Bytes of a collective's operand or result, whichever is larger."""
    return max(size_of(eqn.invars[0]), size_of(eqn.outvars[0]))


def _is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation takes long, or may not change places with others."""
    if eqn.primitive.name in _HEAVY or eqn.effects:
        return True
    if eqn.primitive.name in _LIGHT:  # told quickly, as most are
        return False
    return any(_is_heavy(e) for body in bodies_of(eqn) for e in body.eqns)


# ---------------------------------------------------------------- the program with bundles in it


def combined(jaxpr: Jaxpr, mesh: AnyMesh) -> Jaxpr:
    """A per-device program with small collectives combined; the same one if there are none."""
    rings = _has_rings(mesh)
    found = _all_bundles(jaxpr, rings)
    if not any(found.values()):
        return jaxpr
    written = _written([b for bundles in found.values() for b in bundles], mesh, rings)
    return _Rewriting(found, written).program(jaxpr)


def _has_rings(mesh: AnyMesh) -> bool:
    """Whether collectives between the devices go round in rings, message after message."""
    if not isinstance(mesh, Mesh) or jax.config.jax_cpu_collectives_implementation != "gloo":
        return False
    devices = mesh.devices.flat
    return devices[0].platform == "cpu" and len({d.process_index for d in devices}) > 1


def _all_bundles(jaxpr: Jaxpr, rings: bool) -> dict[Jaxpr, list[Bundle]]:
    """The bundles of a program and of the bodies of loops and branches in it.

    Where collectives go round in rings, one that better does not is a bundle by itself.
    """
    bundles = bundles_of(jaxpr)
    if rings:
        taken = {eqn for b in bundles for eqn in b.members}
        left = [b for b in _alone(jaxpr) if b.members[0] not in taken]
        bundles += filter(_is_exchanged, left)
    found = {jaxpr: bundles}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in LOOPS:
            for body in bodies_of(eqn):
                found |= _all_bundles(body, rings)
    return found


def _is_exchanged(bundle: Bundle) -> bool:
    """Whether AllToAlls do better than a ring."""
    return bundle.size <= EXCHANGED and can_be_exchanged(bundle.members[0])


def _written(bundles: Sequence[Bundle], mesh: AnyMesh, rings: bool) -> dict[Bundle, list[JaxprEqn]]:
    """The equations of every bundle; all are traced at once, which is quicker."""

    def all_together(*operands: jax.Array) -> list[jax.Array]:
        left, results = iter(operands), []
        for bundle in bundles:
            values = [next(left) for _ in bundle.members]
            results += run_together(bundle.members, values, rings and _is_exchanged(bundle))
        return results

    members = [eqn for bundle in bundles for eqn in bundle.members]
    whole = jax.P()
    traced = jax.make_jaxpr(
        jax.shard_map(all_together, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    )(*[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (e.invars[0].aval for e in members)])
    (mapped,) = [e for e in traced.jaxpr.eqns if e.primitive is shard_map_p]
    body = getattr(mapped.params["jaxpr"], "jaxpr", mapped.params["jaxpr"])
    known = dict(zip(body.invars, [e.invars[0] for e in members], strict=True))
    known |= zip(body.outvars, [e.outvars[0] for e in members], strict=True)
    found: dict[Bundle, list[JaxprEqn]] = {}
    left = iter(body.eqns)
    for bundle in bundles:
        last, eqns = bundle.members[-1].outvars[0], found.setdefault(bundle, [])
        while not eqns or last not in eqns[-1].outvars:  # what makes its last result ends a bundle
            eqn = next(left)
            invars = [a if isinstance(a, Literal) else known.get(a, a) for a in eqn.invars]
            outvars = [known.get(v, v) for v in eqn.outvars]
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
    return found


class _Rewriting:
    """Programs with their bundles, of which the equations are `written`."""

    def __init__(self, found: dict[Jaxpr, list[Bundle]], written: dict[Bundle, list[JaxprEqn]]):
        self.found = found
        self.written = written

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """A program, or a body in it, in its new order."""
        bundles = self.found[jaxpr]
        eqns: list[JaxprEqn] = []
        for step in _Schedule(jaxpr, bundles).order() if bundles else jaxpr.eqns:
            eqns += self.written[step] if isinstance(step, Bundle) else [self.equation(step)]
        return jaxpr.replace(eqns=eqns)

    def equation(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation; the bodies of a loop or branch are in their new order."""
        if eqn.primitive.name not in LOOPS:
            return eqn
        return eqn.replace(params={k: self.param(v) for k, v in eqn.params.items()})

    def param(self, value: Any) -> Any:
        """A parameter of a loop or branch; programs in it are rewritten."""
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=self.program(value.jaxpr))
        if isinstance(value, tuple) and any(isinstance(v, ClosedJaxpr) for v in value):
            return tuple(map(self.param, value))
        return value


class _Schedule:
    """Orders a program: heavy equations as they were, others when what they read is there.

    A collective that waits for a bundle may wait until its own result is needed.
    """

    def __init__(self, jaxpr: Jaxpr, bundles: Sequence[Bundle]):
        self.jaxpr = jaxpr
        self.bundle_of = {eqn: b for b in bundles for eqn in b.members}
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.steps: list[JaxprEqn | Bundle] = []
        self.done: set[JaxprEqn] = set()

    def order(self) -> list[JaxprEqn | Bundle]:
        """The equations and bundles, one after the other."""
        for eqn in self.jaxpr.eqns:
            bundle = self.bundle_of.get(eqn)
            alone = not bundle and _is_heavy(eqn) and not _may_move(eqn)
            if alone or (bundle and eqn is bundle.members[-1]):
                self.force(eqn)
            elif not bundle and not self.missing(eqn):
                self.perform(eqn)
        for eqn in self.jaxpr.eqns:
            self.force(eqn)
        return self.steps

    def missing(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equations that make what this one, or its bundle, reads, and have not run."""
        bundle, found = self.bundle_of.get(eqn), []
        for member in bundle.members if bundle else [eqn]:
            for atom in member.invars:
                maker = None if isinstance(atom, Literal) else self.maker.get(atom)
                if maker is not None and maker not in self.done:
                    found.append(maker)
        return found

    def force(self, goal: JaxprEqn) -> None:
        """Run an equation, and first all that it waits for."""
        stack = [goal]
        opened: set[JaxprEqn] = set()
        while stack:
            eqn = stack[-1]
            waiting = [] if eqn in self.done else self.missing(eqn)
            if waiting:
                assert eqn not in opened, "values that wait for each other in one bundle"
                opened.add(eqn)
                stack += reversed(waiting)
            else:
                stack.pop()
                self.perform(eqn)

    def perform(self, eqn: JaxprEqn) -> None:
        """Run an equation, or its bundle, of which all operands are there."""
        if eqn not in self.done:
            bundle = self.bundle_of.get(eqn)
            self.steps.append(bundle or eqn)
            self.done.update(bundle.members if bundle else [eqn])
