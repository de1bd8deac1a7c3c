"""The work of an operator: operations of matrix products and of everything else, and bytes."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

from gshard.forecast.hardware import Hardware
from gshard.forecast.kernels import KERNEL, kernel_work
from gshard.forecast.ops import PRODUCTS, Op, elements, product_of, size_of
from gshard.forecast.program import DeviceOperator
from gshard.moving.costs import passes

_THREEFRY = 120.0  # integer operations for the two words that threefry2x32 makes
_FREE = {"broadcast_in_dim", "iota", "slice", "transpose", "pad", "rev", "convert_element_type"}


def multiplies(op: Op) -> bool:
    """Whether it has matrix products: it is one, or a kernel that may contain some."""
    return op.name in PRODUCTS or op.name == KERNEL


def product_dtype(op: Op) -> Any:
    """The dtype of the operands of its products."""
    own = op.eqn.invars[0].aval.dtype
    return kernel_work(op.eqn).dtype or own if op.name == KERNEL else own


def product_flops(op: Op) -> float:
    """Multiplications and additions of a matrix product or convolution, or of those in a kernel."""
    return kernel_work(op.eqn).products if op.name == KERNEL else product_of(op.eqn).flops


def product_seconds(op: Op, machine: Hardware) -> float:
    """The time of its products, at the rate that a device reaches for their operands."""
    rate = machine.rate(product_dtype(op), is_exact(op))
    return product_flops(op) / (rate * machine.efficiency.products)


def is_exact(op: Op) -> bool:
    """Whether a product asks for more than the default precision."""
    precision = op.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (lax.Precision.HIGHEST, lax.Precision.HIGH) for p in parts)


def vector_flops(operator: DeviceOperator) -> float:
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
        return passes(count)
    if op.name == "random_bits" and op.reads[0].aval.dtype.name == "key<fry>":
        return _THREEFRY if jax.config.jax_threefry_partitionable else _THREEFRY / 2
    return _THREEFRY if op.name == "threefry2x32" else 1.0


def looks_up(operator: DeviceOperator) -> bool:
    """Whether it takes rows of its operands, and may leave others untouched."""
    names = {op.name for op in operator.members}
    return bool(names & {"gather", "dynamic_slice", "slice"}) and not names & PRODUCTS


def updates(operator: DeviceOperator) -> bool:
    """Whether it writes rows into its first operand, in place."""
    return operator.root.name in ("dynamic_update_slice", "scatter", "scatter-add", "scatter_add")


def moved_bytes(operator: DeviceOperator) -> float:
    """Bytes of memory that an operator touches; of a gather or slice, only the rows taken."""
    written = sum(map(size_of, operator.writes))
    if looks_up(operator):
        return written + sum(min(size_of(v), 2 * written) for v in operator.reads)
    if updates(operator):
        return 2 * sum(map(size_of, operator.reads[1:])) + 0.0
    if operator.root.name == KERNEL:
        return kernel_work(operator.root.eqn).bytes
    return float(operator.bytes)
