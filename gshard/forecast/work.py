"""The work of an operator: operations of matrix products and of everything else, and bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.forecast.kernels import KERNEL, kernel_work
from gshard.forecast.ops import PRODUCTS, Op, elements, size_of
from gshard.forecast.program import Operator

_THREEFRY = 120.0  # integer operations for the two words that threefry2x32 makes
_FREE = {"broadcast_in_dim", "iota", "slice", "transpose", "pad", "rev", "convert_element_type"}


def multiplies(op: Op) -> bool:
    """Whether it has matrix products: it is one, or a kernel that may contain some."""
    return op.name in PRODUCTS or op.name == KERNEL


def product_dtype(op: Op) -> Any:
    """The dtype of the operands of its products."""
    own = op.eqn.invars[0].aval.dtype
    return kernel_work(op.eqn).dtype or own if op.name == KERNEL else own


@dataclass(frozen=True)
class Product:
    """A matrix product or convolution as products of matrices, as many as `batch`."""

    batch: int
    rows: int
    columns: int
    terms: int  # of the sum that an element of the result is

    @property
    def flops(self) -> float:
        """Multiplications and additions."""
        return 2.0 * self.batch * self.rows * self.columns * self.terms

    def in_tiles(self, size: int) -> Product:
        """As matrix units compute it that take `size` rows and columns at once."""
        rows, columns = (-(-n // size) * size for n in (self.rows, self.columns))
        return replace(self, rows=rows, columns=columns)


def product_of(eqn: JaxprEqn, shape: tuple[int, ...] | None = None) -> Product:
    """The product that an equation is, or the part of it that makes a result of this shape."""
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    out = eqn.outvars[0].aval.shape if shape is None else shape
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        kernels, columns = rhs[numbers.rhs_spec[0]], out[numbers.out_spec[1]]
        rows, terms = math.prod(out) // max(columns, 1), math.prod(rhs) // max(kernels, 1)
        return Product(1, rows, columns, terms)
    if eqn.primitive.name == "dot_general":
        (contracted, _), (kept, _) = eqn.params["dimension_numbers"]
        first = len(lhs) - len(contracted)  # dim of the result that is the right operand's own
        sides = math.prod(out[len(kept) : first]), math.prod(out[first:])
        terms = math.prod(lhs[d] for d in contracted)
        return Product(math.prod(out[: len(kept)]), *sides, terms)
    return Product(1, math.prod(out[:-1]), out[-1], lhs[-1])  # ragged: a row meets one matrix


def product_flops(op: Op) -> float:
    """Multiplications and additions of a matrix product or convolution, or of those in a kernel."""
    return kernel_work(op.eqn).products if op.name == KERNEL else product_of(op.eqn).flops


def is_exact(op: Op) -> bool:
    """Whether a product asks for more than the default precision."""
    precision = op.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (lax.Precision.HIGHEST, lax.Precision.HIGH) for p in parts)


def vector_flops(operator: Operator) -> float:
    """Operations outside matrix products."""
    total = 0.0
    for op in operator.members:
        if op.name == KERNEL:
            total += kernel_work(op.eqn).vector
        elif op.name not in PRODUCTS:
            count = max(map(elements, (*op.reads, *op.writes)), default=0)
            total += count * operations(op, count)
    return total


def operations(op: Op, count: int) -> float:
    """Operations for each element of an equation that is no product, the largest of whose operands
    and results has `count` of them."""
    if op.name in _FREE:
        return 0.0
    if op.name == "sort":
        return max(1.0, math.log2(max(count, 2)))
    if op.name == "random_bits" and op.reads[0].aval.dtype.name == "key<fry>":
        return _THREEFRY if jax.config.jax_threefry_partitionable else _THREEFRY / 2
    return _THREEFRY if op.name == "threefry2x32" else 1.0


def moved_bytes(operator: Operator) -> float:
    """Bytes of memory that an operator touches; of a gather or slice, only the rows taken."""
    written = sum(map(size_of, operator.writes))
    names = {op.name for op in operator.members}
    if names & {"gather", "dynamic_slice", "slice"} and not names & PRODUCTS:
        return written + sum(min(size_of(v), 2 * written) for v in operator.reads)
    if operator.root.name in ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add"):
        return 2 * sum(map(size_of, operator.reads[1:])) + 0.0
    if operator.root.name == KERNEL:
        return kernel_work(operator.root.eqn).bytes
    return float(operator.bytes)
