"""What XLA for CPUs does to a body before it fuses operators.

Random bits are drawn in a loop of their own. Common subexpressions are eliminated, which undoes
rematerialization outside of loops. Large reductions run in a library that fuses at most one
product: its operands are materialized, broadcasts included. Products and convolutions need one
order of dims, so operands in other orders are transposed first. The backward pass of pooling uses
indices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import Literal

from gshard.forecast.ops import LOOPS, Op, Stored, elements
from gshard.moving.inventory import transfers

_JOINS = {"threefry2x32": False, "concatenate": True}
_REDUCED_APART = {"reduce_sum", "reduce_max", "reduce_min"}
_REDUCED_FROM = 4096  # from this many elements on the library is called
_TAKEN_IN = {"mul", "square", "integer_pow"}


def as_on_cpus(ops: list[Op], outputs: list[Any]) -> tuple[list[Op], list[Any]]:
    """The equations as XLA's CPU compiler has them before fusion."""
    ops = [replace(op, joins=_JOINS.get(op.name, op.joins)) for op in ops]
    ops, outputs = _once(ops, outputs)
    ops = _with_broadcasts(ops)
    expanded = [_EXPANDED[op.name](op) if op.name in _EXPANDED else [op] for op in ops]
    return [op for each in expanded for op in each], outputs


def read_by_reductions(ops: Sequence[Op], makers: Mapping[Any, Op]) -> set[Any]:
    """What large reductions read: their operand, or the operands of a fused product."""
    counts = Counter(v for op in ops for v in op.reads)
    found: set[Any] = set()
    for op in ops:
        if _is_apart(op):
            product = _taken_in(op, makers, counts)
            found.update(product.reads if product else op.reads)
    return found


def _once(ops: list[Op], outputs: list[Any]) -> tuple[list[Op], list[Any]]:
    """Common subexpression elimination, which ignores optimization barriers as XLA does."""
    same: dict[Any, Any] = {}
    seen: dict[Any, Op] = {}
    kept = []
    for op in ops:
        reads = tuple(same.get(v, v) for v in op.reads)
        if op.name == "optimization_barrier":
            same.update(zip(op.writes, reads, strict=True))
            continue
        fixed = tuple(str(a) for a in op.eqn.invars if isinstance(a, Literal))
        settings = tuple((k, _key(v)) for k, v in sorted(op.eqn.params.items()))
        first = seen.setdefault((op.name, reads, fixed, settings), op)
        if first is op or op.eqn.effects or op.name in LOOPS or transfers(op.eqn):
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
    return op.name in _REDUCED_APART and elements(op.reads[0]) >= _REDUCED_FROM


def _taken_in(op: Op, makers: Mapping[Any, Op], counts: Mapping[Any, int]) -> Op | None:
    """The product that a reduction is fused with."""
    maker = makers.get(op.reads[0])
    return maker if maker and maker.name in _TAKEN_IN and counts[op.reads[0]] == 1 else None


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
                new.append(Op(product.eqn, (var,), (wide,), True, "broadcast_in_dim"))
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
            moved = Stored(reads[number].aval)
            before.append(Op(op.eqn, (reads[number],), (moved,), True, "transpose"))
            reads[number] = moved
    return [*before, op if simple else replace(op, reads=tuple(reads), added=op.name)]


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
                moved = Stored(reads[number].aval)
                before.append(Op(op.eqn, (reads[number],), (moved,), True, "transpose"))
                reads[number] = moved
    if tuple(specs.out_spec) == data:
        return [*before, replace(op, reads=tuple(reads))]
    made = Stored(op.writes[0].aval)
    after = Op(op.eqn, (made,), op.writes, True, "transpose")
    return [*before, replace(op, reads=tuple(reads), writes=(made,)), after]


def _with_places(op: Op) -> list[Op]:
    """The backward pass of max pooling: a scatter-add into zeros, with indices for each dim."""
    pooled = max(op.reads, key=elements)
    rank = len(pooled.aval.shape)
    places = [Stored(ShapedArray(pooled.aval.shape, "int32")) for _ in range(rank)]
    zeros = Stored(op.writes[0].aval)
    before = [Op(op.eqn, (), (v,), True, "iota") for v in (*places, zeros)]
    return [*before, replace(op, reads=(*op.reads, *places, zeros))]


_EXPANDED: dict[str, Callable[[Op], list[Op]]] = {
    "dot_general": _as_matrices,
    "conv_general_dilated": _with_transposes,
    "select_and_scatter_add": _with_places,
    "select_and_gather_add": _with_places,
}
