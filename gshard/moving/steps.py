"""The steps of a reshard: each is at most one collective, and knows what it sends.

`moving.plan` searches for the steps between two shardings, by their exact bytes, and runs them.
Tests compare the bytes with what is emitted. A step begins and ends with tiles of the sizes that
shardings prescribe.
"""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes
from gshard.moving.halo import retile_elements, retiled, standard_elements, standardized
from gshard.moving.routes import (
    exchange_groups,
    group_size,
    kept_tiles,
    orders_of_parts,
    plan_boxes,
    route,
)
from gshard.tensors import padding
from gshard.tensors.devices import Groups, Place, groups_by
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile
from gshard.tensors.uneven import unstack

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Step(abc.ABC):
    """One step of a tensor of logical `shape`, from tiles under `here` to those under `target`."""

    kind: ClassVar[str]
    what: ClassVar[str]  # it does, in reasons
    here: Sharding
    target: Sharding
    shape: Shape
    itemsize: int

    @functools.cached_property
    def moved(self) -> int:
        """The bytes that a device sends in its collective."""
        return self._moved()

    @functools.cached_property
    def bytes(self) -> int:
        """What a device sends for it, with what uneven tiles take: padding, and rows that shift."""
        return self.moved + self._uneven()

    @property
    def rounds(self) -> int:
        """How many collectives it counts as; those that even tiles out are not counted."""
        return 0 if isinstance(self, Slice) else 1

    def run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        """The tile under `target`."""
        return self._run(place, tile, reason.then(f"{self.what} to {self.target}"))

    @abc.abstractmethod
    def _moved(self) -> int: ...

    def _uneven(self) -> int:
        return 0

    @abc.abstractmethod
    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile: ...

    @property
    def _local(self) -> Shape:
        return self.here.local_shape(self.shape)

    def _by_groups(self, kind: str, elements: int, members: int) -> int:
        """What a collective of this kind sends, in groups of the devices that hold tiles."""
        groups = math.prod(self.here.tiles) * self.here.replicas // members
        size = elements * self.itemsize
        return collectives.sent_in_groups(kind, size, members, groups, self.here.num_devices)


