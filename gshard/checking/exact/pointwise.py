"""Operators on single elements: of the field, unknown functions, and decisions by floats.

Values are ordered by their floats. Where the field's elements are equal, the values are, whatever
rounding did to the floats; where only the floats are equal, or nearly, the elements of the field
decide, so that every order in which a maximum is taken finds the same one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from gshard.checking import on_host
from gshard.checking.exact import field
from gshard.checking.exact.number import (
    UNKNOWN,
    Exact,
    Move,
    Value,
    by_parts,
    chosen,
    exact,
    exponents,
    integers,
    is_float,
    moved,
    of_array,
    on_distinct,
    plain,
    times,
)
from gshard.graph.evaluate import bind

Operator = Callable[..., Value]
_TIE = 1e-11  # floats that are closer, relatively, may be ordered otherwise after rounding


class Ties:
    """Counts decisions by floats that rounding could have changed."""

    count = 0


def bits_of(dtype: Any) -> int:
    """The bits of a type's significand."""
    return int(jnp.finfo(dtype).nmant)


# ------------------------------------------------------------------------ the ring


def _ring(on_numpy: Any, degree: Callable[..., float], in_field: Any, *first: Any) -> Operator:
    """An operator that the field has; on integers, NumPy's."""

    def operator(eqn: JaxprEqn | None, *xs: Value) -> Value:
        f = on_numpy(*map(plain, xs))
        if not isinstance(xs[0], Exact):
            return f
        return exact(f, *xs, **in_field(*first, *xs), degree=degree(x.degree for x in xs))

    return operator


def _over(a: Exact, b: Exact) -> dict[str, Any]:
    if not a.is_complex:
        return {"r": field.mul(a.r, on_distinct(field.inverse, b.r))}
    norm = field.inverse(field.add(field.mul(b.r, b.r), field.mul(b.e, b.e)))
    conjugate = replace(b, r=field.mul(b.r, norm), e=field.mul(field.neg(b.e), norm))
    return times(field.mul, a, conjugate)


add = _ring(np.add, max, by_parts, field.add)
mul = _ring(np.multiply, sum, times, field.mul)
_div = _ring(np.divide, sum, _over)
neg = _ring(np.negative, max, by_parts, field.neg)
minus = _ring(np.subtract, max, by_parts, field.sub)


def _sub(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """The difference; from a maximum, of the exponents too."""
    made = minus(eqn, a, b)
    if not isinstance(a, Exact) or a.is_complex or not (a.is_max or b.is_max):
        return made
    return replace(made, e=field.sub_exponents(exponents(a), exponents(b)))


def _exp(eqn: JaxprEqn, a: Exact) -> Exact:
    if a.is_complex:
        return opaque(eqn, a)
    f = np.exp(a.f)
    r = on_distinct(field.root_to, exponents(a))
    r = np.where(f == 0, field.u64(0), r)  # far below what any type has
    return exact(f, a, r=r, degree=1.0)


def opaque(eqn: JaxprEqn, *operands: Value) -> Exact:
    """An unknown function on single elements: a hash of them, and of its parameters. The floats are
    those of JAX's own operator, in 64 bits."""
    kept = {k: v for k, v in eqn.params.items() if k != "sharding"}
    name = eqn.primitive.name + str(sorted(kept.items(), key=str))
    is_complex = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)
    keys = [field.key_of(name, part) for part in range(1 + is_complex)]
    of = [x.one if isinstance(x, Exact) else field.of_integers(x) for x in operands]
    xs = [plain(x) for x in operands]
    if len(of) == 1:
        made = [on_distinct(functools.partial(field.hashed, k), of[0]) for k in keys]
        f = on_distinct(lambda x: _in_64_bits(eqn, x), xs[0])
    else:
        made, f = [field.hashed(k, *of) for k in keys], _in_64_bits(eqn, *np.broadcast_arrays(*xs))
    floats = [x for x in operands if isinstance(x, Exact)]
    # NaN, as of log(-1), is a number like others, so that all are compared: exactly, if they are.
    if np.isnan(f).any() and UNKNOWN not in [x.sum_bits for x in floats]:
        any_float = made[0].astype(f.dtype) / 2.0**61
        known = functools.reduce(np.logical_or, [np.isnan(x.f) for x in floats])
        f = np.where(np.isnan(f) & ~known, any_float, f)
    return exact(f, *operands, r=made[0], e=made[1] if is_complex else None, degree=1.0)


