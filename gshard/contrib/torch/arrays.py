"""Operators of ATen on arrays as functions of JAX: elements, reductions, shapes and indices.

An operator takes the arguments of its torch schema. The interpreter casts its results to the types
that torch gives them, so that a function here need not know torch's rules of promotion.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Operator = Callable[..., Any]

# Under one name in both libraries, in this module of JAX.
_IN_NUMPY = (
    "abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not "
    "bitwise_or bitwise_right_shift bitwise_xor ceil copysign cos cosh exp exp2 expm1 floor fmod "
    "hypot isinf isnan log log10 log1p log2 logical_and logical_not logical_or "
    "logical_xor maximum minimum reciprocal remainder round sign sin sinh sqrt tan tanh trunc "
    "where"
)
_IN_LAX = "complex digamma erf erfc lgamma rsqrt"
_IN_PYTHON = "eq ge gt le lt mul ne neg pow"
_REDUCING = "sum mean prod any amax amin argmax argmin"  # of NumPy too


def _div(x: Any, other: Any, rounding_mode: str | None = None) -> Any:
    divide = jnp.floor_divide if rounding_mode == "floor" else jnp.true_divide
    return jnp.trunc(divide(x, other)) if rounding_mode == "trunc" else divide(x, other)


def _clamp(x: Any, min: Any = None, max: Any = None) -> Any:
    """Where a bound is reached the gradient is torch's: one to the tensor, not half."""
    low = x if min is None else jnp.where(x < min, min, x)
    return low if max is None else jnp.where(low > max, max, low)


POINTWISE: dict[str, Operator] = {
    **{name: getattr(jnp, name) for name in _IN_NUMPY.split()},
    **{name: getattr(lax, name) for name in _IN_LAX.split()},
    **{name: getattr(operator, name) for name in _IN_PYTHON.split()},
    "add": lambda x, other, alpha=1: x + (other if alpha == 1 else alpha * other),
    "sub": lambda x, other, alpha=1: x - (other if alpha == 1 else alpha * other),
    "div": _div,
    "clamp": _clamp,
    "erfinv": lax.erf_inv,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x, approximate="none": jax.nn.gelu(x, approximate == "tanh"),
    "__lshift__": jnp.left_shift,
    "__rshift__": jnp.right_shift,
    "_conj": jnp.conj,
    "polar": lambda x, angle: lax.complex(x * jnp.cos(angle), x * jnp.sin(angle)),
    "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
    "view_as_real": lambda x: jnp.stack([jnp.real(x), jnp.imag(x)], -1),
}


def axes(dim: Any) -> Any:
    """The dims of a reduction: for torch, none means all."""
    return tuple(dim) or None if isinstance(dim, list | tuple) else dim


def _reduced(function: Operator) -> Operator:
    return lambda x, dim=None, keepdim=False, dtype=None: function(
        x if dtype is None else x.astype(dtype), axis=axes(dim), keepdims=keepdim
    )


