"""Slices at run-time offsets: dynamic_slice, dynamic_update_slice.

Which device has to send what is not known when the program is made. Two schemes do without a gather
of the operand. A slice of few rows is *collected*: every device puts the rows that it owns into the
result's window, zeros elsewhere, and a ReduceScatter or AllReduce adds the windows up; the bytes
are those of the result. A slice of most rows is a *rotation*: tiles move by the bits of the offset,
a permute for each, and then by rows between neighbours; the bytes are a tile for each bit. An
update is written by the devices that own its rows, and costs nothing if all have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.graph.row_map import Layer, entire
from gshard.moving import collectives
from gshard.moving.costs import timed
from gshard.moving.fetch import Along, fetch
from gshard.moving.halo import groups_along, shifted_pairs
from gshard.moving.row_windows import plan_fetch
from gshard.rules.base.layers import Layers
from gshard.rules.base.rule import Context, Doc, Way, linear_in, on_moved, register, rule
from gshard.rules.painting import RowMap
from gshard.rules.row_map import row_map_rule
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets
from gshard.tensors.tile import Tile, Tiles, row_bytes, rows_within


@dataclass(frozen=True)
class DynamicRows:
    """`rows` rows from the run-time `start` on, which is within the dim."""

    rows: int
    start: Any = None  # an array; left out where the slice is only priced

    def sent(self, size: int, tiles: int) -> float:
        """The cheaper of the two schemes."""
        return min(self._rotated(size, tiles), self._scattered(tiles))

    def _scattered(self, tiles: int) -> int:
        return -(-self.rows // tiles) * (tiles - 1)

    def _rotated(self, size: int, tiles: int) -> int:
        local, width = -(-size // tiles), -(-self.rows // tiles)
        aligned = plan_fetch(tiles, self.rows, np.arange(tiles) * width, width, rows=local).sent
        return rotation_rows(size, self.rows, local) + aligned

    def run(self, ctx: Context, tile: Tile, dim: int, split: Split | None, reason: Reason) -> Array:
        """The rows of this device's tile of the result."""
        place = ctx.place
        if split is None:
            return lax.dynamic_slice_in_dim(tile.array, self.start, self.rows, dim)
        size, width = tile.shape[dim], -(-self.rows // split.tiles)
        if tile.sharding.splits[dim] is None:
            offset = self.start + place.lookup(split.own * width)
            x = padding.pad_end(tile.array, dim, size + split.tiles * width - self.rows)
            return lax.dynamic_slice_in_dim(x, offset, width, dim)
        if self._scattered(split.tiles) < self._rotated(size, split.tiles):
            spread = self._spread(place, tile, dim, split.tiles * width)
            groups = groups_along(tile.sharding, dim)
            return collectives.scatter_disjoint(place, spread, dim, groups, reason)
        x = _rotated(place, tile, dim, self.start, size - self.rows, 1, reason)
        shape = (*tile.shape[:dim], self.rows, *tile.shape[dim + 1 :])
        starts = np.arange(split.tiles) * width
        return fetch(place, Tile(x, tile.sharding, shape), reason, Along(dim, starts, width))

    def collected(self, ctx: Context, tile: Tile, dim: int, reason: Reason) -> Array:
        """The whole result on every device."""
        spread = self._spread(ctx.place, tile, dim, self.rows)
        groups = groups_along(tile.sharding, dim)
        return collectives.merge_disjoint(ctx.place, spread, groups, reason)

    def _spread(self, place: Place, tile: Tile, dim: int, size: int) -> Array:
        """The result's window: the rows of this device in their places, zeros elsewhere."""
        local = tile.array.shape[dim]
        offset = tile.offset(place, dim) - self.start  # the result's row that local row 0 is
        own = rows_within(tile.array.shape, dim, offset, 0, self.rows)
        if dim in tile.padded_dims():
            own &= ~tile.is_padding(place, dim)
        x = lax.select(own, tile.array, padding.blank(tile.array.shape, tile.array.dtype))
        shape = [n if d != dim else size + 2 * local for d, n in enumerate(x.shape)]
        at = jnp.clip(offset + local, 0, size + local)
        wide = lax.dynamic_update_slice_in_dim(padding.blank(shape, x.dtype), x, at, dim)
        return lax.slice_in_dim(wide, local, local + size, axis=dim)


def rotation_rows(size: int, rows: int, local: int) -> int:
    """How many rows a device sends so that tiles move by any offset that `rows` of `size` allow."""
    return local * ((size - rows) // local).bit_length() + min(local, size - rows)


def _rotated(
    place: Place, tile: Tile, dim: int, start: Array, most: int, direction: int, reason: Reason
) -> Array:
    """The rows `start` rows further on (or, in direction -1, back), at most `most`.

    Tiles move by the bits of the offset in tiles, then rows between neighbours.
    """
    x, local, halo = tile.array, tile.array.shape[dim], min(tile.array.shape[dim], most)
    for bit in range((most // local).bit_length()):
        pairs = shifted_pairs(tile.sharding, dim, direction * (1 << bit))
        moved = collectives.collective_permute(place, x, pairs, reason) if pairs else x
        x = jnp.where((start // local >> bit) & 1 == 1, moved, x)
    first = 0 if direction > 0 else local - halo
    near = lax.slice_in_dim(x, first, first + halo, axis=dim)
    pairs = shifted_pairs(tile.sharding, dim, direction)
    near = collectives.collective_permute(place, near, pairs, reason)
    x = lax.concatenate([x, near] if direction > 0 else [near, x], dim)
    begin = start % local if direction > 0 else halo - start % local
    return lax.dynamic_slice_in_dim(x, begin, local, dim)


def _clamped(index: Tile, size: int, rows: int) -> Array:
    """A start index, which JAX moves so that the slice is within the dim."""
    most = min(size - rows, int(jnp.iinfo(index.array.dtype).max))
    return jnp.clip(index.array, 0, most).astype(jnp.int32)


class DynamicSlice(RowMap):
    """A row map of one window whose place is known when the program runs; starts are operands."""

    at_run_time = True

    @staticmethod
    def layers_of(eqn: JaxprEqn) -> Layers:
        """The window, wherever it is."""
        return (entire(0, eqn.params["slice_sizes"]),)

    def rows(self, layer: Layer, dim: int, tiles: Mapping[int, Tile]) -> DynamicRows:
        """The rows from an operand on."""
        rows, size = self.shape[dim], self.operands[0].aval.shape[dim]
        return DynamicRows(rows, _clamped(tiles[1 + dim], size, rows) if tiles else None)


def update_factors(eqn: JaxprEqn) -> Factors:
    """Operand and result are alike; an update of less than half of a dim is best whole there."""
    shape, update = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    names = [f"d{i}" for i in range(len(shape))]
    parts = [f if 2 * m >= n else None for f, n, m in zip(names, shape, update, strict=True)]
    operands: list[Sequence[str | None]] = [names, parts, *([] for _ in eqn.invars[2:])]
    resized = [f for f, n, m in zip(names, shape, update, strict=True) if n != m]
    return Factors.of(eqn, operands, [names], resized=resized)


def update_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Under the sharding of the operand or of the result; the update replicated, or rotated.

    `Way.how` is the dim along which the tiles of an update move, if any.
    """
    here, update, *indices = shardings
    for sharding in dict.fromkeys([targets[0], here]):
        whole = sharding.unsplit(_moving(eqn))
        yield Way((sharding, whole, *indices), (sharding,))
        for dim in _moving(eqn):
            split = sharding.splits[dim]
            if split and update.splits[dim] is split and 0 not in eqn.invars[1].aval.shape:
                kept = whole.replace(dim, split)
                sent = timed(_rotation_bytes(eqn, kept, dim))  # one latency, as a gather has
                yield Way((sharding, kept, *indices), (sharding,), how=dim, sent=sent)


def _moving(eqn: JaxprEqn) -> list[int]:
    """The dims along which the update has an offset."""
    shapes = zip(eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, strict=True)
    return [d for d, (n, m) in enumerate(shapes) if n != m]


def _rotation_bytes(eqn: JaxprEqn, update: Sharding, dim: int) -> int:
    """What a device sends to move the tiles of an update to where they are written."""
    (size, aval), split = (eqn.invars[0].aval.shape[dim], eqn.invars[1].aval), update.splits[dim]
    assert split
    local = -(-size // split.tiles)
    fetched = plan_fetch(split.tiles, aval.shape[dim], np.arange(split.tiles) * local, local)
    rows = rotation_rows(size, aval.shape[dim], local) + fetched.sent
    return rows * row_bytes(update.local_shape(aval.shape), dim, aval.dtype)


@rule(
    p.dynamic_update_slice_p,
    factors=update_factors,
    ways=update_ways,
    linear=linear_in((0, 1)),
    doc=Doc(
        free="every dim, if the update is replicated along dims that it moves in",
        halo="where it moves, most rows: a tile for each bit of the largest offset in tiles",
        gather="where it moves, few rows: AllGather of the update",
    ),
)
@on_moved
def _dynamic_update_slice(
    ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets
) -> Tiles:
    (tile, update, *indices), turned = tiles, way.how
    if 0 in update.shape:
        return [tile]
    starts = {d: _clamped(indices[d], tile.shape[d], update.shape[d]) for d in _moving(eqn)}
    if turned is not None:
        update = _update_in_place(ctx.place, tile, update, turned, starts[turned])
    array = _write(ctx.place, tile, update.array, starts, eqn.invars[1].aval.shape, turned)
    return [Tile(array, way.results[0], tile.shape)]


def _update_in_place(place: Place, tile: Tile, update: Tile, dim: int, start: Array) -> Tile:
    """The rows of the update that belong into the rows of `tile`, for every device."""
    split, local = tile.sharding.splits[dim], tile.array.shape[dim]
    assert split
    why = "tiles of the update to where they are written"
    reason = Reason("step", "dynamic_update_slice", why)
    x = fetch(place, update, reason, Along(dim, np.arange(split.tiles) * local, local))
    shape = (*update.shape[:dim], tile.shape[dim], *update.shape[dim + 1 :])
    spread = Tile(x, update.sharding, shape)
    x = _rotated(place, spread, dim, start, tile.shape[dim] - update.shape[dim], -1, reason)
    return Tile(x, update.sharding, shape)


def _write(
    place: Place,
    tile: Tile,
    update: Array,
    starts: Mapping[int, Array],
    shape: Sequence[int],
    turned: int | None,
) -> Array:
    """`tile` with the rows of an update of the given logical shape that this device owns.

    Only as many rows are touched as the update has, or the tile. Along the dim `turned` the update
    has been brought into its place; along the others it is whole.
    """
    local = tile.array.shape
    at = [jnp.zeros((), jnp.int32)] * len(local)
    edges: list[tuple[int, Array]] = []  # dims, and the update's row in the first touched one
    for dim, start in starts.items():
        if tile.sharding.splits[dim] is None:
            at[dim] = start
            continue
        offset = tile.offset(place, dim)
        rows = local[dim] if dim == turned else min(shape[dim], local[dim])
        at[dim] = jnp.clip(start - offset, 0, local[dim] - rows)
        first = offset + at[dim] - start
        if dim != turned:
            wide = padding.pad(update, dim, rows, rows)
            begin = jnp.clip(first + rows, 0, shape[dim] + rows)
            update = lax.dynamic_slice_in_dim(wide, begin, rows, dim)
        edges.append((dim, first))
    if edges:
        there = lax.dynamic_slice(tile.array, at, update.shape)
        for dim, first in edges:
            inside = rows_within(update.shape, dim, first, 0, shape[dim])
            update = lax.select(inside, update, there)
    return lax.dynamic_update_slice(tile.array, update, at)


_CUT = Doc(
    free="dims that stay as they are",
    halo="others, most rows: a tile for each bit of the largest offset in tiles",
    gather="others, few rows: ReduceScatter or AllReduce of the result",
)
register(row_map_rule(DynamicSlice, doc=_CUT), p.dynamic_slice_p)
