"""Operators that order values: sorts, the largest of a row, and where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from gshard.checking.exact.number import Bits, Exact, Value, leading, moved, plain, spread
from gshard.checking.exact.structure import extended

Index = tuple[Any, ...]


def ranked(value: Value, axis: int) -> list[np.ndarray]:
    """Arrays by which values are sorted along an axis, the first one first."""
    if isinstance(value, Bits):
        value = value.tag
    if not isinstance(value, Exact):
        return [plain(value)]
    f = np.real(value.f) if np.iscomplexobj(value.f) else value.f
    order = np.lexsort((value.r, f), axis=axis)
    f, r = (np.take_along_axis(x, order, axis) for x in (f, value.r))
    # Numbers that are equal in the field are equal, whatever rounding did: they get one place.
    new = np.ones(f.shape, np.int64)
    after, before = (_along(f.ndim, axis, slice(*ends)) for ends in ((1, None), (None, -1)))
    new[after] = (r[after] != r[before]) | np.isnan(f[after])
    places = np.empty_like(new)
    np.put_along_axis(places, order, np.cumsum(new, axis), axis)
    return [places]


def _along(ndim: int, axis: int, part: slice) -> Index:
    return tuple(part if d == axis else slice(None) for d in range(ndim))


def _sort(eqn: JaxprEqn, *operands: Value) -> list[Value]:
    axis, count = 1 + eqn.params["dimension"], max(map(leading, operands))
    operands = tuple(spread(x, count) for x in operands)
    keys = [k for x in operands[: eqn.params["num_keys"]] for k in ranked(x, axis)]
    order = np.lexsort(keys[::-1], axis=axis)
    return [_taken(x, order, axis) for x in operands]


def _taken(value: Value, order: np.ndarray, axis: int) -> Value:
    return moved(lambda x: np.take_along_axis(x, extended(order, x), axis), value)


def _top_k(eqn: JaxprEqn, a: Value) -> list[Value]:
    axis = 1 + eqn.params.get("axis", a.ndim - 2)
    (places,) = ranked(a, axis)
    order = np.argsort(-places.astype(np.int64), axis, kind="stable")
    order = order[_along(order.ndim, axis, slice(eqn.params["k"]))]
    return [_taken(a, order, axis), order.astype(np.int32)]


def _arg(sign: int) -> Callable[..., np.ndarray]:
    def operator(eqn: JaxprEqn, a: Value) -> np.ndarray:
        (axis,) = (1 + d for d in eqn.params["axes"])
        if isinstance(a, Exact):
            (places,) = ranked(a, axis)
            odd = np.isnan(a.f)
            places = np.where(odd, sign * (places.shape[axis] + 1), places)
        else:
            places = plain(a).astype(np.int64) if plain(a).dtype.kind == "b" else plain(a)
        found = places.argmax(axis) if sign > 0 else places.argmin(axis)
        return found.astype(eqn.params["index_dtype"])

    return operator


ORDER: dict[str, Callable[..., Any]] = {
    "sort": _sort, "top_k": _top_k, "approx_top_k": _top_k, "argmax": _arg(1), "argmin": _arg(-1),
}  # fmt: skip
