"""What all of XLA's compilers do to a body: which values they store, and what they fuse.

Pointwise equations are fused into their consumers, so most values of a program are never stored. A
value is stored if it leaves the body, if an operator that cannot be fused reads or makes it, or if
it is expensive to compute and read more than once. Each stored value of pointwise equations is one
operator, whose operands are the stored values that it depends on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar, NamedTuple

from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.forecast.dataflow import Body, DeviceOperator, Equations, Op

DEAR = {
    p.exp_p, p.exp2_p, p.expm1_p, p.log_p, p.log1p_p, p.pow_p, p.sqrt_p, p.rsqrt_p, p.cbrt_p,
    p.tanh_p, p.sin_p, p.cos_p, p.tan_p, p.logistic_p, p.erf_p, p.erf_inv_p, p.erfc_p, p.div_p,
    p.rem_p, p.threefry2x32_p, p.atan2_p, p.integer_pow_p, p.digamma_p, p.lgamma_p,
}  # fmt: skip
_FROM_LITTLE = {p.broadcast_in_dim_p, p.iota_p}

Places = tuple[tuple[int, Any], ...]  # results by index, each with the argument it overwrites


class Order(NamedTuple):
    """An order of operators; values live `early`, from the start; and values `elsewhere`, in the
    buffers of arguments or results."""

    order: Sequence[DeviceOperator]
    early: Sequence[Any] = ()
    elsewhere: Set[Any] = frozenset()


class Dataflow:
    """The equations of a body before they are fused.

    `folds` says which of them a product computes as it reads its operands or writes its result.
    """

    def __init__(
        self, ops: Sequence[Op], outputs: list[Any], folds: Callable[[Op, Dataflow], bool]
    ):
        self.ops = ops
        self.leaving = {v for v in outputs if not isinstance(v, Literal)}
        self.makers = {var: op for op in ops for var in op.writes}
        self.readers: dict[Any, list[Op]] = defaultdict(list)
        for op in ops:
            for var in op.reads:
                self.readers[var].append(op)
        self.folded = {v for op in ops if folds(op, self) for v in op.writes}
        self.alias = {
            new: old
            for op in ops
            if op.is_view or self.folded.intersection(op.writes)
            if len(op.reads) == len(op.writes)
            for new, old in zip(op.writes, op.reads, strict=True)
        }

    def stands_for(self, var: Any) -> Any:
        """The value of which `var` is a view."""
        while var in self.alias:
            var = self.alias[var]
        return var

    def is_view(self, op: Op) -> bool:
        """Whether it makes no value of its own."""
        return bool(op.writes) and op.writes[0] in self.alias

    def users(self, var: Any) -> list[Op]:
        """Who reads a value, through views of it."""
        users = []
        for op in self.readers[var]:
            views = [w for w in op.writes if self.alias.get(w) is var]
            users += [u for w in views for u in self.users(w)] if views else [op]
        return users

    def leaves(self, var: Any) -> bool:
        """Whether a value or a view of it leaves the body."""
        views = [w for op in self.readers[var] for w in op.writes if self.alias.get(w) is var]
        return var in self.leaving or any(map(self.leaves, views))


class Compiler:
    """One of XLA's compilers, as far as they differ in what they fuse and store."""

    overlaps: ClassVar[bool] = False  # schedules collectives beside products
    copies_slices: ClassVar[bool] = True  # of a loop's arguments, for operators that are not fused
    keeps_shapes: ClassVar[bool] = False  # a fusion reuses the buffers of its result's shape alone

    def prepare(self, ops: list[Op], outputs: list[Any], devices: int) -> Equations:
        """The equations of a body, and its results, as they are before fusion.

        For an unpartitioned program, what is possible on each of `devices`.
        """
        return ops, outputs

    def folds(self, op: Op, flow: Dataflow) -> bool:
        """Whether a matrix product computes an equation as it reads its operand or writes its
        result: a transpose."""
        if op.primitive is not p.transpose_p or len(op.writes[0].aval.shape) != 2 or not op.reads:
            return False
        users, maker = flow.readers[op.writes[0]], flow.makers.get(op.reads[0])
        alone = len(flow.readers[op.reads[0]]) == 1
        made = maker is not None and maker.primitive is p.dot_general_p and alone
        return made or (bool(users) and all(u.primitive is p.dot_general_p for u in users))

    def fuses(self, op: Op) -> bool:
        """Whether an equation is fused with its producers."""
        return op.joins

    def stores(self, flow: Dataflow) -> set[Any]:
        """The values that are written to memory."""
        stored: set[Any] = set()
        for op in flow.ops:
            for var in op.writes:
                needed = var in flow.leaving or any(not u.joins for u in flow.readers[var])
                if needed or (var not in flow.alias and (not op.joins or op.reduces)):
                    stored.add(flow.stands_for(var))
        dear: set[Any] = set()  # values that are not stored and expensive to recompute
        of_rows: set[Any] = set()  # row statistics that stay on chip
        for op in flow.ops:
            if op.by_rows or (op.reads and all(flow.stands_for(v) in of_rows for v in op.reads)):
                of_rows.update(op.writes)
                continue
            if op.primitive in _FROM_LITTLE or not op.writes or flow.is_view(op):
                continue
            if op.primitive in DEAR or any(flow.stands_for(v) in dear for v in op.reads):
                for var in op.writes:
                    if var not in stored:
                        # Row-wise reductions are fused with the other consumers.
                        several = sum(not u.by_rows for u in flow.users(var)) > 1
                        (stored if several else dear).add(var)
        return stored

    def recomputes(self, flow: Dataflow, stored: set[Any]) -> set[Any]:
        """The stored values that other operators compute again instead of reading them."""
        return set()

    def together(self, operators: list[DeviceOperator]) -> list[DeviceOperator]:
        """The operators with those combined that the compiler combines."""
        return operators

    def stacking(self, scan: JaxprEqn, body: Body) -> list[DeviceOperator]:
        """The copies of each step of a scan that are operators of their own."""
        return []

    def schedules(self, body: Body, given: Places) -> list[Order]:
        """The orders among which the compiler takes the one that needs the least memory."""
        return [Order(body.operators), Order(depth_first(body))]


