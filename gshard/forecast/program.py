"""A per-device program as the operators that a compiler makes of it.

XLA fuses pointwise equations into their consumers, so most values of a program are never stored.
Here a value is stored if it leaves the body, if an operator that cannot be fused reads or makes it,
or if it is expensive to compute and read more than once. Each stored value of pointwise equations
is one operator, whose operands are the stored values that it depends on. How much is fused depends
on the compiler: XLA for TPUs also fuses a matrix product with the producers of its operands and the
consumers of its result; for CPUs see `gshard.forecast.cpu`: there, gradients are reduced over
devices together, after the last of them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.forecast.cpu import as_on_cpus, read_by_reductions
from gshard.forecast.gpu import as_on_gpus, ends_product, is_window
from gshard.forecast.ops import (
    ALIASES,
    LOOPS,
    PRODUCTS,
    Op,
    Stored,
    inlined,
    size_of,
)
from gshard.graph.regions import bodies, counts_of
from gshard.graph.source import is_unlikely
from gshard.moving.inventory import transfers

STYLES = ("cpu", "gpu", "tpu")  # XLA's compilers, as far as they differ in what they fuse
_DEAR = {
    "exp", "exp2", "expm1", "log", "log1p", "pow", "sqrt", "rsqrt", "cbrt", "tanh", "sin", "cos",
    "tan", "logistic", "erf", "erf_inv", "erfc", "div", "rem", "threefry2x32", "atan2",
    "integer_pow", "digamma", "lgamma",
}  # fmt: skip
_FROM_LITTLE = {"broadcast_in_dim", "iota"}


@dataclass(eq=False)
class DeviceOperator:
    """What a device runs as one: an unfused op, or a fused group that ends in `root`."""

    root: Op
    reads: list[Any]
    writes: list[Any]
    members: list[Op] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """What it reads and writes, each stored value once; of a view only what it shows."""
        reads = dict.fromkeys(self.root.reads) if len(self.members) == 1 else self.reads
        return sum(map(size_of, reads)) + sum(map(size_of, self.writes))


@dataclass
class Body:
    """The operators of one program or loop body, in its order."""

    jaxpr: Jaxpr
    inputs: list[Any]
    outputs: list[Any]
    operators: list[DeviceOperator]
    alias: dict[Any, Any]  # values that are another one under a new shape
    folded: set[Any]  # of those what a product does on the way

    def stands_for(self, var: Any) -> Any:
        """The stored value of which `var` is a view."""
        while var in self.alias:
            var = self.alias[var]
        return var


@functools.lru_cache(maxsize=512)
def body_of(jaxpr: Jaxpr, style: str, devices: int = 1) -> Body:
    """What a compiler makes of one body.

    Of an unpartitioned program: what it makes at most of its part on one of `devices`.
    """
    ops, outputs = inlined(jaxpr)
    if style == "cpu":
        ops, outputs = as_on_cpus(ops, outputs)
    if style == "gpu":
        ops = as_on_gpus(ops, devices)
    makers = {var: op for op in ops for var in op.writes}
    readers: dict[Any, list[Op]] = defaultdict(list)
    for op in ops:
        for var in op.reads:
            readers[var].append(op)
    folded = {v for op in ops if _is_folded(op, makers, readers) for v in op.writes}
    if style == "gpu":
        folded |= {v for op in ops if ends_product(op, makers, readers) for v in op.writes}
        folded |= {v for op in ops if is_window(op, readers) for v in op.writes}
    alias = {
        new: old
        for op in ops
        if op.name in ALIASES or folded.intersection(op.writes)
        if len(op.reads) == len(op.writes)
        for new, old in zip(op.writes, op.reads, strict=True)
    }
    leaving = {v for v in outputs if not isinstance(v, Literal)}
    body = Body(jaxpr, [*jaxpr.constvars, *jaxpr.invars], outputs, [], alias, folded)
    stored = _stored(ops, readers, leaving, body)
    if style == "cpu":
        stored.update(map(body.stands_for, read_by_reductions(ops, makers)))
    if style == "tpu":
        _join_products(ops, readers, leaving, stored, body)
    ends = stored - _recomputed(ops, stored, body) if style == "cpu" else stored
    rows = _RowStatistics()
    for op in ops:
        if op.writes and op.writes[0] in alias:
            continue
        if op.joins or (style == "tpu" and op.name in PRODUCTS):
            kept = [v for v in op.writes if v in stored]
            if kept:
                ended = (stored if op.reduces else ends) | rows.makers.keys()
                body.operators.append(_fusion(op, kept, makers, ended, body))
                rows.note(body.operators[-1])
        else:
            reads = list(dict.fromkeys(body.stands_for(v) for v in op.reads))
            body.operators.append(DeviceOperator(op, reads, list(op.writes), [op]))
    if style == "cpu":
        body.operators = _reduced_together(body.operators)
    return body


class _RowStatistics:
    """Reductions of rows that stay on chip in a first operator: it also writes what others read.

    They are small. To compute them again would keep the rows in memory until then.
    """

    def __init__(self) -> None:
        self.makers: dict[Any, DeviceOperator] = {}

    def note(self, operator: DeviceOperator) -> None:
        """Remember what an operator computes on the way, and that it writes what this one reads."""
        for var in operator.reads:
            maker = self.makers.get(var)
            if maker is not None and var not in maker.writes:
                maker.writes.append(var)
        for op in operator.members:
            if op.by_rows:
                self.makers |= dict.fromkeys(op.writes, operator)


def _is_folded(op: Op, makers: dict[Any, Op], readers: dict[Any, list[Op]]) -> bool:
    """Whether a matrix product absorbs this transpose, of an operand or of its result."""
    if op.name != "transpose" or len(op.writes[0].aval.shape) != 2 or not op.reads:
        return False
    users, maker = readers[op.writes[0]], makers.get(op.reads[0])
    made = maker is not None and maker.name == "dot_general" and len(readers[op.reads[0]]) == 1
    return made or (bool(users) and all(u.name == "dot_general" for u in users))


def _reduced_together(operators: list[DeviceOperator]) -> list[DeviceOperator]:
    """Independent all-reduces combined into one, at the position of the last."""
    merged: dict[Any, DeviceOperator] = {}
    late: dict[DeviceOperator, DeviceOperator] = {}
    behind: dict[Any, set[DeviceOperator]] = {}  # combined all-reduces that a value depends on
    for operator in operators:
        waits: set[DeviceOperator] = set().union(*(behind.get(v, set()) for v in operator.reads))
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
    return _in_order(ordered)


def _in_order(operators: list[DeviceOperator]) -> list[DeviceOperator]:
    """The operators in topological order, otherwise unchanged."""
    makers = {v: o for o in operators for v in o.writes}
    done: set[DeviceOperator] = set()
    order: list[DeviceOperator] = []
    for goal in operators:
        stack = [goal]
        while stack:
            operator = stack[-1]
            waiting = [makers[v] for v in operator.reads if v in makers and makers[v] not in done]
            if operator in done or not waiting:
                stack.pop()
                if operator not in done:
                    done.add(operator)
                    order.append(operator)
            else:
                stack.append(waiting[0])
    return order


def _stored(
    ops: Sequence[Op], readers: dict[Any, list[Op]], leaving: set[Any], body: Body
) -> set[Any]:
    """The values that are written to memory."""
    stored: set[Any] = set()
    for op in ops:
        for var in op.writes:
            needed = var in leaving or any(not u.joins for u in readers[var])
            if needed or (var not in body.alias and (not op.joins or op.reduces)):
                stored.add(body.stands_for(var))
    dear: set[Any] = set()  # values that are not stored and expensive to recompute
    of_rows: set[Any] = set()  # row statistics that stay on chip
    for op in ops:
        if op.by_rows or (op.reads and all(body.stands_for(v) in of_rows for v in op.reads)):
            of_rows.update(op.writes)
            continue
        if op.name in _FROM_LITTLE or not op.writes or op.writes[0] in body.alias:
            continue
        if op.name in _DEAR or any(body.stands_for(v) in dear for v in op.reads):
            for var in op.writes:
                if var not in stored and _uses(var, readers, body) > 1:
                    stored.add(var)
                elif var not in stored:
                    dear.add(var)
    return stored


def _recomputed(ops: Sequence[Op], stored: set[Any], body: Body) -> set[Any]:
    """Stored values that XLA for CPUs recomputes in fusions: the cheap ones."""
    dear: set[Any] = set()
    cheap: set[Any] = set()
    for op in ops:
        if not op.joins or op.reduces or not op.writes or op.writes[0] in body.alias:
            continue
        joined = [v for v in map(body.stands_for, op.reads) if v not in stored]
        if op.name in _DEAR or any(v in dear for v in joined):
            dear.update(op.writes)
        else:
            cheap.update(v for v in op.writes if v in stored)
    return cheap


def _join_products(
    ops: Sequence[Op],
    readers: dict[Any, list[Op]],
    leaving: set[Any],
    stored: set[Any],
    body: Body,
) -> None:
    """Remove from `stored` the values between a product and its single neighbour.

    An operator holds one product at most: `holding` are the values that already come with one.
    """
    holding: set[Any] = set()
    for op in ops:
        if not op.writes or op.writes[0] in body.alias:
            continue
        product = op.name in PRODUCTS
        found = [v for v in map(body.stands_for, op.reads) if v in holding]
        for extra in found if product else found[1:]:
            stored.add(extra)
            holding.discard(extra)
        for var in op.writes:
            users = _users(var, readers, body)
            alone = len(users) == 1 and not _leaves(var, leaving, readers, body)
            if product and alone and users[0].joins:
                stored.discard(var)
            joined = op.joins and not op.reduces and not found
            if alone and joined and users[0].name in PRODUCTS:
                stored.discard(var)
            if var not in stored and (product or found):
                holding.add(var)


def _users(var: Any, readers: dict[Any, list[Op]], body: Body) -> list[Op]:
    """Who reads a value, through views of it."""
    users = []
    for op in readers[var]:
        views = [w for w in op.writes if body.alias.get(w) is var]
        users += [u for w in views for u in _users(w, readers, body)] if views else [op]
    return users


def _leaves(var: Any, leaving: set[Any], readers: dict[Any, list[Op]], body: Body) -> bool:
    """Whether a value or a view of it leaves the body."""
    views = [w for op in readers[var] for w in op.writes if body.alias.get(w) is var]
    return var in leaving or any(_leaves(w, leaving, readers, body) for w in views)


def _uses(var: Any, readers: dict[Any, list[Op]], body: Body) -> int:
    """The number of consumers, without row-wise reductions, which are fused with theirs."""
    return sum(not u.by_rows for u in _users(var, readers, body))


def _fusion(
    root: Op, kept: list[Any], makers: dict[Any, Op], ends: set[Any], body: Body
) -> DeviceOperator:
    reads: dict[Any, None] = {}
    members: dict[Op, Op] = {root: root}
    waiting = [root]
    while waiting:
        for var in waiting.pop().reads:
            var = body.stands_for(var)
            maker = makers.get(var)
            if maker is None or var in ends:
                reads[var] = None
            elif maker not in members:
                members[maker] = maker
                waiting.append(maker)
    return DeviceOperator(root, list(reads), kept, list(members.values()))


def trips(eqn: JaxprEqn) -> int:
    """How often a body of this equation runs; as for balanced data if that depends on data."""
    if is_unlikely(eqn):
        return 0
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def walk(
    jaxpr: Jaxpr, style: str, devices: int = 1
) -> Iterator[tuple[DeviceOperator, int, tuple[JaxprEqn, ...]]]:
    """Every operator with its number of runs and its enclosing loops, bodies before their loop.

    All branches of a conditional are counted, as in the list of collectives.
    """
    yield from _walk(jaxpr, style, devices, 1, ())


def _walk(
    jaxpr: Jaxpr, style: str, devices: int, times: int, around: tuple[JaxprEqn, ...]
) -> Iterator[tuple[DeviceOperator, int, tuple[JaxprEqn, ...]]]:
    for operator in body_of(jaxpr, style, devices).operators:
        eqn = operator.root.eqn
        if operator.root.name in LOOPS:
            inner = bodies(eqn)
            for body in inner:
                yield from _walk(body, style, devices, times * trips(eqn), (*around, eqn))
            if operator.root.name == "scan" and style == "gpu":
                for copy in _stacking(eqn, body_of(inner[0], style, devices)):
                    yield copy, times * trips(eqn), (*around, eqn)
        else:
            yield operator, times, around


def _stacking(eqn: JaxprEqn, body: Body) -> list[DeviceOperator]:
    """The copies of each iteration of a loop on GPUs: slices of its inputs, and stacked results.

    Pointwise operators read a slice in place, and a result without other consumers is written in
    place; matrix products read and write contiguous arrays only.
    """
    consts, carry = counts_of(eqn)
    slices = body.inputs[len(body.jaxpr.constvars) + consts + carry :]
    whole = {v for o in body.operators if not o.root.joins for v in (*o.reads, *o.writes)}
    read = {v for o in body.operators for v in o.reads}
    results = [body.stands_for(v) for v in body.outputs[carry:] if not isinstance(v, Literal)]
    copied = [v for v in slices if v in whole]
    copied += [v for v in results if v in whole or v in read]
    return [
        DeviceOperator(op, [v], [op.writes[0]], [op])
        for v in copied
        for op in [Op(eqn, (v,), (Stored(v.aval),), False, "copy")]
    ]
