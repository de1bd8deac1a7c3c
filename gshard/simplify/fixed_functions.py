"""Functions of one element whose bits depend, in XLA, on where in a loop the element is.

XLA's compilers for CPUs compute a logarithm otherwise in the vector part of a loop than in the rest
of it. Here it is made of operators that are the same in both.
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


def _log(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """log(m 2^e) = e ln 2 + log1p(m - 1), with m around 1, where m - 1 is exact."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError("the logarithm of complex numbers is not reproducible yet")
    if x.dtype.itemsize < 4:
        return lax.convert_element_type(_log(params, x.astype(jnp.float32)), x.dtype)
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
    return lax.mul(_log(params, x), _full(x, 1 / math.log(2)))


FUNCTIONS: dict[str, Callable[..., Any]] = {"log": _log, "log2": _log2, "logistic": _logistic}
