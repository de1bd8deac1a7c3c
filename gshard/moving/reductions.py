"""Reductions by kind: the identity of each, how the values of a group are reduced, and its bytes.

A sum of floats by AllReduce has the order that the devices happen to have. In a sum by "tree" every
device has a subtree of it. What is sent is sent as it is, and each device adds a part of all
subtrees by itself: as many bytes, and one order. `halved` and `neighbours` are written out as
additions of slices, whose order no compiler may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes
from gshard.tensors.devices import Groups, Place
from gshard.tensors.factors import Dim, Factors
from gshard.tensors.tile import Tile

_GATHERED = {"prod": lax.mul, "xor": lax.bitwise_xor, "and": lax.bitwise_and, "or": lax.bitwise_or}


def identity(kind: str, dtype: Any) -> jax.Array:
    """The identity of a reduction."""
    dtype = jnp.dtype(dtype)
    if kind in ("sum", "tree", "or", "xor"):
        return jnp.zeros((), dtype)
    if kind == "prod":
        return jnp.ones((), dtype)
    if kind == "and":
        return ~jnp.zeros((), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(kind == "min")
    if jnp.issubdtype(dtype, jnp.inexact):
        least = -jnp.inf if kind == "max" else jnp.inf
        if not np.isinf(np.asarray(least, dtype)).any():  # some 8-bit floats have no infinity
            least = float(jnp.finfo(dtype).min if kind == "max" else jnp.finfo(dtype).max)
        paired = jnp.issubdtype(dtype, jnp.complexfloating)  # in lexicographic order, as in JAX
        return jnp.asarray(complex(least, least) if paired else least, dtype)
    info = jnp.iinfo(dtype)
    return jnp.asarray(info.min if kind == "max" else info.max, dtype)


def mask_for(place: Place, tile: Tile, dims: tuple[Dim, ...], factors: Factors) -> Tile:
    """`tile` with the identity in the padding of its reduced dims."""
    for number, dim in enumerate(dims):
        kinds = {factors.reduced[f] for f in dim if f in factors.reduced}
        if kinds and number in tile.padded_dims():
            (kind,) = kinds
            tile = tile.masked(place, identity(kind, tile.array.dtype), [number])
    return tile


def _is_gathered(kind: str, dtype: Any) -> bool:
    """Whether there is no collective for it: each device reduces what it gathers."""
    return kind in _GATHERED and not (kind in ("and", "or") and dtype == jnp.bool_)


def reduced_bytes(
    kind: str, elements: int, dtype: Any, members: int, num_devices: int
) -> tuple[int, int]:
    """What `reduce` sends for so many elements on each member of a group; in how many collectives.

    One by a tree is a scatter and a gather, as an AllReduce is, and counts as one.
    """
    dtype, groups = np.dtype(dtype), num_devices // members
    if _is_gathered(kind, dtype):
        size = elements * dtype.itemsize
        return collectives.sent_in_groups("all_gather", size, members, groups, num_devices), 1
    if kind == "tree":
        part = -(-elements // members) * dtype.itemsize
        steps = (("all_to_all", part * members), ("all_gather", part))
        return sum(collectives.sent_in_groups(*s, members, groups, num_devices) for s in steps), 1
    width, values = dtype.itemsize, 1
    if kind in ("max", "min"):
        width, values = sortable_bytes(dtype)
    elif kind == "sum" and dtype == np.bool_:
        width = 4
    return values * sent_bytes("all_reduce", elements * width, members), values


def reduce(place: Place, x: jax.Array, groups: Groups, kind: str, reason: Reason) -> jax.Array:
    """The values of each group reduced, on every member."""
    if _is_gathered(kind, x.dtype):
        parts = collectives.all_gather(place, x[None], 0, groups, reason)
        return lax.reduce(parts, identity(kind, x.dtype), _GATHERED[kind], (0,))
    if kind == "tree":
        return _tree_all_reduce(place, x, groups, reason)
    if kind in ("and", "or"):
        op = "min" if kind == "and" else "max"
        return collectives.all_reduce(place, x.astype(jnp.int8), groups, op, reason).astype(x.dtype)
    if kind in ("max", "min"):
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            return _lexicographic(place, x, groups, kind, reason)
        keys, back = sortable(x, kind)
        return back(collectives.all_reduce(place, keys, groups, kind, reason))
    return collectives.all_reduce(place, x, groups, kind, reason)


def _lexicographic(
    place: Place, x: jax.Array, groups: Groups, kind: str, reason: Reason
) -> jax.Array:
    """Complex numbers compare by their real parts, and equal ones by the imaginary parts."""
    real, imag = lax.real(x), lax.imag(x)
    best = reduce(place, jnp.where(real == 0, 0, real), groups, kind, reason)
    beaten = identity(kind, imag.dtype)
    rest = reduce(place, jnp.where(real == best, imag, beaten), groups, kind, reason)
    return lax.complex(best, rest)


def _tree_all_reduce(place: Place, x: jax.Array, groups: Groups, reason: Reason) -> jax.Array:
    """The sum of the group's values, on every member."""
    members, size = len(groups[0]), math.prod(x.shape)
    flat = lax.reshape(x, (size,))
    padded = lax.pad(flat, lax.full_like(flat, 0, shape=()), ((0, -size % members, 0),))
    parts = lax.reshape(padded, (members, padded.shape[0] // members))
    mine = neighbours(collectives.all_to_all(place, parts, groups, reason), 0, lax.add)
    whole = collectives.all_gather(place, mine, 0, groups, reason)
    return lax.reshape(lax.slice_in_dim(whole, 0, size), x.shape)


def tree_reduce_scatter(
    place: Place, x: jax.Array, dim: int, groups: Groups, reason: Reason
) -> jax.Array:
    """The sum of the group's values, of which member j keeps the j-th part of `dim`."""
    members = len(groups[0])
    rows = x.shape[dim] // members
    parts = lax.reshape(x, (*x.shape[:dim], members, rows, *x.shape[dim + 1 :]))
    first = (dim, *(d for d in range(parts.ndim) if d != dim))
    received = collectives.all_to_all(place, lax.transpose(parts, first), groups, reason)
    return neighbours(received, 0, lax.add)


Combine = Callable[[jax.Array, jax.Array], jax.Array]


def halved(x: jax.Array, axis: int, combine: Combine) -> jax.Array:
    """`x` combined along a dim, the first half with the second; an odd one waits for the end."""
    if x.shape[axis] == 0:
        raise ValueError(f"nothing to combine along dim {axis} of {x.shape}")
    while (n := x.shape[axis]) > 1:
        half = n // 2
        both = combine(_rows(x, 0, half, axis), _rows(x, half, 2 * half, axis))
        x = lax.concatenate([both, _rows(x, n - 1, n, axis)], axis) if n % 2 else both
    return lax.squeeze(x, [axis])


def neighbours(x: jax.Array, axis: int, combine: Combine) -> jax.Array:
    """`x` combined along a dim, by a tree whose subtrees are neighbours; their number is 2**k."""
    n = x.shape[axis]
    assert n & (n - 1) == 0, n
    while x.shape[axis] > 1:
        n = x.shape[axis]
        x = combine(*(lax.slice_in_dim(x, first, n, 2, axis) for first in (0, 1)))
    return lax.squeeze(x, [axis])


def _rows(x: jax.Array, start: int, limit: int, axis: int) -> jax.Array:
    return lax.slice_in_dim(x, start, limit, axis=axis)


# ------------------------------------------------------------ floats as integers in the same order


@cached
def _largest_is_nan(dtype: Any) -> bool:
    """Whether the largest bit pattern of a float is NaN; in some small types it is not."""
    bits = jnp.finfo(dtype).bits
    if bits < 8:
        return False
    largest = np.array(np.iinfo(f"int{bits}").max, f"int{bits}").view(dtype)
    return bool(np.isnan(largest.astype(np.float64)))


def sortable_bytes(dtype: Any) -> tuple[int, int]:
    """Bytes of what is sent for an element, in maxima and minima, and how often: complex numbers
    are compared by their real parts, and then by the others."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return dtype.itemsize // 2, 2
    if jnp.issubdtype(dtype, jnp.floating) and not _largest_is_nan(dtype):
        return 2, 1  # as bfloat16
    return dtype.itemsize, 1


def flipped(bits: jax.Array) -> jax.Array:
    """The bits of negative floats as integers that are in order; and back."""
    info = jnp.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def sortable(x: jax.Array, kind: str) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Floats as integers in the same order, NaN first: collectives lose NaN in max and min."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.int8), lambda y: y.astype(jnp.bool_)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x, lambda y: y
    if not _largest_is_nan(x.dtype):  # no integer for NaN beyond those of numbers
        keys, back_to_bfloat16 = sortable(x.astype(jnp.bfloat16), kind)
        return keys, lambda y: back_to_bfloat16(y).astype(x.dtype)
    integer = jnp.dtype(f"int{jnp.dtype(x.dtype).itemsize * 8}")
    info = jnp.iinfo(integer)
    nan = jnp.asarray(info.max if kind == "max" else info.min, integer)
    keys = jnp.where(jnp.isnan(x), nan, flipped(lax.bitcast_convert_type(x, integer)))

    def back(keys: jax.Array) -> jax.Array:
        value = lax.bitcast_convert_type(flipped(keys), x.dtype)
        return jnp.where(keys == nan, jnp.asarray(jnp.nan, x.dtype), value)

    return keys, back
