"""Random keys, solvers and transforms, and operators that can only be run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.checking.exact import field
from gshard.checking.exact.number import (
    Bits,
    Exact,
    Keys,
    Value,
    exact,
    is_float,
    leading,
    of_floats,
    plain,
    spread,
)
from gshard.checking.exact.pointwise import aligned, opaque
from gshard.checking.replaying.on_host import OnHost, host
from gshard.graph.evaluate import bind
from gshard.rules.pointwise import POINTWISE as ON_ELEMENTS
from gshard.tensors.devices import lookup_p
from gshard.tensors.keys import is_key_type

UNKNOWN = -1  # the bits of a sum that nothing is proved about
# The dims at the end that one result depends on; for each further operand as for the first.
_SOLVERS = dict.fromkeys(
    ("cholesky", "cholesky_update", "eig", "eigh", "svd", "qr", "lu", "householder_product",
     "geqrf", "geqp3", "schur", "hessenberg", "tridiagonal", "tridiagonal_solve",
     "lu_pivots_to_permutation", "symmetric_product"), 2,
)  # fmt: skip
_CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "mark")
_on_host = OnHost()


def other(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """The results of an operator that is none of the usual ones."""
    name = eqn.primitive.name
    if eqn.primitive is lookup_p:
        return [eqn.params["table"].rows[plain(operands[0])]]
    if any(is_key_type(a.aval.dtype) for a in (*eqn.invars, *eqn.outvars)):
        return _keys(eqn, operands)
    if name in _CALLBACKS:
        return [_hash_of_all(eqn, operands, n, ()) for n in range(len(eqn.outvars))]
    if name in _LINEAR:
        return [_LINEAR[name](eqn, *operands)]
    if name in _SOLVERS:
        return _solved(eqn, operands)
    if not any(isinstance(x, (Exact, Bits)) for x in operands):
        return _each(eqn, operands)
    if name in ON_ELEMENTS:
        return [opaque(eqn, *aligned(operands))]
    return [_doubtful(x, n, eqn) for n, x in enumerate(_each(eqn, operands))]


# ------------------------------------------------------------------------ keys


def _keys(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Random keys and numbers, by JAX, for the keys of all devices at once."""
    count = max(map(leading, operands))
    given = [
        jax.random.wrap_key_data(x.raw, impl=x.impl) if isinstance(x, Keys) else plain(x)
        for x in (spread(x, count) for x in operands)
    ]
    with jax.default_device(host()):
        made = jax.vmap(lambda *xs: list(bind(eqn, xs)))(*given)
    return [_of_jax(x) for x in made]


def _of_jax(array: Any) -> Value:
    if is_key_type(array.dtype):
        impl = str(jax.random.key_impl(array))
        return Keys(np.asarray(jax.random.key_data(array)), impl)
    array = np.asarray(array)
    return of_floats(array) if is_float(array.dtype) else array


# ------------------------------------------------------------------------ solvers


