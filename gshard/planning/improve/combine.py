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
from jax.extend.core import primitives as p

from gshard.forecast.dataflow import size_of
from gshard.graph import LOOPS, at_every_level, bodies, in_order
from gshard.graph.evaluate import equations_of
from gshard.graph.kinds import APART, PRODUCTS
from gshard.moving.collectives import AllGather, AllReduce, CollectiveNode, ReduceScatter
from gshard.moving.costs import EXCHANGED, LATENCIES, cost_model
from gshard.moving.inventory import COLLECTIVES
from gshard.moving.nodes import node_of
from gshard.moving.packed import can_be_exchanged, run_together

_HEAVY = {*APART, *PRODUCTS, *LOOPS}
_LIGHT = {
    p.add_p, p.add_jaxvals_p, p.broadcast_in_dim_p, p.convert_element_type_p, p.div_p, p.exp_p,
    p.integer_pow_p, p.max_p, p.mul_p, p.neg_p, p.reduce_sum_p, p.reshape_p, p.rsqrt_p,
    p.select_n_p, p.slice_p, p.sqrt_p, p.squeeze_p, p.sub_p, p.tanh_p, p.transpose_p,
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
    speeds = cost_model()
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
    moving = set(filter(_may_move, jaxpr.eqns))
    if not moving:
        return []
    number = {eqn: i for i, eqn in enumerate(filter(is_heavy, jaxpr.eqns))}
    needed = dict.fromkeys((v for eqn in jaxpr.eqns for v in eqn.outvars), len(number))
    for eqn in reversed(jaxpr.eqns):
        first = number.get(eqn, _NEVER)
        if first is _NEVER:
            first = min([needed[v] for v in eqn.outvars], default=_NEVER)
        elif eqn in moving:  # it can run at the latest before its first consumer
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
        if eqn in moving:
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
    return not node.reason.is_asked


def _size(eqn: JaxprEqn) -> int:
    """Bytes of a collective's operand or result, whichever is larger."""
    return max(size_of(eqn.invars[0]), size_of(eqn.outvars[0]))


def is_heavy(eqn: JaxprEqn) -> bool:
    """Whether an equation is expensive, or must not be reordered."""
    if eqn.primitive in _LIGHT:  # the common case, decided quickly
        return False
    if eqn.primitive in _HEAVY or eqn.effects or node_of(eqn) or eqn.primitive in COLLECTIVES:
        return True
    return any(is_heavy(e) for body in bodies(eqn) for e in body.eqns)


# --------------------------------------------------------------- the program with its combinations


@at_every_level
def combine(plan: Jaxpr) -> Jaxpr:
    """The plan with small collectives combined; the same one if there are none.

    Heavy equations stay in their order. Others come when their operands are ready, and a
    combination where its last member is. Where collectives are rings, one that is better replaced
    is a combination of its own.
    """
    found = combinations_of(plan)
    if cost_model().rings:
        taken = {eqn for c in found for eqn in c.members}
        found += [c for c in _alone(plan) if c.members[0] not in taken and _is_exchanged(c)]
    if not found:
        return plan
    written = _written(found)
    instead = {eqn: written.get(eqn, []) for c in found for eqn in c.members}
    eqns = [new for eqn in plan.eqns for new in instead.get(eqn, [eqn])]
    fixed = {eqn for eqn in plan.eqns if is_heavy(eqn) and not _may_move(eqn)}
    fixed |= {new for made in written.values() for new in made}
    return plan.replace(eqns=in_order(eqns, may_wait=lambda eqn: eqn not in fixed))


def _is_exchanged(combination: Combination) -> bool:
    """Whether AllToAlls are faster than a ring."""
    node = node_of(combination.members[0])
    assert isinstance(node, CollectiveNode)
    return combination.size <= EXCHANGED and can_be_exchanged(node)


def _written(combinations: Sequence[Combination]) -> dict[JaxprEqn, list[JaxprEqn]]:
    """The equations of every combination, by its last member; all traced in one go, for speed."""

    def all_together(*operands: jax.Array) -> list[jax.Array]:
        left, results = iter(operands), []
        for combination in combinations:
            values = [next(left) for _ in combination.members]
            exchanged = cost_model().rings and _is_exchanged(combination)
            results += run_together(combination.members, values, exchanged)
        return results

    members = [eqn for combination in combinations for eqn in combination.members]
    operands, results = [e.invars[0] for e in members], [e.outvars[0] for e in members]
    equations, _ = equations_of(all_together, operands, results)
    found: dict[JaxprEqn, list[JaxprEqn]] = {}
    left = iter(equations)
    for combination in combinations:
        last = combination.members[-1]
        eqns = found[last] = [next(left)]
        while eqns[-1].outvars != last.outvars:  # the equation of its last result ends it
            eqns.append(next(left))
    return found
