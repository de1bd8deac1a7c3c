"""Weights in 8 bits for decoding, which waits for weights to be read: half the bytes of bfloat16.

A weight is integers of -127 to 127 and a scale for each output of its product. The product reads
the integers, multiplies in the dtype of the activations, and is scaled after the sum. There are no
gradients.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from gshard.nn.config import Int8

jax.tree_util.register_dataclass(Int8)
Weight = Array | Int8


def product(equation: str, x: Array, w: Weight, dtype: Any = None) -> Array:
    """The einsum of activations and a weight, in the dtype of the activations or in `dtype`."""
    if not isinstance(w, Int8):
        return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=dtype)
    # Without the barrier XLA would convert the weight once before the loop of a search, and each
    # step would read what it was converted to.
    values, x = jax.lax.optimization_barrier((w.values, x))
    y = jnp.einsum(equation, x, values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (y * scale_along(equation, w.scale)).astype(dtype or x.dtype)


def scale_along(equation: str, scale: Array) -> Array:
    """A weight's scale with the dims of the result, size 1 where the weight has none."""
    operands, result = equation.split("->")
    dims = operands.split(",")[1]
    summed = tuple(n for n, dim in enumerate(dims) if dim not in result)
    kept = [dim for dim in dims if dim in result]
    order = [kept.index(dim) for dim in result if dim in kept]
    placed = scale.squeeze(summed).transpose(order)
    sizes = dict(zip((dim for dim in result if dim in kept), placed.shape, strict=True))
    return placed.reshape([sizes.get(dim, 1) for dim in result])


def looked_up(table_VM: Weight, tokens: Array) -> Array:
    """Rows of a table in float32; indices past its end give its last row."""
    if not isinstance(table_VM, Int8):
        # So that the gradients of a frequent token are summed in it: exact, and far faster on a
        # GPU, which has no addition of bfloat16 in memory.
        table_VM = table_VM.astype(jnp.float32)
    rows = jax.tree.map(lambda x: jnp.take(x, tokens, axis=0, mode="clip"), table_VM)
    return rows.astype(jnp.float32)
