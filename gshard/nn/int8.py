"""Weights in 8 bits for decoding, which waits for weights to be read: half the bytes of bfloat16.

A weight is integers of -127 to 127 and a scale for each output of its product. The product reads
the integers, multiplies in the dtype of the activations, and is scaled after the sum. There are no
gradients.
"""

from __future__ import annotations

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

MOST = 127  # symmetric: -128 is not used


class Int8(eqx.Module):
    """An array of `values * scale`; `scale` has size 1 in the dims that a product sums over."""

    values: Array  # int8
    scale: Array  # float32

    @staticmethod
    @functools.partial(jax.jit, static_argnums=1)
    def of(array: Array, axes: tuple[int, ...]) -> Int8:
        """The nearest numbers of 8 bits, with one scale along `axes`."""
        wide = array.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
        scale = jnp.where(largest > 0, largest / MOST, 1.0)
        return Int8(jnp.rint(wide / scale).astype(jnp.int8), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.values.shape

    @property
    def size(self) -> int:
        """The number of values."""
        return self.values.size

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Int8:
        """Entries of dim 0, which has a scale for each."""
        return Int8(self.values[index], self.scale[index])

    def astype(self, dtype: Any) -> Array:
        """The array itself, where no product takes the integers."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


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
        # As float32, so that the gradients of a frequent token are summed in it: exact, and far
        # faster on a GPU, which has no addition of bfloat16 in memory.
        return jnp.take(table_VM.astype(jnp.float32), tokens, axis=0, mode="clip")
    both = (jnp.take(x, tokens, axis=0, mode="clip") for x in (table_VM.values, table_VM.scale))
    values, scale = both
    return values.astype(jnp.float32) * scale
