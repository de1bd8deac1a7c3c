"""The work of an operator: operations of matrix products and of everything else, and bytes.

That of a Pallas kernel is its `cost_estimate` if given, else counted from its program: it runs once
for each point of its grid, on blocks whose shapes its program has. A loop whose trip count is read
from memory is counted once; authors of such kernels should pass a `cost_estimate` to `pallas_call`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard.forecast.dataflow import Body, DeviceOperator, Op, elements
from gshard.forecast.hardware import Hardware
from gshard.graph.kinds import KERNELS, PRODUCTS, SCATTERS
from gshard.graph.regions import bodies, runs_of
from gshard.moving.costs import passes
from gshard.tensors.tile import size_of

_LOOKUPS = {p.gather_p, p.dynamic_slice_p, p.slice_p}
_UPDATES = {p.dynamic_update_slice_p} | SCATTERS
_THREEFRY = 120.0  # integer operations for the two words that threefry2x32 makes
_FREE = {
    p.broadcast_in_dim_p, p.iota_p, p.slice_p, p.transpose_p, p.pad_p, p.rev_p,
    p.convert_element_type_p,
}  # fmt: skip
_FREE_IN_KERNELS = {
    p.get_p, p.swap_p, p.broadcast_in_dim_p, p.iota_p, p.reshape_p, p.transpose_p,
    p.convert_element_type_p,
}  # fmt: skip


class Work(NamedTuple):
    """What an operator computes, the seconds that it takes at most, and the bytes it touches."""

    flops: float
    seconds: float
    bytes: float


def work_of(operator: DeviceOperator, machine: Hardware) -> Work:
    """The work of an operator that sends nothing."""
    vector, products = vector_flops(operator), list(filter(multiplies, operator.members))
    flops, moved = vector + sum(map(product_flops, products)), moved_bytes(operator)
    seconds = sum(product_seconds(op, machine) for op in products)
    # Different units of a core work in parallel.
    return Work(flops, max(vector / machine.vector_rate, seconds), moved)


def multiplies(op: Op) -> bool:
    """Whether it has matrix products: it is one, or a kernel that may contain some."""
    return op.primitive in PRODUCTS or op.primitive in KERNELS


def product_dtype(op: Op) -> Any:
    """The dtype of the operands of its products."""
    own = op.eqn.invars[0].aval.dtype
    return kernel_work(op.eqn).dtype or own if op.primitive in KERNELS else own


def product_flops(op: Op) -> float:
    """Multiplications and additions of a matrix product or convolution, or of those in a kernel."""
    return kernel_work(op.eqn).products if op.primitive in KERNELS else flops_of(op.eqn)


def product_seconds(op: Op, machine: Hardware) -> float:
    """The time of its products, at the rate that a device reaches for their operands."""
    flops, rate = product_flops(op), machine.rate(product_dtype(op), is_exact(op))
    return flops / (rate * machine.efficiency.products)


def product_work(body: Body) -> float:
    """The operations of a body's products."""
    walked = ((count, op) for each, count, _ in body.walk() for op in each.members)
    return sum(count * product_flops(op) for count, op in walked if multiplies(op))


def is_exact(op: Op) -> bool:
    """Whether a product asks for more than the default precision."""
    precision = op.eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(p in (lax.Precision.HIGHEST, lax.Precision.HIGH) for p in parts)


def vector_flops(operator: DeviceOperator) -> float:
    """Operations outside matrix products."""
    total = 0.0
    for op in operator.members:
        if op.primitive in KERNELS:
            total += kernel_work(op.eqn).vector
        elif op.primitive not in PRODUCTS:
            count = max(map(elements, (*op.reads, *op.writes)), default=0)
            total += count * operations(op, count)
    return total


def operations(op: Op, count: int) -> float:
    """Operations for each element of an equation that is no product, the largest of whose operands
    and results has `count` of them."""
    if op.primitive in _FREE:
        return 0.0
    if op.primitive is p.sort_p:
        return passes(count)
    if op.primitive is p.random_bits_p and op.reads[0].aval.dtype.name == "key<fry>":
        return _THREEFRY if jax.config.jax_threefry_partitionable else _THREEFRY / 2
    return _THREEFRY if op.primitive is p.threefry2x32_p else 1.0


def looks_up(operator: DeviceOperator) -> bool:
    """Whether it takes rows of its operands, and may leave others untouched."""
    found = {op.primitive for op in operator.members}
    return bool(found & _LOOKUPS) and not found & PRODUCTS


def updates(operator: DeviceOperator) -> bool:
    """Whether it writes rows into its first operand, in place."""
    return operator.root.primitive in _UPDATES


def moved_bytes(operator: DeviceOperator) -> float:
    """Bytes of memory that an operator touches; of a gather or slice, only the rows taken."""
    if not looks_up(operator):
        if updates(operator):
            return 2.0 * sum(map(size_of, operator.reads[1:]))
        kernel = operator.root.primitive in KERNELS
        return kernel_work(operator.root.eqn).bytes if kernel else float(operator.bytes)
    written = sum(map(size_of, operator.writes))
    return written + sum(min(size_of(v), 2.0 * written) for v in operator.reads)


def flops_of(eqn: JaxprEqn) -> float:
    """Multiplications and additions of a product: one of each for every term of a sum."""
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive is p.conv_general_dilated_p:
        kernels = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        terms = math.prod(rhs) // max(kernels, 1)
    elif eqn.primitive is p.dot_general_p:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(lhs[d] for d in contracted)
    else:
        terms = lhs[-1]  # ragged: a row meets one matrix
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * terms


class KernelWork(NamedTuple):
    """The work of a kernel over its entire grid."""

    products: float  # operations of matrix products
    dtype: Any  # of the operands of these; None where there are none
    vector: float  # other operations
    bytes: float  # of device memory that it reads and writes


def kernel_work(eqn: JaxprEqn) -> KernelWork:
    """The work of an equation of `pallas_call`."""
    products, dtype, vector = _counted(getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"]))
    given = eqn.params.get("cost_estimate")
    if given is not None:
        flops, other = float(given.flops), float(given.transcendentals)
        if dtype is None:
            return KernelWork(0.0, None, flops + other, float(given.bytes_accessed))
        return KernelWork(flops, dtype, other, float(given.bytes_accessed))
    programs = math.prod(n for n in eqn.params["grid_mapping"].grid if isinstance(n, int))
    moved = sum(map(size_of, dict.fromkeys((*eqn.invars, *eqn.outvars))))
    return KernelWork(programs * products, dtype, programs * vector, float(moved))


@functools.lru_cache(maxsize=256)
def _counted(jaxpr: Jaxpr) -> tuple[float, Any, float]:
    """Operations of products, the dtype of their operands, and other operations, of one program."""
    products, dtype, vector = 0.0, None, 0.0
    for eqn in jaxpr.eqns:
        inner = [_counted(body) for body in bodies(eqn)]
        if inner:
            times = runs_of(eqn)
            products += times * sum(p for p, _, _ in inner)
            vector += times * sum(v for _, _, v in inner)
            dtype = dtype or next((d for _, d, _ in inner if d is not None), None)
        elif eqn.primitive is p.dot_general_p:
            products += flops_of(eqn)
            dtype = dtype or eqn.invars[0].aval.dtype
        elif eqn.primitive not in _FREE_IN_KERNELS:
            vector += max(map(elements, (*eqn.invars, *eqn.outvars)), default=0)
    return products, dtype, vector
