"""`reproducible=True`: every floating-point sum gets one order, whatever the devices.

Bits depend on the order of additions, and on whether a multiplication and an addition become one
fused multiply-add. Both are decided in the logical program, before anything is sharded, by three
passes:

- `fix_order`: a contraction is cut into leaves, whose number depends on the size of the dim alone.
  The leaves are products like any other (`leaf_dot`), and one fixed binary tree adds them
  (`tree_sum`). A device that holds some neighbouring leaves adds its own subtree, and the devices
  add the rest. A reduction is such a tree, down to its elements.
- `pin_rounded` (`pins`): a product or another rounded result is pinned: XLA cannot fuse it with
  what uses it, cannot leave out its rounding, and cannot compute it in advance with another
  library.
- `merge_trees` (`trees`): trees that are added become one.

Manual regions are refused: what they compute depends on the mesh by itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard._jax import private_primitives, ragged_dot_dense, scatter_sub_p
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph
from gshard.graph.evaluate import bind, equations_of, evaluate
from gshard.graph.source import on_behalf_of, source_of
from gshard.graph.windows import MOST_SLICES, convolution, fourier, window_sum
from gshard.moving.reductions import halved
from gshard.reproducible.rules import leaf_dot_p, leaf_sum_p, scatter_in_order_p, tree_sum_p
from gshard.tensors.manual import MANUAL

# ln 2 in two parts, the first with so few bits that a multiple of it is exact.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH


def _full(x: jax.Array, value: float) -> jax.Array:
    return lax.full_like(x, value)


def _log(x: jax.Array) -> jax.Array:
    """log(m 2^e) = e ln 2 + log1p(m - 1), with m around 1, where m - 1 is exact."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ValueError("the logarithm of complex numbers is not reproducible yet")
    mantissa_bits = jnp.finfo(x.dtype).nmant
    integer = jnp.dtype(f"int{x.dtype.itemsize * 8}")
    bits = lax.bitcast_convert_type(x, integer)
    # The exponent of x / sqrt(1/2), so that m is between sqrt(1/2) and sqrt(2).
    root = lax.bitcast_convert_type(jnp.asarray(math.sqrt(0.5), x.dtype), integer)
    above = lax.sub(bits, lax.broadcast(root, bits.shape))
    exponent = lax.shift_right_arithmetic(above, lax.full_like(bits, mantissa_bits))
    shifted = lax.shift_left(exponent, lax.full_like(bits, mantissa_bits))
    mantissa = lax.bitcast_convert_type(lax.sub(bits, shifted), x.dtype)
    near = lax.log1p(lax.sub(mantissa, _full(x, 1.0)))
    e = lax.convert_element_type(exponent, x.dtype)
    high, low = lax.mul(e, _full(x, _LN2_HIGH)), lax.mul(e, _full(x, _LN2_LOW))
    result = lax.add(high, lax.add(near, low))
    result = lax.select(lax.eq(x, _full(x, math.inf)), x, result)
    tiny = _full(x, float(jnp.finfo(x.dtype).tiny))  # below it, XLA's CPUs take numbers for zero
    result = lax.select(lax.lt(x, tiny), _full(x, -math.inf), result)
    wrong = lax.bitwise_not(lax.ge(x, _full(x, 0.0)))  # negative, or no number
    return lax.select(wrong, _full(x, math.nan), result)


def _logistic(params: dict[str, Any], x: jax.Array) -> jax.Array:
    one = _full(x, 1.0)
    return lax.div(one, lax.add(one, lax.exp(lax.neg(x))))


