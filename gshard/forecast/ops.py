"""The equations of a body with calls inlined: the input of the models of compilers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.graph.regions import called
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


def product_of(eqn: JaxprEqn) -> Product:
    """The product that an equation is."""
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    out = eqn.outvars[0].aval.shape
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


def inlined(jaxpr: Jaxpr) -> tuple[list[Op], list[Any]]:
    """The equations with calls inlined, and the results' variables."""
    ops: list[Op] = []
    return ops, _inline(jaxpr, {}, ops)


def _inline(jaxpr: Jaxpr, env: dict[Any, Any], ops: list[Op]) -> list[Any]:
    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else env.get(atom, atom)

    for eqn in jaxpr.eqns:
        reads = [read(a) for a in eqn.invars]
        if (body := called(eqn)) is not None:
            # A body may be shared by several calls: each gets fresh variables.
            fresh = _Fresh(zip(body.jaxpr.invars, reads, strict=True))
            results = _inline(body.jaxpr, fresh, ops)
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        writes = []
        for var in eqn.outvars:
            if isinstance(env, _Fresh):
                env[var] = Stored(var.aval)
            writes.append(env.get(var, var))
        values = tuple(r for r in reads if not isinstance(r, Literal))
        joins = eqn.primitive.name not in _ALONE and not transfers(eqn)
        ops.append(Op(eqn, values, tuple(writes), joins))
    return [read(a) for a in jaxpr.outvars]


class _Fresh(dict[str, Any]):
    """The values of one call of a body."""


@dataclass(eq=False, frozen=True)
class Stored:
    """A value of an inlined call."""

    aval: Any
