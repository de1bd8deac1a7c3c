"""Row maps on arrays: windows painted one over the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives as p

from gshard.graph.row_map import Axis, Layer, cut_dims
from gshard.tensors import padding

# Which elements of a window, of a given shape, are painted; all if there is none.
Mask = Callable[[Sequence[int]], jax.Array] | None


def painted(
    shape: Sequence[int],
    layers: Sequence[Layer],
    arrays: Sequence[jax.Array],
    masks: Sequence[Mask] | None = None,
) -> jax.Array:
    """The array that `layers` of arrays make; a layer's source is the number of its array."""
    masks = masks or [None] * len(layers)
    joined = _joined_along(shape, layers) if not any(masks) else None
    if joined is not None:
        parts = [_window(layer, arrays[layer.source]) for layer in layers]
        return lax.concatenate(parts, joined) if len(parts) > 1 else parts[0]
    if len(layers) == 2 and not any(masks) and layers[0].is_constant:
        (around, inside), ends = layers, zip(layers[1].axes, shape, strict=True)
        pads = [(axis.at, n - axis.end, axis.step - 1) for axis, n in ends]
        return lax.pad(_window(inside, arrays[inside.source]), arrays[around.source], pads)
    x: jax.Array | None = None
    for layer, mask in zip(layers, masks, strict=True):
        window = _window(layer, arrays[layer.source])
        if x is None and window.shape == tuple(shape):  # nobody reads what is not painted
            x = window
        else:
            x = padding.filled(shape, window.dtype) if x is None else x
            x = _over(x, layer, window, mask)
    assert x is not None
    return x


def _joined_along(shape: Sequence[int], layers: Sequence[Layer]) -> int | None:
    """The dim along which the layers, one after the other, are all of the result."""
    cut = cut_dims(layers, shape)
    if len(cut) > 1:
        return None
    (dim,), at = cut or {0}, 0
    for layer in layers:
        axis = layer.axes[dim] if shape else Axis(0, 1)
        if axis.at != at or axis.step != 1:
            return None
        at = axis.end
    return dim if not shape or at == shape[dim] else None


def _window(layer: Layer, x: jax.Array) -> jax.Array:
    """The elements of a layer, without gaps."""
    counts = [axis.rows for axis in layer.axes]
    if layer.is_constant:
        return lax.broadcast(x, counts)
    rows = [layer.read(d) for d in range(x.ndim)]
    if list(x.shape) != counts or any(r.step > 1 for r in rows):
        x = lax.slice(x, *zip(*((r.start, r.stop, r.step) for r in rows), strict=True))
    turned = [axis.dim for axis in layer.axes if axis.dim is not None and axis.stride < 0]
    return lax.rev(x, turned) if turned else x


def _over(below: jax.Array, layer: Layer, x: jax.Array, mask: Mask) -> jax.Array:
    """`below`, with a window painted over it."""
    steps = [axis.step for axis in layer.axes]
    starts = [axis.at for axis in layer.axes]
    gaps = [d for d, step in enumerate(steps) if step > 1]
    if gaps:
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, step - 1) for step in steps])
    limits = [a + n for a, n in zip(starts, x.shape, strict=True)]
    covers = x.shape == below.shape
    if gaps or mask:
        inside = [
            lax.rem(lax.broadcasted_iota(np.int32, x.shape, d), np.int32(steps[d])) == 0
            for d in gaps
        ]
        if mask:
            found = mask(x.shape)  # for all elements, or a scalar
            inside.append(jnp.broadcast_to(found, x.shape) if gaps else found)
        there = below if covers else lax.slice(below, starts, limits)
        x = lax.select(functools.reduce(lax.bitwise_and, inside), x, there)
    if covers:
        return x
    # Without the equations by which `lax` wraps offsets that are negative.
    return p.dynamic_update_slice_p.bind(below, x, *[np.int32(a) for a in starts])


def all_of(masks: Sequence[Mask]) -> Mask:
    """The elements that all masks have."""
    return _joined_masks(lax.bitwise_and, masks) if masks else None


def any_of(masks: Sequence[Mask]) -> Mask:
    """The elements that one of the masks has."""
    return None if None in masks else _joined_masks(lax.bitwise_or, masks)


def _joined_masks(by: Callable[..., jax.Array], masks: Sequence[Mask]) -> Mask:
    if len(masks) == 1:
        return masks[0]
    return lambda shape: functools.reduce(
        by, [jnp.broadcast_to(m(shape), shape) for m in masks if m]
    )