def _wide(function: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A function of floats, computed with 32 bits or more."""

    def rewrite(params: dict[str, Any], x: jax.Array) -> jax.Array:
        if x.dtype.itemsize >= 4:
            return function(x)
        return lax.convert_element_type(function(x.astype(jnp.float32)), x.dtype)

    return rewrite


def _cbrt(x: jax.Array) -> jax.Array:
    """A power, and one step of Newton's method: y - (y^3 - |x|) / 3y^2."""
    size = lax.abs(x)
    y = lax.exp(lax.mul(_log(size), _full(x, 1 / 3)))
    y = lax.sub(y, lax.mul(lax.sub(y, lax.div(lax.div(size, y), y)), _full(x, 1 / 3)))
    root = lax.select(lax.lt(x, _full(x, 0.0)), lax.neg(y), y)
    itself = lax.bitwise_or(lax.eq(x, _full(x, 0.0)), lax.eq(size, _full(x, math.inf)))
    return lax.select(itself, x, root)


def _erf(x: jax.Array) -> jax.Array:
    """1 - erfc(|x|), and a Taylor series near 0."""
    size, square = lax.abs(x), lax.mul(x, x)
    far = lax.mul(lax.sign(x), lax.sub(_full(x, 1.0), lax.erfc(size)))
    last = 7 if x.dtype.itemsize == 4 else 13
    total = _full(x, 0.0)
    for n in reversed(range(last)):
        term = 2 / math.sqrt(math.pi) * (-1) ** n / (math.factorial(n) * (2 * n + 1))
        total = lax.add(lax.mul(total, square), _full(x, term))
    return lax.select(lax.gt(size, _full(x, 0.5)), far, lax.mul(x, total))


# XLA for CPUs computes a logarithm differently in the vector part of a loop than in the rest of it,
# and others differently in a small `while`. The operators that these are made of it does not.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "log": _wide(_log),
    "log2": lambda params, x: lax.mul(_wide(_log)(params, x), _full(x, 1 / math.log(2))),
    "logistic": _logistic,
    "tan": _wide(lambda x: lax.div(lax.sin(x), lax.cos(x))),
    "atan": _wide(lambda x: lax.atan2(x, _full(x, 1.0))),
    "cbrt": _wide(_cbrt),
    "erf": _wide(_erf),
}


LEAVES = 8  # of a sum: as many devices may split it
ROWS = 24  # of a leaf of a product, at least: shorter ones take longer to add than to multiply

(ragged_dot_general_p,) = private_primitives("lax.lax", "ragged_dot_general_p")


@in_every_body
def fix_order(graph: Graph) -> list[JaxprEqn]:
    """The equations with one order for every sum."""
    _refuse_manual(graph.eqns)
    return [made for eqn in graph.eqns for made in _in_order(eqn, graph)]


def _refuse_manual(eqns: Sequence[JaxprEqn]) -> None:
    """An error for a manual region, which is known by the operators at its borders and in it."""
    found = [eqn for eqn in eqns if eqn.primitive in MANUAL]
    if found:
        lines = [source_of(eqn) for eqn in found]
        line = next((line for line in lines if line != "unknown"), lines[0])
        raise ValueError(
            f"{line}: what a manual region computes depends on its mesh, for which "
            "reproducible=True cannot fix an order; write that part without shard_map "
            "(docs/howto/reproducible.md)"
        )


def _in_order(eqn: JaxprEqn, graph: Graph) -> list[JaxprEqn]:
    """The equations in the place of one."""
    rewrite = _REWRITES.get(eqn.primitive) or FUNCTIONS.get(eqn.primitive.name)
    is_float = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    if rewrite is None or not is_float or _is_simple(eqn):
        return [eqn]
    if eqn.primitive is p.scatter_add_p and graph.fill(eqn.invars[0]) == 0:
        rewrite = functools.partial(_scatter_add, into_zeros=True)
    with on_behalf_of(eqn):
        eqns, _ = equations_of(functools.partial(rewrite, eqn.params), eqn.invars, eqn.outvars)
    inner = Graph(eqns)
    return [made for e in eqns for made in _in_order(e, inner)]


def _is_simple(eqn: JaxprEqn) -> bool:
    """Whether an operator is what its own rewrite is made of."""
    if eqn.primitive is p.fft_p:
        return len(eqn.params["fft_lengths"]) == 1
    if eqn.primitive is p.reduce_window_sum_p:
        large = math.prod(eqn.params["window_dimensions"]) > MOST_SLICES
        return large or 0 in eqn.invars[0].aval.shape
    if eqn.primitive in (p.tan_p, p.atan_p):
        return jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.complexfloating)
    return False


