"""Operators of ATen on each element, and reductions, as functions of JAX.

An operator takes the arguments of its torch schema. The interpreter casts its results to the types
that torch gives them, so that a function here need not know torch's rules of promotion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Operator = Callable[..., Any]

# Under one name in both libraries, in this module of JAX.
_IN_NUMPY = (
    "abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not "
    "bitwise_or bitwise_right_shift bitwise_xor ceil copysign cos cosh exp exp2 expm1 floor fmod "
    "hypot isinf isnan log log10 log1p log2 logical_and logical_not logical_or "
    "logical_xor maximum minimum reciprocal remainder round sign sin sinh sqrt tan tanh trunc "
    "where"
)
_IN_LAX = "complex digamma erf erfc lgamma rsqrt"


def _div(x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return jnp.true_divide(x, other)
    if rounding_mode == "floor":
        return jnp.floor_divide(x, other)
    return jnp.trunc(jnp.true_divide(x, other))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Where a bound is reached the gradient is torch's: one to the tensor, not half."""
    low = x if min is None else jnp.where(x < min, min, x)
    return low if max is None else jnp.where(low > max, max, low)


POINTWISE: dict[str, Operator] = {
    **{name: getattr(jnp, name) for name in _IN_NUMPY.split()},
    **{name: getattr(lax, name) for name in _IN_LAX.split()},
    "add": lambda x, other, alpha=1: x + (other if alpha == 1 else alpha * other),
    "sub": lambda x, other, alpha=1: x - (other if alpha == 1 else alpha * other),
    "mul": lambda x, other: x * other,
    "neg": lambda x: -x,
    "div": _div,
    "pow": lambda x, exponent: x**exponent,
    "clamp": _clamp,
    "eq": lambda x, other: x == other,
    "ne": lambda x, other: x != other,
    "lt": lambda x, other: x < other,
    "le": lambda x, other: x <= other,
    "gt": lambda x, other: x > other,
    "ge": lambda x, other: x >= other,
    "erfinv": lax.erf_inv,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate == "tanh"),
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "_conj": jnp.conj,
    "polar": lambda x, angle: lax.complex(x * jnp.cos(angle), x * jnp.sin(angle)),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], -1),
}


def axes(dim: Any) -> Any:
    """The dims of a reduction: for torch, none means all."""
    return tuple(dim) or None if isinstance(dim, list | tuple) else dim


def _reduced(function: Operator) -> Operator:
    def reduce(x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
        given = x if dtype is None else x.astype(dtype)
        return function(given, axis=axes(dim), keepdims=keepdim)

    return reduce


def _extreme(values: Operator, where: Operator) -> Operator:
    """`max` and `min`: of all elements, or along a dim, with their places."""

    def extreme(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return values(x)
        at = where(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, at, dim)
        return (found, at) if keepdim else (found.squeeze(dim), at.squeeze(dim))

    return extreme


def _var(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    correction = 1 if correction is None else int(correction)  # an older overload: unbiased
    return jnp.var(x, axis=axes(dim), ddof=correction, keepdims=keepdim)


def _along(function: Operator) -> Operator:
    """A function along a dim; of a scalar, as torch allows."""
    return lambda x, dim, dtype=None: (
        function(jnp.atleast_1d(x), axis=dim).reshape(x.shape) if x.ndim else x
    )


def _wide(function: Operator) -> Operator:
    return lambda x, dim, half_to_float=False: function(
        x.astype(jnp.float32) if half_to_float else x, dim
    )


REDUCTIONS: dict[str, Operator] = {
    **{name: _reduced(getattr(jnp, name)) for name in ("sum", "mean", "prod", "any")},
    **{name: _reduced(getattr(jnp, name)) for name in ("amax", "amin", "argmax", "argmin")},
    "max": _extreme(jnp.max, jnp.argmax),
    "min": _extreme(jnp.min, jnp.argmin),
    "var": _var,
    "var_mean": lambda x, dim=None, correction=None, keepdim=False: (
        _var(x, dim, correction, keepdim),
        jnp.mean(x, axis=axes(dim), keepdims=keepdim),
    ),
    "cumsum": _along(jnp.cumsum),
    "cumprod": _along(jnp.cumprod),
    "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
    "_softmax": _wide(jax.nn.softmax),
    "_log_softmax": _wide(jax.nn.log_softmax),
}
