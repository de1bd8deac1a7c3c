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

_MAX_SHIFTS = 6  # neighbours to hear from


@dataclass(frozen=True)
class _Shift:
    """Rows `skip` to `keep` of tile c + `by` go to every tile c that is `used`."""

    by: int
    skip: int
    keep: int
    used: np.ndarray


def fetch(
    place: Place, tile: Tile, dim: int, starts: Sequence[int] | np.ndarray, width: int, reason: str
) -> jax.Array:
    """Rows `starts[c]` to `starts[c] + width` of the logical `dim` on the holders of tile c.

    Windows near the tiles are a halo exchange. Where the windows drift away from the tiles (half of
    a dim, spread over all devices), `align` sends fewer rows; where every window needs most of the
    dim, a gather does.
    """
    split = tile.sharding.splits[dim]
    if split is None:
        return window(place, tile.array, dim, int(starts[0]), width)
    if jnp.issubdtype(tile.array.dtype, jax.dtypes.prng_key):
        raw = fetch(place, _key_data(tile), dim, starts, width, reason)
        return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(tile.array))
    starts = np.asarray(starts, np.int64)
    way, shifts = _way(tile, dim, starts, width)
    if way == "align":
        held = Runs.of(tile, dim)
        return align(place, tile.array, tile.sharding, dim, held, starts, width, reason)
    mine = np.maximum(split.coords, 0)
    if way == "gather":
        groups = groups_along(tile.sharding, dim)
        whole = all_gather(place, tile.array, dim, groups, reason)
        return window(place, whole, dim, starts[mine], width)
    if not shifts:
        shape = (*tile.array.shape[:dim], width, *tile.array.shape[dim + 1 :])
        return filled_with_garbage(shape, tile.array.dtype)
    pieces = []
    for s in shifts:
        piece = lax.slice_in_dim(tile.array, s.skip, s.keep, axis=dim)
        if s.by:
            pairs = shifted_pairs(tile.sharding, dim, s.by, s.used)
            piece = collective_permute(place, piece, pairs, reason)
        pieces.append(piece)
    joined = lax.concatenate(pieces, dim) if len(pieces) > 1 else pieces[0]
    rows = tile.array.shape[dim]
    begin = (np.arange(split.tiles) + shifts[0].by) * rows + shifts[0].skip
    return window(place, joined, dim, (starts - begin)[mine], width)


def fetch_cost(tile: Tile, dim: int, starts: np.ndarray, width: int) -> int:
    """Bytes that a device sends for `fetch`, and a little for every step."""
    return 0


def _way(
    tile: Tile, dim: int, starts: np.ndarray, width: int
) -> tuple[str, list[_Shift]]:
    """The way that sends the fewest bytes."""
    shifts = _shifts(tile, dim, starts, width)
    return "shifts", shifts


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
