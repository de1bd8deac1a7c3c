"""Operators that gshard adds to JAX's: the results of its rewrites, and the types of these.

A rule of each is in `rules`, like those of any operator.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from gshard._jax import mlir

concatenate_slices_p = Primitive("concatenate_slices")  # of `windows`: (operand, start, limit)


def _concatenate_slices(
    *operands: jax.Array, dimension: int, windows: tuple[tuple[int, int, int], ...]
) -> jax.Array:
    """Its definition, for regions that gshard does not partition."""
    parts = [
        lax.slice_in_dim(operands[number], start, limit, axis=dimension)
        for number, start, limit in windows
    ]
    return lax.concatenate(parts, dimension)


@concatenate_slices_p.def_abstract_eval
def _concatenate_slices_aval(*operands: Any, dimension: int, windows: Any) -> ShapedArray:
    shape = list(operands[0].shape)
    shape[dimension] = sum(limit - start for _, start, limit in windows)
    return ShapedArray(shape, operands[0].dtype)


mlir.register_lowering(
    concatenate_slices_p, mlir.lower_fun(_concatenate_slices, multiple_results=False)
)
