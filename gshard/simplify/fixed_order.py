"""`reproducible=True`: every floating-point sum gets one order, whatever the devices.

Bits depend on the order of additions, and on whether a multiplication and an addition become one
fused multiply-add. Both are decided here, in the logical program, before anything is sharded:

- A contraction is cut into leaves, whose number depends on the size of the dim alone. The leaves
  are products like any other (`leaf_dot`), and one fixed binary tree adds them (`tree_sum`). A
  device that holds some neighbouring leaves adds its own subtree, and the devices add the rest.
- A reduction is such a tree, down to its elements.
- A product or another rounded result is pinned: XLA cannot fuse it with what uses it, cannot leave
  out its rounding, and cannot compute it in advance with another library.

What has no fixed order is refused, with its line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import Var, mlir, scatter_sub_p
from gshard.graph import LOOPS, map_bodies, renamed
from gshard.graph.source import on_behalf_of, source_of
from gshard.simplify.fixed_functions import FUNCTIONS
from gshard.simplify.trees import halved

LEAVES = 8  # of a contraction: as many devices may split a contracting dim

# The same value, as bits that the compiler knows nothing about.
pin_p = Primitive("pin")
pin_p.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))

# A sum over one dim by a binary tree of neighbours; devices may hold subtrees of it.
tree_sum_p = Primitive("tree_sum")


@tree_sum_p.def_abstract_eval
def _tree_sum_aval(x: Any, *, axis: int) -> ShapedArray:
    return ShapedArray((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)


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

# Rounded by no more than one operation of IEEE 754, or not at all: nothing to fix.
_EXACT = frozenset((
    "abs", "add", "add_any", "add_jaxvals", "and", "annotate", "argmax", "argmin",
    "bitcast_convert_type", "broadcast_in_dim", "ceil", "clamp", "complex", "concatenate",
    "concatenate_slices", "conj", "convert_element_type", "copy", "create_token", "cummax",
    "cummin", "custom_lin", "debug_callback", "debug_print", "device_put", "dynamic_slice",
    "dynamic_update_slice", "empty2", "floor", "gather", "imag", "io_callback", "iota",
    "is_finite", "leaf_dot", "max", "min", "name", "neg", "nextafter", "optimization_barrier",
    "pad", "pin", "pure_callback", "random_bits", "random_clone", "random_fold_in",
    "random_gamma", "random_seed", "random_split", "random_unwrap", "random_wrap", "real",
    "reduce_max", "reduce_min", "reduce_precision", "reduce_window_max", "reduce_window_min",
    "rem", "reshape", "rev", "round", "scatter", "scatter-max", "scatter-min", "scatter_in_order",
    "select_n", "sharding_constraint", "sign", "slice", "sort", "split", "squeeze", "stack",
    "stop_gradient", "sub", "tile", "top_k", "transpose", "tree_sum", "unstack",
))  # fmt: skip

# Rounded, and possibly made of products: pinned.
_ROUNDED = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e",
    "cbrt", "cholesky", "cos", "cosh", "digamma", "div", "eig", "eigh", "erf", "erf_inv", "erfc",
    "exp", "exp2", "expm1", "geqrf", "hessenberg", "householder_product", "igamma",
    "igamma_grad_a", "igammac", "integer_pow", "lgamma", "log1p", "lu", "mul", "one_minus_square",
    "polygamma", "pow", "qr", "regularized_incomplete_beta", "rsqrt", "schur", "sin", "sinh",
    "sqrt", "square", "svd", "tan", "tanh", "tridiagonal", "zeta",
))  # fmt: skip


def fix_order(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with one order for every sum.

    Its first constant is the number with which values are pinned (see `OPAQUE`).
    """
    fixed = _fixed(closed)
    opaque = Var(ShapedArray((), np.dtype(np.uint32)))
    jaxpr = fixed.jaxpr.replace(constvars=[opaque, *fixed.jaxpr.constvars])
    return ClosedJaxpr(jaxpr, [np.uint32(2**32 - 1), *fixed.consts])


def _fixed(closed: ClosedJaxpr) -> ClosedJaxpr:
    constants: set[Any] = set()  # the variables that are one number in all places
    eqns: list[JaxprEqn] = []
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive is p.broadcast_in_dim_p and isinstance(eqn.invars[0], Literal):
            constants.add(eqn.outvars[0])
        eqns += _in_order(eqn, constants)
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))


def _in_order(eqn: JaxprEqn, constants: set[Any]) -> list[JaxprEqn]:
    """The equations in the place of one."""
    if eqn.primitive in LOOPS:
        return [map_bodies(eqn, _fixed)]
    if not any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars):
        return [eqn]
    rewrite = _REWRITES.get(eqn.primitive) or FUNCTIONS.get(eqn.primitive.name)
    if rewrite:
        return _replaced(eqn, rewrite)
    name = eqn.primitive.name
    if name in _ROUNDED or _is_rounded(eqn, constants):
        return _pinned(eqn)
    if name not in _EXACT:
        raise ValueError(
            f"{source_of(eqn)}: {name} has no fixed order of its sums yet, which "
            "reproducible=True needs; allowed are products, reductions, scans, scatters and "
            "operators that work element by element (docs/howto/reproducible.md)"
        )
    return [eqn]


def _is_rounded(eqn: JaxprEqn, constants: set[Any]) -> bool:
    """Whether an operator that is exact by itself has to be pinned for what it might join with."""
    if eqn.primitive is p.convert_element_type_p:
        old, new = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
        return not jnp.issubdtype(old, jnp.inexact) or new.itemsize < old.itemsize
    if eqn.primitive in (p.add_p, p.sub_p):  # constants would be added to each other first
        return any(isinstance(a, Literal) or a in constants for a in eqn.invars)
    return eqn.primitive is p.iota_p


