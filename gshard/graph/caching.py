"""The cache across lowerings: results of pure functions, by the values of their arguments.

It is for speed only. What belongs to one lowering is kept by the objects of that lowering.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from gshard._jax import register_cache

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 1 << 14  # results of one function


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose latest results are kept; `jax.clear_caches` drops them."""
    kept = functools.lru_cache(maxsize=_MOST)(function)
    register_cache(kept, f"gshard: {function.__qualname__}")
    return cast(Callable[P, R], kept)
