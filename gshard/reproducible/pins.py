"""Pins: rounded values that a compiler cannot join with the operators around them.

Whether a multiplication and an addition become one instruction, or a function is computed by one
library or another, would depend on the operators between them and on the sizes of tiles. An
operator that is in no list below runs in one piece: split along batch dims at most
(`in_one_piece`). So do `igamma` and its like, which are loops inside.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import LOOPS, Graph, renamed, replacing
from gshard.reproducible.rules import in_one_piece_p, pin_p

# Rounded by no more than one operation of IEEE 754, or not at all: nothing to fix.
_EXACT = frozenset((
    "abs", "add", "add_any", "add_jaxvals", "and", "annotate", "argmax", "argmin",
    "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "complex", "concatenate",
    "conj", "convert_element_type", "copy", "create_token", "cummax",
    "cummin", "custom_lin", "debug_callback", "debug_print", "device_put", "dynamic_slice",
    "dynamic_update_slice", "empty2", "floor", "gather", "imag", "io_callback", "iota",
    "is_finite", "leaf_dot", "leaf_sum", "max", "min", "name", "neg", "nextafter",
    "optimization_barrier", "pad", "pin", "pure_callback", "random_bits", "random_clone",
    "random_fold_in",
    "random_gamma", "random_seed", "random_split", "random_unwrap", "random_wrap", "real",
    "reduce_max", "reduce_min", "reduce_precision", "reduce_window_max", "reduce_window_min",
    "rem", "reshape", "rev", "round", "row_map", "scatter", "scatter-max", "scatter-min",
    "scatter_in_order", "select_n", "sharding_constraint", "sign", "slice", "sort", "split",
    "squeeze", "stack", "stop_gradient", "sub", "tile", "top_k", "transpose", "tree_sum", "unstack",
))  # fmt: skip

# Rounded, and possibly made of products: pinned.
_ROUNDED = frozenset((
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "integer_pow", "lu",
    "mul", "one_minus_square", "qr", "schur", "sqrt", "square", "svd", "tridiagonal",
))  # fmt: skip

# Rounded as the library that computes them pleases: pinned before and after.
_FUNCTIONS = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cos",
    "cosh", "digamma", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log1p", "pow", "rsqrt",
    "sin", "sinh", "tan", "tanh",
))  # fmt: skip

# The dims of one system, behind the batch dims.
_CORE = {"triangular_solve": 2, "ormqr": 2, "tridiagonal_solve": 1}


def pin_rounded(program: ClosedJaxpr) -> ClosedJaxpr:
    """The program with pins after what is rounded.

    Its first constant is the number with which values are pinned (`Place.opaque`).
    """
    pinned = _pin_bodies(program)
    opaque = Var(ShapedArray((), np.dtype(np.uint32)))
    jaxpr = pinned.jaxpr.replace(constvars=[opaque, *pinned.jaxpr.constvars])
    return ClosedJaxpr(jaxpr, [np.uint32(2**32 - 1), *pinned.consts])


@in_every_body
def _pin_bodies(graph: Graph) -> list[JaxprEqn]:
    return [made for eqn in graph.eqns for made in _pinned(eqn, graph)]


def _pinned(eqn: JaxprEqn, graph: Graph) -> list[JaxprEqn]:
    """The equations in the place of one."""
    if eqn.primitive in LOOPS or not any(map(_is_float, eqn.outvars)):
        return [eqn]
    name = eqn.primitive.name
    if eqn.primitive is p.div_p:
        return _divided(eqn)
    if name in _FUNCTIONS:
        return _apart(eqn)
    if name in _ROUNDED or _is_rounded(eqn, graph):
        return _with_pins(eqn)
    return [eqn] if name in _EXACT else _with_pins(_in_one_piece(eqn))


def _is_float(atom: Any) -> bool:
    return jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def _is_rounded(eqn: JaxprEqn, graph: Graph) -> bool:
    """Whether an operator that is exact by itself has to be pinned for what it might join with."""
    if eqn.primitive is p.convert_element_type_p:
        old, new = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
        return not jnp.issubdtype(old, jnp.inexact) or new.itemsize < old.itemsize
    if eqn.primitive in (p.add_p, p.sub_p):  # constants would be added to each other first
        return any(_is_number(a, graph) for a in eqn.invars)
    return eqn.primitive is p.iota_p


def _is_number(atom: Any, graph: Graph) -> bool:
    """Whether a value is a literal, or one in all places."""
    maker = graph.maker(atom)
    if maker is not None and maker.primitive is p.broadcast_in_dim_p:
        atom = maker.invars[0]
    return isinstance(atom, Literal)


def _with_pins(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation whose float results are pinned."""
    made = [Var(v.aval) if _is_float(v) else v for v in eqn.outvars]
    pairs = [(a, v) for a, v in zip(made, eqn.outvars, strict=True) if a is not v]
    return [eqn.replace(outvars=made), *(replacing(eqn, pin_p, [a], v) for a, v in pairs)]


def _apart(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A function whose operands are pinned, too.

    Libraries that reduce take some functions of the result along, with bits of their own, if there
    is enough to reduce.
    """
    floats = (a for a in eqn.invars if not isinstance(a, Literal) and _is_float(a))
    pinned = {a: Var(a.aval) for a in floats}
    pins = [replacing(eqn, pin_p, [a], v) for a, v in pinned.items()]
    return [*pins, *_with_pins(renamed(eqn, pinned))]


def _divided(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A division that stays one.

    XLA multiplies by the reciprocal of a divisor that is broadcast. On a device that has one column
    of the result nothing is broadcast, and XLA divides: other bits. Here no divisor is broadcast.
    """
    x, y = eqn.invars
    if isinstance(x, Literal) or isinstance(y, Literal):
        return _with_pins(eqn)
    shape = np.broadcast_shapes(x.aval.shape, y.aval.shape)
    divisor = Var(ShapedArray(shape, y.aval.dtype))
    pin = replacing(eqn, pin_p, [y, x], divisor)
    return [pin, *_with_pins(eqn.replace(invars=[x, divisor]))]


def _in_one_piece(eqn: JaxprEqn) -> JaxprEqn:
    """The same operator, split along batch dims at most."""
    core = eqn.params["fft_lengths"] if eqn.primitive is p.fft_p else ()
    matrix = _CORE.get(eqn.primitive.name, len(core))
    batch = len(eqn.invars[0].aval.shape) - matrix if matrix else 0
    params = {"of": eqn.primitive, "params": tuple(eqn.params.items()), "batch": batch}
    return eqn.replace(primitive=in_one_piece_p, params=params)
