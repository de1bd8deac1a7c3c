"""JAX's operators on exact numbers: those of the field, unknown functions, and what only runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.checking.exact import field
from gshard.checking.exact.moving import MOVING
from gshard.checking.exact.number import (
    UNKNOWN,
    Exact,
    Value,
    exact,
    integers,
    is_float,
    of_array,
    plain,
)
from gshard.checking.exact.pointwise import KEEPS_BITS, POINTWISE, aligned, opaque
from gshard.checking.exact.sums import SUMS
from gshard.checking.on_host import OnHost
from gshard.rules.pointwise import POINTWISE as ON_ELEMENTS

# Functions of a matrix, or of more: of the last two dims of their first operand.
_SOLVERS = (
    "cholesky", "cholesky_update", "eig", "eigh", "svd", "qr", "lu", "householder_product",
    "geqrf", "geqp3", "schur", "hessenberg", "tridiagonal", "tridiagonal_solve",
    "lu_pivots_to_permutation", "symmetric_product",
)  # fmt: skip
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "mark")
_on_host = OnHost()


def local(eqn: JaxprEqn, operands: Sequence[Value], active: np.ndarray) -> list[Value]:
    """The results of an equation that sends nothing."""
    name = eqn.primitive.name
    if name in POINTWISE:
        if name not in KEEPS_BITS:
            pairs = zip(operands, eqn.invars, strict=True)
            operands = [integers(x, a.aval.dtype) if _is_bits(x) else x for x, a in pairs]
        operands = aligned(operands) if len(eqn.outvars) == 1 else operands
    if operator := _OPERATORS.get(name):
        made = operator(eqn, *operands)
        return made if isinstance(made, list) else [made]
    if name in _CALLBACKS:
        return [_hash_of_all(eqn, operands, n, ()) for n in range(len(eqn.outvars))]
    if name in _SOLVERS:
        return _solved(eqn, operands)
    if name in ON_ELEMENTS and any(isinstance(x, Exact) for x in operands):
        return [opaque(eqn, *aligned(operands))]
    made = _run(eqn, operands, active)
    if not any(isinstance(x, Exact) for x in operands):
        return made
    return [_doubtful(x, n, eqn) for n, x in enumerate(made)]


def _is_bits(value: Value) -> bool:
    return isinstance(value, Exact) and value.bits is not None


def _run(eqn: JaxprEqn, operands: Sequence[Value], active: Any = None) -> list[Value]:
    """An operator on the floats that control, in their own types, on each device in turn."""
    on = np.ones(max((len(plain(x)) for x in operands), default=1), bool)
    made = _on_host.on_each(eqn, [plain(x) for x in operands], on if active is None else active)
    return [of_array(x) for x in made]


def _doubtful(made: Value, number: int, eqn: JaxprEqn) -> Value:
    """A result of which the floats alone are known, in the type of the program."""
    if not isinstance(made, Exact):
        return made
    numbers = np.arange(made.r[0].size, dtype=np.uint64).reshape(made.r[0].shape)
    r = field.hashed(field.key_of(eqn.primitive.name, number, id(eqn)), numbers)
    return Exact(made.f, np.broadcast_to(r, made.f.shape), sum_bits=UNKNOWN)


# ------------------------------------------------------------------------ functions of all elements


def _solved(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Unknown functions of a matrix, for each of a batch."""
    batch = tuple(range(1, operands[0].ndim - 2))
    return [
        exact(made.f, _hash_of_all(eqn, operands, n, batch).r, *operands)
        if isinstance(made, Exact)
        else made
        for n, made in enumerate(_run(eqn, operands))
    ]


def _digest(value: Value, batch: Sequence[int]) -> np.ndarray:
    """A hash of all that is behind the batch dims, with as many dims as the operand."""
    r = value.r if isinstance(value, Exact) else field.of_integers(value)
    rest = tuple(d for d in range(1, r.ndim) if d not in batch)
    sizes = [r.shape[d] if d in rest else 1 for d in range(r.ndim)]
    weights = np.arange(math.prod(sizes), dtype=np.uint64).reshape(sizes)
    mixed = field.mul(field.hashed(field.key_of("digest"), weights), r)
    return field.total(mixed, rest, keepdims=True)


def _hash_of_all(
    eqn: JaxprEqn, operands: Sequence[Value], number: int, batch: Sequence[int]
) -> Value:
    """A result every element of which depends on all elements of its batch."""
    aval, kept = eqn.outvars[number].aval, 1 + len(batch)
    parts = [_digest(x, [d for d in batch if d < x.ndim]) for x in operands]
    parts = [x.reshape(*x.shape[:kept], *(1,) * (aval.ndim + 1 - kept)) for x in parts]
    sizes = [1 if d < kept else n for d, n in enumerate((1, *aval.shape))]
    index = np.arange(math.prod(sizes), dtype=np.uint64).reshape(sizes)
    known = {k: v for k, v in eqn.params.items() if not callable(v)}
    key = field.key_of(eqn.primitive.name, number, str(sorted(known.items(), key=str)))
    r = field.hashed(key, index, *parts)
    r = np.broadcast_to(r, (max((len(plain(x)) for x in operands), default=1), *aval.shape))
    if not is_float(aval.dtype):
        return (r % field.u64(2)).astype(aval.dtype)
    return exact(r.astype(np.float64) / 2.0**61, r, *operands)


def _fourier(eqn: JaxprEqn, a: Exact) -> Exact:
    """A Fourier transform: a linear function, with a matrix of hashes for each dim."""
    lengths, r = eqn.params["fft_lengths"], a.r
    last, kind = a.ndim - 1, lax.FftType(eqn.params["fft_type"]).name
    for number, dim in enumerate(range(a.ndim - len(lengths), a.ndim)):
        rows, columns = r.shape[dim], eqn.outvars[0].aval.shape[dim - 1]
        # Only the last dim is of real numbers: the others are transforms like any other.
        key = kind if dim == last else kind.replace("RFFT", "FFT")
        numbers = np.arange(rows * columns, dtype=np.uint64).reshape(rows, columns)
        matrix = field.hashed(field.key_of("fft", key, lengths[number]), numbers)
        r = np.moveaxis(field.matmul(np.moveaxis(r, dim, -1), matrix), -1, dim)
    return exact(plain(_run(eqn, [a])[0]), r, a)


def _triangular_solve(eqn: JaxprEqn, a: Exact, b: Exact) -> Exact:
    """Linear in the right side: a product with an unknown matrix, which is a function of `a`."""
    size = a.shape[-1]
    numbers = np.arange(size * size, dtype=np.uint64).reshape(size, size)
    settings = {k: v for k, v in eqn.params.items() if k != "left_side"}
    key = field.key_of("triangular_solve", str(sorted(settings.items())))
    matrix = field.hashed(key, numbers, _digest(a, range(1, a.ndim - 2)))
    sides = (matrix, b.r) if eqn.params["left_side"] else (b.r, matrix)
    made = plain(_run(eqn, [a, b])[0])
    return exact(made, field.matmul(*sides), a, b, degree=b.degree + 1)


_OPERATORS: dict[str, Callable[..., Any]] = {
    **POINTWISE, **MOVING, **SUMS, "fft": _fourier, "triangular_solve": _triangular_solve,
}  # fmt: skip