class Slice(Step):
    """Each device keeps a part of what it holds."""

    kind, what = "slice", "cut"

    def _moved(self) -> int:
        return 0

    def _uneven(self) -> int:
        here, local, sent = self.here, self._local, 0
        for dim, new, rows, factor in self._cuts():
            sent += retile_elements(here, local, dim, rows * factor, self.shape)
            local = (*local[:dim], rows, *local[dim + 1 :])
            here = here.replace(dim, new)
        return sent * self.itemsize

    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        for dim, new, rows, factor in self._cuts():
            tile = retiled(place, tile, dim, rows * factor, reason)
            start = place.lookup(new.own % factor * rows)
            array = lax.dynamic_slice_in_dim(tile.array, start, rows, dim)
            tile = Tile(array, tile.sharding.replace(dim, new), tile.shape)
        return tile

    def _cuts(self) -> list[tuple[int, Split, int, int]]:
        """The dims that are cut, their splits, rows of a part, and of how many parts it is one."""
        pairs = enumerate(zip(self.here.splits, self.target.splits, strict=True))
        return [
            (dim, new, -(-self.shape[dim] // new.tiles), new.tiles // (old.tiles if old else 1))
            for dim, (old, new) in pairs
            if new is not None and old is not new
        ]


class Permute(Step):
    """Each device gets another tile."""

    kind, what = "permute", "permute tiles"

    def _moved(self) -> int:
        return math.prod(self._local) * self.itemsize

    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        pairs = permutation(self.here, self.target)
        x = collectives.collective_permute(place, tile.array, pairs, reason)
        return Tile(x, self.target, tile.shape)


def can_permute(here: Sharding, target: Sharding) -> bool:
    """Whether every device gets its tile if each sends its own once."""
    return here.tiles == target.tiles and target.replicas <= here.replicas


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


class Gather(Step):
    """Groups of devices gather a dim, or its minor parts."""

    kind, what = "gather", "gather"

    def _moved(self) -> int:
        members = math.prod(self.here.tiles) // math.prod(self.target.tiles)
        return self._by_groups("all_gather", math.prod(self._local), members)

    def _uneven(self) -> int:
        tiles = zip(self._local, self.here.tiles, self.target.tiles, strict=True)
        after = tuple(n * h // t for n, h, t in tiles)
        return standard_elements(self.target, after, self.shape) * self.itemsize

    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        dim, groups = gather_groups(self.here, self.target)
        x = collectives.all_gather(place, tile.array, dim, groups, reason)
        return standardized(place, Tile(x, self.target, tile.shape), reason)


@cached
def gather_groups(here: Sharding, target: Sharding) -> tuple[int, Groups]:
    """The dim to gather, and the groups that gather it, their members in the order of its parts."""
    (dim,) = [d for d in range(here.rank) if here.splits[d] is not target.splits[d]]
    split = here.splits[dim]
    assert split
    factor = split.tiles // target.tiles[dim]
    copy = copies_as_split(here)
    key = target.tile_index * here.replicas + (copy.coords if copy else 0)
    return dim, groups_by(np.where(here.tile_index < 0, -1, key), split.coords % factor)


def copies_as_split(sharding: Sharding) -> Split | None:
    """The copies of each tile as a split that could be added to the tensor."""
    if sharding.replicas == 1:
        return None
    number = np.full(sharding.num_devices, -1)
    flat = sharding.devices.reshape(-1, sharding.replicas)
    number[flat] = np.arange(sharding.replicas)
    return Split.of(number)


class Exchange(Step):
    """Groups of devices exchange minor parts of some dims for those of others."""

    kind, what = "exchange", "exchange parts"

    @property
    def _evened(self) -> Shape:
        """The shape of a tile that falls into equal parts."""
        kept, local = kept_tiles(self.here, self.target), self._local
        pairs = enumerate(zip(self.target.tiles, kept, strict=True))
        return tuple(
            t // k * -(-self.shape[dim] // t) if t > k else local[dim] for dim, (t, k) in pairs
        )

    def _moved(self) -> int:
        members = group_size(self.here, self.target)
        return self._by_groups("all_to_all", math.prod(self._evened), members)

    def _uneven(self) -> int:
        evened = self._evened
        tiles = zip(evened, self.target.tiles, self.here.tiles, strict=True)
        after = tuple(n * h // t for n, t, h in tiles)
        before = standard_elements(self.here, self._local, self.shape, evened)
        return (before + standard_elements(self.target, after, self.shape)) * self.itemsize

    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        here, target = self.here, self.target
        kept, groups = kept_tiles(here, target), exchange_groups(here, target)
        give = [t // k for t, k in zip(target.tiles, kept, strict=True)]  # parts a dim falls into
        grow = [t // k for t, k in zip(here.tiles, kept, strict=True)]  # parts a dim is made of
        for dim, rows in enumerate(self._evened):
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
    place: Place, x: jax.Array, here: Sharding, kept: tuple[int, ...], groups: Groups
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


class Route(Step):
    """Each device gets the boxes that it lacks, point to point."""

    kind, what = "route", "send the missing parts"

    @property
    def rounds(self) -> int:
        """Its permutes; where devices hold nothing, the other way is to send all to all of them."""
        return 1 if self.here.idle else 1 + len(plan_boxes(self.here, self.target, self.shape))

    def _moved(self) -> int:
        rounds = plan_boxes(self.here, self.target, self.shape)
        return sum(r.sent for r in rounds) * self.itemsize

    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        return route(place, tile, self.target, reason)


class SpreadStep(Step):
    """All devices get all of what some devices hold."""

    kind, what = "spread", "spread to the devices that held none"

    @property
    def _mostly_held(self) -> bool:
        """Whether so few devices have no tile that a gather from all sends less than a sum."""
        return self.here.num_devices < 2 * math.prod(self.here.tiles)

    def _moved(self) -> int:
        if self._mostly_held:
            tile = math.prod(self._local) * self.itemsize
            return sent_bytes("all_gather", tile, self.here.num_devices)
        return 2 * math.prod(self.shape) * self.itemsize  # as among many devices

    def _uneven(self) -> int:
        padded = math.prod(self._local) * math.prod(self.here.tiles) * self.itemsize
        summed = sent_bytes("all_reduce", padded, self.here.num_devices)
        return 0 if self._mostly_held else summed - self.moved

    def _run(self, place: Place, tile: Tile, reason: Reason) -> Tile:
        everyone = (tuple(range(place.num_devices)),)
        if self._mostly_held:
            stack = collectives.all_gather(place, tile.array, 0, everyone, reason)
            return Tile(unstack(stack, self.here, tile.shape), self.target, tile.shape)
        whole = _summed_over_all(place, tile, everyone, reason)
        return Tile(lax.slice(whole, [0] * whole.ndim, tile.shape), self.target, tile.shape)


def _summed_over_all(place: Place, tile: Tile, everyone: Groups, reason: Reason) -> jax.Array:
    """One holder of each tile contributes it to a sum, the others zeros."""
    x = place.where(tile.sharding.first_copies, tile.array)  # padding is cut off in the end
    padded = [n * t for n, t in zip(tile.array.shape, tile.sharding.tiles, strict=True)]
    offsets = [tile.offset(place, d) for d in range(tile.sharding.rank)]
    starts = [jnp.asarray(offset, jnp.int32) for offset in offsets]
    whole = lax.dynamic_update_slice(padding.blank(padded, x.dtype), x, starts)
    return collectives.merge_disjoint(place, whole, everyone, reason)
