"""What XLA for GPUs does to a body: row-wise fusions, products, and layouts of loops.

A reduction along the last dim is fused with its row-wise consumers into one kernel, as in a softmax
or a norm: the row stays on chip. That needs rows that are contiguous in memory. A matrix product
computes the relu that follows it in its epilogue, and reads a contiguous slice where it is.

A product writes its dims in the order (batch, free dims of either operand); a transpose of that is
only a layout, which pointwise operators pass on. A loop that stacks such values stacks them in that
layout, but another loop reads its arguments in the default layout: between them they are copied.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.forecast.compilers.base import Compiler, Dataflow
from gshard.forecast.dataflow import (
    Body,
    DeviceOperator,
    Equations,
    Op,
    copied,
    elements,
    inlined,
)
from gshard.graph.kinds import ALIASES, PRODUCTS
from gshard.graph.regions import Stored, bodies, counts_of
from gshard.tensors.tile import size_of


class GPU(Compiler):
    """XLA for GPUs."""

    overlaps = True

    def prepare(self, ops: list[Op], outputs: list[Any], devices: int) -> Equations:
        """The equations with row-wise reductions marked, and copies between loops of other layouts.

        For an unpartitioned program, those are marked that may be row-wise on each of `devices`.
        """
        turned: set[Any] = set()
        found: list[Op] = []
        scattered = _turned(ops) if devices == 1 else set()
        for op in ops:
            if op.primitive is not p.scan_p:
                found.append(
                    replace(op, by_rows=True) if _is_by_rows(op, scattered, devices) else op
                )
                continue
            reads = list(op.reads)
            for number, var in enumerate(reads):
                if var in turned:
                    reads[number] = Stored(var.aval)
                    found.append(Op(op.eqn, (var,), (reads[number],), False, p.transpose_p))
            found.append(Op(op.eqn, tuple(reads), op.writes, op.joins))
            inner, results = inlined(bodies(op.eqn)[0])
            made, carry = _turned(inner), counts_of(op.eqn)[1]
            stacks = list(zip(op.writes, results, strict=True))[carry:]
            turned.update(w for w, v in stacks if not isinstance(v, Literal) and v in made)
        return found, outputs

    def folds(self, op: Op, flow: Dataflow) -> bool:
        """A relu behind a product and a window before it too."""
        return super().folds(op, flow) or _ends_product(op, flow) or _is_window(op, flow)

    def stores(self, flow: Dataflow) -> set[Any]:
        """A sum too, such as that of a residual, of which several kernels read all terms again.

        XLA fuses a value into all its consumers if that takes less time (its priority fusion): if
        they read what it is made of in less time than it takes to write and to read the value.
        """
        stored = super().stores(flow)
        kernels = _kernels(flow, stored)
        made_of: dict[Any, set[Any]] = {}  # the stored values that a value is computed from
        for op in flow.ops:
            terms: set[Any] = set()
            for var in map(flow.stands_for, op.reads if op.joins else ()):
                terms |= {var} if var in stored else made_of.get(var, {var})
            for var in op.writes if op.joins and not flow.is_view(op) else ():
                made_of[var] = terms
                if len(terms) > 1 and (readers := len(kernels[var])) > 1:
                    own = made_of[var] = {v for v in terms if elements(v) == elements(var)}
                    read, size = sum(map(size_of, own)), size_of(var)
                    if readers * read > read + (1 + readers) * size:
                        stored.add(var)
        return stored

    def stacking(self, scan: JaxprEqn, body: Body) -> list[DeviceOperator]:
        """Slices of a loop's inputs, and stacked results.

        Pointwise operators read a slice in place, and a result without other consumers is written
        in place; matrix products read and write contiguous arrays only.
        """
        consts, carry = counts_of(scan)
        slices = body.inputs[len(body.jaxpr.constvars) + consts + carry :]
        whole = {v for o in body.operators if not o.root.joins for v in (*o.reads, *o.writes)}
        read = {v for o in body.operators for v in o.reads}
        results = [body.stands_for(v) for v in body.outputs[carry:] if not isinstance(v, Literal)]
        alone = [v for v in slices if v in whole]
        alone += [v for v in results if v in whole or v in read]
        return [copied(scan, v) for v in alone]


_KERNELS = 8  # readers of a value; more of them change nothing


def _kernels(flow: Dataflow, stored: set[Any]) -> dict[Any, set[Any]]:
    """For each value some of the stored results that are computed from it."""
    found: dict[Any, set[Any]] = {}
    for op in reversed(flow.ops):
        for var in op.writes:
            own: set[Any] = set()
            for made in (w for user in flow.users(var) for w in user.writes):
                own |= {made} if made in stored else found.get(made, set())
                if len(own) >= _KERNELS:
                    break
            found[var] = own
    return found


def _is_by_rows(op: Op, scattered: set[Any], devices: int) -> bool:
    """Whether it reduces the last dim alone, and rows are contiguous, or nothing at all.

    A device has a single row of the other dims that it reduces if there are enough devices.
    """
    if not op.reduces or len(op.reads) != 1 or op.reads[0] in scattered:
        return False
    shape = op.reads[0].aval.shape
    last = len(shape) - 1
    rows = math.prod(shape[axis] for axis in op.eqn.params.get("axes", ()) if axis != last)
    return last > 0 and rows <= devices


def _turned(ops: list[Op]) -> set[Any]:
    """The values that have the transposed layout of a product."""
    made: dict[Any, Op] = {}  # of products: dims in the order in which they are written
    turned: set[Any] = set()
    for op in ops:
        if op.primitive in PRODUCTS:
            made.update(dict.fromkeys(op.writes, op))
        elif op.primitive is p.transpose_p and op.reads and op.reads[0] in made:
            if not _is_swap(op, made[op.reads[0]]):
                turned.update(op.writes)
        elif op.writes and op.joins and not op.reduces and op.primitive is not p.transpose_p:
            same = [v for v in op.reads if elements(v) == elements(op.writes[0])]
            if any(v in turned for v in same):
                turned.update(op.writes)
            elif product := next((made[v] for v in same if v in made), None):
                made.update(dict.fromkeys(op.writes, product))
    return turned


def _is_swap(transpose: Op, product: Op) -> bool:
    """Whether the product with its operands swapped writes the transposed result.

    Dims of one element have no place in memory.
    """
    if product.primitive is not p.dot_general_p:
        return False
    (summed, _), (kept, _) = product.eqn.params["dimension_numbers"]
    batch, first = len(kept), len(product.eqn.invars[0].aval.shape) - len(summed)
    shape = transpose.reads[0].aval.shape
    dims = list(range(len(shape)))
    swapped = [*dims[:batch], *dims[first:], *dims[batch:first]]
    order, *written = (
        [d for d in dims if shape[d] > 1]
        for dims in (transpose.eqn.params["permutation"], dims, swapped)
    )
    return order in written


def _is_window(op: Op, flow: Dataflow) -> bool:
    """Whether it is a slice without gaps that only products read."""
    if op.primitive is not p.slice_p or len(op.reads) != 1:
        return False
    if set(op.eqn.params["strides"] or (1,)) != {1}:
        return False
    source, taken = op.reads[0].aval.shape, op.writes[0].aval.shape
    cut = [d for d, (a, b) in enumerate(zip(source, taken, strict=True)) if a != b]
    contiguous = not cut or all(n == 1 for n in taken[: cut[-1]])
    return contiguous and _only_products(op.writes[0], flow)


def _only_products(var: Any, flow: Dataflow) -> bool:
    """Whether products, and nothing else, read a value, through views of it."""
    return bool(flow.readers[var]) and all(
        _only_products(u.writes[0], flow) if u.primitive in ALIASES else u.primitive in PRODUCTS
        for u in flow.readers[var]
    )


def _ends_product(op: Op, flow: Dataflow) -> bool:
    """Whether it is a relu that the preceding product computes in its epilogue."""
    if op.primitive is not p.max_p or len(op.reads) != 1:
        return False
    var = op.reads[0]
    if elements(var) != elements(op.writes[0]):
        return False
    while (maker := flow.makers.get(var)) is not None and len(flow.readers[var]) == 1:
        if maker.primitive in PRODUCTS:
            return True
        if maker.primitive not in ALIASES:
            return False
        var = maker.reads[0]
    return False
