"""Nodes that reshard from any sharding to any other, and their steps on tiles."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.boxes import route
from gshard.moving.exchange import exchange_groups, kept_tiles, orders_of_parts
from gshard.moving.halo import Halo
from gshard.moving.nodes import TensorNode, communicate
from gshard.moving.plan import copies_as_split, plan_reshard
from gshard.moving.row_windows import retiling
from gshard.moving.sent import mostly_held
from gshard.tensors import padding
from gshard.tensors.devices import Groups, Place, groups_by
from gshard.tensors.keys import as_integers, is_key
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


@dataclass(frozen=True)
class Reshard(TensorNode):
    """A tensor of logical `shape` under another sharding, its `target`."""

    name: ClassVar[str] = "reshard"
    target: Sharding
    shape: tuple[int, ...]

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The tile under the target."""
        return self.target.local_shape(self.shape)

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """Run the steps that `moving.plan` found."""
        return _resharded(place, Tile(array, self.sharding, self.shape), self.target, self.reason)

    def __str__(self) -> str:
        return f"{self.sharding} -> {self.target}"


def reshard(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    """`tile` under `target`: a node of the plan."""
    if tile.sharding == target and tile.is_standard:
        return tile
    node = Reshard(reason, tile.sharding, target, tile.shape)
    return Tile(communicate(node, tile.array, place), target, tile.shape)


def retile(place: Place, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
    """`tile` with tiles of `size` rows along `dim`: a node of the plan, if rows have to move."""
    if tile.array.shape[dim] == size or tile.sharding.splits[dim] is None:
        return retiled(place, tile, dim, size, reason)
    array = communicate(_evening_out(tile, dim, size, reason), tile.array, place)
    return Tile(array, tile.sharding, tile.shape)


# ---------------------------------------------------------------- how they are carried out


def _resharded(place: Place, tile: Tile, target: Sharding, reason: Reason) -> jax.Array:
    if is_key(tile.array):
        raw, back = as_integers(tile.array)
        inside = raw.shape[tile.array.ndim :]  # the dim of a key's integers is not split
        whole = Tile(raw, tile.sharding.extended(len(inside)), (*tile.shape, *inside))
        return back(_resharded(place, whole, target.extended(len(inside)), reason))
    if 0 in tile.shape:
        return jnp.zeros(target.local_shape(tile.shape), tile.array.dtype)
    tile = standardized(place, tile, reason)
    for step in plan_reshard(tile.sharding, target, tile.shape, tile.array.dtype):
        why = reason.then(f"{_ARROWS[step.kind]} to {step.target}")
        tile = _RUN[step.kind](place, tile, step.target, why)
    return tile.array


def standardized(place: Place, tile: Tile, reason: Reason) -> Tile:
    """`tile` with the local shape that its sharding prescribes: rows shift between neighbours."""
    local = tile.sharding.local_shape(tile.shape)
    for dim, size in enumerate(local):
        tile = retiled(place, tile, dim, size, reason)
    return tile


def retiled(place: Place, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
    """`tile` with tiles of `size` rows along `dim`."""
    if tile.array.shape[dim] == size:
        return tile
    if tile.sharding.splits[dim] is None:
        return Tile(_resize(tile.array, dim, size), tile.sharding, tile.shape)
    array = _evening_out(tile, dim, size, reason).run(place, tile.array)
    return Tile(array, tile.sharding, tile.shape)


def _evening_out(tile: Tile, dim: int, size: int, reason: Reason) -> Halo:
    """The halo that leaves tiles of `size` rows."""
    windows = retiling(tile.sharding.tiles[dim], tile.array.shape[dim], size, tile.shape[dim])
    return Halo(reason.then(f"even out tiles of dim {dim}"), tile.sharding, dim, windows)


def _exchange(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    here, rank = tile.sharding, tile.sharding.rank
    kept = kept_tiles(here, target)
    groups = exchange_groups(here, target)
    give = [t // k for t, k in zip(target.tiles, kept, strict=True)]  # parts that a dim falls into
    grow = [t // k for t, k in zip(here.tiles, kept, strict=True)]  # parts that a dim is made of
    for dim in range(rank):
        if give[dim] > 1:
            rows = give[dim] * -(-tile.shape[dim] // target.tiles[dim])
            tile = retiled(place, tile, dim, rows, reason)
    pieces, parts = _take_apart(tile.array, give)
    pieces = collectives.all_to_all(place, pieces, groups, reason)
    pieces = _in_order_of_parts(place, pieces, here, kept, groups)
    x = _put_together(pieces, grow, parts)
    return standardized(place, Tile(x, target, tile.shape), reason)


def _take_apart(x: jax.Array, give: list[int]) -> tuple[jax.Array, tuple[int, ...]]:
    """`x` as a row of pieces, with dim d in `give[d]` parts; and the shape of a piece."""
    parts = tuple(n // g for n, g in zip(x.shape, give, strict=True))
    cut = [d for d, g in enumerate(give) if g > 1]
    x = x.reshape([n for d, p in enumerate(parts) for n in ((give[d], p) if d in cut else (p,))])
    fronts = [d + number for number, d in enumerate(cut)]  # the positions of the new dims
    x = jnp.moveaxis(x, fronts, range(len(cut)))
    return x.reshape(-1, *parts), parts


def _put_together(x: jax.Array, grow: list[int], parts: tuple[int, ...]) -> jax.Array:
    """The inverse: pieces, in row-major order of the dims that they make up, as one array."""
    joined = [d for d, g in enumerate(grow) if g > 1]
    x = x.reshape(*(grow[d] for d in joined), *parts)
    places = [d + number for number, d in enumerate(joined)]
    x = jnp.moveaxis(x, range(len(joined)), places)
    return x.reshape([g * p for g, p in zip(grow, parts, strict=True)])


def _in_order_of_parts(
    place: Place,
    x: jax.Array,
    here: Sharding,
    kept: tuple[int, ...],
    groups: tuple[tuple[int, ...], ...],
) -> jax.Array:
    """Received pieces, reordered from member order to the order of parts."""
    orders = orders_of_parts(here, kept, groups)
    if len(orders) == 1:
        (order,) = orders
        return x if list(order) == sorted(order) else x[np.array(order)]
    table = np.zeros((place.num_devices, len(groups[0])), np.int32)
    for order, members in orders.items():
        table[list(members)] = order
    return jnp.take(x, place.lookup(table), axis=0, unique_indices=True, mode="clip")


# ---------------------------------------------------------------- the other steps


def _gather(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    dim, groups = gather_groups(tile.sharding, target)
    x = collectives.all_gather(place, tile.array, dim, groups, reason)
    return standardized(place, Tile(x, target, tile.shape), reason)


@functools.lru_cache(maxsize=4096)
def gather_groups(here: Sharding, target: Sharding) -> tuple[int, Groups]:
    """The dim to gather, and the groups that gather it, their members in the order of its parts."""
    (dim,) = [d for d in range(here.rank) if here.splits[d] is not target.splits[d]]
    split = here.splits[dim]
    assert split
    factor = split.tiles // target.tiles[dim]
    copy = copies_as_split(here)
    key = target.tile_index * here.replicas + (copy.coords if copy else 0)
    return dim, groups_by(np.where(here.tile_index < 0, -1, key), split.coords % factor)


def _slice(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    for dim, (old, new) in enumerate(zip(tile.sharding.splits, target.splits, strict=True)):
        if old is new or new is None:
            continue
        rows = -(-tile.shape[dim] // new.tiles)
        factor = new.tiles // (old.tiles if old else 1)
        tile = retiled(place, tile, dim, rows * factor, reason)
        start = place.lookup(np.maximum(new.coords, 0) % factor * rows)
        array = lax.dynamic_slice_in_dim(tile.array, start, rows, dim)
        tile = Tile(array, tile.sharding.replace(dim, new), tile.shape)
    return tile


def _permute(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    pairs = permutation(tile.sharding, target)
    x = collectives.collective_permute(place, tile.array, pairs, reason)
    return Tile(x, target, tile.shape)


def permutation(source: Sharding, target: Sharding) -> list[tuple[int, int]]:
    """The (source, destination) pairs that give every device its tile in `target`."""
    senders = {
        t: list(row) for t, row in enumerate(source.devices.reshape(-1, source.replicas).tolist())
    }
    pairs, late = [], []
    for device, index in enumerate(target.tile_index.tolist()):
        if index < 0:
            continue
        if source.tile_index[device] == index:
            senders[index].remove(device)
            pairs.append((device, device))
        else:
            late.append((device, index))
    pairs += [(senders[index].pop(0), device) for device, index in late]
    return sorted(pairs)


def _spread(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    """From some devices to all of them."""
    join = _gathered_from_all if mostly_held(tile.sharding) else _summed_over_all
    whole = join(place, tile, (tuple(range(place.num_devices)),), reason)
    return Tile(lax.slice(whole, [0] * whole.ndim, tile.shape), target, tile.shape)


def _gathered_from_all(place: Place, tile: Tile, everyone: Groups, reason: Reason) -> jax.Array:
    """Gather from all devices, and select and assemble the tiles."""
    tiles, rank = tile.sharding.tiles, tile.sharding.rank
    found = collectives.all_gather(place, tile.array[None], 0, everyone, reason)
    parts = found[tile.sharding.devices[..., 0].ravel()].reshape(*tiles, *tile.array.shape)
    joined = lax.transpose(parts, [d for i in range(rank) for d in (i, rank + i)])
    return joined.reshape([n * t for n, t in zip(tile.array.shape, tiles, strict=True)])


def _summed_over_all(place: Place, tile: Tile, everyone: Groups, reason: Reason) -> jax.Array:
    """One holder of each tile contributes it to a sum, the others zeros."""
    x = place.where(tile.sharding.first_copies, tile.array)  # padding is cut off in the end
    padded = [n * t for n, t in zip(tile.array.shape, tile.sharding.tiles, strict=True)]
    offsets = [tile.offset(place, d) for d in range(tile.sharding.rank)]
    starts = [jnp.asarray(offset, jnp.int32) for offset in offsets]
    whole = lax.dynamic_update_slice(jnp.zeros(padded, x.dtype), x, starts)
    return collectives.merge_disjoint(place, whole, everyone, reason)


def _resize(x: jax.Array, dim: int, size: int) -> jax.Array:
    """Slice or pad a dim at its end."""
    if size < x.shape[dim]:
        return lax.slice_in_dim(x, 0, size, axis=dim)
    return padding.pad_end(x, dim, size)


_RUN = {
    "slice": _slice,
    "permute": _permute,
    "exchange": _exchange,
    "gather": _gather,
    "route": route,
    "spread": _spread,
}
_ARROWS = {
    "slice": "cut",
    "permute": "permute tiles",
    "exchange": "exchange parts",
    "gather": "gather",
    "route": "send the missing parts",
    "spread": "spread to the devices that held none",
}
