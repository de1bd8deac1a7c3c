"""Random keys as the integers that they are made of.

XLA does not know keys, and NumPy does not either: they move, pad and stack as integers, which
stand in a last dim and stay together.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(value: Any) -> bool:
    """Whether these are random keys, which NumPy does not know."""
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)
