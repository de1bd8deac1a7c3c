"""What XLA for CPUs does to a body, before it fuses operators and after.

Random bits are drawn in a loop of their own. Common subexpressions are eliminated, which with JAX
0.10 undoes rematerialization outside of loops. Large reductions run in a library that fuses at most
one product: its operands are materialized, broadcasts included. Products and convolutions need one
order of dims, so operands in other orders are transposed first. The backward pass of pooling uses
indices.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import optimization_barrier_p
from gshard.forecast.compilers.base import DEAR, Compiler, Dataflow, Order, Places, in_order
from gshard.forecast.dataflow import Body, DeviceOperator, Equations, Op, elements
from gshard.graph.regions import LOOPS, Stored
from gshard.moving.inventory import transfers
from gshard.tensors.tile import size_of

_JOINS = {p.threefry2x32_p: False, p.concatenate_p: True}
_REDUCED_APART = {p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p}
_REDUCED_FROM = 4096  # from this many elements on the library is called
_TAKEN_IN = {p.mul_p, p.square_p, p.integer_pow_p}
BARRIERS_HOLD = jax.__version_info__ >= (0, 11)  # before, XLA for CPUs ignored them


class CPU(Compiler):
    """XLA for CPUs; it reduces gradients over devices together, after the last of them."""

    keeps_shapes = True

    def prepare(self, ops: list[Op], outputs: list[Any], devices: int) -> Equations:
        """The equations as they are before fusion."""
        updates = [op for op in ops if op.primitive is p.dynamic_update_slice_p]
        updated = {op.reads[0] for op in updates}  # in place: other reads of it come before
        slices = [o for o in ops if o.primitive is p.dynamic_slice_p and o.reads[0] in updated]
        # A slice of all rows computes nothing, and their update copies what has been stored.
        apart = {o for o in slices if elements(o.eqn.invars[0]) > elements(o.writes[0])}
        apart |= {o for o in updates if elements(o.eqn.invars[1]) == elements(o.writes[0])}
        ops = [replace(o, joins=o not in apart and _JOINS.get(o.primitive, o.joins)) for o in ops]
        ops, outputs = _once(ops, outputs)
        ops = _with_broadcasts(ops)
        found = []
        for op in ops:
            expand = _EXPANDED.get(op.primitive)
            found += expand(op) if expand else [op]
        return found, outputs

    def stores(self, flow: Dataflow) -> set[Any]:
        """What large reductions read too: their operand, or the operands of a fused product."""
        stored = super().stores(flow)
        counts = Counter(v for op in flow.ops for v in op.reads)
        for op in filter(_is_apart, flow.ops):
            read = _taken_in(op, flow.makers, counts) or op
            stored.update(map(flow.stands_for, read.reads))
        return stored

    def recomputes(self, flow: Dataflow, stored: set[Any]) -> set[Any]:
        """The cheap ones, in fusions."""
        dear: set[Any] = set()
        cheap: set[Any] = set()
        for op in flow.ops:
            if not op.joins or op.reduces or not op.writes or flow.is_view(op):
                continue
            joined = [v for v in map(flow.stands_for, op.reads) if v not in stored]
            if op.primitive in DEAR or any(v in dear for v in joined):
                dear.update(op.writes)
            else:
                cheap.update(v for v in op.writes if v in stored)
        return cheap

    def together(self, operators: list[DeviceOperator]) -> list[DeviceOperator]:
        """Independent all-reduces combined into one, at the position of the last."""
        merged: dict[Any, DeviceOperator] = {}
        late: dict[DeviceOperator, DeviceOperator] = {}
        behind: dict[Any, set[DeviceOperator]] = {}  # combined all-reduces that a value depends on
        for operator in operators:
            waits: set[DeviceOperator] = set().union(
                *(behind.get(v, set()) for v in operator.reads)
            )
            sent = transfers(operator.root.eqn)
            if sent and sent[0].kind == "all_reduce":
                key = (sent[0].reduction, sent[0].groups, len(waits))
                first = merged.setdefault(key, operator)
                late[operator] = first
                if first is not operator:
                    first.reads += operator.reads
                    first.writes += operator.writes
                    first.members += operator.members
                waits = waits | {first}
            for var in operator.writes:
                behind[var] = waits
        last = {late[o]: number for number, o in enumerate(operators) if o in late}
        ordered = []
        for number, operator in enumerate(operators):
            joint = late.get(operator)
            if joint is None or last[joint] == number:
                ordered.append(joint or operator)
        return in_order(ordered)

    def schedules(self, body: Body, given: Places) -> list[Order]:
        """Breadth first; zeros for the stacked results of loops are live from the start."""
        order, aside = _breadth_first(body), _kept_aside(body, given)
        loops = [(o, o.loop.scan) for o in body.operators if o.loop and o.loop.scan]
        stacks = [v for o, (_, carry) in loops for v in o.writes[carry:]]
        return [Order(order, [*aside, *stacks], _in_given_places(body, order, given, aside))]


def _once(ops: list[Op], outputs: list[Any]) -> tuple[list[Op], list[Any]]:
    """Common subexpression elimination.

    What reads a value behind an optimization barrier waits for the barrier, if barriers hold.
    """
    same: dict[Any, Any] = {}
    behind: dict[Any, Stored] = {}
    seen: dict[Any, Op] = {}
    kept = []
    for op in ops:
        passed = dict.fromkeys(behind[v] for v in op.reads if v in behind)
        reads = (*(same.get(v, v) for v in op.reads), *passed)
        if op.primitive is optimization_barrier_p:
            same.update(zip(op.writes, reads, strict=False))
            if BARRIERS_HOLD:
                barrier = Stored(ShapedArray((), bool))
                behind.update(dict.fromkeys(op.writes, barrier))
                kept.append(Op(op.eqn, reads, (barrier,), False))
            continue
        fixed = tuple(str(a) for a in op.eqn.invars if isinstance(a, Literal))
        settings = tuple((k, _key(v)) for k, v in sorted(op.eqn.params.items()))
        first = seen.setdefault((op.primitive, reads, fixed, settings), op)
        if first is op or op.eqn.effects or op.primitive in LOOPS or transfers(op.eqn):
            kept.append(Op(op.eqn, reads, op.writes, op.joins))
        else:
            same.update(zip(op.writes, first.writes, strict=True))
    return kept, [v if isinstance(v, Literal) else same.get(v, v) for v in outputs]


def _key(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def _is_apart(op: Op) -> bool:
    return op.primitive in _REDUCED_APART and elements(op.reads[0]) >= _REDUCED_FROM


def _taken_in(op: Op, makers: Mapping[Any, Op], counts: Mapping[Any, int]) -> Op | None:
    """The product that a reduction is fused with."""
    maker = makers.get(op.reads[0])
    return maker if maker and maker.primitive in _TAKEN_IN and counts[op.reads[0]] == 1 else None


def _with_broadcasts(ops: list[Op]) -> list[Op]:
    """The operands of products fused into reductions, each broadcast to the product's shape."""
    makers = {v: op for op in ops for v in op.writes}
    counts = Counter(v for op in ops for v in op.reads)
    widened: dict[Any, Any] = {}
    changed: dict[Op, list[Op]] = {}
    for op in ops:
        product = _taken_in(op, makers, counts) if _is_apart(op) else None
        if product is None:
            continue
        aval = product.writes[0].aval
        new = []
        for var in product.reads:
            if elements(var) < elements(product.writes[0]) and (var, aval.shape) not in widened:
                wide = widened[var, aval.shape] = Stored(aval)
                new.append(Op(product.eqn, (var,), (wide,), True, p.broadcast_in_dim_p))
        reads = tuple(widened.get((v, aval.shape), v) for v in product.reads)
        changed[product] = [*new, replace(product, reads=reads)]
    return [new for op in ops for new in changed.get(op, [op])]


