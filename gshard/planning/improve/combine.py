"""A pass over a plan that combines small collectives of one kind.

Each collective has a latency, whatever its size. Where the operands of several are ready before the
result of the first is needed, one collective replaces them (`moving/packed.py`): 19 small gradients
are summed by one AllReduce. It must not cost more than it saves:

1. A value is combined if copying it into a common array takes no longer than the latency of a
   collective of its own (larger ones gain little, and compilers combine those without a copy).
2. A combination sends at most what the links carry in `LATENCIES` times the latency. That bounds
   the memory that it keeps alive for longer, and the time that other operations are delayed.
3. No product, loop, sort or other collective is delayed by a combination beyond the point at which
   the program's own order had the collective. Only elementwise work is moved.

AllReduce, AllGather and ReduceScatter are combined, in the bodies of loops too. Collectives that
the user wrote in a manual region are not changed. Other equations are only reordered.

Between processes on CPUs (Gloo) these three are rings, and every step wakes another process: an
AllReduce of 8 devices takes as long as four AllToAlls, however small it is. There they are replaced
by AllToAlls, combined or not: with as many bytes, or, for small operands, in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.forecast.ops import APART, LOOPS, PRODUCTS, size_of
from gshard.graph.evaluate import equations_of
from gshard.graph.regions import bodies, map_bodies
from gshard.moving.collectives import AllGather, AllReduce, CollectiveNode, ReduceScatter
from gshard.moving.costs import EXCHANGED, LATENCIES, machine
from gshard.moving.inventory import COLLECTIVES
from gshard.moving.nodes import node_of
from gshard.moving.packed import can_be_exchanged, run_together

_HEAVY = APART | PRODUCTS | LOOPS | COLLECTIVES.keys()
_LIGHT = {
    "add", "add_any", "broadcast_in_dim", "convert_element_type", "div", "exp", "integer_pow",
    "max", "mul", "neg", "reduce_sum", "reshape", "rsqrt", "select_n", "slice", "sqrt", "squeeze",
    "sub", "tanh", "transpose",
}  # fmt: skip
_NEVER = 1 << 60


# ---------------------------------------------------------------- what may be combined


@dataclass(eq=False)
class Combination:
    """Collectives of one kind, which can run from `ready` on and until `needed`.

    Times are positions among the heavy equations of the program.
    """

    key: Any
    ready: int
    needed: int
    size: int
    members: list[JaxprEqn] = field(default_factory=list)

    def takes(self, other: Combination, limit: float) -> bool:
        """Whether both can be one collective."""
        together = max(self.ready, other.ready) <= min(self.needed, other.needed)
        return self.key == other.key and together and self.size + other.size <= limit

    def join(self, other: Combination) -> None:
        """Add the other's members."""
        self.ready, self.needed = max(self.ready, other.ready), min(self.needed, other.needed)
        self.size += other.size
        self.members += other.members


def combinations_of(jaxpr: Jaxpr) -> list[Combination]:
    """The combinations of a program or body, of two or more collectives each."""
    speeds = machine()
    found: list[Combination] = []
    for alone in _alone(jaxpr):
        if alone.size <= speeds.largest_combined:
            limit = LATENCIES * speeds.latency
            joined = next((b for b in reversed(found) if b.takes(alone, limit)), None)
            if joined:
                joined.join(alone)
            else:
                found.append(alone)
    return [b for b in found if len(b.members) > 1]


def _alone(jaxpr: Jaxpr) -> list[Combination]:
    """Every collective that could be combined, as a combination of one, in program order."""
    if not any(map(_may_move, jaxpr.eqns)):
        return []
    number = {eqn: i for i, eqn in enumerate(filter(_is_heavy, jaxpr.eqns))}
    needed = dict.fromkeys((v for eqn in jaxpr.eqns for v in eqn.outvars), len(number))
    for eqn in reversed(jaxpr.eqns):
        first = number.get(eqn, _NEVER)
        if first is _NEVER:
            first = min([needed[v] for v in eqn.outvars], default=_NEVER)
        elif _may_move(eqn):  # it can run at the latest before its first consumer
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
            alone = Combination(_key(eqn), start, needed[eqn.outvars[0]], _size(eqn), [eqn])
            found.append(alone)
            # Combined or not, its consumers run later.
            end = alone.needed + 1
        for var in eqn.outvars:
            ready[var] = end
    return found


def _key(eqn: JaxprEqn) -> Any:
    """A key that is equal for collectives that differ only in their operands and dims."""
    node: Any = node_of(eqn)
    return node.name, node.groups, getattr(node, "kind", ""), eqn.invars[0].aval.dtype


def _may_move(eqn: JaxprEqn) -> bool:
    """Whether an equation is a collective that the partitioner made, and not the user."""
    node = node_of(eqn)
    if not isinstance(node, (AllReduce, AllGather, ReduceScatter)) or not size_of(eqn.outvars[0]):
        return False
    return not node.reason.is_asked and node.reason.pieces == 1


def _size(eqn: JaxprEqn) -> int:
    """Bytes of a collective's operand or result, whichever is larger."""
    return max(size_of(eqn.invars[0]), size_of(eqn.outvars[0]))


