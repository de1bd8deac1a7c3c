"""Operators that gshard adds to JAX's: the results of its rewrites, and the types of these.

A rule of each is in `rules`, like those of any operator.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from gshard._jax import mlir
from gshard.graph.row_map import Layer, shape_of
from gshard.tensors.painting import painted

# A tensor painted with windows of its operands: `layers`, whose sources are numbers of operands.
row_map_p = Primitive("row_map")


def _row_map(*operands: jax.Array, layers: tuple[Layer, ...]) -> jax.Array:
    """Its definition, for regions that gshard does not partition."""
    return painted(shape_of(layers), layers, operands)


@row_map_p.def_abstract_eval
def _row_map_aval(*operands: Any, layers: tuple[Layer, ...]) -> ShapedArray:
    return ShapedArray(shape_of(layers), operands[0].dtype)


mlir.register_lowering(row_map_p, mlir.lower_fun(_row_map, multiple_results=False))

# The first operand, where it enters or leaves a `recursion`: then the others are what it is made of
# (`capture.simplify.recursions`), and `number` is that of a result or gradient.
edge_p = Primitive("edge")
edge_p.def_impl(lambda x, *_, **__: x)
edge_p.def_abstract_eval(lambda x, *_, **__: x)
mlir.register_lowering(edge_p, lambda ctx, x, *_, **__: [x])