def _extreme(values: Operator, where: Operator) -> Operator:
    """`max` and `min`: of all elements, or along a dim, with their places."""

    def extreme(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        if dim is None:
            return values(x)
        at = where(x, axis=dim, keepdims=True)
        found = jnp.take_along_axis(x, at, dim)
        return (found, at) if keepdim else (found.squeeze(dim), at.squeeze(dim))

    return extreme


def _var_mean(x: Any, dim: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    correction = 1 if correction is None else int(correction)  # an older overload: unbiased
    how: Any = {"axis": axes(dim), "keepdims": keepdim}
    return jnp.var(x, ddof=correction, **how), jnp.mean(x, **how)


def _along(function: Operator) -> Operator:
    """A function along a dim; of a scalar, as torch allows."""
    return lambda x, dim, dtype=None: function(x, axis=dim) if x.ndim else x


def _wide(function: Operator) -> Operator:
    return lambda x, dim, wide=False: function(x.astype(jnp.float32) if wide else x, dim)


REDUCTIONS: dict[str, Operator] = {
    **{name: _reduced(getattr(jnp, name)) for name in _REDUCING.split()},
    "max": _extreme(jnp.max, jnp.argmax),
    "min": _extreme(jnp.min, jnp.argmin),
    "var": lambda *args, **kwargs: _var_mean(*args, **kwargs)[0],
    "var_mean": _var_mean,
    "cumsum": _along(jnp.cumsum),
    "cumprod": _along(jnp.cumprod),
    "logcumsumexp": lambda x, dim: lax.cumlogsumexp(x, dim % x.ndim),
    "_softmax": _wide(jax.nn.softmax),
    "_log_softmax": _wide(jax.nn.log_softmax),
}


def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Any:
    """A size of -1 stays as it is."""
    shape = (1,) * (len(size) - x.ndim) + x.shape
    return jnp.broadcast_to(x, [o if n == -1 else n for n, o in zip(size, shape, strict=True)])


def _squeeze(x: Any, dim: Any = None) -> Any:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    return lax.squeeze(x, [d for d in dims if x.ndim and x.shape[d] == 1])


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    first, last, step = slice(start, end, step).indices(x.shape[dim])
    return lax.slice_in_dim(x, first, max(first, last), step, dim)


def _cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """torch leaves out empty tensors of one dim, whatever the others are."""
    return jnp.concatenate([x for x in tensors if x.shape != (0,)] or tensors[:1], dim)


def _pad(x: Any, pad: Sequence[int], value: Any = 0) -> Any:
    """torch names the last dim first."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    widths = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    return lax.pad(x, jnp.asarray(value, x.dtype), [(low, high, 0) for low, high in widths])


def _unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Windows along a dim, which become the last one."""
    count = (x.shape[dim] - size) // step + 1
    rows = [_slice(x, dim, n, n + (count - 1) * step + 1, step) for n in range(size)]
    return jnp.stack(rows, -1)


SHAPES: dict[str, Operator] = {
    "view": jnp.reshape,
    **dict.fromkeys(("alias", "clone", "_to_copy"), lambda x, **_: x),
    "detach": lax.stop_gradient,
    "copy": lambda x, src, **_: jnp.broadcast_to(src, x.shape),
    "permute": lambda x, dims: lax.transpose(x, [d % x.ndim for d in dims]),
    "expand": _expand,
    "unsqueeze": jnp.expand_dims,
    "squeeze": _squeeze,
    "slice": _slice,
    "select": lambda x, dim, index: lax.index_in_dim(x, index, dim, keepdims=False),
    "split_with_sizes": lambda x, sizes, dim=0: lax.split(x, sizes, dim % x.ndim),
    "cat": _cat,
    "stack": jnp.stack,
    "repeat": jnp.tile,
    "flip": jnp.flip,
    "unfold": _unfold,
    "diagonal": jnp.diagonal,
    "constant_pad_nd": _pad,
    "arange": jnp.arange,
    "full": jnp.full,
    "full_like": lambda x, value, dtype=None: jnp.full_like(x, value, dtype=dtype),
    "scalar_tensor": lambda value, dtype=None: jnp.asarray(value, dtype),
    "empty": jnp.zeros,
    "empty_permuted": lambda size, order, dtype=None: jnp.zeros(size, dtype),
}


def _at(x: Any, indices: Sequence[Any]) -> Any:
    return x.at[tuple(slice(None) if index is None else index for index in indices)]


def _index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    at = _at(x, indices)
    return at.add(values) if accumulate else at.set(values)


def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Any:
    """It takes as much of the other dims as the index has."""
    if x.ndim == 0:
        return x
    sizes = [x.shape[d] if d == dim % x.ndim else n for d, n in enumerate(index.shape)]
    cut = x if tuple(sizes) == x.shape else x[tuple(map(slice, sizes))]
    return jnp.take_along_axis(cut, index, dim, mode="promise_in_bounds")


_REDUCE = {"sum": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def _scatter(
    x: Any, dim: int, index: Any, src: Any, reduce: str = "set", include_self: bool = True
) -> Any:
    if reduce == "mean" or not include_self:
        raise NotImplementedError(f"scatter_reduce by {reduce!r}, include_self={include_self}")
    at = [lax.broadcasted_iota(jnp.int32, index.shape, d) for d in range(x.ndim)]
    at[dim] = index
    if getattr(src, "ndim", 0):
        src = src[tuple(map(slice, index.shape))]
    return getattr(x.at[tuple(at)], _REDUCE.get(reduce, reduce))(src)


def _sort(x: Any, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    """Values and where they were; a descending order is the ascending one of negated keys."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    negated = jnp.negative if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.invert
    places = lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)
    keys = negated(x) if descending else x
    values, order = lax.sort((keys, places), dimension=dim % x.ndim, is_stable=True, num_keys=1)
    return negated(values) if descending else values, order


def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not largest:
        return [_slice(found, dim, 0, k) for found in _sort(x, dim)]
    return [jnp.moveaxis(found, -1, dim) for found in lax.top_k(jnp.moveaxis(x, dim, -1), k)]


def _histc(x: Any, bins: int = 100, min: Any = 0, max: Any = 0) -> Any:
    """Counts, by comparing with each bin: a sum over elements, which may be sharded."""
    if min == max:
        raise NotImplementedError("histc without bounds, which are then those of its data")
    x = x.reshape(-1)
    place = jnp.where(x == max, bins - 1, jnp.floor((x - min) * (bins / (max - min))))
    return jnp.sum(place[:, None] == jnp.arange(bins, dtype=place.dtype), 0)


INDEXING: dict[str, Operator] = {
    "index": lambda x, at: _at(x, at).get(mode="promise_in_bounds"),
    "index_put": _index_put,
    "embedding": lambda weight, at, *_: weight.at[at].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    ),
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": lambda x, dim, index, src: _scatter(x, dim, index, src, "add"),
    "scatter_reduce": _scatter,
    "slice_scatter": lambda x, src, dim=0, start=None, end=None, step=1: x.at[
        (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)
    ].set(src),
    "sort": _sort,
    "topk": _topk,
    "histc": _histc,
}
