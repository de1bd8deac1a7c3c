"""Random keys as the integers that they are made of.

Neither XLA nor NumPy supports keys: they are moved, padded and stacked as integers, in an
additional last dim that is never split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gshard.graph.caching import cached


@cached
def is_key_type(dtype: Any) -> bool:
    """Whether this is the type of random keys."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


def is_key(value: Any) -> bool:
    """Whether these are random keys."""
    return is_key_type(getattr(value, "dtype", np.float32))


def as_integers(x: jax.Array) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """Random keys as integers, and the inverse function; the identity for anything else."""
    if not is_key(x):
        return x, lambda same: same
    impl = jax.random.key_impl(x)
    return jax.random.key_data(x), lambda raw: jax.random.wrap_key_data(raw, impl=impl)
