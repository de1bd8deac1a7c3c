"""Halo exchange (section 3.3.3 and the appendix on window-based operators).

Every device needs a window of rows of a split dim that is not quite its tile: shifted, wider, or
larger on some devices than on others. The sequence is the paper's: exchange the maximum that any
device needs with the neighbours, put the pieces side by side, and cut out this device's window by
its number. Rows outside of the tensor are garbage, for the caller to mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.collectives import Place, collective_permute
from gshard.route import route_windows
from gshard.sharding import Sharding
from gshard.tile import Tile, garbage

_MAX_SHIFTS = 6  # neighbours to hear from; beyond that, pieces are routed one by one


def fetch(
    place: Place, tile: Tile, dim: int, starts: Sequence[int] | np.ndarray, width: int, reason: str
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + width` of the logical `dim` on the holders of tile c."""
    split, rows, size = tile.sharding.splits[dim], tile.array.shape[dim], tile.shape[dim]
    if split is None:
        return window(place, tile.array, dim, int(starts[0]), width)
    starts = np.asarray(starts, np.int64)
    number = np.arange(split.tiles)
    low, high = np.clip(starts, 0, size), np.clip(starts + width, 0, size)
    needed = low < high
    if not needed.any():
        return jnp.zeros(
            (*tile.array.shape[:dim], width, *tile.array.shape[dim + 1 :]), tile.array.dtype
        )
    first = np.where(needed, low // rows - number, 0)
    last = np.where(needed, (high - 1) // rows - number, 0)
    left, right = int(first[needed].min()), int(last[needed].max())
    if right - left > _MAX_SHIFTS:
        return route_windows(place, tile, dim, starts, width, reason)
    pieces = []
    begin = np.zeros(split.tiles, np.int64)
    for shift in range(left, right + 1):
        source = number + shift
        used = needed & (first <= shift) & (shift <= last)
        piece, skipped = tile.array, 0
        if shift == left and shift < right:  # only the last rows of the leftmost neighbour
            skipped = int(np.clip(low[used] - source[used] * rows, 0, rows).min())
        keep = rows
        if shift == right:
            keep = int(np.clip(high[used] - source[used] * rows, 0, rows).max())
        if shift == left:
            if shift == right:
                skipped = int(np.clip(low[used] - source[used] * rows, 0, rows).min())
            begin = source * rows + skipped
        piece = lax.slice_in_dim(piece, skipped, keep, axis=dim)
        if shift:
            piece = collective_permute(
                place, piece, shifted_pairs(tile.sharding, dim, shift, used), reason
            )
        pieces.append(piece)
    joined = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    offsets = (starts - begin)[np.maximum(split.coords, 0)]
    return window(place, joined, dim, offsets, width)


def shifted_pairs(
    sharding: Sharding, dim: int, shift: int, used: np.ndarray | None = None
) -> list[tuple[int, int]]:
    """(source, destination): the holder of tile c + shift along `dim` sends to that of tile c."""
    devices = np.moveaxis(sharding.devices, dim, 0)
    tiles = len(devices)
    return [
        (int(s), int(d))
        for c in range(tiles)
        if 0 <= c + shift < tiles and (used is None or used[c])
        for s, d in zip(devices[c + shift].ravel(), devices[c].ravel(), strict=True)
    ]


def window(place: Place, x: jax.Array, dim: int, starts: int | np.ndarray, width: int) -> jax.Array:
    """`width` rows of the local `x` from `starts` (per device) on; garbage where `x` has none."""
    starts = np.asarray(starts)
    before = int(max(0, -starts.min()))
    after = int(max(0, starts.max() + width - x.shape[dim]))
    if before or after:
        pads = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        x = lax.pad(x, garbage(x.dtype), pads)
    if width == x.shape[dim]:
        return x
    start = int(starts + before) if starts.ndim == 0 else place.lookup(starts + before)
    if isinstance(start, int):
        return lax.slice_in_dim(x, start, start + width, axis=dim)
    return lax.dynamic_slice_in_dim(x, start, width, dim)
