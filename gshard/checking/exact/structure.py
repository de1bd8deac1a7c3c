"""Operators that move elements: views, slices, gathers, scatters, sorts.

Each is a function of one array with a leading dim of devices; dims at the end, which random keys
and shared bits have, stay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
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
        a = a.transpose(0, *(1 + d for d in order), *range(1 + len(order), a.ndim))
    return a.reshape(a.shape[0], *eqn.outvars[0].aval.shape, *_rest(eqn, a))


def _transpose(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    order = [1 + d for d in eqn.params["permutation"]]
    return a.transpose(0, *order, *range(1 + len(order), a.ndim))


def _broadcast(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    shape, dims = eqn.params["shape"], eqn.params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for d, size in zip(dims, a.shape[1:], strict=False):
        sizes[d] = size
    rest = _rest(eqn, a)
    return np.broadcast_to(a.reshape(a.shape[0], *sizes, *rest), (a.shape[0], *shape, *rest))


def _rev(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    return np.flip(a, tuple(1 + d for d in eqn.params["dimensions"]))


def _slice(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    strides = eqn.params["strides"] or [1] * len(eqn.params["start_indices"])
    limits = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    return a[(slice(None), *(slice(*limit) for limit in limits))]


def _split(eqn: JaxprEqn, a: Value) -> list[Value]:
    axis, ends = 1 + eqn.params["axis"], np.cumsum(eqn.params["sizes"])
    starts = ends - eqn.params["sizes"]
    return [at(a, (slice(None),) * axis + (slice(*e),)) for e in zip(starts, ends, strict=True)]


def _concatenate(eqn: JaxprEqn, *parts: Value) -> Value:
    count = max(map(leading, parts))
    axis = 1 + eqn.params["dimension"]
    return joined(lambda xs: np.concatenate(xs, axis), [spread(x, count) for x in parts])


def _stack(eqn: JaxprEqn, *parts: Value) -> Value:
    count, axis = max(map(leading, parts)), 1 + eqn.params["axis"]
    return joined(lambda xs: np.stack(xs, axis), [spread(x, count) for x in parts])


def _unstack(eqn: JaxprEqn, a: Value) -> list[Value]:
    axis = 1 + eqn.params["axis"]
    return [at(a, (slice(None),) * axis + (n,)) for n in range(len(eqn.outvars))]


def _tile(eqn: JaxprEqn, a: np.ndarray) -> np.ndarray:
    return np.tile(a, (1, *eqn.params["reps"], *(1,) * len(_rest(eqn, a))))


def _pad(eqn: JaxprEqn, a: Value, fill: Value) -> Value:
    return padded(a, fill, eqn.params["padding_config"])


def padded(a: Value, fill: Value, config: Sequence[tuple[int, int, int]]) -> Value:
    """Rows added, or taken away, at the ends of dims and between their rows."""
    count = max(leading(a), leading(fill))

    def pad(both: Sequence[np.ndarray]) -> np.ndarray:
        x, value = both
        rest = x.shape[1 + len(config) :]
        whole = [
            low + high + size + max(size - 1, 0) * inner
            for size, (low, high, inner) in zip(x.shape[1:], config, strict=False)
        ]
        value = value.reshape(value.shape[0], *(1,) * len(config), *value.shape[1:])
        out = np.array(np.broadcast_to(value, (count, *whole, *rest)))
        into, of = [slice(None)], [slice(None)]
        for size, n, (low, _, inner) in zip(x.shape[1:], whole, config, strict=False):
            first = -(low // (inner + 1)) if low < 0 else 0  # rows that are cut off
            start = low + first * (inner + 1)
            number = max(0, min(size - first, -(-(n - start) // (inner + 1))))
            into.append(slice(start, start + number * (inner + 1), inner + 1))
            of.append(slice(first, first + number))
            if not number:
                return out
        out[tuple(into)] = x[tuple(of)]
        return out

    return joined(pad, [a, fill])


def _iota(eqn: JaxprEqn, *_: Value) -> Value:
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    sizes = [n if d == dim else 1 for d, n in enumerate(shape)]
    numbers = np.broadcast_to(np.arange(shape[dim]).reshape(sizes), shape)[None]
    dtype = eqn.params["dtype"]
    return of_floats(numbers.astype(np.float64)) if is_float(dtype) else numbers.astype(dtype)


# ------------------------------------------------------------------------ by index


def _starts(starts: Sequence[Value], shape: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """The rows of a window that begins at `starts`, clamped, for each dim, with the devices."""
    found = []
    for dim, (start, whole, size) in enumerate(zip(starts, shape, sizes, strict=True)):
        first = np.clip(plain(start).astype(np.int64), 0, whole - size)
        rows = first[:, None] + np.arange(size)
        before, after = (1,) * dim, (1,) * (len(shape) - dim - 1)
        found.append(rows.reshape(rows.shape[0], *before, size, *after))
    return found


def _devices(count: int, ndim: int) -> np.ndarray:
    return np.arange(count).reshape(count, *(1,) * ndim)


def _dynamic_slice(eqn: JaxprEqn, a: Value, *starts: Value) -> Value:
    shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    starts = starts[: len(shape)]
    index = _starts(starts, shape, sizes)
    count = max([leading(a), *(x.shape[0] for x in index)])
    if count == 1 or all(x.shape[0] == 1 for x in index):
        rows = [slice(int(x.flat[0]), int(x.flat[0]) + x.size) for x in index if x.size]
        return at(a, (slice(None), *rows)) if 0 not in sizes else _emptied(eqn, a)
    where = (_devices(count, len(shape)), *index)
    return moved(lambda x: np.broadcast_to(x, (count, *x.shape[1:]))[where], a)


def _emptied(eqn: JaxprEqn, a: Value) -> Value:
    shape = eqn.outvars[0].aval.shape
    return moved(lambda x: np.zeros((x.shape[0], *shape), x.dtype), a)


def _dynamic_update_slice(eqn: JaxprEqn, a: Value, part: Value, *starts: Value) -> Value:
    shape, sizes = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    if 0 in sizes:
        return a
    index = _starts(starts[: len(shape)], shape, sizes)
    count = max([leading(a), leading(part), *(x.shape[0] for x in index)])
    where = (_devices(count, len(shape)), *index)

    def update(both: Sequence[np.ndarray]) -> np.ndarray:
        out = np.array(np.broadcast_to(both[0], (count, *both[0].shape[1:])))
        out[where] = both[1]
        return out

    return joined(update, [a, part])


class _SlidingWindows:
    """The elements that a gather reads, or a scatter writes: an index for each dim of the array."""

    def __init__(
        self,
        indices: Value,
        shape: Sequence[int],
        sizes: Sequence[int],
        batch_at: Sequence[int],
        window_at: Sequence[int],
        gone: Sequence[int],
        mapped: Sequence[int],
        batching: tuple[Sequence[int], Sequence[int]],
        clip: bool,
    ):
        array = plain(indices)
        count, batch = array.shape[0], array.shape[1:-1]
        rank = len(batch_at) + len(window_at)

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
                start = array[..., list(mapped).index(dim)].astype(np.int64)
            elif dim in batching[0]:
                other = batching[1][list(batching[0]).index(dim)]
                numbers = np.arange(batch[other])
                around = [batch[other] if b == other else 1 for b in range(len(batch))]
                start = numbers.reshape(1, *around)
            if not clip:
                self.valid = self.valid & along((start >= 0) & (start <= whole - size))
            rows = along(np.clip(start, 0, max(whole - size, 0)))
            if dim not in gone and dim not in batching[0]:
                place = next(windows)
                offsets = [size if d == place else 1 for d in range(rank)]
                rows = rows + np.arange(size).reshape(1, *offsets)
            self.index.append(rows)
        self.count = count


def _mode(eqn: JaxprEqn) -> bool:
    """Whether indices that are out of bounds are clamped; they are left out otherwise."""
    return "FILL_OR_DROP" not in str(eqn.params["mode"]).upper()


def _gather(eqn: JaxprEqn, a: Value, indices: Value) -> Value:
    numbers = eqn.params["dimension_numbers"]
    shape, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    offsets = numbers.offset_dims
    windows = _SlidingWindows(
        indices, shape, eqn.params["slice_sizes"],
        [d for d in range(len(out)) if d not in offsets], offsets,
        numbers.collapsed_slice_dims, numbers.start_index_map,
        (numbers.operand_batching_dims, numbers.start_indices_batching_dims), _mode(eqn),
    )  # fmt: skip
    if 0 in shape or 0 in out:
        found = _emptied(eqn, a)
    else:
        count = max(leading(a), windows.count)
        where = (_devices(count, len(out)), *windows.index)
        found = moved(lambda x: np.broadcast_to(x, (count, *x.shape[1:]))[where], a)
    if windows.valid.all():
        return found
    valid = np.broadcast_to(windows.valid, found.shape)
    return joined(
        lambda both: np.where(extended(valid, both[0]), *both), [found, _fill(eqn, found)]
    )


def extended(which: np.ndarray, like: np.ndarray) -> np.ndarray:
    """A mask beside arrays that have more dims at the end."""
    return which.reshape(*which.shape, *(1,) * (like.ndim - which.ndim))


def _fill(eqn: JaxprEqn, found: Value) -> Value:
    """What a gather has for indices that are out of bounds."""
    value, dtype = eqn.params.get("fill_value"), eqn.outvars[0].aval.dtype
    if value is None and is_float(dtype):
        value = np.nan
    elif value is None:
        unsigned = dtype.kind == "u"
        value = np.iinfo(dtype).max if unsigned else np.iinfo(dtype).min if dtype.kind == "i" else 1
    like = plain(found)
    array = np.full(like.shape, value, np.float64 if is_float(dtype) else dtype)
    return of_floats(array) if is_float(dtype) else array


_COMBINE: dict[str, Callable[[Value, Value], Value]] = {
    "scatter": lambda old, new: new,
    "scatter-mul": lambda old, new: POINTWISE["mul"](None, old, new),
    "scatter_mul": lambda old, new: POINTWISE["mul"](None, old, new),
    "scatter-max": larger, "scatter_max": larger, "scatter-min": smaller, "scatter_min": smaller,
    "scatter_sub": lambda old, new: POINTWISE["sub"](None, old, new),
    "scatter-sub": lambda old, new: POINTWISE["sub"](None, old, new),
}  # fmt: skip


def _scatter(eqn: JaxprEqn, a: Value, indices: Value, updates: Value) -> Value:
    numbers = eqn.params["dimension_numbers"]
    shape, given = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    window = numbers.update_window_dims
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = iter(window)
    sizes = [1 if d in gone else given[next(kept)] for d in range(len(shape))]
    windows = _SlidingWindows(
        indices, shape, sizes, [d for d in range(len(given)) if d not in window], window,
        numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims,
        (numbers.operand_batching_dims, numbers.scatter_indices_batching_dims), _mode(eqn),
    )  # fmt: skip
    if 0 in given or 0 in shape:
        return a
    count = max(leading(a), windows.count, leading(updates))
    full = (count, *given)
    where = np.ravel_multi_index(
        tuple(np.broadcast_to(x, full) for x in (_devices(count, len(given)), *windows.index)),
        (count, *shape),
    ).ravel()
    valid = np.broadcast_to(windows.valid, full).ravel()
    rest = [math.prod((count, *shape)), math.prod(full)]
    flat, new = (
        _flat(spread(v, count), *sizes)
        for v, *sizes in ((a, rest[0], len(shape)), (updates, rest[1], len(given)))
    )
    new, where = at(new, valid), where[valid]
    name = eqn.primitive.name
    if name in ("scatter-add", "scatter_add", "scatter_in_order"):
        done = _added(eqn, flat, where, new)
    else:
        done = _combined(_COMBINE[name], flat, where, new)
    return moved(lambda x: x.reshape(count, *shape, *x.shape[1:]), done)


def _added(eqn: JaxprEqn, flat: Value, where: np.ndarray, new: Value) -> Value:
    if not isinstance(flat, Exact):
        out = np.array(plain(flat))
        np.add.at(out, where, plain(new))
        return out
    f = np.array(flat.f)
    np.add.at(f, where, new.f)
    r = field.add_at(flat.r, where, new.r)
    bits = min(flat.sum_bits, new.sum_bits, bits_of(eqn.outvars[0].aval.dtype))
    return exact(f, r, flat, new, sum_bits=bits)


def _combined(
    combine: Callable[[Value, Value], Value], flat: Value, where: np.ndarray, new: Value
) -> Value:
    """Updates in rounds, each of which has every index once: later updates come later."""
    while where.size:
        _, first = np.unique(where, return_index=True)
        rows = where[first]
        made = combine(at(flat, rows), at(new, first))
        flat = joined(functools.partial(_put, rows), [flat, made])
        left = np.setdiff1d(np.arange(where.size), first)
        where, new = where[left], at(new, left)
    return flat


def _flat(value: Value, size: int, rank: int) -> Value:
    return moved(lambda x: np.array(x).reshape(size, *x.shape[1 + rank :]), value)


def _put(rows: np.ndarray, both: Sequence[np.ndarray]) -> np.ndarray:
    out = np.array(both[0])
    out[rows] = both[1]
    return out


STRUCTURE: dict[str, Callable[..., Any]] = {
    "reshape": _view(_reshape), "transpose": _view(_transpose), "rev": _view(_rev),
    "broadcast_in_dim": _view(_broadcast), "slice": _view(_slice), "squeeze": _view(_reshape),
    "expand_dims": _view(_reshape), "split": _split, "concatenate": _concatenate, "pad": _pad,
    "stack": _stack, "unstack": _unstack, "tile": _view(_tile),
    "iota": _iota, "dynamic_slice": _dynamic_slice, "gather": _gather,
    "dynamic_update_slice": _dynamic_update_slice, "scatter-add": _scatter, "scatter_add": _scatter,
    "scatter_in_order": _scatter, **dict.fromkeys(_COMBINE, _scatter),
}  # fmt: skip
