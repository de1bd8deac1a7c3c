"""The operators of a reproducible program: their types; `rules` has a rule of each."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.extend.core import primitives as p

from gshard._jax import mlir

# A sum within leaves, whose dims are not split.
leaf_sum_p = Primitive("leaf_sum")


@leaf_sum_p.def_abstract_eval
def _leaf_sum_aval(x: Any, *, axes: tuple[int, ...]) -> ShapedArray:
    return ShapedArray(tuple(n for d, n in enumerate(x.shape) if d not in axes), x.dtype)


# An operator that is split along its first `batch` dims alone, which all its tensors have.
in_one_piece_p = Primitive("in_one_piece")
in_one_piece_p.multiple_results = True


@in_one_piece_p.def_effectful_abstract_eval
def _in_one_piece_aval(*avals: Any, of: Primitive, params: Any, batch: int) -> Any:
    found, effects = of.abstract_eval(*avals, **dict(params))
    return (found if of.multiple_results else [found]), effects


# A `dot_general` whose contracting dims are not split.
leaf_dot_p = Primitive("leaf_dot")


@leaf_dot_p.def_abstract_eval
def _leaf_dot_aval(x: Any, y: Any, *, dimension_numbers: Any, dtype: Any) -> ShapedArray:
    (left, right), (batch, right_batch) = dimension_numbers
    shape = [x.shape[d] for d in batch]
    shape += [n for d, n in enumerate(x.shape) if d not in (*left, *batch)]
    shape += [n for d, n in enumerate(y.shape) if d not in (*right, *right_batch)]
    return ShapedArray(tuple(shape), dtype)


# A `scatter_add` that applies its updates one after the other.
scatter_in_order_p = Primitive("scatter_in_order")
scatter_in_order_p.def_abstract_eval(
    lambda x, indices, updates, **params: ShapedArray(x.shape, x.dtype)
)
mlir.register_lowering(
    scatter_in_order_p, mlir.lower_fun(p.scatter_add_p.bind, multiple_results=False)
)


def scatter_by_loop(x: Any, indices: Any, updates: Any, **params: Any) -> Any:
    """One update at a time: XLA's deterministic scatter on GPUs adds in an order of sizes."""
    numbers = params["dimension_numbers"]
    rows = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    kept = numbers.scatter_indices_batching_dims  # each has a part of `x` of its own
    dims = [d for d in range(indices.ndim - 1) if d not in kept]
    sizes = [indices.shape[d] for d in dims]

    def add(number: Any, total: Any) -> Any:
        own, update = indices, updates
        for d, place in zip(dims, jnp.unravel_index(number, sizes), strict=True):
            own = lax.dynamic_slice_in_dim(own, place, 1, d)
            update = lax.dynamic_slice_in_dim(update, place, 1, rows[d])
        return p.scatter_add_p.bind(total, own, update, **params | {"unique_indices": True})

    return lax.fori_loop(0, math.prod(sizes), add, x)


mlir.register_lowering(
    scatter_in_order_p, mlir.lower_fun(scatter_by_loop, multiple_results=False), platform="gpu"
)

# The same value, as bits that the compiler knows nothing about; broadcast to the shape of a second
# operand, on which the bits seem to depend.
pin_p = Primitive("pin")


@pin_p.def_abstract_eval
def _pin_aval(x: Any, *others: Any) -> ShapedArray:
    return ShapedArray(np.broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


# A sum over one dim by a binary tree of neighbours; devices may hold subtrees of it.
tree_sum_p = Primitive("tree_sum")


@tree_sum_p.def_abstract_eval
def _tree_sum_aval(x: Any, *, axis: int) -> ShapedArray:
    return ShapedArray((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)
