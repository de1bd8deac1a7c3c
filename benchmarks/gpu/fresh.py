"""Fresh weights for a benchmark, made leaf by leaf.

As one program the initialization of a model with its layers written out takes longer to compile
than its training step does; the leaves have a dozen different shapes.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from gshard.nn import Transformer, TransformerConfig


def fresh_model(config: TransformerConfig) -> Transformer:
    """A model with normal weights of the usual deviations."""
    key = jax.random.key(0)
    shapes = eqx.filter_eval_shape(Transformer, config, key)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(key, len(leaves))
    return tree.unflatten(
        [_draw(k, *_of(path, leaf)) for k, (path, leaf) in zip(keys, leaves, strict=True)]
    )


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: Any, shape: tuple[int, ...], dtype: Any, scale: float, shift: float) -> Any:
    return (shift + scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def _of(path: Any, leaf: Any) -> tuple[tuple[int, ...], Any, float, float]:
    """The shape, dtype, deviation and mean of a leaf."""
    names = [key.name for key in path if hasattr(key, "name")]
    if names[-1] in ("scale", "bias"):
        return leaf.shape, leaf.dtype, 0.0, float(names[-1] == "scale")
    if names[-1] == "table":
        fan_in = leaf.shape[-1]
    elif names[-1] in ("wq", "wk", "wv"):
        fan_in = leaf.shape[-3]
    elif "attention" in names[-2]:  # wo, from heads and their dims
        fan_in = math.prod(leaf.shape[-3:-1])
    else:
        fan_in = leaf.shape[-2]
    return leaf.shape, leaf.dtype, fan_in**-0.5, 0.0