def _in_64_bits(eqn: JaxprEqn, *xs: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        return on_host.on_all((eqn, "wide"), lambda *xs: list(bind(eqn, xs)), xs)[0]


def _complex(eqn: JaxprEqn, a: Exact, b: Exact) -> Exact:
    r, e = np.broadcast_arrays(a.r, b.r)
    return exact(a.f + 1j * b.f, a, b, r=r, e=e)


def _part(fn: Move, parts: Callable[[Exact], dict[str, Any]]) -> Operator:
    """A part of a complex number, or another complex number."""

    def operator(eqn: JaxprEqn, a: Exact) -> Exact:
        a = converted(a, np.dtype(np.complex128))
        return exact(fn(a.f), a, **parts(a))

    return operator


# ------------------------------------------------------------------------ decisions


def below(a: Value, b: Value) -> np.ndarray:
    """Whether a < b."""
    if not isinstance(a, Exact) or not isinstance(b, Exact):
        return np.asarray(integers(a, b.dtype) < integers(b, a.dtype))
    differs, apart = a.one != b.one, np.abs(a.f - b.f)
    less, near = (a.f < b.f) & differs, apart <= _TIE * (np.abs(a.f) + np.abs(b.f))
    if not near.any():
        return less
    near &= np.isfinite(apart)
    Ties.count += int(np.count_nonzero(near & differs & (apart > 0)))
    return np.where(near, a.one < b.one, less)


def equal(a: Value, b: Value) -> np.ndarray:
    """Whether a == b."""
    if isinstance(a, Exact) and isinstance(b, Exact):
        return (a.one == b.one) & ~np.isnan(a.f)
    return np.asarray(integers(a, b.dtype) == integers(b, a.dtype))


def _at_most(a: Value, b: Value) -> np.ndarray:
    return below(a, b) | equal(a, b)


def _extreme(fn: Any, loses: Callable[[Value, Value], np.ndarray]) -> Callable[..., Value]:
    """The maximum, or the minimum; NaN if one is."""

    def best(a: Value, b: Value) -> Value:
        if not isinstance(a, Exact):  # as devices have them
            return fn(a, b)
        first = (~loses(a, b) & ~np.isnan(b.f)) | np.isnan(a.f)
        return replace(chosen(first, a, b), is_max=True)

    return best


larger = _extreme(np.maximum, below)
smaller = _extreme(np.minimum, lambda a, b: below(b, a))


def aligned(eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
    """Operands with scalars in as many dims as the others."""
    rank = max((a.aval.ndim for a in eqn.invars), default=0)
    widened: Move = lambda a: a.reshape(len(a), *(1,) * rank, *a.shape[1:])  # noqa: E731
    pairs = zip(operands, eqn.invars, strict=True)
    return [x if a.aval.ndim == rank else moved(widened, x) for x, a in pairs]


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: Value) -> Value:
    found = cases[0]
    for number, case in enumerate(cases[1:], 1):
        found = chosen(which == number, case, found)
    return found


def rounded(a: Exact, fn: Move) -> np.ndarray:
    """Floats made whole numbers by `fn`; what is one in the field is that one."""
    nearest = np.rint(a.f)
    known = np.isfinite(a.f) & (np.abs(nearest) < 2.0**53)
    is_whole = known & (field.of_floats(np.where(known, nearest, 0.0)) == a.r)
    return np.where(is_whole, nearest, fn(a.f))


def _whole(eqn: JaxprEqn, a: Exact) -> Exact:
    return of_array(rounded(a, lambda f: _in_64_bits(eqn, f)))


def _sign(eqn: JaxprEqn, a: Exact) -> Exact:
    return opaque(eqn, a) if a.is_complex else of_array(np.where(a.r == 0, 0.0, np.sign(a.f)))


def _abs(eqn: JaxprEqn, a: Exact) -> Exact:
    if a.is_complex:
        return opaque(eqn, a)
    return exact(np.abs(a.f), a, r=np.where(a.f < 0, field.neg(a.r), a.r))


# ------------------------------------------------------------------------ types


def converted(a: Value, dtype: Any) -> Value:
    """A value in another type: between floats nothing changes; the types in which sums are made
    are compared apart."""
    if not is_float(dtype):
        if not isinstance(a, Exact):
            return a.astype(dtype)
        return a.one != 0 if dtype == np.bool_ else _cast(rounded(a, np.trunc), dtype)
    if not isinstance(a, Exact):
        a = Exact(a.astype(np.float64), field.of_integers(a))
    is_complex = bool(jnp.issubdtype(dtype, jnp.complexfloating))
    if is_complex == a.is_complex:
        return a
    if is_complex:
        return replace(a, f=a.f.astype(np.complex128), e=np.zeros_like(a.r))
    return exact(a.f.real, a, r=a.r)


def _cast(f: np.ndarray, dtype: Any) -> np.ndarray:
    """Whole floats as integers, within the type's limits."""
    info = jnp.iinfo(dtype)
    high = float(info.max)
    high = np.nextafter(high, 0) if high > info.max else high
    return np.clip(np.nan_to_num(f.real, nan=0.0), info.min, high).astype(dtype)


def _bitcast(eqn: JaxprEqn, a: Value) -> Value:
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    if isinstance(a, Exact) and (a.bits is None or a.bits == new or not is_float(new)):
        if a.bits is not None or old.itemsize <= new.itemsize:
            return replace(a, bits=None if is_float(new) else a.bits or old)
        a = a.f.astype(old)
    raw = np.ascontiguousarray(integers(a, old))
    made = (raw[..., None] if old.itemsize > new.itemsize else raw).view(new)
    return of_array(made[..., 0] if old.itemsize < new.itemsize else made)


def _xor(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """Bits whose order is changed, and changed back, are still those of the same floats."""
    return a if isinstance(a, Exact) else b if isinstance(b, Exact) else a ^ b


_IDENTITIES = (
    "copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "annotate", "device_put",
    "sharding_constraint", "reduce_precision", "stage", "pvary", "pin", "convert_layout", "pcast",
    "random_wrap", "random_unwrap", "mesh_cast", "layout_constraint", "in_one_piece", "reshard",
    "pbroadcast",
)  # fmt: skip
_COMPARE: dict[str, Callable[..., Any]] = {
    "max": larger, "min": smaller, "clamp": lambda low, x, high: larger(low, smaller(x, high)),
    "eq": equal, "ne": lambda a, b: ~equal(a, b), "lt": below, "gt": lambda a, b: below(b, a),
    "le": _at_most, "ge": lambda a, b: _at_most(b, a), "eq_to": equal, "le_to": _at_most,
    "lt_to": below,
}  # fmt: skip
# What leaves the bits of floats the bits of floats.
KEEPS_BITS = {*_IDENTITIES, *_COMPARE, "bitcast_convert_type", "xor", "select_n"}

OF_ANY: dict[str, Callable[..., Any]] = {  # integers, too
    **dict.fromkeys(_IDENTITIES, lambda eqn, *xs: list(xs)),
    **{name: lambda eqn, *xs, fn=fn: fn(*xs) for name, fn in _COMPARE.items()},
    "add": add, "add_any": add, "sub": _sub, "mul": mul, "neg": neg, "select_n": _select,
    "and": lambda eqn, a, b: a & b, "or": lambda eqn, a, b: a | b, "not": lambda eqn, a: ~a,
    "xor": _xor,
    "convert_element_type": lambda eqn, a: converted(a, eqn.params["new_dtype"]),
}  # fmt: skip
OF_FLOATS: dict[str, Operator] = {
    **dict.fromkeys(("floor", "ceil", "round"), _whole),
    "div": _div, "exp": _exp, "complex": _complex, "sign": _sign, "abs": _abs,
    "real": _part(np.real, lambda a: {"r": a.r}), "imag": _part(np.imag, lambda a: {"r": a.e}),
    "conj": _part(np.conj, lambda a: {"r": a.r, "e": field.neg(a.e)}),
    "is_finite": lambda eqn, a: np.isfinite(a.f), "bitcast_convert_type": _bitcast,
}  # fmt: skip
