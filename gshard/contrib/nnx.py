"""`jit`: `flax.nnx.jit`, partitioned by gshard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from gshard.capture.calls import called_with
from gshard.contrib._swap import LibraryLowered, partitioned, take_own


def jit(fun: Callable[..., Any] | None = None, **keywords: Any) -> Any:
    """`flax.nnx.jit` with gshard's partitioner: modules are changed in place.

    What the function does to modules, optimizers, RNG streams and metrics among its arguments
    has happened to them after the call, shared references included. `nnx.value_and_grad` and the
    other transformations of NNX are used inside as usual.

    Args:
        fun: the function to compile; without it, a decorator is returned.
        keywords: those of `flax.nnx.jit` (`static_argnums`, `donate_argnames`, `in_shardings`,
            `graph` and so on), and what `gshard.jit` takes beyond `jax.jit`: `devices`,
            `partitioner`, `memory_limit`, `strict`, `hardware`.

    Returns:
        A function like those of `flax.nnx.jit`. Its `lower` returns a `gshard.Lowered`.

    Raises:
        TypeError: for a keyword that neither of the two takes.
        ValueError: for a bound method, as in NNX: decorate the method in its class.

    Example:
        ```python
        import gshard, jax.numpy as jnp, optax
        from flax import nnx
        from gshard.contrib import nnx as gnnx

        @gnnx.jit
        def train_step(model, optimizer, x, y):
            x = gshard.split(x, 0, 8)
            loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
            optimizer.update(model, grads)
            return loss

        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
        loss = train_step(model, optimizer, jnp.ones((16, 4)), jnp.ones((16, 2)))
        ```
    """
    if fun is None:
        return functools.partial(jit, **keywords)
    own = take_own(keywords)
    wrapper: Any = nnx.jit(fun, **keywords)
    wrapper.jitted_fn = partitioned(wrapper.jitted_fn, own)
    lower = wrapper.lower

    def lowered(*args: Any, **kwargs: Any) -> LibraryLowered:
        """Partition for arguments like these, which are not changed."""
        with called_with(fun, args, kwargs):
            found = lower(*args, **kwargs)
        return LibraryLowered(found.lowered, found.compile)

    wrapper.lower = lowered
    return wrapper