def _solved(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """Unknown functions of a matrix, or of the dims at the end, for each of a batch."""
    controls = _each(eqn, operands)
    batch = tuple(range(1, operands[0].ndim - _SOLVERS[eqn.primitive.name]))
    made = []
    for number, (control, var) in enumerate(zip(controls, eqn.outvars, strict=True)):
        if not is_float(var.aval.dtype):
            made.append(control)
            continue
        found = _hash_of_all(eqn, operands, number, batch)
        made.append(exact(plain(control), found.r, *operands))
    return made


def _digest(value: Value, batch: tuple[int, ...]) -> np.ndarray:
    """A hash of all that is behind the batch dims, with as many dims as the operand."""
    r = value.r if isinstance(value, Exact) else field.of_integers(plain(value))
    rest = tuple(d for d in range(1, r.ndim) if d not in batch)
    sizes = [r.shape[d] if d in rest else 1 for d in range(r.ndim)]
    weights = np.arange(math.prod(sizes), dtype=np.uint64).reshape(sizes)
    mixed = field.mul(field.hashed(field.key_of("digest"), weights), r)
    return field.total(mixed, rest, keepdims=True)


def _hash_of_all(
    eqn: JaxprEqn, operands: Sequence[Value], number: int, batch: tuple[int, ...]
) -> Value:
    """A result every element of which depends on all elements of its batch."""
    aval = eqn.outvars[number].aval
    rank = aval.ndim + 1
    parts = [_digest(x, tuple(d for d in batch if d < x.ndim)) for x in operands]
    kept = 1 + len(batch)
    parts = [x.reshape(*x.shape[:kept], *(1,) * (rank - kept)) for x in parts]
    sizes = [1 if d < kept else n for d, n in enumerate((1, *aval.shape))]
    index = np.arange(math.prod(sizes), dtype=np.uint64).reshape(sizes)
    known = {k: v for k, v in eqn.params.items() if not callable(v)}
    key = field.key_of(eqn.primitive.name, number, str(sorted(known.items(), key=str)))
    r = field.hashed(key, index, *parts)
    count = max(map(leading, operands), default=1)
    r = np.broadcast_to(r, (count, *aval.shape))
    if not is_float(aval.dtype):
        return (r % field.u64(2)).astype(aval.dtype)
    return exact(r.astype(np.float64) / 2.0**61, r, *operands)


def _transformed(eqn: JaxprEqn, a: Exact) -> Exact:
    """A Fourier transform: a linear function, with a matrix of hashes for each dim."""
    (control,) = _each(eqn, [a])
    lengths, r = eqn.params["fft_lengths"], a.r
    last, kind = a.ndim - 1, lax.FftType(eqn.params["fft_type"]).name
    for number, dim in enumerate(range(a.ndim - len(lengths), a.ndim)):
        rows, columns = r.shape[dim], eqn.outvars[0].aval.shape[dim - 1]
        # Only the last dim is of real numbers: the others are transforms like any other.
        key = kind if dim == last else kind.replace("RFFT", "FFT")
        numbers = np.arange(rows * columns, dtype=np.uint64).reshape(rows, columns)
        matrix = field.hashed(field.key_of("fft", key, lengths[number]), numbers)
        r = np.moveaxis(field.matmul(np.moveaxis(r, dim, -1), matrix), -1, dim)
    return exact(plain(control), r, a)


def _triangular_solve(eqn: JaxprEqn, a: Exact, b: Exact) -> Exact:
    """Linear in the right side: a product with an unknown matrix, which is a function of `a`."""
    (control,) = _each(eqn, [a, b])
    size = a.shape[-1]
    numbers = np.arange(size * size, dtype=np.uint64).reshape(size, size)
    settings = {k: v for k, v in eqn.params.items() if k != "left_side"}
    key = field.key_of("triangular_solve", str(sorted(settings.items())))
    matrix = field.hashed(key, numbers, _digest(a, tuple(range(1, a.ndim - 2))))
    sides = (matrix, b.r) if eqn.params["left_side"] else (b.r, matrix)
    return exact(plain(control), field.matmul(*sides), a, b, degree=b.degree + 1)


_LINEAR: dict[str, Callable[..., Exact]] = {
    "fft": _transformed,
    "triangular_solve": _triangular_solve,
}


# ------------------------------------------------------------------------ by JAX's own operators


def _each(eqn: JaxprEqn, operands: Sequence[Value]) -> list[Value]:
    """An operator on the floats that control, in their own types, on each device in turn."""
    count = max(map(leading, operands), default=1)
    rows = []
    for device in range(count):
        own = [
            plain(x)[device if leading(x) > 1 else 0].astype(a.aval.dtype)
            for x, a in zip(operands, eqn.invars, strict=True)
        ]
        rows.append([np.asarray(x) for x in _on_host(eqn, own)])
    arrays = [np.stack(column) for column in zip(*rows, strict=True)]
    return [of_floats(x) if is_float(x.dtype) else x for x in arrays]


def _doubtful(made: Value, number: int, eqn: JaxprEqn) -> Value:
    """A result of which the floats alone are known, in the type of the program."""
    if not isinstance(made, Exact):
        return made
    numbers = np.arange(made.r[0].size, dtype=np.uint64).reshape(made.r[0].shape)
    r = field.hashed(field.key_of(eqn.primitive.name, number, id(eqn)), numbers)
    return Exact(made.f, np.broadcast_to(r, made.f.shape), sum_bits=UNKNOWN)
