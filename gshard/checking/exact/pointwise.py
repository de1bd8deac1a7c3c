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

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from scipy import special

from gshard.checking.exact import field
from gshard.checking.exact.number import (
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

Operator = Callable[..., Value]
_TIE = 1e-11  # floats that are closer, relatively, may be ordered otherwise after rounding


class Ties:
    """Counts decisions by floats that rounding could have changed."""

    count = 0


def bits_of(dtype: Any) -> int:
    """The bits of a type's significand."""
    return int(jnp.finfo(dtype).nmant)


# ------------------------------------------------------------------------ the ring


def _ring(on_floats: Any, degree: Callable[..., float], in_field: Any, *first: Any) -> Operator:
    """An operator that the field has."""

    def operator(eqn: JaxprEqn | None, *xs: Exact) -> Exact:
        f = on_floats(*(x.f for x in xs))
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
_minus = _ring(np.subtract, max, by_parts, field.sub)


def sub(eqn: JaxprEqn | None, a: Exact, b: Exact) -> Exact:
    """The difference; from a maximum, of the exponents too."""
    made = _minus(eqn, a, b)
    if (a.is_max or b.is_max) and not a.is_complex:
        return replace(made, e=field.sub_exponents(exponents(a), exponents(b)))
    return made


def _rem(eqn: JaxprEqn, a: Exact, b: Exact) -> Exact:
    return _minus(eqn, a, mul(eqn, b, of_array(np.trunc(_div(eqn, a, b).f))))


def _integer_pow(eqn: JaxprEqn, a: Exact) -> Exact:
    power, found = eqn.params.get("y", 2), a
    ones = of_array(np.ones((1,) * a.ndim, a.dtype))
    for bit in bin(abs(power))[3:]:
        found = mul(eqn, found, found)
        found = mul(eqn, found, a) if bit == "1" else found
    return found if power > 0 else _div(eqn, ones, found) if power else mul(eqn, ones, ones)


# ------------------------------------------------------------------------ functions


def _exp(eqn: JaxprEqn, a: Exact) -> Exact:
    if a.is_complex:
        return unknown("exp", np.exp)(eqn, a)
    f = np.exp(a.f)
    r = on_distinct(field.root_to, exponents(a))
    r = np.where(f == 0, field.u64(0), r)  # far below what any type has
    return exact(f, a, r=r, degree=1.0)


def unknown(name: str, fn: Callable[..., np.ndarray] | None = None) -> Operator:
    """An unknown function of its operands: a hash of them; floats of `fn`, if known."""

    def operator(eqn: JaxprEqn, *operands: Value) -> Value:
        of = [x.one if isinstance(x, Exact) else field.of_integers(x) for x in operands]
        is_complex = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.complexfloating)
        keys = [field.key_of(name, part) for part in range(1 + is_complex)]
        if len(of) == 1:
            made = [on_distinct(functools.partial(field.hashed, k), of[0]) for k in keys]
        else:
            made = [field.hashed(k, *of) for k in keys]
        any_float = made[0].astype(np.complex128 if is_complex else np.float64) / 2.0**61
        f = any_float if fn is None else np.asarray(fn(*map(plain, operands)))
        if np.isnan(f).any():  # as of log(-1): a number like others, so that all are compared
            known = [np.isnan(x.f) for x in operands if isinstance(x, Exact)]
            f = np.where(np.isnan(f) & ~functools.reduce(np.logical_or, known), any_float, f)
        return exact(f, *operands, r=made[0], e=made[1] if is_complex else None, degree=1.0)

    return operator


def opaque(eqn: JaxprEqn, *operands: Value) -> Value:
    """An unknown function on single elements, for each of its parameters."""
    kept = {k: v for k, v in eqn.params.items() if k != "sharding"}
    return unknown(eqn.primitive.name + str(sorted(kept.items(), key=str)))(eqn, *operands)


def _complex(eqn: JaxprEqn, a: Exact, b: Exact) -> Exact:
    r, e = np.broadcast_arrays(a.r, b.r)
    return exact(a.f + 1j * b.f, a, b, r=r, e=e)


def _conj(eqn: JaxprEqn, a: Exact) -> Exact:
    a = converted(a, np.dtype(np.complex128))
    return exact(np.conj(a.f), a, r=a.r, e=field.neg(a.e))


# ------------------------------------------------------------------------ decisions


def below(a: Value, b: Value) -> np.ndarray:
    """Whether a < b."""
    if not isinstance(a, Exact) or not isinstance(b, Exact):
        return _whole(a, b) < _whole(b, a)
    one, other = a.one, b.one
    differs, apart = one != other, np.abs(a.f - b.f)
    near = np.isfinite(apart) & (apart <= _TIE * (np.abs(a.f) + np.abs(b.f)))
    if near.any():
        Ties.count += int(np.count_nonzero(near & differs & (apart > 0)))
    return np.where(near | (a.f == b.f), one < other, (a.f < b.f) & differs)


def _whole(a: Value, other: Value) -> np.ndarray:
    return integers(a, other.dtype) if isinstance(a, Exact) else a


