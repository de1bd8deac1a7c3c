"""A pass over a plan that combines small collectives of one kind.

Each collective has a latency, whatever its size. Where the operands of several are ready before the
result of the first is needed, one collective replaces them: 19 small gradients
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

A combined AllReduce takes the flattened operands concatenated. An AllGather does too, and its
result has one row per member; a ReduceScatter takes such rows. The equations for one of the values
have the user's line of that value, so that the program itself shows what is combined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph import LOOPS, at_every_level, bodies, in_order
from gshard.graph.caching import cached
from gshard.graph.kinds import APART, PRODUCTS
from gshard.graph.reason import Reason
from gshard.graph.source import because, reason_of
from gshard.moving import costs
from gshard.moving.collectives import AllGather, AllReduce, AllToAll, CollectiveNode, ReduceScatter
from gshard.moving.costs import EXCHANGED, LATENCIES, cost_model
from gshard.moving.inventory import COLLECTIVES
from gshard.moving.nodes import Code, add_node, node_of
from gshard.planning.improve.expand import inlined
from gshard.tensors.tile import size_of

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
    node = eqn.params["node"]
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
    written = {c.members[-1]: _written(c) for c in found}
    instead = {eqn: written.get(eqn, []) for c in found for eqn in c.members}
    eqns = [new for eqn in plan.eqns for new in instead.get(eqn, [eqn])]
    made = {new for each in written.values() for new in each}
    eqns = in_order(eqns, lambda e: e not in made and (not is_heavy(e) or _may_move(e)))
    return plan.replace(eqns=eqns)


def _is_exchanged(combination: Combination) -> bool:
    """Whether AllToAlls are faster than a ring."""
    sizes = set(map(len, combination.members[0].params["node"].groups))
    return combination.size <= EXCHANGED and len(sizes) == 1  # AllToAlls take groups of one


def _written(combination: Combination) -> list[JaxprEqn]:
    """The equations of a combination; those of equal ones are traced once."""
    members = combination.members
    operands, results = [e.invars[0] for e in members], [e.outvars[0] for e in members]
    nodes = tuple([eqn.params["node"].unexplained() for eqn in members])
    shapes, dtype = tuple([a.aval.shape for a in operands]), operands[0].aval.dtype

    def origin(inner: JaxprEqn) -> tuple[JaxprEqn, Reason]:
        step = reason_of(inner)
        member = members[int(step.detail)]
        return member, replace(reason_of(member), values=step.values)

    by_exchange = cost_model().rings and _is_exchanged(combination)
    code = _code(nodes, shapes, dtype, costs.AT_ONCE if by_exchange else None)
    return inlined(code, operands, results, origin)


# ---------------------------------------------------------------- several collectives as one


@cached
def _code(
    nodes: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], dtype: Any, at_once: int | None
) -> Code:
    """The code of nodes that are collectives and differ only in their operands and dims.

    With `at_once`, it is AllToAlls: one for up to as many bytes. The reason of an equation has the
    number of the member whose line it is on.
    """
    reasons = [Reason("member", detail=str(number)) for number in range(len(nodes))]
    node = replace(nodes[0], reason=replace(reasons[0], values=len(nodes)))

    def run(*values: jax.Array) -> list[jax.Array]:
        rows = []
        for reason, own, x in zip(reasons, nodes, values, strict=True):
            with because(reason):
                rows.append(_as_rows(own, x))
        with because(node.reason):
            packed = lax.concatenate(rows, rows[0].ndim - 1)
            if at_once is not None:
                whole = _exchanged(node, packed, at_once)
            elif isinstance(node, ReduceScatter):
                whole = add_node(replace(node, dim=0), lax.reshape(packed, (packed.size,)))
            elif isinstance(node, AllGather):
                whole = add_node(replace(node, dim=0), packed)
                whole = lax.reshape(whole, (whole.size // packed.size, packed.size))
            else:
                whole = add_node(node, packed)
        results, start = [], 0
        for reason, own, row, shape in zip(reasons, nodes, rows, shapes, strict=True):
            end = start + row.shape[-1]
            with because(reason):
                part = lax.slice_in_dim(whole, start, end, axis=-1)
                results.append(_as_result(own, part, shape))
            start = end
        return results

    return Code.of(run, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])


def _exchanged(node: CollectiveNode, packed: jax.Array, at_once: int) -> jax.Array:
    """The collective of all operands, made of AllToAlls; an AllReduce may be padded.

    In an AllReduce each member sums one part and sends the sum to all others. Few numbers are sent
    to all members in one step.
    """
    members = len(node.groups[0])

    def exchange(rows: jax.Array) -> jax.Array:
        return add_node(AllToAll(node.reason, node.groups), rows)

    def to_all(x: jax.Array) -> jax.Array:
        return exchange(lax.broadcast(x, (members,)))

    if isinstance(node, AllGather):
        return to_all(packed)
    if isinstance(node, ReduceScatter):
        return _reduced(exchange(packed), lax.reduce_sum)
    assert isinstance(node, AllReduce)
    reduce = {"sum": lax.reduce_sum, "max": lax.reduce_max, "min": lax.reduce_min}[node.kind]
    if packed.size <= 2 or packed.nbytes * members <= at_once:
        return _reduced(lax.reshape(to_all(packed), (members, packed.size)), reduce)
    parts = lax.pad(packed, packed.dtype.type(0), [(0, -packed.size % members, 0)])
    parts = lax.reshape(parts, (members, parts.size // members))
    whole = to_all(_reduced(exchange(parts), reduce))
    return lax.reshape(whole, (whole.size,))


def _reduced(rows: jax.Array, reduce: Callable[..., jax.Array]) -> jax.Array:
    """The reduction of rows; narrow floats are accumulated in float32."""
    short = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
    wide = rows.astype(jnp.float32) if short else rows
    return reduce(wide, (0,)).astype(rows.dtype)


def _as_rows(node: CollectiveNode, x: jax.Array) -> jax.Array:
    """An operand flattened; for a ReduceScatter, one row per member's part of the result."""
    if not isinstance(node, ReduceScatter):
        return lax.reshape(x, (x.size,))
    dim, members = node.dim, len(node.groups[0])
    shape = (*x.shape[:dim], members, x.shape[dim] // members, *x.shape[dim + 1 :])
    return lax.reshape(_moved(lax.reshape(x, shape), dim, 0), (members, x.size // members))


def _as_result(node: CollectiveNode, x: jax.Array, local: tuple[int, ...]) -> jax.Array:
    """The inverse, for the result of an operand of this shape."""
    if not isinstance(node, AllGather):
        return lax.reshape(x, node.result(local))
    parts = lax.reshape(x, (len(node.groups[0]), *local))
    return lax.reshape(_moved(parts, 0, node.dim), node.result(local))


def _moved(x: jax.Array, dim: int, to: int) -> jax.Array:
    """`x` with one dim moved to another place."""
    order = [d for d in range(x.ndim) if d != dim]
    order.insert(to, dim)
    return lax.transpose(x, order)
