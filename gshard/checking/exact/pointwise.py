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
    Exact,
    Move,
    Value,
    beside,
    chosen,
    exact,
    exponents,
    integers,
    is_float,
    moved,
    of_array,
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


def _ring(on_floats: Any, in_field: Any, degree: Callable[..., float], on_integers: Any) -> Any:
    """An operator that the field has."""

    def operator(eqn: JaxprEqn | None, *xs: Value) -> Value:
        if not isinstance(xs[0], Exact):
            return np.asarray(on_integers(*xs)).astype(xs[0].dtype)
        r = in_field(*(x.r for x in xs))
        return exact(on_floats(*(x.f for x in xs)), r, *xs, degree=degree(x.degree for x in xs))

    return operator


def _over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return field.mul(a, on_distinct(field.inverse, b))


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Rounded towards zero; all bits are set for a division by zero."""
    safe = np.where(b == 0, 1, b)
    return np.where(b == 0, ~np.zeros((), a.dtype), (a - np.fmod(a, safe)) // safe)


add = _ring(np.add, field.add, max, np.add)
mul = _ring(np.multiply, field.mul, sum, np.multiply)
_div = _ring(np.divide, _over, sum, _quotient)
_neg = _ring(np.negative, field.neg, max, np.negative)
_minus = _ring(np.subtract, field.sub, max, np.subtract)


def sub(eqn: JaxprEqn | None, a: Value, b: Value) -> Value:
    """The difference; from a maximum, of the exponents too."""
    made = _minus(eqn, a, b)
    if isinstance(a, Exact) and (a.is_max or b.is_max):
        return replace(made, e=field.sub_exponents(exponents(a), exponents(b)))
    return made


def _rem(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    if not isinstance(a, Exact):
        return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b))).astype(a.dtype)
    return _minus(eqn, a, mul(eqn, b, of_array(np.trunc(_div(eqn, a, b).f))))


def _integer_pow(eqn: JaxprEqn, a: Value) -> Value:
    power = eqn.params.get("y", 2)
    of_field: Move = lambda r: on_distinct(lambda x: field.power(x, power), r)  # noqa: E731
    return _ring(
        lambda f: f ** float(power), of_field, lambda d: sum(d) * max(abs(power), 1),
        lambda x: x**power,
    )(eqn, a)  # fmt: skip


# ------------------------------------------------------------------------ functions


def _exp(eqn: JaxprEqn, a: Exact) -> Exact:
    f = np.exp(a.f)
    r = on_distinct(field.root_to, exponents(a))
    r = np.where(f == 0, field.u64(0), r)  # far below what any type has
    return exact(f, r, a, degree=1.0)


def unknown(name: str, fn: Callable[..., np.ndarray] | None = None) -> Operator:
    """An unknown function of its operands: a hash of them; floats of `fn`, if known."""

    def operator(eqn: JaxprEqn, *operands: Value) -> Value:
        key = field.key_of(name)
        of = [x.r if isinstance(x, Exact) else field.of_integers(x) for x in operands]
        r = field.hashed(key, *of)
        if len(of) == 1:
            r = on_distinct(lambda x: field.hashed(key, x), of[0])
        any_float = r.astype(np.float64) / 2.0**61
        f = any_float if fn is None else np.asarray(fn(*map(plain, operands)))
        if np.isnan(f).any():  # as of log(-1): a number like others, so that all are compared
            known = [np.isnan(x.f) for x in operands if isinstance(x, Exact)]
            f = np.where(np.isnan(f) & ~functools.reduce(np.logical_or, known), any_float, f)
        return exact(f, r, *operands, degree=1.0)

    return operator


def opaque(eqn: JaxprEqn, *operands: Value) -> Value:
    """An unknown function on single elements, for each of its parameters."""
    kept = {k: v for k, v in eqn.params.items() if k != "sharding"}
    return unknown(eqn.primitive.name + str(sorted(kept.items(), key=str)))(eqn, *operands)


def _linear(factor: Any, fn: Move) -> Operator:
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
    if not isinstance(a, Exact) or not isinstance(b, Exact):
        return _whole(a, b) < _whole(b, a)
    differs, apart = a.r != b.r, np.abs(a.f - b.f)
    near = np.isfinite(apart) & (apart <= _TIE * (np.abs(a.f) + np.abs(b.f)))
    if near.any():
        Ties.count += int(np.count_nonzero(near & differs & (apart > 0)))
    return np.where(near | (a.f == b.f), a.r < b.r, (a.f < b.f) & differs)


def _whole(a: Value, other: Value) -> np.ndarray:
    return integers(a, other.dtype) if isinstance(a, Exact) else a


def equal(a: Value, b: Value) -> np.ndarray:
    """Whether a == b."""
    if isinstance(a, Exact) and isinstance(b, Exact):
        return (a.r == b.r) & ~np.isnan(a.f)
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
    if not isinstance(a, Exact):
        return fn(a, b)
    first = (~loses(a, b) & ~np.isnan(b.f)) | np.isnan(a.f)
    return replace(chosen(first, a, b), is_max=True)


def aligned(operands: Sequence[Value]) -> Sequence[Value]:
    """Scalars beside arrays of more dims."""
    widest = max(map(plain, operands), key=np.ndim) if operands else np.zeros(())
    return [moved(lambda a: beside(a, widest), x) for x in operands]


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
    return lambda eqn, a: of_array(rounded(a, fn)) if isinstance(a, Exact) else a


def _round(eqn: JaxprEqn, a: Exact) -> Exact:
    even = int(eqn.params["rounding_method"]) == 1
    return of_array(rounded(a, np.rint if even else lambda f: np.trunc(f + np.copysign(0.5, f))))


def _sign(eqn: JaxprEqn, a: Value) -> Value:
    if not isinstance(a, Exact) or np.iscomplexobj(a.f):
        return opaque(eqn, a) if isinstance(a, Exact) else np.sign(a)
    return of_array(np.where(a.r == 0, 0.0, np.sign(a.f)))


def _abs(eqn: JaxprEqn, a: Value) -> Value:
    if not isinstance(a, Exact) or np.iscomplexobj(a.f):
        return unknown("abs", np.abs)(eqn, a) if isinstance(a, Exact) else np.abs(a)
    return exact(np.abs(a.f), np.where(a.f < 0, field.neg(a.r), a.r), a)


# ------------------------------------------------------------------------ types


def convert(eqn: JaxprEqn, a: Value) -> Value:
    """Between floats nothing changes; the types in which sums are made are compared apart."""
    return converted(a, eqn.params["new_dtype"])


def converted(a: Value, dtype: Any) -> Value:
    """A value in another type."""
    if isinstance(a, Exact) and is_float(dtype):
        is_real = not jnp.issubdtype(dtype, jnp.complexfloating)
        return _linear(_REAL, np.real)(None, a) if is_real and np.iscomplexobj(a.f) else a
    if isinstance(a, Exact):
        return a.r != 0 if dtype == np.bool_ else _cast(rounded(a, np.trunc), dtype)
    if is_float(dtype):
        return Exact(a.astype(np.float64), field.of_integers(a))
    return a != 0 if dtype == np.bool_ else a.astype(dtype)


def _cast(f: np.ndarray, dtype: Any) -> np.ndarray:
    """Whole floats as integers, within the type's limits."""
    info = jnp.iinfo(dtype)
    high = float(info.max)
    high = np.nextafter(high, 0) if high > info.max else high
    return np.clip(np.nan_to_num(f, nan=0.0), info.min, high).astype(dtype)


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
    tagged = next((x for x in (a, b) if isinstance(x, Exact)), None)
    return a ^ b if tagged is None else tagged


