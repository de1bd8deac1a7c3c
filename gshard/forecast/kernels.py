"""The work of a Pallas kernel: its `cost_estimate` if given, else counted from its program.

A kernel runs once for each point of its grid, on blocks whose shapes its program has. A loop whose
trip count is read from memory is counted once; authors of such kernels should pass a
`cost_estimate` to `pallas_call`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from gshard.forecast.ops import elements, product_of, size_of
from gshard.graph.regions import bodies

KERNEL = "pallas_call"
_FREE = {"get", "swap", "broadcast_in_dim", "iota", "reshape", "transpose", "convert_element_type"}


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
            times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
            products += times * sum(p for p, _, _ in inner)
            vector += times * sum(v for _, _, v in inner)
            dtype = dtype or next((d for _, d, _ in inner if d is not None), None)
        elif eqn.primitive.name == "dot_general":
            products += product_of(eqn).flops
            dtype = dtype or eqn.invars[0].aval.dtype
        elif eqn.primitive.name not in _FREE:
            vector += max((elements(v) for v in (*eqn.invars, *eqn.outvars)), default=0)
    return products, dtype, vector