def _as_matrices(op: Op) -> list[Op]:
    """A product, and the transposes that turn its operands into matrices.

    The first operand needs dims (batch, free, contracted), the second (batch, contracted, free).
    A product whose operands already have that form needs no transposes.
    """
    contracted, batch = op.eqn.params["dimension_numbers"]
    if len(op.reads) != 2:
        return [op]
    orders, simple = [], True
    for number, var in enumerate(op.reads):
        summed, kept, rank = contracted[number], batch[number], len(var.aval.shape)
        own = [d for d in range(rank) if d not in summed and d not in kept]
        orders.append([*kept, *own, *summed] if number == 0 else [*kept, *summed, *own])
        leads = list(kept) == list(range(len(kept)))
        simple = simple and leads and len(summed) == 1 and len(own) <= 1
    before, reads = [], list(op.reads)
    for number, order in enumerate(orders):
        if not simple and order != sorted(order):
            before.append(_transposed(op, reads[number]))
            reads[number] = before[-1].writes[0]
    return [*before, op if simple else replace(op, reads=tuple(reads), added=op.primitive)]


def _transposed(op: Op, var: Any) -> Op:
    """The transpose of an operand that a compiler adds."""
    return Op(op.eqn, (var,), (Stored(var.aval),), True, p.transpose_p)


