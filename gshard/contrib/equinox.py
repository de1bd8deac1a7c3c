"""`filter_jit`: `equinox.filter_jit`, partitioned by gshard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from gshard.capture.calls import called_with
from gshard.contrib._swap import LibraryLowered, as_array, partitioned, take_own


def filter_jit(
    fun: Callable[..., Any] | None = None, *, donate: str = "none", **keywords: Any
) -> Any:
    """`equinox.filter_jit` with gshard's partitioner: modules go in and come out.

    Arrays of JAX and NumPy are traced. Everything else in the arguments is static: functions,
    strings, and the Python bools and numbers that modules such as `eqx.nn.Dropout` branch on.

    Args:
        fun: the function to compile; without it, a decorator is returned.
        donate: "all", "all-except-first", "warn", "warn-except-first" or "none", as in Equinox.
        keywords: those of `equinox.filter_jit`, and what `gshard.jit` takes beyond `jax.jit`:
            `devices`, `partitioner`, `memory_limit`, `strict`, `hardware`.

    Returns:
        A function like those of `equinox.filter_jit`. Its `lower` returns a `gshard.Lowered`.

    Raises:
        ValueError: for another `donate`, and for `static_argnums`, `donate_argnums`,
            `in_shardings` and `out_shardings`: annotate inside of `fun` instead.

    Example:
        ```python
        import equinox as eqx, gshard, jax, jax.numpy as jnp
        from gshard.contrib.equinox import filter_jit

        @filter_jit
        def forward(model, x, key):
            x = gshard.split(x, 0, 8)
            return jax.vmap(model)(x, key=jax.random.split(key, x.shape[0]))

        y = forward(eqx.nn.Dropout(0.1), jnp.ones((16, 4)), jax.random.key(0))
        ```
    """
    if fun is None:
        return functools.partial(filter_jit, donate=donate, **keywords)
    return FilterJitted(fun, donate, keywords)


class FilterJitted:
    """A function of modules to be partitioned: call it, or `lower` it to see what that does."""

    def __init__(self, fun: Callable[..., Any], donate: str, keywords: dict[str, Any]):
        own = take_own(keywords)
        library: Any = eqx.filter_jit  # its type has neither the keywords nor the wrapper
        self._wrapper = library(fun, donate=donate, **keywords)
        # A field of a frozen module, and the one place where Equinox keeps its `jax.jit`.
        object.__setattr__(self._wrapper, "_cached", partitioned(self._wrapper._cached, own))
        functools.update_wrapper(self, fun, updated=())

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Partition for these arguments if that has not been done yet, and run."""
        return self._wrapper(*args, **kwargs)

    def lower(self, /, *args: Any, **kwargs: Any) -> LibraryLowered:
        """Partition for arguments like these; arrays in them may be `jax.ShapeDtypeStruct`s."""
        args, kwargs = jax.tree.map(as_array, (args, kwargs))
        with called_with(self._wrapper.__wrapped__, args, kwargs):
            found = self._wrapper.lower(*args, **kwargs)
        return LibraryLowered(found.lowered, found.compile)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method of a module."""
        return self if instance is None else eqx.Partial(self, instance)
