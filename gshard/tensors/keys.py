"""Random keys as the integers that they are made of.

XLA does not know keys, and NumPy does not either: they move, pad and stack as integers, which
stand in a last dim and stay together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key_type(dtype: Any) -> bool:
    """Whether this is the type of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def is_key(value: Any) -> bool:
    """Whether these are random keys, which NumPy does not know."""
    return is_key_type(getattr(value, "dtype", np.float32))


def as_integers(x: jax.Array) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """Random keys as integers, and the way back; anything else stays as it is."""
    if not is_key(x):
        return x, lambda same: same
    impl = jax.random.key_impl(x)
    return jax.random.key_data(x), lambda raw: jax.random.wrap_key_data(raw, impl=impl)
