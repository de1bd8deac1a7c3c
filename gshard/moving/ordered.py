"""Floats as integers in the same order, for collectives that lose NaN in maxima and minima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.caching import cached


@cached
def _largest_is_nan(dtype: Any) -> bool:
    """Whether the largest bit pattern of a float is NaN; in some small types it is not."""
    bits = jnp.finfo(dtype).bits
    if bits < 8:
        return False
    largest = np.array(np.iinfo(f"int{bits}").max, f"int{bits}").view(dtype)
    return bool(np.isnan(largest.astype(np.float64)))


def sortable_bytes(dtype: Any) -> tuple[int, int]:
    """Bytes of what is sent for an element, in maxima and minima, and how often: complex numbers
    are compared by their real parts, and then by the others."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype.itemsize // 2, 2
    if jnp.issubdtype(dtype, jnp.floating) and not _largest_is_nan(dtype):
        return 2, 1  # as bfloat16
    return dtype.itemsize, 1


def flipped(bits: jax.Array) -> jax.Array:
    """The bits of negative floats as integers that are in order; and back."""
    info = jnp.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def sortable(x: jax.Array, kind: str) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Floats as integers in the same order, NaN first: collectives lose NaN in max and min."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int8), lambda y: y.astype(jnp.bool_)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x, lambda y: y
    if not _largest_is_nan(x.dtype):  # no integer for NaN beyond those of numbers
        keys, back_to_bfloat16 = sortable(x.astype(jnp.bfloat16), kind)
        return keys, lambda y: back_to_bfloat16(y).astype(x.dtype)
    integer = jnp.dtype(f"int{jnp.dtype(x.dtype).itemsize * 8}")
    info = jnp.iinfo(integer)
    nan = jnp.asarray(info.max if kind == "max" else info.min, integer)
    keys = jnp.where(jnp.isnan(x), nan, flipped(lax.bitcast_convert_type(x, integer)))

    def back(keys: jax.Array) -> jax.Array:
        value = lax.bitcast_convert_type(flipped(keys), x.dtype)
        return jnp.where(keys == nan, jnp.asarray(jnp.nan, x.dtype), value)

    return keys, back
