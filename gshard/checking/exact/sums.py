"""Sums, products of tensors, other reductions, cumulative ones, windows and convolutions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from gshard.checking.exact import field
from gshard.checking.exact.number import (
    Exact,
    Value,
    at,
    exact,
    is_float,
    joined,
    leading,
    moved,
    of_floats,
    plain,
    reshaped,
    spread,
)
from gshard.checking.exact.pointwise import POINTWISE, bits_of, larger, smaller, unknown
from gshard.checking.exact.structure import padded
from gshard.rules.by_rows import sized_dims

Combine = Callable[[Value, Value], Value]


def _narrowed(eqn: JaxprEqn, made: Exact) -> Exact:
    """A sum, with the type that it was added up in."""
    return replace(made, sum_bits=min(made.sum_bits, bits_of(eqn.outvars[0].aval.dtype)))


def summed(a: Value, axes: Sequence[int]) -> Value:
    """The sum over some dims, of all kinds of values."""
    if isinstance(a, Exact):
        return exact(a.f.sum(tuple(axes)), field.total(a.r, axes), a)
    if isinstance(a, np.ndarray):
        return a.sum(tuple(axes), dtype=a.dtype)
    tag = summed(a.tag, axes)
    return type(a)(a.i.sum(tuple(axes), dtype=a.i.dtype), tag)


def summed_in(groups: Sequence[Sequence[int]], tiles: Value) -> Value:
    """What the devices of each group have, added up; groups may have different sizes."""
    sums = [summed(at(tiles, np.asarray([group])), (1,)) for group in groups]
    return joined(np.concatenate, sums)


def _axes(eqn: JaxprEqn) -> tuple[int, ...]:
    return tuple(1 + d for d in eqn.params["axes"])


def _reduce_sum(eqn: JaxprEqn, a: Value) -> Value:
    made = summed(a, _axes(eqn))
    return _narrowed(eqn, made) if isinstance(made, Exact) else made


def folded(combine: Combine, a: Value, axis: int) -> Value:
    """All elements along an axis combined, in a tree."""
    while plain(a).shape[axis] > 1:
        size = plain(a).shape[axis]
        half = size // 2
        parts = [(0, half), (half, 2 * half), (2 * half, size)]
        first, second, rest = (_rows(a, axis, slice(*part)) for part in parts)
        a = combine(first, second)
        if size % 2:
            a = joined(lambda xs: np.concatenate(xs, axis), [a, rest])
    return moved(lambda x: x.squeeze(axis), a)


def _rows(a: Value, axis: int, part: slice | int) -> Value:
    return at(a, (slice(None),) * axis + (part,))


def _reduced(combine: Combine, start: Callable[[JaxprEqn], Any]) -> Callable[..., Value]:
    def operator(eqn: JaxprEqn, a: Value) -> Value:
        if 0 in [plain(a).shape[d] for d in _axes(eqn)]:
            aval = eqn.outvars[0].aval
            full = np.full((1, *aval.shape), start(eqn), aval.dtype)
            return of_floats(full) if is_float(aval.dtype) else full
        for axis in sorted(_axes(eqn), reverse=True):
            a = folded(combine, a, axis)
        return a

    return operator


def _limit(sign: int) -> Callable[[JaxprEqn], Any]:
    def limit(eqn: JaxprEqn) -> Any:
        dtype = eqn.outvars[0].aval.dtype
        if is_float(dtype):
            return sign * np.inf
        if dtype.kind == "b":
            return sign > 0
        return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min

    return limit


def _times(a: Value, b: Value) -> Value:
    return POINTWISE["mul"](None, a, b)


def _plus(a: Value, b: Value) -> Value:
    return POINTWISE["add"](None, a, b)


def _cumulative(combine: Combine) -> Callable[..., Value]:
    def operator(eqn: JaxprEqn, a: Value) -> Value:
        axis, size = 1 + eqn.params["axis"], eqn.outvars[0].aval.shape[eqn.params["axis"]]
        order = range(size)[::-1] if eqn.params["reverse"] else range(size)
        rows: list[Value] = []
        for n in order:
            row = _rows(a, axis, slice(n, n + 1))
            rows.append(combine(rows[-1], row) if rows else row)
        if not rows:
            return a
        rows = rows[::-1] if eqn.params["reverse"] else rows
        return joined(lambda xs: np.concatenate(xs, axis), rows)

    return operator


def _cumsum(eqn: JaxprEqn, a: Value) -> Value:
    axis = 1 + eqn.params["axis"]
    flip: Callable[[np.ndarray], np.ndarray] = (
        (lambda x: np.flip(x, axis)) if eqn.params["reverse"] else lambda x: x
    )
    if isinstance(a, Exact):
        f, r = np.cumsum(flip(a.f), axis), field.running_total(flip(a.r), axis)
        return _narrowed(eqn, exact(flip(f), flip(r), a))
    return flip(np.cumsum(flip(a), axis, dtype=a.dtype))


def _cumlogsumexp(eqn: JaxprEqn, a: Exact) -> Exact:
    total = _cumsum(eqn, POINTWISE["exp"](eqn, a))
    return unknown("log", np.log)(eqn, total)


# ------------------------------------------------------------------------ products


def _dot_general(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    (contracted, batch) = eqn.params["dimension_numbers"]
    made = product(a, b, contracted, batch)
    dtype = eqn.outvars[0].aval.dtype
    if not isinstance(made, Exact):
        return of_integers_as(made, dtype)
    return _narrowed(eqn, made)


def of_integers_as(made: np.ndarray, dtype: Any) -> Value:
    """Whole numbers in the type of a result."""
    return of_floats(made.astype(np.float64)) if is_float(dtype) else made.astype(dtype)


def product(a: Value, b: Value, contracted: Any, batch: Any) -> Value:
    """`lax.dot_general` of values with a dim of devices, as one batch of matrix products."""
    a, b = (_as_float(x, y) for x, y in ((a, b), (b, a)))
    count = max(leading(a), leading(b))
    if leading(a) != leading(b):
        a, b = spread(a, count), spread(b, count)
    sides = []
    for x, own, shared, last in (
        (a, contracted[0], batch[0], True),
        (b, contracted[1], batch[1], False),
    ):
        free = [d for d in range(x.ndim - 1) if d not in own and d not in shared]
        order = [*shared, *free, *own] if last else [*shared, *own, *free]
        sizes = [x.shape[1 + d] for d in order]
        cuts = [len(shared), len(shared) + (len(free) if last else len(own))]
        matrix = [
            count, *sizes[: cuts[0]],
            math.prod(sizes[cuts[0] : cuts[1]]), math.prod(sizes[cuts[1] :]),
        ]  # fmt: skip
        shape = [x.shape[1 + d] for d in free]
        view = [0, *(1 + d for d in order)]
        sides.append((reshaped(x, matrix, view), shape))
    (left, rows), (right, columns) = sides
    shape = [*plain(left).shape[:-2], *rows, *columns]
    if isinstance(left, Exact):
        f, r = np.matmul(left.f, right.f), field.matmul(left.r, right.r)
        degree = a.degree + b.degree
        return exact(f.reshape(shape), r.reshape(shape), a, b, degree=degree)
    return np.matmul(left.astype(np.int64), right.astype(np.int64)).reshape(shape)


def _as_float(x: Value, other: Value) -> Value:
    if isinstance(other, Exact) and not isinstance(x, Exact):
        return POINTWISE["convert_element_type"](_ToFloat, x)
    return x


class _ToFloat:
    params = {"new_dtype": np.dtype(np.float64)}  # noqa: RUF012


def _ragged_dot(eqn: JaxprEqn, a: Value, b: Value, sizes: Value) -> Value:
    """Rows of the left side times the matrix of their group, or sums over the rows of a group."""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        contracted, batch, ragged, groups = ((1,), (1,)), ((), ()), 0, (0,)
    else:
        contracted, batch = numbers.dot_dimension_numbers
        (ragged,), groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    ends = np.cumsum(plain(sizes), -1)
    count = max(leading(a), leading(b), ends.shape[0])
    a, b = spread(a, count), spread(b, count)
    rows = np.arange(plain(a).shape[1 + ragged])
    placed = [*(sized_dims(eqn) if ends.ndim > 2 else []), ragged]
    parts = []
    for group in range(ends.shape[-1]):
        start = ends[..., group - 1] if group else np.zeros_like(ends[..., 0])
        inside = (rows >= start[..., None]) & (rows < ends[..., group, None])
        inside = inside.transpose(0, *(1 + np.argsort(placed)))
        kept = [n if d in placed else 1 for d, n in enumerate(plain(a).shape[1:])]
        own = _masked(a, inside.reshape(len(inside), *kept[: a.ndim - 1]))
        if groups:
            matrix = _rows(b, 1 + groups[0], group)
            shift = lambda d, g=groups[0]: d - (d > g)  # noqa: E731
            dims = (
                (contracted[0], tuple(map(shift, contracted[1]))),
                (batch[0], tuple(map(shift, batch[1]))),
            )
            parts.append(product(own, matrix, *dims))
        else:
            parts.append(product(own, b, contracted, batch))
    if groups:
        return _narrowed(eqn, functools.reduce(_plus, parts))
    return _narrowed(eqn, joined(lambda xs: np.stack(xs, 1), parts))


def _masked(a: Value, inside: np.ndarray) -> Value:
    zero = (
        of_floats(np.zeros((1,) * a.ndim))
        if isinstance(a, Exact)
        else np.zeros((1,) * a.ndim, plain(a).dtype)
    )
    return joined(lambda xs: np.where(inside, *xs), [a, zero])


# ------------------------------------------------------------------------ windows


def _windows(
    a: Value, window: Sequence[int], strides: Sequence[int], dilation: Sequence[int], first: int
) -> Iterator[tuple[tuple[int, ...], Value]]:
    """The elements of every window at each of its places; dims begin at `first`."""
    sizes = [
        max(0, -(-(n - (w - 1) * d) // s))
        for n, w, s, d in zip(plain(a).shape[first:], window, strides, dilation, strict=False)
    ]
    for place in np.ndindex(*window):
        index = [slice(None)] * first
        for p, s, d, size in zip(place, strides, dilation, sizes, strict=True):
            index.append(slice(p * d, p * d + (size - 1) * s + 1, s) if size else slice(0, 0))
        yield place, at(a, tuple(index))


def _reduce_window(combine: Combine, start: Callable[[JaxprEqn], Any]) -> Callable[..., Value]:
    def operator(eqn: JaxprEqn, a: Value, *_: Value) -> Value:
        q, dtype = eqn.params, eqn.outvars[0].aval.dtype
        value = np.full((1,), start(eqn), dtype)
        fill = of_floats(value) if is_float(dtype) else value
        base = q.get("base_dilation") or (1,) * len(q["window_dimensions"])
        config = [(lo, hi, d - 1) for (lo, hi), d in zip(q["padding"], base, strict=True)]
        wide = padded(a, fill, config)
        dilation = q.get("window_dilation") or (1,) * len(q["window_dimensions"])
        found = _windows(wide, q["window_dimensions"], q["window_strides"], dilation, 1)
        made = functools.reduce(combine, (x for _, x in found))
        return _narrowed(eqn, made) if combine is _plus and isinstance(made, Exact) else made

    return operator


def _conv(eqn: JaxprEqn, x: Value, w: Value) -> Value:
    q, numbers = eqn.params, eqn.params["dimension_numbers"]
    count = max(leading(x), leading(w))
    x = moved(lambda a: a.transpose(0, *(1 + d for d in numbers.lhs_spec)), spread(x, count))
    w = moved(lambda a: a.transpose(0, *(1 + d for d in numbers.rhs_spec)), spread(w, count))
    groups, batches = q["feature_group_count"], q["batch_group_count"]
    dtype = eqn.outvars[0].aval.dtype
    x, w = _as_float(x, w), _as_float(w, x)
    kind = isinstance(x, Exact)
    zero = of_floats(np.zeros(1)) if kind else np.zeros(1, plain(x).dtype)
    config = [(lo, hi, d - 1) for (lo, hi), d in zip(q["padding"], q["lhs_dilation"], strict=True)]
    x = padded(x, zero, [(0, 0, 0), (0, 0, 0), *config])
    (_, n, c, *_), (_, o, i, *window) = plain(x).shape, plain(w).shape
    x = moved(
        lambda a: a.reshape(count, batches, n // batches, groups, c // groups, *a.shape[3:]), x
    )
    parts = []
    for place, rows in _windows(x, window, q["window_strides"], q["rhs_dilation"], 5):
        taps = at(w, (..., *place))  # devices, o, i
        taps = reshaped(taps, (count, batches, groups, o // groups // batches, i))
        # batch dims: batches and groups; features are contracted
        parts.append(product(rows, taps, ((3,), (3,)), ((0, 2), (0, 1))))
    if not parts or 0 in eqn.outvars[0].aval.shape:
        empty = np.zeros((count, *eqn.outvars[0].aval.shape))
        return of_integers_as(empty, dtype)
    made = functools.reduce(_plus, parts)  # devices, batches, groups, n, spatial, o
    rank = plain(made).ndim - 5
    order = (0, 3, 1, 2, 4 + rank, *range(4, 4 + rank))
    made = moved(
        lambda a: a.transpose(order).reshape(count, n // batches, o, *a.shape[4 : 4 + rank]), made
    )
    back = np.argsort([0, *(1 + d for d in numbers.out_spec)])
    made = moved(lambda a: a.transpose(back), made)
    return _narrowed(eqn, made) if isinstance(made, Exact) else of_integers_as(made, dtype)


def _zero(eqn: JaxprEqn) -> Any:
    return 0


def _ones(eqn: JaxprEqn) -> Any:
    return ~np.zeros((), eqn.outvars[0].aval.dtype)


SUMS: dict[str, Callable[..., Any]] = {
    "reduce_sum": _reduce_sum, "leaf_sum": _reduce_sum, "tree_sum": _reduce_sum,
    "reduce_prod": _reduced(_times, lambda eqn: 1),
    "reduce_max": _reduced(larger, _limit(-1)), "reduce_min": _reduced(smaller, _limit(1)),
    "reduce_and": _reduced(lambda a, b: a & b, _ones),
    "reduce_or": _reduced(lambda a, b: a | b, _zero),
    "reduce_xor": _reduced(lambda a, b: a ^ b, _zero),
    "cumsum": _cumsum, "cumprod": _cumulative(_times), "cummax": _cumulative(larger),
    "cummin": _cumulative(smaller), "cumlogsumexp": _cumlogsumexp, "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot, "ragged_dot": _ragged_dot, "conv_general_dilated": _conv,
    "reduce_window_sum": _reduce_window(_plus, _zero),
    "reduce_window_max": _reduce_window(larger, _limit(-1)),
    "reduce_window_min": _reduce_window(smaller, _limit(1)),
}  # fmt: skip
