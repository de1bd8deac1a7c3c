"""What XLA for GPUs makes of a body: layouts that two loops do not agree on.

A product writes its dims in the order (batch, own dims of either operand); a transpose of that is
only a layout, which what is pointwise hands on. A loop that stacks such values stacks them in that
layout, but another loop reads its arguments in the order of their dims: between them they are
copied.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Literal

from gshard.forecast.ops import PRODUCTS, Op, Stored, bodies_of, elements, inlined


def as_on_gpus(ops: list[Op]) -> list[Op]:
    """The equations with the copies between loops that do not agree on a layout."""
    turned: set[Any] = set()
    found: list[Op] = []
    for op in ops:
        if op.name != "scan":
            found.append(op)
            continue
        reads = list(op.reads)
        for number, var in enumerate(reads):
            if var in turned:
                reads[number] = Stored(var.aval)
                found.append(Op(op.eqn, (var,), (reads[number],), False, "transpose"))
        found.append(Op(op.eqn, tuple(reads), op.writes, op.joins))
        stacked = range(op.eqn.params["num_carry"], len(op.writes))
        inside = _turned_results(bodies_of(op.eqn)[0])
        turned.update(op.writes[n] for n in stacked if n in inside)
    return found


def _turned_results(body: Any) -> set[int]:
    """The results of a body, by number, that are laid out as a product wrote them, transposed."""
    ops, outputs = inlined(body)
    made: dict[Any, Op] = {}  # by products, dims in the order they are written
    turned: set[Any] = set()
    for op in ops:
        if op.name in PRODUCTS:
            made.update(dict.fromkeys(op.writes, op))
        elif op.name == "transpose" and op.reads and op.reads[0] in made:
            if not _is_swap(op, made[op.reads[0]]):
                turned.update(op.writes)
        elif op.joins and not op.reduces and op.name != "transpose":
            same = [v for v in op.reads if elements(v) == elements(op.writes[0])]
            if any(v in turned for v in same):
                turned.update(op.writes)
            elif product := next((made[v] for v in same if v in made), None):
                made.update(dict.fromkeys(op.writes, product))
    return {n for n, v in enumerate(outputs) if not isinstance(v, Literal) and v in turned}


def _is_swap(transpose: Op, product: Op) -> bool:
    """Whether the product with its operands swapped writes the transposed result."""
    order = list(transpose.eqn.params["permutation"])
    if product.name != "dot_general":
        return False
    (summed, _), (kept, _) = product.eqn.params["dimension_numbers"]
    batch, first = len(kept), len(product.eqn.invars[0].aval.shape) - len(summed)
    dims = list(range(len(order)))
    return order in (dims, [*dims[:batch], *dims[first:], *dims[batch:first]])