def _with_transposes(op: Op) -> list[Op]:
    """A convolution between transposes, where its dims are not (batch, places, features)."""
    specs = op.eqn.params["dimension_numbers"]
    rank = len(specs.lhs_spec)
    data = (0, rank - 1, *range(1, rank - 1))
    kernel = (rank - 1, rank - 2, *range(rank - 2))
    before, reads = [], list(op.reads)
    if len(reads) == 2:
        for number, (spec, wanted) in enumerate(((specs.lhs_spec, data), (specs.rhs_spec, kernel))):
            if tuple(spec) != wanted:
                before.append(_transposed(op, reads[number]))
                reads[number] = before[-1].writes[0]
    if tuple(specs.out_spec) == data:
        return [*before, replace(op, reads=tuple(reads))]
    made = Stored(op.writes[0].aval)
    after = Op(op.eqn, (made,), op.writes, True, p.transpose_p)
    return [*before, replace(op, reads=tuple(reads), writes=(made,)), after]


def _with_places(op: Op) -> list[Op]:
    """The backward pass of max pooling: a scatter-add into zeros, with indices for each dim."""
    pooled = max(op.reads, key=elements)
    rank = len(pooled.aval.shape)
    places = [Stored(ShapedArray(pooled.aval.shape, "int32")) for _ in range(rank)]
    zeros = Stored(op.writes[0].aval)
    before = [Op(op.eqn, (), (v,), True, p.iota_p) for v in (*places, zeros)]
    return [*before, replace(op, reads=(*op.reads, *places, zeros))]


_EXPANDED: dict[Primitive, Callable[[Op], list[Op]]] = {
    p.dot_general_p: _as_matrices,
    p.conv_general_dilated_p: _with_transposes,
    p.select_and_scatter_add_p: _with_places,
    p.select_and_gather_add_p: _with_places,
}


def _breadth_first(body: Body) -> list[DeviceOperator]:
    """Operators in the order in which their operands become ready."""
    pending = {o: len(set(o.reads)) for o in body.operators}
    outside = [v for v in body.readers if v not in body.makers]
    queue = deque(o for o in body.operators if not pending[o])
    order: list[DeviceOperator] = []
    ready: deque[Any] = deque(dict.fromkeys([*body.inputs, *outside]))
    while ready or queue:
        if ready:
            waiting = body.readers.get(ready.popleft(), ())
            for operator in sorted(waiting, key=lambda o: _when_rewritten(o, body)):
                pending[operator] -= 1
                if not pending[operator]:
                    queue.append(operator)
            continue
        order.append(queue.popleft())
        ready.extend(dict.fromkeys(order[-1].writes))
    return order


def _when_rewritten(operator: DeviceOperator, body: Body) -> int:
    """When XLA for CPUs rewrites a matrix product: consumers of a value run in that order.

    Unchanged are those that contract the rows of their first operand. Last are those whose result
    is transposed, except in programs for several devices, which are simplified again: there they
    are first.
    """
    root = operator.root
    if root.primitive is not p.dot_general_p or not root.reads:
        return 1
    if any(body.alias[v] == root.writes[0] for v in body.folded):
        return 0 if any(transfers(o.root.eqn) for o in body.operators) else 2
    ((summed, _), (kept, _)) = root.eqn.params["dimension_numbers"]
    by_rows = len(kept) in summed
    return 0 if not root.added and by_rows != (root.reads[0] in body.folded) else 1


def _kept_aside(body: Body, given: Places) -> list[Any]:
    """Donated arguments that XLA for CPUs copies first, before it schedules.

    An operator may read them after their buffer is overwritten: one on which the overwriting
    operator does not depend.
    """
    found = []
    for number, argument in given:
        result = body.outputs[number]
        maker = None if isinstance(result, Literal) else body.makers.get(body.stands_for(result))
        if maker is None:
            continue
        before = _ancestors(maker, body.makers)
        if any(o not in before for o in body.readers.get(argument, ())):
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