def _is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation is expensive, or must not be reordered."""
    if eqn.primitive.name in _HEAVY or eqn.effects or node_of(eqn) is not None:
        return True
    if eqn.primitive.name in _LIGHT:  # the common case, decided quickly
        return False
    return any(_is_heavy(e) for body in bodies(eqn) for e in body.eqns)


# --------------------------------------------------------------- the program with its combinations


def combine(plan: Jaxpr) -> Jaxpr:
    """The plan with small collectives combined; the same one if there are none."""
    rings = machine().rings
    found = _all_combinations(plan, rings)
    if not any(found.values()):
        return plan
    written = _written([b for combinations in found.values() for b in combinations], rings)
    return _Rewriting(found, written).program(plan)


def _all_combinations(jaxpr: Jaxpr, rings: bool) -> dict[Jaxpr, list[Combination]]:
    """The combinations of a program and of the bodies of loops and branches in it.

    Where collectives are rings, one that is better replaced is a combination of its own.
    """
    combinations = combinations_of(jaxpr)
    if rings:
        taken = {eqn for b in combinations for eqn in b.members}
        left = [b for b in _alone(jaxpr) if b.members[0] not in taken]
        combinations += filter(_is_exchanged, left)
    found = {jaxpr: combinations}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in LOOPS:
            for body in bodies(eqn):
                found |= _all_combinations(body, rings)
    return found


def _is_exchanged(combination: Combination) -> bool:
    """Whether AllToAlls are faster than a ring."""
    node = node_of(combination.members[0])
    assert isinstance(node, CollectiveNode)
    return combination.size <= EXCHANGED and can_be_exchanged(node)


def _written(combinations: Sequence[Combination], rings: bool) -> dict[Combination, list[JaxprEqn]]:
    """The equations of every combination, all traced in one go, which is faster."""

    def all_together(*operands: jax.Array) -> list[jax.Array]:
        left, results = iter(operands), []
        for combination in combinations:
            values = [next(left) for _ in combination.members]
            results += run_together(
                combination.members, values, rings and _is_exchanged(combination)
            )
        return results

    members = [eqn for combination in combinations for eqn in combination.members]
    operands, results = [e.invars[0] for e in members], [e.outvars[0] for e in members]
    equations, _ = equations_of(all_together, operands, results)
    found: dict[Combination, list[JaxprEqn]] = {}
    left = iter(equations)
    for combination in combinations:
        last, eqns = combination.members[-1].outvars[0], found.setdefault(combination, [])
        while not eqns or last not in eqns[-1].outvars:  # the equation of its last result ends it
            eqns.append(next(left))
    return found


class _Rewriting:
    """Rewrites programs with their combinations, whose equations are in `written`."""

    def __init__(
        self, found: dict[Jaxpr, list[Combination]], written: dict[Combination, list[JaxprEqn]]
    ):
        self.found = found
        self.written = written

    def program(self, jaxpr: Jaxpr) -> Jaxpr:
        """A program, or a body in it, in its new order."""
        combinations = self.found[jaxpr]
        eqns: list[JaxprEqn] = []
        for step in _Schedule(jaxpr, combinations).order() if combinations else jaxpr.eqns:
            eqns += self.written[step] if isinstance(step, Combination) else [self.equation(step)]
        return jaxpr.replace(eqns=eqns)

    def equation(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation; the bodies of a loop or branch are in their new order."""
        if eqn.primitive.name not in LOOPS:
            return eqn
        return map_bodies(eqn, lambda closed: closed.replace(jaxpr=self.program(closed.jaxpr)))


class _Schedule:
    """Orders a program: heavy equations as before, others when their operands are ready.

    A collective in a combination may be delayed until its own result is needed.
    """

    def __init__(self, jaxpr: Jaxpr, combinations: Sequence[Combination]):
        self.jaxpr = jaxpr
        self.combination_of = {eqn: b for b in combinations for eqn in b.members}
        self.maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
        self.steps: list[JaxprEqn | Combination] = []
        self.done: set[JaxprEqn] = set()

    def order(self) -> list[JaxprEqn | Combination]:
        """The equations and combinations, one after the other."""
        for eqn in self.jaxpr.eqns:
            combination = self.combination_of.get(eqn)
            alone = not combination and _is_heavy(eqn) and not _may_move(eqn)
            if alone or (combination and eqn is combination.members[-1]):
                self.force(eqn)
            elif not combination and not self.missing(eqn):
                self.perform(eqn)
        for eqn in self.jaxpr.eqns:
            self.force(eqn)
        return self.steps

    def missing(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equations that this one, or its combination, depends on and that have not run."""
        combination, found = self.combination_of.get(eqn), []
        for member in combination.members if combination else [eqn]:
            for atom in member.invars:
                maker = None if isinstance(atom, Literal) else self.maker.get(atom)
                if maker is not None and maker not in self.done:
                    found.append(maker)
        return found

    def force(self, goal: JaxprEqn) -> None:
        """Run an equation, after everything that it depends on."""
        stack = [goal]
        opened: set[JaxprEqn] = set()
        while stack:
            eqn = stack[-1]
            before = [] if eqn in self.done else self.missing(eqn)
            if before:
                assert eqn not in opened, "values that depend on each other in one combination"
                opened.add(eqn)
                stack += reversed(before)
            else:
                stack.pop()
                self.perform(eqn)

    def perform(self, eqn: JaxprEqn) -> None:
        """Run an equation, or its combination, whose operands are all ready."""
        if eqn not in self.done:
            combination = self.combination_of.get(eqn)
            self.steps.append(combination or eqn)
            self.done.update(combination.members if combination else [eqn])