def equal(a: Value, b: Value) -> np.ndarray:
    """Whether a == b."""
    if isinstance(a, Exact) and isinstance(b, Exact):
        return (a.one == b.one) & ~np.isnan(a.f)
    return np.asarray(_whole(a, b) == _whole(b, a))


def _at_most(a: Value, b: Value) -> np.ndarray:
    return below(a, b) | equal(a, b)


def larger(a: Value, b: Value) -> Value:
    """The maximum; NaN if one is."""
    return _extreme(np.maximum, below, a, b)


def smaller(a: Value, b: Value) -> Value:
    """The minimum; NaN if one is."""
    return _extreme(np.minimum, lambda x, y: below(y, x), a, b)


def _extreme(fn: Any, loses: Callable[[Value, Value], np.ndarray], a: Value, b: Value) -> Value:
    if not isinstance(a, Exact):  # as devices have them
        return fn(a, b)
    first = (~loses(a, b) & ~np.isnan(b.f)) | np.isnan(a.f)
    return replace(chosen(first, a, b), is_max=True)


def aligned(eqn: JaxprEqn, operands: Sequence[Value]) -> Sequence[Value]:
    """Operands with scalars in as many dims as the others."""
    rank = max((a.aval.ndim for a in eqn.invars), default=0)
    pairs = zip(operands, eqn.invars, strict=True)
    return [x if a.aval.ndim == rank else _widened(x, rank) for x, a in pairs]


def _widened(x: Value, rank: int) -> Value:
    return moved(lambda a: a.reshape(len(a), *(1,) * rank, *a.shape[1:]), x)


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


def _decided(fn: Move) -> Operator:
    return lambda eqn, a: of_array(rounded(a, fn))


def _round(eqn: JaxprEqn, a: Exact) -> Exact:
    even = int(eqn.params["rounding_method"]) == 1
    return of_array(rounded(a, np.rint if even else lambda f: np.trunc(f + np.copysign(0.5, f))))


def _sign(eqn: JaxprEqn, a: Exact) -> Exact:
    return opaque(eqn, a) if a.is_complex else of_array(np.where(a.r == 0, 0.0, np.sign(a.f)))


def _abs(eqn: JaxprEqn, a: Exact) -> Exact:
    if a.is_complex:
        return unknown("abs", np.abs)(eqn, a)
    return exact(np.abs(a.f), a, r=np.where(a.f < 0, field.neg(a.r), a.r))


# ------------------------------------------------------------------------ types


def converted(a: Value, dtype: Any) -> Value:
    """A value in another type: between floats nothing changes; the types in which sums are made
    are compared apart."""
    if not isinstance(a, Exact):
        a = Exact(a.astype(np.float64), field.of_integers(a))
    if not is_float(dtype):
        return a.one != 0 if dtype == np.bool_ else _cast(rounded(a, np.trunc), dtype)
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
    if old.itemsize == new.itemsize:
        return of_array(raw.view(new))
    return of_array(
        raw.view(new)[..., 0] if old.itemsize < new.itemsize else raw[..., None].view(new)
    )


def _xor(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """Bits whose order is changed, and changed back, are still those of the same floats."""
    return a if isinstance(a, Exact) else b


def _same(eqn: JaxprEqn, *operands: Value) -> Value:
    return operands[0] if len(operands) == 1 else list(operands)


_KNOWN: dict[str, Callable[..., Any]] = {
    "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "log": np.log, "log2": np.log2,
    "exp2": np.exp2, "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "erf": special.erf, "erfc": special.erfc,
    "erf_inv": special.erfinv, "lgamma": special.gammaln, "digamma": special.digamma,
    "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2,
    "pow": lambda x, y: np.power(x, y.astype(np.float64)), "nextafter": np.nextafter,
}  # fmt: skip
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

POINTWISE: dict[str, Operator] = {
    **{name: unknown(name, fn) for name, fn in _KNOWN.items()},
    **{name: lambda eqn, *xs, fn=fn: fn(*xs) for name, fn in _COMPARE.items()},
    "add": add, "add_any": add, "sub": sub, "mul": mul, "div": _div, "rem": _rem, "neg": neg,
    "integer_pow": _integer_pow, "square": _integer_pow, "exp": _exp, "complex": _complex,
    "real": lambda eqn, a: exact(a.f.real, a, r=a.r), "conj": _conj,
    "imag": lambda eqn, a: exact(a.f.imag, a, r=a.e), "sign": _sign, "abs": _abs,
    "floor": _decided(np.floor), "ceil": _decided(np.ceil), "round": _round, "xor": _xor,
    "is_finite": lambda eqn, a: np.isfinite(a.f),
    "convert_element_type": lambda eqn, a: converted(a, eqn.params["new_dtype"]),
    "bitcast_convert_type": _bitcast,
}  # fmt: skip
# These are for integers, too.
OF_ANY: dict[str, Operator] = {**dict.fromkeys(_IDENTITIES, _same), "select_n": _select}
