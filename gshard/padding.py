"""What stands in padding: garbage.

Anything would do, and tests see to that: they replace `garbage` by NaN. So it is always called
through this module (`padding.garbage`), never imported by name.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def garbage(dtype) -> jax.Array:
    """What stands in padding that gshard makes itself; anything would do, and tests see to that."""
    return jnp.zeros((), dtype)


def filled(shape: Sequence[int], dtype) -> jax.Array:
    """An array for rows to be put into; those that are not are padding."""
    return lax.full(shape, garbage(dtype))


def pad_end(x: jax.Array, dim: int, size: int) -> jax.Array:
    """`x` with garbage added at the end of `dim`, up to `size` rows."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raw = pad_end(jax.random.key_data(x), dim, size)
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(x))
    pads = [(0, size - x.shape[d] if d == dim else 0, 0) for d in range(x.ndim)]
    return lax.pad(x, garbage(x.dtype), pads)
