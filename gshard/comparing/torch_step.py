"""A training step of a PyTorch module: gradient descent on its loss, or the mean of its results."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import gshard


def step_of_torch(
    module: Any, inputs: tuple[Any, ...], remat: str | None = None, parts: int = 0
) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments, for a module, the shapes of its inputs and `from_torch`'s `remat`.

    Inputs are shapes, arrays or torch's tensors, of which the shapes count. They are split in
    `parts`, by default as many as there are devices, along their first dim (data parallelism); a
    dict has inputs by name. What is in the module, dropout and its mode, is as it was exported.
    """
    import torch

    from gshard.contrib.torch import from_torch

    def described(x: Any) -> Any:
        return jax.ShapeDtypeStruct(tuple(x.shape), str(x.dtype).removeprefix("torch."))

    def example(x: Any) -> Any:
        return torch.empty(x.shape, dtype=getattr(torch, str(x.dtype)), device="meta")

    def by_name(inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return ((), inputs[0]) if [*map(type, inputs)] == [dict] else (inputs, {})

    inputs = jax.tree.map(described, inputs)
    examples = by_name(jax.tree.map(example, inputs))
    function, params = from_torch(module.to("meta"), *examples, remat=remat)

    def loss(params: Any, key: Any, inputs: Any) -> Any:
        args, kwargs = by_name(inputs)
        result = function(params, *args, key=key, **kwargs)
        own = getattr(result, "loss", None)  # Hugging Face's, of inputs with labels
        floats = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.mean(x.astype(jnp.float32)) for x in floats) if own is None else own

    def step(params: Any, key: Any, *inputs: Any) -> Any:
        count = parts or jax.device_count()  # of one, `gshard.auto` chooses for others
        if count > 1:
            inputs = jax.tree.map(lambda x: gshard.split(x, 0, count) if x.ndim else x, inputs)
        gradients = jax.grad(loss)(params, key, inputs)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradients)

    step.__name__ = type(module).__name__
    if not by_name(inputs)[1]:  # a dict has the names of its inputs
        # mypy knows no `__signature__` of a function, which `inspect` reads
        step.__signature__ = named_like(step, module.forward, len(inputs))  # type: ignore[attr-defined]
    return step, (params, jax.eval_shape(lambda: jax.random.key(0)), *inputs)


def named_like(
    step: Callable[..., Any], forward: Callable[..., Any], inputs: int
) -> inspect.Signature:
    """The signature of a step of `*inputs` with the names that `forward` has for them."""
    signature = inspect.signature(step)
    *own, _ = signature.parameters.values()
    named = list(inspect.signature(forward).parameters.values())[:inputs]
    known = {p.name for p in own}.isdisjoint(p.name for p in named)
    if not known or len(named) < inputs or any(p.kind > p.POSITIONAL_OR_KEYWORD for p in named):
        return signature
    return signature.replace(parameters=[*own, *(p.replace(default=p.empty) for p in named)])
