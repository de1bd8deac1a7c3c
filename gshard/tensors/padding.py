"""The contents of padding: garbage.

No result may depend on it: tests replace `garbage` by NaN. So it is always called through this
module (`padding.garbage`), never imported by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.tensors.keys import as_integers


def garbage(dtype: Any) -> jax.Array:
    """The contents of padding that gshard makes; no result may depend on them."""
    return jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype))


def filled(shape: Sequence[int], dtype: Any) -> jax.Array:
    """An array to write rows into; the others are padding."""
    return lax.full(shape, garbage(dtype))


def blank(shape: Sequence[int], dtype: Any) -> jax.Array:
    """Values whose bits are zero, also of a type that has no zero: sums of bits keep the others."""
    return lax.full(shape, np.zeros((), dtype))


def pad(x: jax.Array, dim: int, before: int, after: int, value: Any = None) -> jax.Array:
    """`x` with rows added at the ends of `dim`: of `value`, or garbage."""
    raw, back = as_integers(x)
    pads = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(raw.ndim)]
    fill = garbage(raw.dtype) if value is None else jnp.asarray(value, raw.dtype)
    return back(lax.pad(raw, fill, pads))


def pad_end(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`x` with garbage added at the end of `dim`, up to `size` rows."""
    return pad(x, dim, 0, size - x.shape[dim])
