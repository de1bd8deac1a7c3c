"""Sums in a fixed order, written out as additions of slices: no compiler may change it."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

Combine = Callable[[jax.Array, jax.Array], jax.Array]


def halved(x: jax.Array, axis: int, combine: Combine) -> jax.Array:
    """`x` combined along a dim, the first half with the second; an odd one waits for the end."""
    if x.shape[axis] == 0:
        raise ValueError(f"nothing to combine along dim {axis} of {x.shape}")
    while (n := x.shape[axis]) > 1:
        half = n // 2
        both = combine(_rows(x, 0, half, axis), _rows(x, half, 2 * half, axis))
        x = lax.concatenate([both, _rows(x, n - 1, n, axis)], axis) if n % 2 else both
    return lax.squeeze(x, [axis])


def neighbours(x: jax.Array, axis: int, combine: Combine) -> jax.Array:
    """`x` combined along a dim, by a tree whose subtrees are neighbours; their number is 2**k."""
    n = x.shape[axis]
    assert n & (n - 1) == 0, n
    while x.shape[axis] > 1:
        n = x.shape[axis]
        x = combine(*(lax.slice_in_dim(x, first, n, 2, axis) for first in (0, 1)))
    return lax.squeeze(x, [axis])


def _rows(x: jax.Array, start: int, limit: int, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, limit, axis=axis)
