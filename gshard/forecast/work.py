"""The arithmetic of an operator: operations of matrix products, and of everything else."""

from __future__ import annotations

import math
from typing import Any

from jax import lax

from gshard.forecast.kernels import KERNEL, kernel_work
from gshard.forecast.ops import PRODUCTS, Op
from gshard.forecast.program import Operator

_THREEFRY = 120  # integer operations for the two words that threefry2x32 makes
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
    if op.name == KERNEL:
        return kernel_work(op.eqn).products
    lhs, rhs = (v.aval for v in op.eqn.invars[:2])
    (out,) = (v.aval for v in op.eqn.outvars[:1])
    if op.name == "conv_general_dilated":
        numbers = op.eqn.params["dimension_numbers"]
        out_feature = rhs.shape[numbers.rhs_spec[0]]
        return 2.0 * math.prod(out.shape) * math.prod(rhs.shape) / max(out_feature, 1)
    if op.name == "dot_general":
        (contracted, _), _ = op.eqn.params["dimension_numbers"]
        return 2.0 * math.prod(out.shape) * math.prod(lhs.shape[d] for d in contracted)
    return 2.0 * math.prod(out.shape) * lhs.shape[-1]  # ragged: every row meets one matrix


def is_exact(op: Op) -> bool:
    """Whether a product asks for more than the default precision."""
    precision = op.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (lax.Precision.HIGHEST, lax.Precision.HIGH) for p in parts)


def vector_flops(operator: Operator) -> float:
    """Operations outside matrix products, one for each element that an equation makes."""
    total = 0.0
    for op in operator.members:
        if op.name in PRODUCTS or op.name in _FREE:
            continue
        if op.name == KERNEL:
            total += kernel_work(op.eqn).vector
            continue
        shapes = [_count(v) for v in (*op.reads, *op.writes)]
        elements = max(shapes, default=0)
        if op.name == "threefry2x32":
            total += _THREEFRY * elements
        elif op.name == "sort":
            total += elements * max(1.0, math.log2(max(elements, 2)))
        else:
            total += elements
    return total


def _count(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))
