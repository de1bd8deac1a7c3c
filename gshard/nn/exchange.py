"""Tokens sent to their experts and back in eight bits: half the bytes of bfloat16.

What is sent is rounded to e4m3 forward and to e5m2 backward, each tensor times a scale that is one
number; what is received has the dtype of before. Eight-bit values stay inside the function, and
sums are not affected: only what moves between devices is rounded. On one device nothing moves, and
the tokens are rounded alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from gshard.nn.float8 import power_of_two
from gshard.nn.kernels.float8 import E4M3, E5M2, rounded

Annotate = Callable[[Array], Array]

_SAMPLE = 64  # one of this many numbers of the last dims is sampled for a scale


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def exchanged(here: Annotate, there: Annotate, x: Array) -> Array:
    """`x`, which is sharded as `here` annotates, sharded as `there` does; sent in eight bits."""
    return _sent(here, there, x, E4M3)


def _forward(here: Annotate, there: Annotate, x: Array) -> tuple[Array, None]:
    return exchanged(here, there, x), None


def _backward(here: Annotate, there: Annotate, _: None, grads: Array) -> tuple[Array]:
    return (_sent(there, here, grads, E5M2),)


exchanged.defvjp(_forward, _backward)


def _sent(here: Annotate, there: Annotate, x: Array, dtype: Any) -> Array:
    """As bits: some libraries of collectives have no eight-bit floating-point numbers."""
    scale = _scale(x)
    bits = lax.bitcast_convert_type(rounded(x.astype(jnp.float32) * scale, dtype), jnp.uint8)
    found = lax.bitcast_convert_type(there(here(bits)), dtype)
    return (found.astype(jnp.float32) / scale).astype(x.dtype)


def _scale(x: Array) -> Array:
    """A power of two that brings the bulk of the numbers near 1, from a sample of them."""
    every = math.gcd(x.shape[-1], _SAMPLE)
    some = x.reshape(*x.shape[:-1], -1, every)[..., 0].astype(jnp.float32)
    return power_of_two(lax.rsqrt(jnp.mean(jnp.square(some))))
