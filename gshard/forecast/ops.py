"""The equations of a body with calls inlined: the input of the models of compilers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.graph.regions import with_calls_inlined
from gshard.moving.inventory import transfers
from gshard.tensors.tile import byte_size

LOOPS = {"scan", "while", "cond"}
PRODUCTS = {"dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"}
ALIASES = {
    "reshape", "squeeze", "expand_dims", "bitcast_convert_type", "copy", "stop_gradient",
    "random_wrap", "random_unwrap", "optimization_barrier", "copy_p",
    "annotate", "pin",  # of programs before they are partitioned
}  # fmt: skip
APART = {
    "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
    "sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp",
    "dynamic_update_slice", "fft", "cholesky", "triangular_solve", "lu", "qr", "eigh", "svd",
    "reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window",
    "select_and_scatter_add", "select_and_gather_add", "pallas_call", "ffi_call", "io_callback",
    "pure_callback", "custom_partitioning", "concatenate", "rng_bit_generator",
}  # fmt: skip
_ALONE = APART | PRODUCTS | LOOPS  # never fused, like collectives


@dataclass(frozen=True, eq=False)
class Op:
    """An equation of a body, calls inlined; `reads` are variables, literals left out."""

    eqn: JaxprEqn
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    joins: bool  # whether a compiler fuses it with its neighbours
    added: str = ""  # its name, if a compiler adds it
    by_rows: bool = False  # a reduction that is fused with its consumers too

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.added or self.eqn.primitive.name

    @property
    def reduces(self) -> bool:
        """Whether it is fused with its producers but not with its consumers."""
        named = self.name.startswith(("reduce_", "arg"))
        return named and self.joins and not self.by_rows


def size_of(var: Any) -> int:
    """Bytes of a value."""
    aval = var.aval
    return byte_size(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0


def elements(var: Any) -> int:
    """How many numbers a value has."""
    return math.prod(getattr(var.aval, "shape", ()))


def inlined(jaxpr: Jaxpr) -> tuple[list[Op], list[Any]]:
    """The equations with calls inlined, and the results' variables."""
    steps, outputs = with_calls_inlined(jaxpr)
    ops = []
    for eqn, operands, results in steps:
        reads = tuple(r for r in operands if not isinstance(r, Literal))
        joins = eqn.primitive.name not in _ALONE and not transfers(eqn)
        ops.append(Op(eqn, reads, results, joins))
    return ops, outputs
