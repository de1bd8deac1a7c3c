"""Operators that move elements: views, slices, gathers, scatters, sorts.

Each is a function of one array with a leading dim of devices; dims at the end, which random keys
and shared bits have, stay.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.checking import on_host
from gshard.checking.exact import field
from gshard.checking.exact.number import (
    Exact,
    Move,
    Value,
    alike,
    at,
    beside,
    by_parts,
    exact,
    is_float,
    joined,
    moved,
    of_array,
    plain,
    spread,
)
from gshard.checking.exact.pointwise import bits_of, larger, mul, neg, smaller
from gshard.graph.evaluate import bind


def _view(move: Callable[[JaxprEqn, np.ndarray], np.ndarray]) -> Callable[..., Value]:
    """An operator that moves the elements of its operand, wherever they are."""
    return lambda eqn, a, *sizes: moved(lambda array: move(eqn, array), a)


def _rest(eqn: JaxprEqn, a: np.ndarray) -> tuple[int, ...]:
    """The dims at the end that the operand does not have."""
    return a.shape[1 + eqn.invars[0].aval.ndim :]


def _reshape(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    if order := eqn.params.get("dimensions") if eqn.primitive.name == "reshape" else None:
        a = _reordered(a, order)
    return a.reshape(a.shape[0], *eqn.outvars[0].aval.shape, *_rest(eqn, a))


def _reordered(a: np.ndarray, order: Sequence[int]) -> np.ndarray:
    return a.transpose(0, *(1 + d for d in order), *range(1 + len(order), a.ndim))


def _broadcast(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    shape, rest = eqn.params["shape"], _rest(eqn, a)
    sizes = [1] * len(shape)
    for d, size in zip(eqn.params["broadcast_dimensions"], a.shape[1:], strict=False):
        sizes[d] = size
    return np.broadcast_to(a.reshape(a.shape[0], *sizes, *rest), (a.shape[0], *shape, *rest))


def _slice(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    strides = eqn.params["strides"] or [1] * len(eqn.params["start_indices"])
    limits = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    return a[(slice(None), *(slice(*limit) for limit in limits))]


def _together(join: Callable[..., np.ndarray], dim: str) -> Callable[..., Value]:
    """An operator that puts its operands side by side, along the dim that a parameter names."""
    return lambda eqn, *parts: joined(lambda xs: join(xs, 1 + eqn.params[dim]), alike(parts))


def _apart(eqn: JaxprEqn, a: Value) -> list[Value]:
    """Some rows each, or one without its dim."""
    axis, sizes = 1 + eqn.params["axis"], eqn.params.get("sizes")
    if sizes is None:
        return [at(a, _along(axis, n)) for n in range(plain(a).shape[axis])]
    ends = np.cumsum([0, *sizes]).tolist()
    return [at(a, _along(axis, slice(*rows))) for rows in itertools.pairwise(ends)]


def _iota(eqn: JaxprEqn, *_: Value) -> Value:
    shape, dim, dtype = (eqn.params[k] for k in ("shape", "dimension", "dtype"))
    sizes = [n if d == dim else 1 for d, n in enumerate(shape)]
    numbers = np.broadcast_to(np.arange(shape[dim]).reshape(sizes), shape)[None]
    wide = np.complex128 if np.dtype(dtype).kind == "c" else np.float64
    return of_array(numbers.astype(wide if is_float(dtype) else dtype))


# ------------------------------------------------------------------------ by index


def _moves(count: int) -> Callable[..., list[Value]]:
    """An operator that moves the elements of its first `count` operands: JAX moves their numbers,
    on all devices at once."""

    def operator(eqn: JaxprEqn, *operands: Value) -> list[Value]:
        ends = np.cumsum([0, *(math.prod(a.aval.shape) for a in eqn.invars[:count])])
        pairs = zip(eqn.invars[:count], ends, strict=False)
        numbers = [_numbered(a.aval.shape, start) for a, start in pairs]
        flat = [moved(_flat(a), x) for x, a in zip(operands[:count], eqn.invars, strict=False)]
        values = flat[0] if len(flat) == 1 else _side_by_side(flat)
        changed = {"fill_value": -1} if "fill_value" in eqn.params else {}

        def move(*own: Any) -> list[Any]:
            return list(bind(eqn, [*numbers, *own], **changed))

        found = on_host.on_all((eqn, "places"), move, operands[count:])
        return [_taken_at(eqn, values, places) for places in found]

    return operator


def _window(eqn: JaxprEqn, sizes: Sequence[int], starts: Sequence[np.ndarray]) -> Any:
    """An index of each device's window, which is moved into the array as XLA should do it: some
    releases of XLA forget to when they simplify a program."""
    shape, count = eqn.invars[0].aval.shape, max(map(len, starts), default=1)
    rows = zip(starts, shape, sizes, strict=True)
    first = [np.clip(start.astype(np.int64), 0, n - size) for start, n, size in rows]
    if count == 1:  # a view
        ends = [(int(s[0]), int(s[0]) + size) for s, size in zip(first, sizes, strict=True)]
        return (slice(None), *(slice(*each) for each in ends))
    own, *grid = np.ix_(np.arange(count), *map(np.arange, sizes))
    wide = [start.reshape(-1, *(1,) * len(shape)) for start in first]
    return (own, *map(np.add, wide, grid))


def _slice_at(eqn: JaxprEqn, a: Value, *starts: np.ndarray) -> Value:
    a, index = alike([a, *starts])[0], _window(eqn, eqn.params["slice_sizes"], starts)
    return at(a, index)


def _update_at(eqn: JaxprEqn, a: Value, new: Value, *starts: np.ndarray) -> Value:
    index = _window(eqn, eqn.invars[1].aval.shape, starts)
    a, new, *_ = alike([a, new, *starts])
    return written(eqn, a, index, new)


def _numbered(shape: Sequence[int], start: int = 0) -> np.ndarray:
    return np.arange(start, start + math.prod(shape), dtype=np.int32).reshape(shape)


def _flat(atom: Any) -> Move:
    dims = 1 + atom.aval.ndim
    return lambda a: a.reshape(len(a), math.prod(a.shape[1:dims]), *a.shape[dims:])


def _taken_at(eqn: JaxprEqn, values: Value, places: np.ndarray) -> Value:
    """The elements at these places; for -1, the last, what JAX has for indices out of bounds."""
    if (places < 0).any():
        none, beyond = jnp.zeros(1, eqn.outvars[0].aval.dtype), np.ones(1, np.int32)
        how = {"mode": "fill", "fill_value": eqn.params["fill_value"]}
        (fill,) = on_host.on_all((eqn, "fill"), lambda: [none.at[beyond].get(**how)], [])
        values = _side_by_side([values, of_array(fill)])
    if len(places) == 1:
        return at(values, (slice(None), places[0]))
    own = np.arange(len(places)).reshape(-1, *(1,) * (places.ndim - 1))
    return at(spread(values, len(places)), (own, places))


def _side_by_side(parts: Sequence[Value]) -> Value:
    return joined(lambda xs: np.concatenate(xs, 1), alike(parts))


def _written_at(eqn: JaxprEqn, a: Value, new: Value, places: np.ndarray, put: Any) -> Value:
    """`a`, after `put(eqn, flat, where, new)` of `new` at these places; none for -1."""
    shape = eqn.invars[0].aval.shape
    if 0 in places.shape or 0 in shape:
        return a
    a, new = alike([a, new, places])[:2]
    count, size = len(plain(a)), math.prod(shape)
    where = (np.arange(count)[:, None] * size + places.reshape(len(places), -1)).ravel()
    valid = np.broadcast_to(places, (count, *places.shape[1:])).ravel() >= 0
    flat = moved(lambda x: x.reshape(-1, *_rest(eqn, x)), a)
    new = at(moved(lambda x: x.reshape(-1, *x.shape[places.ndim :]), new), valid)
    made = put(eqn, flat, where[valid], new)
    return moved(lambda x: x.reshape(count, *shape, *x.shape[1:]), made)


def _scatter(eqn: JaxprEqn, a: Value, indices: np.ndarray, updates: Value) -> Value:
    """Updates are written where the transpose of a sum of them, a gather, reads."""
    of, _, new = (jax.ShapeDtypeStruct(x.aval.shape, np.int32) for x in eqn.invars)
    q = {k: eqn.params[k] for k in ("dimension_numbers", "mode")}

    def read(own: jax.Array) -> list[jax.Array]:
        add = lambda new: lax.scatter_add(jnp.zeros(of.shape, of.dtype), own, new, **q)  # noqa: E731
        (found,) = jax.linear_transpose(add, new)(1 + _numbered(of.shape))
        return [found - 1]  # -1 for what is out of bounds

    (places,) = on_host.on_all((eqn, "places"), read, [indices])
    put = _PUT[eqn.primitive.name.replace("-", "_")]
    return _written_at(eqn, a, updates, places, put)


def written(eqn: JaxprEqn | None, a: Value, where: Any, new: Value) -> Value:
    """The last of several updates of an element stays."""

    def put(both: Sequence[np.ndarray]) -> np.ndarray:
        out = np.array(both[0])
        out[where] = both[1]
        return out

    return joined(put, [a, new])


def _added(eqn: JaxprEqn, flat: Exact, where: np.ndarray, new: Exact) -> Exact:
    bits = min(flat.sum_bits, new.sum_bits, bits_of(eqn.outvars[0].aval.dtype))

    def added(half: np.ndarray) -> np.ndarray:
        sums = np.zeros(flat.shape, half.dtype)
        np.add.at(sums, where, half)
        return sums

    sums = by_parts(lambda old, part: field.add(old, field.by_halves(added, part)), flat, new)
    return exact(flat.f + added(new.f), flat, new, **sums, sum_bits=bits)


def _combined(combine: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """Updates in rounds, each of which has every index once: later updates come later."""

    def put(eqn: JaxprEqn, flat: Value, where: np.ndarray, new: Value) -> Value:
        while where.size:
            _, first = np.unique(where, return_index=True)
            rows = where[first]
            flat = written(eqn, flat, rows, combine(at(flat, rows), at(new, first)))
            left = np.setdiff1d(np.arange(where.size), first)
            where, new = where[left], at(new, left)
        return flat

    return put


_PUT: dict[str, Callable[..., Value]] = {
    "scatter": written, "scatter_add": _added, "scatter_in_order": _added,
    "scatter_sub": lambda eqn, a, i, new: _added(eqn, a, i, neg(eqn, new)),
    "scatter_mul": _combined(lambda a, b: mul(None, a, b)),
    "scatter_max": _combined(larger), "scatter_min": _combined(smaller),
}  # fmt: skip


# ------------------------------------------------------------------------ by order


def ranked(value: Value, axis: int) -> np.ndarray:
    """Numbers by which values are sorted along an axis."""
    if not isinstance(value, Exact):
        return value
    parts = (value.f.imag, value.f.real) if value.is_complex else (value.f,)
    order = np.lexsort((value.one, *parts), axis=axis)
    r = np.take_along_axis(value.one, order, axis)
    # Numbers that are equal in the field are equal, whatever rounding did: they get one place.
    new = np.ones(r.shape, np.int64)
    after, before = (_along(axis, slice(*ends)) for ends in ((1, None), (None, -1)))
    new[after] = r[after] != r[before]
    places = np.empty_like(new)
    np.put_along_axis(places, order, np.cumsum(new, axis), axis)
    return places


def _along(axis: int, part: Any) -> tuple[Any, ...]:
    return (slice(None),) * axis + (part,)


def _sort(eqn: JaxprEqn, *operands: Value) -> list[Value]:
    axis, operands = 1 + eqn.params["dimension"], tuple(alike(operands))
    keys = [ranked(x, axis) for x in operands[: eqn.params["num_keys"]]]
    order = np.lexsort(keys[::-1], axis=axis)
    return [_taken(x, order, axis) for x in operands]


def _taken(value: Value, order: np.ndarray, axis: int) -> Value:
    return moved(lambda x: np.take_along_axis(x, beside(order, x), axis), value)


def _top_k(eqn: JaxprEqn, a: Value) -> list[Value]:
    axis = 1 + eqn.params.get("axis", a.ndim - 2)
    order = np.argsort(-ranked(a, axis).astype(np.int64), axis, kind="stable")
    order = order[_along(axis, slice(eqn.params["k"]))]
    return [_taken(a, order, axis), order.astype(np.int32)]


OF_ANY: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _view(_reshape)),
    "transpose": _view(lambda eqn, a: _reordered(a, eqn.params["permutation"])),
    "rev": _view(lambda eqn, a: np.flip(a, tuple(1 + d for d in eqn.params["dimensions"]))),
    "broadcast_in_dim": _view(_broadcast), "slice": _view(_slice),
    "tile": _view(lambda eqn, a: np.tile(a, (1, *eqn.params["reps"], *(1 for _ in _rest(eqn, a))))),
    "concatenate": _together(np.concatenate, "dimension"), "stack": _together(np.stack, "axis"),
    "split": _apart, "unstack": _apart, "gather": _moves(1), "pad": _moves(2),
    "dynamic_slice": _slice_at, "dynamic_update_slice": _update_at,
    "scatter": _scatter, "sort": _sort, "top_k": _top_k, "approx_top_k": _top_k,
    "iota": _iota,
}  # fmt: skip
OF_FLOATS = {name.replace("_", mark): _scatter for name in _PUT for mark in "_-"}