def leaf_counts(sizes: Sequence[int]) -> list[int]:
    """How many leaves each of some contracted dims has; each leaf has `ROWS` or more."""
    counts, most = [], LEAVES
    while most > 1 and math.prod(sizes) < most * ROWS:
        most //= 2
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
        return _complex_dot(params, x, y)
    # Leaves are parts of major dims (heads, not their elements), which are those that are split.
    left, right = zip(*sorted(zip(left, right, strict=True)), strict=True) if left else ((), ())
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


def _complex_dot(params: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of complex numbers, as four of real ones."""
    dtype = params["preferred_element_type"] or jnp.result_type(x, y)
    part = jnp.finfo(dtype).dtype
    params = params | {"preferred_element_type": part}

    def parts(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        if jnp.issubdtype(z.dtype, jnp.complexfloating):
            return lax.real(z).astype(part), lax.imag(z).astype(part)
        return z.astype(part), jnp.zeros(z.shape, part)

    (a, b), (c, d) = parts(x), parts(y)
    real = lax.sub(_dot(params, a, c), _dot(params, b, d))
    return lax.complex(real, lax.add(_dot(params, a, d), _dot(params, b, c)))


def _sum(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """A sum over dims: within leaves first, and then their tree, dim by dim."""
    axes = sorted(params["axes"])
    if 0 in x.shape or not axes:
        return lax.broadcast(
            jnp.zeros((), x.dtype), [n for d, n in enumerate(x.shape) if d not in axes]
        )
    counts = [math.gcd(x.shape[d], LEAVES) for d in axes]
    x = _cut(x, axes, counts)
    leaves = [d + i for i, d in enumerate(axes)]
    x = leaf_sum_p.bind(x, axes=tuple(d + 1 for d in leaves))
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


def _scatter_add(
    params: dict[str, Any], x: Any, indices: Any, updates: Any, into_zeros: bool = False
) -> jax.Array:
    """Updates one after the other; if there are many, in leaves, each into zeros of its own."""
    window = params["dimension_numbers"].update_window_dims
    rows = [d for d in range(updates.ndim) if d not in window]
    batched = params["dimension_numbers"].operand_batching_dims
    count = min(LEAVES, updates.size // x.size) if x.size and rows and not batched else 1
    count = math.gcd(updates.shape[rows[0]], 1 << max(count, 1).bit_length() - 1) if rows else 1
    if count == 1:
        return scatter_in_order_p.bind(x, indices, updates, **params)
    cut = [_cut(indices, [0], [count]), jnp.moveaxis(_cut(updates, [rows[0]], [count]), rows[0], 0)]
    zeros = jnp.zeros((count, *x.shape), x.dtype)
    scatter = functools.partial(p.scatter_add_p.bind, **params)
    closed = jax.make_jaxpr(jax.vmap(scatter))(zeros, *cut)
    (leaves,) = evaluate(closed, [zeros, *cut], _scatter_in_order)
    total: jax.Array = tree_sum_p.bind(leaves, axis=0)
    return total if into_zeros else lax.add(x, total)


def _scatter_in_order(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
    added = eqn.primitive is p.scatter_add_p
    return bind(eqn.replace(primitive=scatter_in_order_p) if added else eqn, values)


_REWRITES: dict[Primitive, Callable[..., Any]] = {
    p.dot_general_p: _dot,
    p.reduce_sum_p: _sum,
    p.reduce_prod_p: _prod,
    p.cumsum_p: _cumulative(lax.add),
    p.cumprod_p: _cumulative(lax.mul),
    p.cumlogsumexp_p: _cumulative(_logaddexp),
    p.scatter_add_p: _scatter_add,
    scatter_sub_p: lambda params, x, at, y: _scatter_add(params, x, at, lax.neg(y)),
    p.conv_general_dilated_p: convolution,
    p.reduce_window_sum_p: window_sum,
    p.fft_p: fourier,
    ragged_dot_general_p: lambda params, *args: ragged_dot_dense(*args, **params),
}
