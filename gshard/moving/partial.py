"""Partial results: each device has reduced only its own part of a split dim.

They are combined by AllReduce, or by ReduceScatter if the result is to be split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import LATENCIES, CostModel, cost_model, sent_bytes, timed
from gshard.moving.halo import retile_elements, retiled, standard_elements, standardized
from gshard.moving.nodes import TensorNode, communicate
from gshard.moving.plan import reshard, reshard_cost
from gshard.moving.reductions import identity, reduce, reduced_bytes, tree_reduce_scatter
from gshard.moving.steps import copies_as_split
from gshard.tensors.devices import Groups, Place, groups_by
from gshard.tensors.sharding import Sharding, Split, compatible, divisors, towards
from gshard.tensors.tile import Tile, itemsize_of


@dataclass(frozen=True)
class _Scatter:
    """A ReduceScatter along `dim`: the group is divided into `parts` shards of `result`."""

    dim: int
    result: Sharding
    parts: int


@dataclass(frozen=True)
class Reduce(TensorNode):
    """A value that is unreduced, reduced by `kind`, and scattered by `scatter` if given.

    `reason` names the operator that left it unreduced.
    """

    name: ClassVar[str] = "reduce"
    shape: tuple[int, ...]
    kind: str
    scatter: _Scatter | None

    @property
    def target(self) -> Sharding:
        """The sharding of the result."""
        return self.scatter.result if self.scatter else self.sharding.reduced

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The tile, or the part of it that is scattered to a device."""
        return self.target.local_shape(self.shape) if self.scatter else local

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """An AllReduce, or a ReduceScatter."""
        key, order, size = _parts(self.sharding)
        if self.scatter:
            tile = Tile(array, self.sharding.reduced, self.shape)
            return _scattered(place, tile, self.scatter, self).array
        groups = groups_by(key, order)
        if _has_idle_copies(self.sharding):
            # Devices without a part get the result too; they and copies of a part contribute
            # identities.
            part = place.lookup((key == 0).astype(np.int32))
            array = jnp.where(part == 1, array, identity(self.kind, array.dtype))
            groups = (tuple(range(place.num_devices)),)
        reason = self.reason.then(f"partial results over {size} devices")
        return reduce(place, array, groups, self.kind, reason)

    def __str__(self) -> str:
        over = math.prod(s.tiles for s in self.sharding.unreduced)
        result = f" -> {self.target}" if self.scatter else ""
        return f"{self.kind} over {over}{result}"


def combine(place: Place, tile: Tile, kind: str, target: Sharding, name: str = "") -> Tile:
    """`tile`, reduced by `kind` or scattered towards `target` if it is unreduced: a node.

    The reason is the operator that left it so, or the one of this `name`, which needs it.
    """
    here = tile.sharding
    if not here.unreduced or 0 in tile.shape:
        return Tile(tile.array, here.reduced, tile.shape)
    reason, cut = Reason("step", tile.origin or name), _wanted(here, target, tile.shape)
    array = tile.array
    if cut is not here:
        array = reshard(place, Tile(array, here.reduced, tile.shape), cut.reduced, reason).array
    scatter, _, _ = _plan(cut, kind, target, tile.shape, tile.array.dtype, cost_model())
    node = Reduce(reason, cut, tile.shape, kind, scatter)
    return Tile(communicate(node, array, place), node.target, tile.shape)


@cached
def _wanted(here: Sharding, target: Sharding, shape: tuple[int, ...]) -> Sharding:
    """An unreduced value without the rows that no member of a group wants: other groups' rows."""
    key, _, _ = _parts(here)
    for dim, (now, wanted) in enumerate(zip(here.splits, target.splits, strict=True)):
        for finer in towards(now, wanted):
            alike = len(np.unique(key * finer.tiles + finer.own)) == len(np.unique(key))
            even = now is None or shape[dim] % finer.tiles == 0
            cut = here.replace(dim, finer).unreduced_over(here.unreduced)
            if alike and even and not cut.idle and compatible(cut.splits) and (key >= 0).all():
                here = cut
    return here


def _has_idle_copies(here: Sharding) -> bool:
    """Whether devices without a part of a value that nothing else splits get its reduction too."""
    return here.unreduced[0].idle and here.reduced.is_replicated


