"""Sums, products of tensors, and other reductions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from gshard.checking.exact import field
from gshard.checking.exact.number import (
    Exact,
    Move,
    Value,
    alike,
    at,
    by_parts,
    constant,
    exact,
    is_float,
    joined,
    moved,
    plain,
    reshaped,
    times,
)
from gshard.checking.exact.pointwise import bits_of, converted, larger, mul, smaller

Combine = Callable[[Value, Value], Value]


def narrowed(eqn: JaxprEqn, made: Value) -> Value:
    """A sum, with the type that it was added up in."""
    if not isinstance(made, Exact) or made.bits is not None:
        return made
    return replace(made, sum_bits=min(made.sum_bits, bits_of(eqn.outvars[0].aval.dtype)))


def summed(a: Value, axes: Sequence[int]) -> Value:
    """The sum over some dims; of narrow floats, rounded once, as compilers do."""
    if isinstance(a, Exact):
        parts = by_parts(lambda part: field.total(part, axes), a)
        return exact(a.f.sum(tuple(axes)), a, **parts, bits=a.bits)
    narrow = jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize < 4
    if not is_float(a.dtype) or len(axes) > 1:
        return a.sum(tuple(axes), dtype=a.dtype)
    rows = np.moveaxis(a.astype(np.float32) if narrow else a, axes[0], 0)
    total = rows[0]
    for row in rows[1:]:  # in their order, as devices add
        total = total + row
    return total.astype(a.dtype)


def summed_in(groups: Sequence[Sequence[int]], tiles: Value) -> Value:
    """What the devices of each group have, added up; groups may have different sizes."""
    if len({len(group) for group in groups}) == 1:
        return summed(at(tiles, np.asarray(groups)), (1,))
    sums = [summed(at(tiles, np.asarray([group])), (1,)) for group in groups]
    return joined(np.concatenate, sums)


def _axes(eqn: JaxprEqn) -> tuple[int, ...]:
    return tuple(1 + d for d in eqn.params.get("axes", (eqn.params.get("axis"),)))


def _reduce_sum(eqn: JaxprEqn, a: Value) -> Value:
    return narrowed(eqn, summed(a, _axes(eqn)))


def folded(combine: Combine, a: Value, axis: int) -> Value:
    """All elements along an axis combined, in a tree."""
    while plain(a).shape[axis] > 1:
        size = plain(a).shape[axis]
        half = size // 2
        parts = [(0, half), (half, 2 * half), (2 * half, size)]
        first, second, rest = (at(a, (slice(None),) * axis + (slice(*part),)) for part in parts)
        a = combine(first, second)
        if size % 2:
            a = joined(lambda xs: np.concatenate(xs, axis), [a, rest])
    return moved(lambda x: x.squeeze(axis), a)


def _reduced(combine: Combine, start: Callable[[Any], Any]) -> Callable[..., Value]:
    def operator(eqn: JaxprEqn, a: Value) -> Value:
        if 0 in [plain(a).shape[d] for d in _axes(eqn)]:
            aval = eqn.outvars[0].aval
            return constant(np.full(aval.shape, start(aval.dtype), aval.dtype))
        for axis in sorted(_axes(eqn), reverse=True):
            a = folded(combine, a, axis)
        return a

    return operator


def limit(sign: int) -> Callable[[Any], Any]:
    """The largest number of a type, or the smallest."""

    def of_type(dtype: Any) -> Any:
        if is_float(dtype):
            return sign * np.inf
        if dtype.kind == "b":
            return sign > 0
        return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min

    return of_type


def _arg(combine: Combine) -> Callable[..., np.ndarray]:
    """Where the largest element is, or the smallest."""

    def operator(eqn: JaxprEqn, a: Exact) -> np.ndarray:
        (axis,) = _axes(eqn)
        best = moved(lambda x: np.expand_dims(x, axis), folded(combine, a, axis))
        return (a.one == best.one).argmax(axis).astype(eqn.params["index_dtype"])

    return operator


def _cumsum(eqn: JaxprEqn, a: Exact) -> Value:
    axis = 1 + eqn.params["axis"]
    flip: Move = (lambda x: np.flip(x, axis)) if eqn.params["reverse"] else (lambda x: x)
    parts = by_parts(lambda part: flip(field.running_total(flip(part), axis)), a)
    return narrowed(eqn, exact(flip(np.cumsum(flip(a.f), axis)), a, **parts))


def _dot_general(eqn: JaxprEqn, a: Value, b: Value) -> Value:
    is_complex = any(x.dtype.kind == "c" for x in (a, b))
    a, b = (converted(x, np.dtype(np.complex128 if is_complex else np.float64)) for x in (a, b))
    return narrowed(eqn, product(a, b, *eqn.params["dimension_numbers"]))


def product(a: Exact, b: Exact, contracted: Any, batch: Any) -> Exact:
    """`lax.dot_general` of values with a dim of devices, as one batch of matrix products."""
    a, b = alike([a, b])
    sides, free = [], []
    for x, own, shared, last in (
        (a, contracted[0], batch[0], True),
        (b, contracted[1], batch[1], False),
    ):
        rest = [d for d in range(x.ndim - 1) if d not in own and d not in shared]
        groups = [shared, rest, own] if last else [shared, own, rest]
        order = [0, *(1 + d for group in groups for d in group)]
        sizes = [[x.shape[1 + d] for d in group] for group in groups]
        matrix = (x.shape[0], *sizes[0], math.prod(sizes[1]), math.prod(sizes[2]))
        free += [x.shape[1 + d] for d in rest]
        sides.append(reshaped(x, order, matrix))
    left, right = sides
    shape = [*left.shape[:-2], *free]
    parts = times(lambda x, y: field.matmul(x, y).reshape(shape), left, right)
    f = np.matmul(left.f, right.f).reshape(shape)
    return exact(f, a, b, **parts, degree=a.degree + b.degree)


SUMS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("reduce_sum", "leaf_sum", "tree_sum"), _reduce_sum), "cumsum": _cumsum,
    **dict.fromkeys(("dot_general", "leaf_dot"), _dot_general),
    "reduce_prod": _reduced(lambda a, b: mul(None, a, b), lambda dtype: 1),
    "reduce_max": _reduced(larger, limit(-1)), "reduce_min": _reduced(smaller, limit(1)),
    "argmax": _arg(larger), "argmin": _arg(smaller),
}  # fmt: skip
