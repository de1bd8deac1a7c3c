"""Functions of one element whose bits depend, in XLA, on more than the element.

XLA's compilers for CPUs compute a logarithm differently in the vector part of a loop than in the
rest of it, and `tan`, `atan`, `cbrt` and `erf` differently in a `while` whose values are small.
Here they are made of operators that are the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# ln 2 in two parts, the first with so few bits that a multiple of it is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH


def _full(x: jax.Array, value: float) -> jax.Array:
    return lax.full_like(x, value)


def _log(x: jax.Array) -> jax.Array:
    """log(m 2^e) = e ln 2 + log1p(m - 1), with m around 1, where m - 1 is exact."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError("the logarithm of complex numbers is not reproducible yet")
    mantissa_bits = jnp.finfo(x.dtype).nmant
    integer = jnp.dtype(f"int{x.dtype.itemsize * 8}")
    bits = lax.bitcast_convert_type(x, integer)
    # The exponent of x / sqrt(1/2), so that m is between sqrt(1/2) and sqrt(2).
    root = lax.bitcast_convert_type(jnp.asarray(math.sqrt(0.5), x.dtype), integer)
    above = lax.sub(bits, lax.broadcast(root, bits.shape))
    exponent = lax.shift_right_arithmetic(above, lax.full_like(bits, mantissa_bits))
    shifted = lax.shift_left(exponent, lax.full_like(bits, mantissa_bits))
    mantissa = lax.bitcast_convert_type(lax.sub(bits, shifted), x.dtype)
    near = lax.log1p(lax.sub(mantissa, _full(x, 1.0)))
    e = lax.convert_element_type(exponent, x.dtype)
    high, low = lax.mul(e, _full(x, _LN2_HIGH)), lax.mul(e, _full(x, _LN2_LOW))
    result = lax.add(high, lax.add(near, low))
    result = lax.select(lax.eq(x, _full(x, math.inf)), x, result)
    tiny = _full(x, float(jnp.finfo(x.dtype).tiny))  # below it, XLA's CPUs take numbers for zero
    result = lax.select(lax.lt(x, tiny), _full(x, -math.inf), result)
    wrong = lax.bitwise_not(lax.ge(x, _full(x, 0.0)))  # negative, or no number
    return lax.select(wrong, _full(x, math.nan), result)


def _logistic(params: dict[str, Any], x: jax.Array) -> jax.Array:
    one = _full(x, 1.0)
    return lax.div(one, lax.add(one, lax.exp(lax.neg(x))))


def _log2(params: dict[str, Any], x: jax.Array) -> jax.Array:
    return lax.mul(_wide(_log)(params, x), _full(x, 1 / math.log(2)))


def _wide(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A function of floats, computed with 32 bits or more."""

    def rewrite(params: dict[str, Any], x: jax.Array) -> jax.Array:
        if x.dtype.itemsize >= 4:
            return function(x)
        return lax.convert_element_type(function(x.astype(jnp.float32)), x.dtype)

    return rewrite


def _tan(x: jax.Array) -> jax.Array:
    return lax.div(lax.sin(x), lax.cos(x))


def _atan(x: jax.Array) -> jax.Array:
    return lax.atan2(x, _full(x, 1.0))


def _cbrt(x: jax.Array) -> jax.Array:
    """A power, and one step of Newton's method: y - (y^3 - |x|) / 3y^2."""
    size = lax.abs(x)
    y = lax.exp(lax.mul(_log(size), _full(x, 1 / 3)))
    y = lax.sub(y, lax.mul(lax.sub(y, lax.div(lax.div(size, y), y)), _full(x, 1 / 3)))
    root = lax.select(lax.lt(x, _full(x, 0.0)), lax.neg(y), y)
    itself = lax.bitwise_or(lax.eq(x, _full(x, 0.0)), lax.eq(size, _full(x, math.inf)))
    return lax.select(itself, x, root)


def _erf(x: jax.Array) -> jax.Array:
    """1 - erfc(|x|), and a Taylor series near 0."""
    size, square = lax.abs(x), lax.mul(x, x)
    far = lax.mul(lax.sign(x), lax.sub(_full(x, 1.0), lax.erfc(size)))
    last = 7 if x.dtype.itemsize == 4 else 13
    total = _full(x, 0.0)
    for n in reversed(range(last)):
        term = 2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1))
        total = lax.add(lax.mul(total, square), _full(x, term))
    return lax.select(lax.gt(size, _full(x, 0.5)), far, lax.mul(x, total))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log": _wide(_log),
    "log2": _log2,
    "logistic": _logistic,
    "tan": _wide(_tan),
    "atan": _wide(_atan),
    "cbrt": _wide(_cbrt),
    "erf": _wide(_erf),
}