def _scattered(place: Place, tile: Tile, scatter: _Scatter, node: Reduce) -> Tile:
    """Partial sums scattered; then reduced among the members with the same part."""
    _, _, size = _parts(node.sharding)
    left_by = node.reason
    result, dim, parts = scatter.result, scatter.dim, scatter.parts
    rows = -(-tile.shape[dim] // result.tiles[dim])
    padded = retiled(place, tile, dim, rows * parts, Reason("result", left_by.operator))
    reason = left_by.then(f"partial sums over {parts} devices, result split")
    within, across = scatter_groups(node.sharding, result)
    summed = tree_reduce_scatter if node.kind == "tree" else collectives.reduce_scatter
    x = summed(place, padded.array, dim, within, reason)
    if parts < size:
        reason = left_by.then(f"partial sums over {size // parts} groups of devices")
        x = collectives.all_reduce(place, x, across, "sum", reason)
    return standardized(place, Tile(x, result, tile.shape), reason)


def scatter_groups(here: Sharding, result: Sharding) -> tuple[Groups, Groups]:
    """The groups that scatter a value unreduced `here`, their members in the order of its parts.

    And the groups of members with the same part, which reduce it afterwards.
    """
    key, _, size = _parts(here)
    same = key * math.prod(result.tiles) + result.tile_index  # devices with the same part
    turn = np.zeros(len(same), np.int64)
    for group in groups_by(same, np.arange(len(same))):
        turn[list(group)] = np.arange(len(group))
    return groups_by(key * size + turn, result.tile_index), groups_by(same, turn)


def combine_disjoint(place: Place, tile: Tile, target: Sharding) -> Tile:
    """`combine` for values that one device has and the others have zeros for: bit-exact.

    It sums integers: sums of floats lose the sign of zero, and some flush denormals.
    """
    x, unreduced = tile.array, tile.sharding.unreduced
    if not unreduced:
        return tile
    if _in_pairs(x.dtype, tile, target):  # sums of 16-bit integers would be sent as 32 bits
        pairs = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint32)
        halved = (*tile.shape[:-1], tile.shape[-1] // 2)
        done = combine(place, replace(tile.holding(pairs), shape=halved), "sum", target)
        halves = lax.bitcast_convert_type(done.array, x.dtype)
        return Tile(halves.reshape(*halves.shape[:-2], -1), done.sharding, tile.shape)
    bits, back = collectives.as_bits(x)
    more = bits.shape[x.ndim :]  # of complex numbers, both parts
    here = tile.sharding.extended(len(more)).unreduced_over(unreduced)
    stacked = Tile(bits, here, (*tile.shape, *more), tile.origin)
    done = combine(place, stacked, "sum", target.extended(len(more)))
    return Tile(back(done.array), done.sharding.project(range(x.ndim)), tile.shape)


def _in_pairs(dtype: Any, tile: Tile, target: Sharding) -> bool:
    """Whether neighbours along the last dim stay together however it is split."""
    if itemsize_of(dtype) != 2 or not tile.shape:
        return False
    tiles = (tile.sharding.tiles[-1], target.tiles[-1])
    return all(tile.shape[-1] % (2 * t) == 0 for t in tiles)


def combine_cost(here: Sharding, kind: str, target: Sharding, aval: Any) -> float:
    """Bytes to reduce a value by `kind`, if it is unreduced, and to reshard it to `target`.

    They are those of the nodes that `combine` and a reshard of its result add to a plan.
    """
    shape = tuple(aval.shape)
    cost, result = 0.0, here.reduced
    if here.unreduced and 0 not in shape:
        cut = _wanted(here, target, shape)
        scatter, *sent = _plan(cut, kind, target, shape, aval.dtype, cost_model())
        cost, result = timed(*sent), scatter.result if scatter else cut.reduced
    return cost + reshard_cost(result, target, shape, aval.dtype)


@cached
def _plan(
    here: Sharding,
    kind: str,
    target: Sharding,
    shape: tuple[int, ...],
    dtype: Any,
    speeds: CostModel,
) -> tuple[_Scatter | None, int, int]:
    """How a value is scattered while it is reduced, if it is; and its bytes and collectives.

    If members share a part it takes two collectives. A small sum, for which the second would cost
    more even in a full combination (`LATENCIES`) than it saves in bytes, is all-reduced.
    """
    elements, members = math.prod(here.local_shape(shape)), _parts(here)[2]
    scatter = None
    if _has_idle_copies(here):
        members = here.num_devices
    elif kind == "tree":
        scatter = _by_subtrees(here, target, shape, dtype)
    elif kind == "sum":
        scatter = _scatter(here, target)
    if scatter and kind == "sum" and scatter.parts < members:
        saved = elements * itemsize_of(dtype) * (scatter.parts - 1) / scatter.parts
        scatter = scatter if saved > speeds.latency / LATENCIES else None
    if scatter:
        return scatter, *_scattered_bytes(here, scatter, shape, itemsize_of(dtype))
    return None, *reduced_bytes(kind, elements, dtype, members, here.num_devices)


def _scattered_bytes(
    here: Sharding, scatter: _Scatter, shape: tuple[int, ...], itemsize: int
) -> tuple[int, int]:
    """What `_scattered` sends, and in how many collectives."""
    dim, result, parts = scatter.dim, scatter.result, scatter.parts
    local, rows = here.local_shape(shape), -(-shape[dim] // result.tiles[dim])
    after = (*local[:dim], rows, *local[dim + 1 :])
    part, across = math.prod(after) * itemsize, _parts(here)[2] // parts
    shifted = retile_elements(here.reduced, local, dim, rows * parts, shape)
    shifted += standard_elements(result, after, shape)
    sent = sent_bytes("reduce_scatter", part * parts, parts) + shifted * itemsize
    return (sent + sent_bytes("all_reduce", part, across), 2) if across > 1 else (sent, 1)


@cached
def _parts(here: Sharding) -> tuple[np.ndarray, np.ndarray, int]:
    """The devices that combine: those with the same tile of the result and all parts of it."""
    parts = Sharding(here.unreduced, here.num_devices)
    both = Sharding((*here.splits, *here.unreduced), here.num_devices)
    number = copy.coords if (copy := copies_as_split(both)) else 0
    key = np.where(parts.tile_index < 0, -1, here.tile_index * both.replicas + number)
    return key, parts.tile_index, math.prod(parts.tiles)


def reducing_key(here: Sharding) -> np.ndarray:
    """For every device the number of the group that its part of an unreduced value belongs to."""
    key, _, _ = _parts(here)
    return key


def reducing_groups(here: Sharding) -> Groups:
    """The devices whose parts of an unreduced value belong together."""
    key, order, _ = _parts(here)
    return groups_by(key, order)


@cached
def _by_subtrees(
    here: Sharding, target: Sharding, shape: tuple[int, ...], dtype: Any
) -> _Scatter | None:
    """A scatter in the order of subtrees, if that and a reshard send less than an AllReduce."""
    scatter = _scatter(here, target)
    if scatter and _ordered(here, scatter):
        return scatter
    _, order, size = _parts(here)
    split = None if (order < 0).any() else Split.of(order)
    best, found = reshard_cost(here.reduced, target, shape, dtype), None
    best += math.prod(here.local_shape(shape)) * itemsize_of(dtype) * (size - 1) / size
    for dim, (now, wanted) in enumerate(zip(here.splits, target.splits, strict=True)):
        if split and wanted and now is None and shape[dim] % size == 0:
            result = here.reduced.replace(dim, split)
            if compatible(result.splits):
                cost = reshard_cost(result, target, shape, dtype)
                if cost < best:
                    best, found = cost, _Scatter(dim, result, size)
    return found


def _ordered(here: Sharding, scatter: _Scatter) -> bool:
    """Whether members hold all parts of the result in the order of their subtrees."""
    key, order, size = _parts(here)
    tiles = scatter.result.tile_index
    return scatter.parts == size and groups_by(key, order) == groups_by(key, tiles)


@cached
def _scatter(here: Sharding, target: Sharding) -> _Scatter | None:
    """A sharding towards `target` in which members of a reducing group hold different parts."""
    key, order, size = _parts(here)
    if (order < 0).any():
        return None
    for parts in divisors(size)[:0:-1]:
        for dim, (now, wanted) in enumerate(zip(here.splits, target.splits, strict=True)):
            tiles = parts * here.tiles[dim]
            finer = next((each for each in towards(now, wanted) if each.tiles == tiles), None)
            if finer is None:
                continue
            result = here.replace(dim, finer)
            same = key * math.prod(result.tiles) + result.tile_index
            _, counts = np.unique(same, return_counts=True)
            even = len(counts) * size == here.num_devices * parts and len(set(counts)) == 1
            if compatible(result.splits) and even and not (result.tile_index < 0).any():
                return _Scatter(dim, result, parts)
    return None
