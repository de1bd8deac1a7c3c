"""Operators that move elements: views, slices, gathers, scatters, sorts.

Each is a function of one array with a leading dim of devices; dims at the end, which random keys
and shared bits have, stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from gshard.checking.exact import field
from gshard.checking.exact.number import (
    Exact,
    Move,
    Value,
    alike,
    at,
    beside,
    chosen,
    constant,
    exact,
    is_float,
    joined,
    moved,
    of_array,
    plain,
    spread,
)
from gshard.checking.exact.pointwise import POINTWISE, bits_of, larger, smaller


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


def _concatenate(eqn: JaxprEqn, *parts: Value) -> Value:
    axis = 1 + eqn.params["dimension"]
    return joined(lambda xs: np.concatenate(xs, axis), alike(parts))


def _pad(eqn: JaxprEqn, a: Value, fill: Value) -> Value:
    """Rows added, or taken away, at the ends of dims and between their rows."""
    config = eqn.params["padding_config"]

    def pad(both: Sequence[np.ndarray]) -> np.ndarray:
        x, value = both
        value = value.reshape(value.shape[0], *(1,) * len(config), *value.shape[1:])
        for dim, (low, high, inner) in enumerate(config, 1):
            size = x.shape[dim]
            rows = np.arange(low + high + size + max(size - 1, 0) * inner) - low
            own = (rows % (inner + 1) == 0) & (rows >= 0) & (rows < size * (inner + 1))
            if own.all() and len(rows) == size:
                continue
            own_shape = [len(rows) if d == dim else 1 for d in range(x.ndim)]
            if size:
                x = np.take(x, np.where(own, rows // (inner + 1), 0), dim)
            else:
                x = np.zeros((*x.shape[:dim], len(rows), *x.shape[dim + 1 :]), x.dtype)
            x = np.where(own.reshape(own_shape), x, value)
        return x

    return joined(pad, alike([a, fill]))


def _iota(eqn: JaxprEqn, *_: Value) -> Value:
    shape, dim, dtype = (eqn.params[k] for k in ("shape", "dimension", "dtype"))
    sizes = [n if d == dim else 1 for d, n in enumerate(shape)]
    numbers = np.broadcast_to(np.arange(shape[dim]).reshape(sizes), shape)[None]
    return of_array(numbers.astype(np.float64 if is_float(dtype) else dtype))


# ------------------------------------------------------------------------ by index


class _Windows:
    """The elements that a gather reads, or a scatter writes: an index for each dim of the array.

    Windows have these `sizes` and begin at `starts`, which has numbers for the dims in `mapped` in
    its last dim. Its other dims are at `batch_at` of what is read or written, and those of windows,
    without the dims in `gone`, at the other places.
    """

    def __init__(
        self,
        starts: np.ndarray,
        shape: Sequence[int],
        sizes: Sequence[int],
        window_at: Sequence[int],
        mapped: Sequence[int],
        gone: Sequence[int] = (),
        batching: tuple[Sequence[int], Sequence[int]] = ((), ()),
        clip: bool = True,
    ):
        self.count, *batch = starts.shape[:-1]
        rank = len(batch) + len(window_at)
        batch_at = [d for d in range(rank) if d not in window_at]

        def along(rows: np.ndarray) -> np.ndarray:
            """An array of the batch dims, in their places."""
            places = [1] * rank
            for place, size in zip(batch_at, rows.shape[1:], strict=True):
                places[place] = size
            return rows.reshape(rows.shape[0], *places)

        self.valid = np.ones((1, *(1,) * rank), bool)
        self.index: list[np.ndarray] = []
        windows = iter(window_at)
        for dim, (whole, size) in enumerate(zip(shape, sizes, strict=True)):
            start = np.zeros((1, *(1,) * len(batch)), np.int64)
            if dim in mapped:
                start = starts[..., list(mapped).index(dim)].astype(np.int64)
            elif dim in batching[0]:
                other = batching[1][list(batching[0]).index(dim)]
                around = [batch[other] if b == other else 1 for b in range(len(batch))]
                start = np.arange(batch[other]).reshape(1, *around)
            if not clip:
                self.valid = self.valid & along((start >= 0) & (start <= whole - size))
            rows = along(np.clip(start, 0, max(whole - size, 0)))
            if dim not in gone and dim not in batching[0]:
                place = next(windows)
                offsets = [size if d == place else 1 for d in range(rank)]
                rows = rows + np.arange(size).reshape(1, *offsets)
            self.index.append(rows)

    def read(self, a: Value, out: Sequence[int]) -> Value:
        """The elements of `a`, as an array of shape `out`."""
        if 0 in out:
            return moved(lambda x: np.zeros((len(x), *out), x.dtype), a)
        count = max(len(plain(a)), self.count)
        index = (np.arange(count).reshape(count, *(1,) * len(out)), *self.index)
        return moved(lambda x: np.broadcast_to(x, (count, *x.shape[1:]))[index], a)

    def write(
        self, a: Value, shape: Sequence[int], updates: Value, given: Sequence[int], put: Any
    ) -> Value:
        """`a` of this `shape`, after `put(flat, where, new)` of the updates."""
        if 0 in given or 0 in shape:
            return a
        count = max(len(plain(a)), self.count, len(plain(updates)))
        full = (count, *given)
        own = np.arange(count).reshape(count, *(1,) * len(given))
        index = tuple(np.broadcast_to(x, full) for x in (own, *self.index))
        where = np.ravel_multi_index(index, (count, *shape)).ravel()
        valid = np.broadcast_to(self.valid, full).ravel()
        flat, new = (
            moved(_flattening(1 + len(s)), spread(v, count))
            for v, s in ((a, shape), (updates, given))
        )
        if not valid.all():
            new, where = at(new, valid), where[valid]
        return moved(lambda x: x.reshape(count, *shape, *x.shape[1:]), put(flat, where, new))


def _flattening(dims: int) -> Move:
    return lambda x: x.reshape(-1, *x.shape[dims:])


def _starts(starts: Sequence[Value], rank: int) -> np.ndarray:
    return np.stack([x.astype(np.int64) for x in alike(starts[:rank])], -1)


def _dynamic_slice(eqn: JaxprEqn, a: Value, *starts: Value) -> Value:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if not shape:
        return a
    first = _starts(starts, len(shape))
    if len(first) == 1 and 0 not in sizes:  # the same rows on all devices: a view
        begin = np.clip(first[0], 0, np.subtract(shape, sizes))
        return at(a, (slice(None), *map(slice, begin.tolist(), (begin + sizes).tolist())))
    return _Windows(first, shape, sizes, range(len(shape)), range(len(shape))).read(a, sizes)


def _dynamic_update_slice(eqn: JaxprEqn, a: Value, part: Value, *starts: Value) -> Value:
    shape, sizes = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if not shape:
        return part
    first, dims = _starts(starts, len(shape)), range(len(shape))
    return _Windows(first, shape, sizes, dims, dims).write(a, shape, part, sizes, _written)


def _clips(eqn: JaxprEqn) -> bool:
    """Whether indices that are out of bounds are clamped; they are left out otherwise."""
    return "FILL_OR_DROP" not in str(eqn.params["mode"]).upper()


def _gather(eqn: JaxprEqn, a: Value, indices: np.ndarray) -> Value:
    q, aval = eqn.params["dimension_numbers"], eqn.outvars[0].aval
    windows = _Windows(
        indices, eqn.invars[0].aval.shape, eqn.params["slice_sizes"], q.offset_dims,
        q.start_index_map, q.collapsed_slice_dims,
        (q.operand_batching_dims, q.start_indices_batching_dims), _clips(eqn),
    )  # fmt: skip
    out = aval.shape
    if 0 in eqn.invars[0].aval.shape and 0 not in out:  # all indices are out of bounds
        return constant(np.full(out, _fill(eqn)).astype(aval.dtype))
    found = windows.read(a, out)
    if windows.valid.all():
        return found
    fill = constant(np.asarray(_fill(eqn)).astype(aval.dtype))
    return chosen(windows.valid, found, moved(lambda x: x.reshape((1,) * found.ndim), fill))


def _fill(eqn: JaxprEqn) -> Any:
    """What a gather has for indices that are out of bounds."""
    value, dtype = eqn.params.get("fill_value"), eqn.outvars[0].aval.dtype
    if value is not None or is_float(dtype):
        return np.nan if value is None else value
    if dtype.kind == "b":
        return True
    return np.iinfo(dtype).max if dtype.kind == "u" else np.iinfo(dtype).min


def _scatter(eqn: JaxprEqn, a: Value, indices: np.ndarray, updates: Value) -> Value:
    q = eqn.params["dimension_numbers"]
    shape, given = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    gone = (*q.inserted_window_dims, *q.operand_batching_dims)
    kept = iter(q.update_window_dims)
    sizes = [1 if d in gone else given[next(kept)] for d in range(len(shape))]
    windows = _Windows(
        indices, shape, sizes, q.update_window_dims, q.scatter_dims_to_operand_dims,
        q.inserted_window_dims, (q.operand_batching_dims, q.scatter_indices_batching_dims),
        _clips(eqn),
    )  # fmt: skip
    put = _PUT[eqn.primitive.name.replace("-", "_")]
    return windows.write(a, shape, updates, given, functools.partial(put, eqn))


def _written(flat: Value, where: np.ndarray, new: Value) -> Value:
    """The last of several updates of an element stays."""

    def put(both: Sequence[np.ndarray]) -> np.ndarray:
        out = np.array(both[0])
        out[where] = both[1]
        return out

    return joined(put, [flat, new])


def _added(eqn: JaxprEqn, flat: Value, where: np.ndarray, new: Value) -> Value:
    sums = np.array(plain(flat))
    np.add.at(sums, where, plain(new))
    if not isinstance(flat, Exact):
        return sums
    bits = min(flat.sum_bits, new.sum_bits, bits_of(eqn.outvars[0].aval.dtype))
    return exact(sums, field.add_at(flat.r, where, new.r), flat, new, sum_bits=bits)


def _combined(combine: Callable[[Value, Value], Value]) -> Callable[..., Value]:
    """Updates in rounds, each of which has every index once: later updates come later."""

    def put(eqn: JaxprEqn, flat: Value, where: np.ndarray, new: Value) -> Value:
        while where.size:
            _, first = np.unique(where, return_index=True)
            rows = where[first]
            flat = _written(flat, rows, combine(at(flat, rows), at(new, first)))
            left = np.setdiff1d(np.arange(where.size), first)
            where, new = where[left], at(new, left)
        return flat

    return put


_PUT: dict[str, Callable[..., Value]] = {
    "scatter": lambda eqn, *xs: _written(*xs), "scatter_add": _added, "scatter_in_order": _added,
    "scatter_sub": lambda eqn, a, i, new: _added(eqn, a, i, POINTWISE["neg"](eqn, new)),
    "scatter_mul": _combined(lambda a, b: POINTWISE["mul"](None, a, b)),
    "scatter_max": _combined(larger), "scatter_min": _combined(smaller),
}  # fmt: skip


# ------------------------------------------------------------------------ by order


def ranked(value: Value, axis: int) -> np.ndarray:
    """Numbers by which values are sorted along an axis."""
    if not isinstance(value, Exact):
        return value
    f = np.real(value.f) if np.iscomplexobj(value.f) else value.f
    order = np.lexsort((value.r, f), axis=axis)
    f, r = (np.take_along_axis(x, order, axis) for x in (f, value.r))
    # Numbers that are equal in the field are equal, whatever rounding did: they get one place.
    new = np.ones(f.shape, np.int64)
    after, before = (_along(axis, slice(*ends)) for ends in ((1, None), (None, -1)))
    new[after] = r[after] != r[before]
    places = np.empty_like(new)
    np.put_along_axis(places, order, np.cumsum(new, axis), axis)
    return places


def _along(axis: int, part: slice) -> tuple[slice, ...]:
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


MOVING: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), _view(_reshape)),
    "transpose": _view(lambda eqn, a: _reordered(a, eqn.params["permutation"])),
    "rev": _view(lambda eqn, a: np.flip(a, tuple(1 + d for d in eqn.params["dimensions"]))),
    "broadcast_in_dim": _view(_broadcast), "slice": _view(_slice), "concatenate": _concatenate,
    "pad": _pad, "iota": _iota, "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice, "gather": _gather, "sort": _sort,
    "top_k": _top_k, "approx_top_k": _top_k,
    **{name.replace("_", mark): _scatter for name in _PUT for mark in "_-"},
}  # fmt: skip