def fused(flow: Dataflow, compiler: Compiler) -> list[DeviceOperator]:
    """The operators that a compiler makes of a body's equations."""
    stored = compiler.stores(flow)
    ends = stored - compiler.recomputes(flow, stored)
    operators: list[DeviceOperator] = []
    on_chip: dict[Any, DeviceOperator] = {}  # reductions of rows, by their results
    for op in flow.ops:
        if flow.is_view(op):
            continue
        if not compiler.fuses(op):
            reads = list(dict.fromkeys(map(flow.stands_for, op.reads)))
            operators.append(DeviceOperator(op, reads, list(op.writes), [op]))
        elif kept := [v for v in op.writes if v in stored]:
            ended = (stored if op.reduces else ends) | on_chip.keys()
            operators.append(_fusion(op, kept, flow, ended))
            _note_rows(operators[-1], on_chip)
    return compiler.together(operators)


def _fusion(root: Op, kept: list[Any], flow: Dataflow, ends: set[Any]) -> DeviceOperator:
    """An operator that ends in `root` and computes what it depends on, up to the values `ends`."""
    reads: dict[Any, None] = {}
    members: dict[Op, Op] = {root: root}
    waiting = [root]
    while waiting:
        for var in map(flow.stands_for, waiting.pop().reads):
            maker = flow.makers.get(var)
            if maker is None or var in ends:
                reads[var] = None
            elif maker not in members:
                members[maker] = maker
                waiting.append(maker)
    return DeviceOperator(root, list(reads), kept, list(members.values()))


def _note_rows(operator: DeviceOperator, on_chip: dict[Any, DeviceOperator]) -> None:
    """Reductions of rows that stay on chip in a first operator: it also writes what others read.

    They are small. To compute them again would keep the rows in memory until then.
    """
    for var in operator.reads:
        maker = on_chip.get(var)
        if maker is not None and var not in maker.writes:
            maker.writes.append(var)
    for op in operator.members:
        if op.by_rows:
            on_chip |= dict.fromkeys(op.writes, operator)


def depth_first(body: Body) -> list[DeviceOperator]:
    """Operators ordered so that each result is finished before the next is begun."""
    place = {o: i for i, o in enumerate(body.operators)}
    results = [body.stands_for(v) for v in body.outputs if not isinstance(v, Literal)]
    goals = [body.makers[v] for v in results if v in body.makers]
    return in_order([*goals, *body.operators], lambda needed: min(needed, key=place.__getitem__))


def in_order(
    operators: Sequence[DeviceOperator],
    first: Callable[[list[DeviceOperator]], DeviceOperator] = lambda needed: needed[0],
) -> list[DeviceOperator]:
    """Operators after those that they read; `first` chooses among these."""
    makers = {v: o for o in operators for v in o.writes}
    order: dict[DeviceOperator, None] = {}
    for goal in operators:
        stack = [goal]
        while stack:
            operator = stack[-1]
            needed = [makers[v] for v in operator.reads if v in makers and makers[v] not in order]
            if needed and operator not in order:
                stack.append(first(needed))
            else:
                order[stack.pop()] = None
    return list(order)
