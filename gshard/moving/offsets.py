"""Slices and updates of local rows at non-negative offsets, without equations that wrap indices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import primitives as p


def rows_at(x: jax.Array, start: jax.Array | int, size: int, dim: int) -> jax.Array:
    """`size` rows of `x` along `dim`, from `start` on."""
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + size, axis=dim)
    sizes = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return p.dynamic_slice_p.bind(x, *_starts(x, start, dim), slice_sizes=sizes)


def rows_put(x: jax.Array, rows: jax.Array, start: jax.Array | int, dim: int) -> jax.Array:
    """`x` with other rows along `dim`, from `start` on."""
    return p.dynamic_update_slice_p.bind(x, rows, *_starts(x, start, dim))


def _starts(x: jax.Array, start: jax.Array | int, dim: int) -> list[Any]:
    first = np.int32(start) if isinstance(start, int) else start
    return [first if d == dim else np.int32(0) for d in range(x.ndim)]