def _shift(fn: Callable[..., np.ndarray], fill: int) -> Operator:
    def operator(eqn: JaxprEqn, a: np.ndarray, by: np.ndarray) -> np.ndarray:
        inside = (by >= 0) & (by < a.dtype.itemsize * 8)
        return np.where(inside, fn(a, np.where(inside, by, 0)), fill * (a < 0)).astype(a.dtype)

    return operator


def _logical_right(a: np.ndarray, by: np.ndarray) -> np.ndarray:
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    return (a.view(unsigned) >> by.astype(unsigned)).view(a.dtype)


def _threefry(eqn: JaxprEqn, *operands: np.ndarray) -> list[np.ndarray]:
    """The generator of random bits (Salmon et al., 2011), as XLA need not compile it here."""
    k0, k1, x0, x1 = aligned(operands)
    keys = [k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA), k0]
    x0, x1 = x0 + k0, x1 + k1
    for turn in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[turn % 2]:
            x0 = x0 + x1
            x1 = x0 ^ ((x1 << np.uint32(bits)) | (x1 >> np.uint32(32 - bits)))
        x0, x1 = x0 + keys[turn % 3], x1 + keys[(turn + 1) % 3] + np.uint32(turn + 1)
    return [x0, x1]


def _same(eqn: JaxprEqn, *operands: Value) -> Value:
    return operands[0] if len(operands) == 1 else list(operands)


def _compared(fn: Callable[..., Any]) -> Operator:
    return lambda eqn, *xs: fn(*xs)


_KNOWN: dict[str, Callable[..., Any]] = {
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
    **dict.fromkeys(_IDENTITIES, _same), **{n: _compared(fn) for n, fn in _COMPARE.items()},
    "add": add, "add_any": add, "sub": sub, "mul": mul, "div": _div, "rem": _rem, "neg": _neg,
    "integer_pow": _integer_pow, "square": _integer_pow, "exp": _exp, "complex": _complex,
    "real": _linear(_REAL, np.real), "imag": _linear(_IMAG, np.imag),
    "conj": _linear(field.element("conj"), np.conj), "select_n": _select, "sign": _sign,
    "abs": _abs, "floor": _decided(np.floor), "ceil": _decided(np.ceil), "round": _round,
    "is_finite": lambda eqn, a: np.isfinite(a.f), "convert_element_type": convert,
    "bitcast_convert_type": _bitcast, "xor": _xor, "and": _compared(np.bitwise_and),
    "or": _compared(np.bitwise_or), "not": _compared(np.invert),
    "threefry2x32": _threefry, "shift_left": _shift(np.left_shift, 0),
    "shift_right_arithmetic": _shift(np.right_shift, -1),
    "shift_right_logical": _shift(_logical_right, 0),
}  # fmt: skip
