"""Convolutions, sums over windows and Fourier transforms as operators that have a fixed order.

A convolution is one product for each element of its window, or, where the window is larger than the
result (the gradient of a kernel), for each element of the result. The products are of shifted
slices, and are added one after the other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

MOST_SLICES = 64  # of a window that is written out


def convolution(params: dict[str, Any], x: Array, kernel: Array) -> Array:
    """A convolution of any strides, dilations and groups."""
    numbers = params["dimension_numbers"]
    dtype = params["preferred_element_type"] or jnp.result_type(x, kernel)
    x = lax.transpose(x, (numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1]))
    kernel = lax.transpose(
        kernel, (numbers.rhs_spec[0], *numbers.rhs_spec[2:], numbers.rhs_spec[1])
    )
    around = (params[k] for k in ("padding", "lhs_dilation", "rhs_dilation", "window_strides"))
    shape = list(map(_size, x.shape[1:-1], kernel.shape[1:-1], *around))
    groups = max(params["feature_group_count"], params["batch_group_count"])
    dim = 0 if params["batch_group_count"] > 1 else x.ndim - 1
    x, kernel = _grouped(x, dim, groups), _grouped(kernel, 0, groups)
    if 0 in (*x.shape, *kernel.shape, *shape):
        result = jnp.zeros((groups, x.shape[1], *shape, kernel.shape[1]), dtype)
    else:
        result = _by_position(params, x, kernel, shape)
    result = lax.transpose(result, (*range(1, result.ndim - 1), 0, result.ndim - 1))
    result = lax.reshape(result, (*result.shape[:-2], result.shape[-2] * result.shape[-1]))
    out = numbers.out_spec
    place = {out[0]: 0, out[1]: result.ndim - 1} | {d: i + 1 for i, d in enumerate(out[2:])}
    ordered = lax.transpose(result, [place[d] for d in range(result.ndim)])
    return lax.convert_element_type(ordered, dtype)


def _size(
    rows: int, taps: int, padding: tuple[int, int], base: int, dilation: int, stride: int
) -> int:
    """The size of a spatial dim of the result."""
    stretched = max((rows - 1) * base + 1, 0) + sum(padding)
    reach = max((taps - 1) * dilation + 1, 0)
    return max((stretched - reach) // stride + 1, 0)


def _rows(
    x: Array, dim: int, low: int, dilation: int, start: int, count: int, step: int, fill: float = 0
) -> Array:
    """`count` rows of `x`, padded by `low` and dilated, from `start` on, `step` apart.

    It is one `pad`, whose result is as large as the operand where a convolution keeps sizes: then
    tiles stay aligned, and only rows that cross their borders are sent.
    """
    reach = (count - 1) * step + 1
    stretched = (x.shape[dim] - 1) * dilation + 1
    around = (low - start, start + reach - low - stretched, dilation - 1)
    pads = [around if d == dim else (0, 0, 0) for d in range(x.ndim)]
    x = lax.pad(x, jnp.asarray(fill, x.dtype), pads)
    return lax.slice_in_dim(x, 0, reach, step, dim) if step > 1 else x


def _grouped(x: Array, dim: int, groups: int) -> Array:
    """`x` with its groups, which are the major part of `dim`, as the first dim."""
    shape = (*x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :])
    others = (d for d in range(len(shape)) if d != dim)
    return lax.transpose(lax.reshape(x, shape), (dim, *others))


def _by_position(params: dict[str, Any], x: Array, kernel: Array, shape: Sequence[int]) -> Array:
    """x[group, batch, ..., channels] with kernel[group, features, ..., channels]."""
    wide = jnp.promote_types(jnp.result_type(x, kernel), jnp.float32)
    strides, dilations = params["window_strides"], params["rhs_dilation"]
    taps = kernel.shape[2:-1]
    whole = [w > n for w, n in zip(taps, shape, strict=True)]  # the window is summed in one product
    turns = [range(n if all_taps else w) for n, w, all_taps in zip(shape, taps, whole, strict=True)]
    first = max(range(len(taps)), key=lambda i: x.shape[2 + i]) if taps else 0
    order = [first, *(i for i in range(len(taps)) if i != first)]

    @functools.cache
    def shifted(at: tuple[int, ...]) -> Array:
        """`x` for these turns of the first dims in `order`."""
        if not at:
            return x
        i, turn = order[len(at) - 1], at[-1]
        start, count, step = turn * dilations[i], shape[i], strides[i]
        if whole[i]:
            start, count, step = turn * strides[i], taps[i], dilations[i]
        low, dilation = params["padding"][i][0], params["lhs_dilation"][i]
        return _rows(shifted(at[:-1]), 2 + i, low, dilation, start, count, step)

    results: dict[tuple[int, ...], Array] = {}  # by the places in dims whose window is whole
    for at in itertools.product(*turns):
        rows, part = shifted(tuple(at[i] for i in order)), kernel
        for i, turn in enumerate(at):
            if not whole[i]:
                part = lax.slice_in_dim(part, turn, turn + 1, axis=2 + i)
        product = _product(rows, part, whole, wide)
        place = tuple(turn for turn, all_taps in zip(at, whole, strict=True) if all_taps)
        results[place] = lax.add(results[place], product) if place in results else product
    for i in (i for i, all_taps in enumerate(whole) if all_taps):
        rest: dict[tuple[int, ...], list[Array]] = {}
        for place, value in results.items():
            rest.setdefault(place[1:], []).append(lax.expand_dims(value, [2 + i]))
        results = {place: lax.concatenate(values, 2 + i) for place, values in rest.items()}
    return results[()]


def _product(x: Array, kernel: Array, whole: Sequence[bool], dtype: Any) -> Array:
    """[group, batch, spatial dims that stay..., features]."""
    spatial = [2 + i for i, all_taps in enumerate(whole) if all_taps]
    gone = [2 + i for i, all_taps in enumerate(whole) if not all_taps]
    kernel = lax.squeeze(kernel, gone)
    summed = [(d, 2 + i) for i, d in enumerate(spatial)]
    pairs = [*summed, (x.ndim - 1, kernel.ndim - 1)]
    pairs.sort(key=lambda pair: -x.shape[pair[0]])  # the largest dim is the one that is split
    left, right = zip(*pairs, strict=True)
    # Leaves are parts of the first contracted dim.
    x = lax.transpose(x, (*(d for d in range(x.ndim) if d not in left), *left))
    numbers = ((tuple(range(x.ndim - len(left), x.ndim)), right), ((0,), (0,)))
    return lax.dot_general(x, kernel, numbers, preferred_element_type=dtype)


def window_places(params: dict[str, Any], x: Array, fill: Any = 0) -> list[Array]:
    """The elements at each place of all windows, one place after the other."""
    window, count = params["window_dimensions"], x.ndim
    strides = params["window_strides"]
    base, dilations = (params.get(f"{k}_dilation") or (1,) * count for k in ("base", "window"))
    sizes = list(map(_size, x.shape, window, params["padding"], base, dilations, strides))
    if 0 in sizes:
        return [jnp.full(sizes, fill, x.dtype)]
    parts = []
    for at in itertools.product(*map(range, window)):
        part = x
        for dim, turn in enumerate(at):
            low, start = params["padding"][dim][0], turn * dilations[dim]
            part = _rows(part, dim, low, base[dim], start, sizes[dim], strides[dim], fill)
        parts.append(part)
    return parts


def window_sum(params: dict[str, Any], x: Array) -> Array:
    """The sum over each window, one element after the other."""
    return functools.reduce(lax.add, window_places(params, x))


def fourier(params: dict[str, Any], x: Array) -> Array:
    """A transform of several dims as one of each, which is the last dim meanwhile."""
    kind, lengths = lax.FftType(params["fft_type"]), params["fft_lengths"]
    dims = list(range(x.ndim - len(lengths), x.ndim))
    real = kind in (lax.FftType.RFFT, lax.FftType.IRFFT)
    complex_kind = lax.FftType.IFFT if kind is lax.FftType.IRFFT else lax.FftType.FFT
    turns = [(d, complex_kind if real else kind, n) for d, n in zip(dims, lengths, strict=True)]
    if real:
        last = (dims[-1], kind, lengths[-1])
        rest = turns[:-1]
        turns = [last, *rest] if kind is lax.FftType.RFFT else [*rest, last]
    for dim, how, length in turns:
        order = [*(d for d in range(x.ndim) if d != dim), dim]
        back = [order.index(d) for d in range(x.ndim)]
        x = lax.transpose(lax.fft(lax.transpose(x, order), how, (length,)), back)
    return x
