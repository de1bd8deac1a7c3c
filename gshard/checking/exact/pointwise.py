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
    IMAGINARY,
    Bits,
    Exact,
    Value,
    chosen,
    exact,
    exponents,
    is_float,
    moved,
    of_floats,
    of_integers,
    on_distinct,
    plain,
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


def _add(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    if isinstance(a, Exact):
        return exact(a.f + b.f, field.add(a.r, b.r), a, b)
    return _integers(np.add, a, b)


def _sub(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    if not isinstance(a, Exact):
        return _integers(np.subtract, a, b)
    e = field.sub_exponents(exponents(a), exponents(b)) if b.is_max or a.is_max else None
    return exact(a.f - b.f, field.sub(a.r, b.r), a, b, e=e)


def _mul(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    if isinstance(a, Exact):
        return exact(a.f * b.f, field.mul(a.r, b.r), a, b, degree=a.degree + b.degree)
    return _integers(np.multiply, a, b)


def _div(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    if isinstance(a, Exact):
        r = field.mul(a.r, on_distinct(field.inverse, b.r))
        return exact(a.f / b.f, r, a, b, degree=a.degree + b.degree)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a, a // np.where(b == 0, 1, b)).astype(a.dtype)
    safe = np.where(b == 0, 1, b)
    found = np.abs(a.astype(np.int64)) // np.abs(safe.astype(np.int64)) * np.sign(a) * np.sign(safe)
    return np.where(b == 0, -1, found).astype(a.dtype)


def _rem(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    if not isinstance(a, Exact):
        return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))).astype(a.dtype)
    times = of_floats(np.trunc(_div(eqn, a, b).f))
    return replace(_sub(eqn, a, _mul(eqn, b, times)), e=None)


def _neg(eqn: JaxprEqn, a: Value) -> Value:
    return exact(-a.f, field.neg(a.r), a) if isinstance(a, Exact) else _integers(np.negative, a)


def _integer_pow(eqn: JaxprEqn, a: Value) -> Value:
    power = eqn.params.get("y", 2)
    if isinstance(a, Exact):
        r = on_distinct(lambda r: field.power(r, power), a.r)
        return exact(a.f ** float(power), r, a, degree=a.degree * max(abs(power), 1))
    return _integers(lambda x: x**power, a)


def _integers(fn: Callable[..., np.ndarray], *values: Value) -> np.ndarray:
    arrays = [plain(x) for x in values]
    return np.asarray(fn(*arrays)).astype(arrays[0].dtype)


# ------------------------------------------------------------------------ functions


def _exp(eqn: JaxprEqn, a: Exact) -> Exact:
    f = np.exp(a.f)
    r = on_distinct(field.root_to, exponents(a))
    r = np.where(f == 0, field.u64(0), r)  # far below what any type has
    return exact(f, r, a, degree=1.0)


def _expm1(eqn: JaxprEqn, a: Exact) -> Exact:
    return _sub(eqn, _exp(eqn, a), of_floats(np.ones((1,) * a.ndim)))


def _log1p(eqn: JaxprEqn, a: Exact) -> Exact:
    one = of_floats(np.ones((1,) * a.ndim))
    return unknown("log", np.log)(eqn, _add(eqn, one, a))


def unknown(name: str, fn: Callable[..., np.ndarray] | None, *names: str) -> Operator:
    """An unknown function of its operands, and of some parameters; floats of `fn`, if known."""

    def operator(eqn: JaxprEqn, *operands: Value) -> Value:
        key = field.key_of(name, *(str(eqn.params[n]) for n in names))
        residues = [x.r if isinstance(x, Exact) else field.of_integers(plain(x)) for x in operands]
        if len(residues) == 1:
            r = on_distinct(lambda x: field.hashed(key, x), residues[0])
        else:
            r = field.hashed(key, *residues)
        any_float = r.astype(np.float64) / 2.0**61
        f = any_float if fn is None else np.asarray(fn(*map(plain, operands)))
        if np.isnan(f).any():  # as of log(-1): a number like others, so that all are compared
            known = [np.isnan(x.f) for x in operands if isinstance(x, Exact)]
            f = np.where(np.isnan(f) & ~functools.reduce(np.logical_or, known), any_float, f)
        return exact(f, r, *operands, degree=1.0)

    return operator


def opaque(eqn: JaxprEqn, *operands: Value) -> Value:
    """An unknown function on single elements."""
    kept = {k: v for k, v in eqn.params.items() if k != "sharding"}
    return unknown(eqn.primitive.name + str(sorted(kept.items(), key=str)), None)(eqn, *operands)


def _linear(factor: Any, fn: Callable[[np.ndarray], np.ndarray]) -> Operator:
    """A linear function that the field does not have: a product with a constant."""
    return lambda eqn, a: exact(fn(a.f), field.mul(a.r, factor), a)


def _complex(eqn: JaxprEqn, a: Exact, b: Exact) -> Exact:
    return exact(a.f + 1j * b.f, field.add(a.r, field.mul(IMAGINARY, b.r)), a, b)


# A number is its real part, and `IMAGINARY` times the other part.
_REAL, _PRIME = field.element("real"), int(field.P)
_IMAG = field.u64((1 - int(_REAL)) * pow(int(IMAGINARY), -1, _PRIME) % _PRIME)


# ------------------------------------------------------------------------ decisions


def below(a: Value, b: Value) -> np.ndarray:
    """Whether a < b."""
    if isinstance(a, Bits) and isinstance(b, Bits):
        a, b = a.tag, b.tag
    if not (isinstance(a, Exact) and isinstance(b, Exact)):
        return plain(a) < plain(b)
    differs = a.r != b.r
    apart = np.abs(a.f - b.f)
    near = np.isfinite(apart) & (apart <= _TIE * (np.abs(a.f) + np.abs(b.f)))
    Ties.count += int(np.count_nonzero(near & differs & (apart > 0)))
    return np.where(near | (a.f == b.f), a.r < b.r, (a.f < b.f) & differs)


def equal(a: Value, b: Value) -> np.ndarray:
    """Whether a == b."""
    if isinstance(a, Exact):
        return (a.r == b.r) & ~np.isnan(a.f)
    return np.asarray(plain(a) == plain(b))


def _at_most(a: Value, b: Value) -> np.ndarray:
    return below(a, b) | equal(a, b)


def larger(a: Value, b: Value) -> Value:
    """The maximum; NaN if one is."""
    return _extreme(~below(a, b), a, b)


def smaller(a: Value, b: Value) -> Value:
    """The minimum; NaN if one is."""
    return _extreme(~below(b, a), a, b)


def _extreme(first: np.ndarray, a: Value, b: Value) -> Value:
    if isinstance(a, Exact):
        first = (first & ~np.isnan(b.f)) | np.isnan(a.f)
        return replace(chosen(first, a, b), is_max=True)
    return chosen(first, a, b)


def _clamp(eqn: JaxprEqn, low: Value, x: Value, high: Value) -> Value:
    return larger(low, smaller(x, high))


def aligned(operands: Sequence[Value]) -> Sequence[Value]:
    """Scalars beside arrays of more dims."""
    rank = max((x.ndim for x in operands), default=0)
    return [x if x.ndim == rank else moved(_more(rank - x.ndim), x) for x in operands]


def _more(dims: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda a: a.reshape(*a.shape, *(1,) * dims)


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: Value) -> Value:
    found = cases[0]
    for number, case in enumerate(cases[1:], 1):
        found = chosen(which == number, case, found)
    return found


def whole(a: Exact, fn: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Floats made whole numbers by `fn`; what is one in the field is that one."""
    nearest = np.rint(a.f)
    known = np.isfinite(a.f) & (np.abs(nearest) < 2.0**53)
    is_whole = known & (field.of_floats(np.where(known, nearest, 0.0)) == a.r)
    return np.where(is_whole, nearest, fn(a.f))


def _round(eqn: JaxprEqn, a: Exact) -> Exact:
    even = int(eqn.params["rounding_method"]) == 1
    return of_floats(whole(a, np.rint if even else lambda f: np.trunc(f + np.copysign(0.5, f))))


def _sign(eqn: JaxprEqn, a: Value) -> Value:
    if not isinstance(a, Exact):
        return np.sign(a)
    if np.iscomplexobj(a.f):
        return opaque(eqn, a)
    return of_floats(np.where(a.r == 0, 0.0, np.sign(a.f)))


def _abs(eqn: JaxprEqn, a: Value) -> Value:
    if not isinstance(a, Exact):
        return np.abs(a)
    if np.iscomplexobj(a.f):
        return unknown("abs", np.abs)(eqn, a)
    return exact(np.abs(a.f), np.where(a.f < 0, field.neg(a.r), a.r), a)


# ------------------------------------------------------------------------ types


def _convert(eqn: JaxprEqn, a: Value) -> Value:
    """Between floats nothing changes; the types in which sums are made are compared apart."""
    dtype = eqn.params["new_dtype"]
    if isinstance(a, Exact) and is_float(dtype):
        is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
        return _linear(_REAL, np.real)(eqn, a) if is_real and np.iscomplexobj(a.f) else a
    if isinstance(a, Exact):
        return a.r != 0 if dtype == np.bool_ else _cast(whole(a, np.trunc), dtype)
    if is_float(dtype):
        return of_integers(plain(a))
    return plain(a) != 0 if dtype == np.bool_ else plain(a).astype(dtype)


def _cast(f: np.ndarray, dtype: Any) -> np.ndarray:
    """Whole floats as integers, within the type's limits."""
    info = jnp.iinfo(dtype)
    high = float(info.max)
    high = np.nextafter(high, 0) if high > info.max else high
    return np.clip(np.nan_to_num(f, nan=0.0), info.min, high).astype(dtype)


def _bitcast(eqn: JaxprEqn, a: Value) -> Value:
    old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"])
    if isinstance(a, Bits) and is_float(new):
        return a.tag
    raw = a.f.astype(old) if isinstance(a, Exact) else np.ascontiguousarray(plain(a))
    if old.itemsize == new.itemsize:
        bits = np.ascontiguousarray(raw).view(new)
    elif old.itemsize < new.itemsize:
        bits = np.ascontiguousarray(raw).view(new)[..., 0]
    else:
        bits = np.ascontiguousarray(raw)[..., None].view(new)
    if isinstance(a, Exact) and old.itemsize <= new.itemsize and not is_float(new):
        return Bits(bits, a)
    return of_floats(bits) if is_float(new) else bits


def _xor(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    """Bits whose order is changed, and changed back, are still those of the same floats."""
    found = plain(a) ^ plain(b)
    tagged = next((x for x in (a, b) if isinstance(x, Bits)), None)
    return found if tagged is None or found.shape != tagged.shape else replace(tagged, i=found)


def _shift(fn: Callable[..., np.ndarray], fill: int) -> Operator:
    def operator(eqn: JaxprEqn, a: Value, by: Value) -> np.ndarray:
        a, by = plain(a), plain(by)
        width = a.dtype.itemsize * 8
        inside = (by >= 0) & (by < width)
        return np.where(inside, fn(a, np.where(inside, by, 0)), fill * (a < 0)).astype(a.dtype)

    return operator


def _logical_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(unsigned) >> by.astype(unsigned)).view(a.dtype)


def _same(eqn: JaxprEqn, *operands: Value) -> Value:
    return operands[0] if len(operands) == 1 else list(operands)


def _bitwise(fn: Callable[..., np.ndarray]) -> Operator:
    return lambda eqn, *xs: _integers(fn, *xs)


def _compared(fn: Callable[[Value, Value], np.ndarray]) -> Operator:
    return lambda eqn, a, b: fn(a, b)


def _decided(fn: Callable[[np.ndarray], np.ndarray]) -> Operator:
    return lambda eqn, a: of_floats(whole(a, fn)) if isinstance(a, Exact) else a


_KNOWN: dict[str, Callable[..., Any] | None] = {
    "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": np.cbrt, "log": np.log, "log2": np.log2,
    "exp2": np.exp2, "logistic": special.expit, "erf": special.erf, "erfc": special.erfc,
    "erf_inv": special.erfinv, "lgamma": special.gammaln, "digamma": special.digamma,
    "sinh": np.sinh, "cosh": np.cosh, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh, "atan2": np.arctan2,
    "pow": lambda x, y: np.power(x, y.astype(np.float64)), "nextafter": np.nextafter,
}  # fmt: skip
_IDENTITIES = (
    "copy", "copy_p", "stop_gradient", "optimization_barrier", "name", "annotate", "device_put",
    "sharding_constraint", "reduce_precision", "stage", "pvary", "pin", "convert_layout", "pcast",
    "mesh_cast", "layout_constraint", "in_one_piece", "reshard", "pbroadcast",
)  # fmt: skip

POINTWISE: dict[str, Operator] = {
    **{name: unknown(name, fn) for name, fn in _KNOWN.items()},
    **dict.fromkeys(_IDENTITIES, _same),
    "add": _add, "add_any": _add, "sub": _sub, "mul": _mul, "div": _div, "rem": _rem, "neg": _neg,
    "integer_pow": _integer_pow, "square": _integer_pow, "exp": _exp, "expm1": _expm1,
    "log1p": _log1p, "complex": _complex, "real": _linear(_REAL, np.real),
    "imag": _linear(_IMAG, np.imag), "conj": _linear(field.element("conj"), np.conj),
    "max": _compared(larger), "min": _compared(smaller), "clamp": _clamp, "select_n": _select,
    "eq": _compared(equal), "ne": _compared(lambda a, b: ~equal(a, b)), "lt": _compared(below),
    "gt": _compared(lambda a, b: below(b, a)), "le": _compared(_at_most),
    "ge": _compared(lambda a, b: _at_most(b, a)), "eq_to": _compared(equal),
    "le_to": _compared(_at_most), "lt_to": _compared(below), "sign": _sign, "abs": _abs,
    "floor": _decided(np.floor), "ceil": _decided(np.ceil), "round": _round,
    "is_finite": lambda eqn, a: np.isfinite(a.f), "convert_element_type": _convert,
    "bitcast_convert_type": _bitcast, "xor": _xor, "and": _bitwise(np.bitwise_and),
    "or": _bitwise(np.bitwise_or), "not": _bitwise(np.invert),
    "shift_left": _shift(np.left_shift, 0), "shift_right_arithmetic": _shift(np.right_shift, -1),
    "shift_right_logical": _shift(_logical_right, 0),
}  # fmt: skip