def _pinned(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation whose float results are pinned."""
    made: list[Any] = []
    pins: list[JaxprEqn] = []
    for var in eqn.outvars:
        if not jnp.issubdtype(var.aval.dtype, jnp.inexact):
            made.append(var)
            continue
        made.append(Var(var.aval))
        pins.append(
            eqn.replace(invars=[made[-1]], outvars=[var], primitive=pin_p, params={}, effects=set())
        )
    return [eqn.replace(outvars=made), *pins]


def _replaced(eqn: JaxprEqn, rewrite: Callable[..., Any]) -> list[JaxprEqn]:
    """The equations of `rewrite(params, *operands)`, in order themselves."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
    with on_behalf_of(eqn):
        closed = jax.make_jaxpr(lambda *args: rewrite(eqn.params, *args))(*avals)
    jaxpr: Jaxpr = closed.jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    for var, value in zip(jaxpr.constvars, closed.consts, strict=True):
        names[var] = Literal(np.asarray(value), var.aval)
    for inner in jaxpr.eqns:
        names |= {v: Var(v.aval) for v in inner.outvars}
    names |= dict(zip(jaxpr.outvars, eqn.outvars, strict=True))
    eqns = [renamed(inner, names) for inner in jaxpr.eqns]
    return _fixed(ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=eqn.outvars), ())).jaxpr.eqns


def leaf_counts(sizes: Sequence[int], most: int = LEAVES) -> list[int]:
    """How many leaves each of some dims has that are summed together, `most` in all."""
    counts = []
    for size in sizes:
        counts.append(math.gcd(size, most))
        most //= counts[-1]
    return counts


def _cut(x: jax.Array, dims: Sequence[int], counts: Sequence[int]) -> jax.Array:
    """Each of the `dims` as two, of which the first counts the leaves."""
    by_dim = dict(zip(dims, counts, strict=True))
    shape: list[int] = []
    for d, n in enumerate(x.shape):
        shape += [by_dim[d], n // by_dim[d]] if d in by_dim else [n]
    return lax.reshape(x, shape)


def _dot(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """A product in leaves, which are batch dims, and their tree."""
    (left, right), (batch, right_batch) = params["dimension_numbers"]
    dtype = params["preferred_element_type"] or jnp.result_type(x, y)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        raise ValueError("a product of complex numbers has no fixed order of its sums yet")
    counts = leaf_counts([x.shape[d] for d in left])
    many = [i for i, count in enumerate(counts) if count > 1]
    operands, places = [], []
    for operand, contracted, batched in ((x, left, batch), (y, right, right_batch)):
        cut = [contracted[i] for i in many]
        operands.append(_cut(operand, cut, [counts[i] for i in many]))
        moved = {d: d + sum(c < d for c in cut) for d in range(operand.ndim)}  # the leaves before
        leaves = tuple(moved[d] for d in cut)
        inner = tuple(moved[d] + (d in cut) for d in contracted)
        places.append((inner, (*(moved[d] for d in batched), *leaves)))
    numbers = tuple(zip(*places, strict=True))
    result = leaf_dot_p.bind(*operands, dimension_numbers=numbers, dtype=jnp.dtype(dtype))
    for number in reversed(range(len(many))):
        result = tree_sum_p.bind(result, axis=len(batch) + number)
    return result


def _sum(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """A sum over dims: within leaves first, and then their tree, dim by dim."""
    axes = sorted(params["axes"])
    if 0 in x.shape or not axes:
        return lax.broadcast(
            jnp.zeros((), x.dtype), [n for d, n in enumerate(x.shape) if d not in axes]
        )
    counts = leaf_counts([x.shape[d] for d in axes])
    x = _cut(x, axes, counts)
    leaves = [d + i for i, d in enumerate(axes)]
    for d in reversed(leaves):
        x = halved(x, d + 1, lax.add)
    for number, count in reversed(list(enumerate(counts))):
        d = leaves[number] - number
        x = tree_sum_p.bind(x, axis=d) if count > 1 else lax.squeeze(x, [d])
    return x


def _prod(params: dict[str, Any], x: jax.Array) -> jax.Array:
    for d in sorted(params["axes"], reverse=True):
        x = halved(x, d, lax.mul)
    return x


def _cumulative(combine: Callable[..., Any]) -> Callable[..., Any]:
    """A scan by the tree that `lax.associative_scan` is."""

    def rewrite(params: dict[str, Any], x: jax.Array) -> jax.Array:
        axis, reverse = params["axis"], params["reverse"]
        return lax.associative_scan(combine, x, reverse=reverse, axis=axis)

    return rewrite


def _logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    largest = lax.max(x, y)
    apart = lax.neg(lax.abs(lax.sub(x, y)))
    equal = lax.eq(x, y)  # infinities have no difference
    apart = lax.select(equal, jnp.zeros_like(apart), apart)
    return lax.add(largest, lax.log1p(lax.exp(apart)))


def _scatter_add(params: dict[str, Any], x: Any, indices: Any, updates: Any) -> jax.Array:
    return scatter_in_order_p.bind(x, indices, updates, **params)


def _scatter_sub(params: dict[str, Any], x: Any, indices: Any, updates: Any) -> jax.Array:
    return _scatter_add(params, x, indices, lax.neg(updates))


_REWRITES: dict[Primitive, Callable[..., Any]] = {
    p.dot_general_p: _dot,
    p.reduce_sum_p: _sum,
    p.reduce_prod_p: _prod,
    p.cumsum_p: _cumulative(lax.add),
    p.cumprod_p: _cumulative(lax.mul),
    p.cumlogsumexp_p: _cumulative(_logaddexp),
    p.scatter_add_p: _scatter_add,
    scatter_sub_p: _scatter_sub,
}
