"""The exact bytes that collectives and the steps of a reshard send.

Plans are compared by these numbers, and tests compare them with what is emitted. Uneven tiles send
more: to even them out, rows shift between neighbours before or after a step.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gshard.moving.boxes import plan_boxes
from gshard.moving.costs import sent_bytes
from gshard.moving.exchange import group_size, kept_tiles
from gshard.moving.ordered import sortable_bytes
from gshard.moving.row_windows import plan_windows, retiling
from gshard.tensors.sharding import Sharding

Shape = tuple[int, ...]
Sent = tuple[int, int]  # bytes, and in how many collectives


def gathered(size: int, members: int, groups: int, num_devices: int) -> int:
    """An AllGather in this many groups; if they omit an odd number of devices, a sum of parts."""
    if _covers_evenly(members, groups, num_devices):
        return sent_bytes("all_gather", size, members)
    return sent_bytes("all_reduce", size * members, members)


def exchanged(size: int, members: int, groups: int, num_devices: int) -> int:
    """An AllToAll; if its groups omit an odd number of devices, a gather."""
    if _covers_evenly(members, groups, num_devices):
        return sent_bytes("all_to_all", size, members)
    return sent_bytes("all_reduce", size * members, members)


def reduced(kind: str, elements: int, dtype: Any, members: int, num_devices: int) -> Sent:
    """The reduction of as many elements on each member of a group, by `kind`."""
    dtype, groups = np.dtype(dtype), num_devices // members
    size, is_bool = elements * dtype.itemsize, dtype == np.bool_
    if kind in ("prod", "xor") or (kind in ("and", "or") and not is_bool):  # of what is gathered
        return gathered(size, members, groups, num_devices), 1
    if kind == "tree":
        part = -(-elements // members) * dtype.itemsize
        sent = exchanged(part * members, members, groups, num_devices)
        # An AllReduce is a scatter and a gather, too, and counts as one.
        return sent + gathered(part, members, groups, num_devices), 1
    if kind == "sum":
        return sent_bytes("all_reduce", elements * 4 if is_bool else size, members), 1
    if kind in ("max", "min"):
        width, values = sortable_bytes(dtype)
        return values * sent_bytes("all_reduce", elements * width, members), values
    return sent_bytes("all_reduce", size, members), 1


@functools.lru_cache(maxsize=16384)
def scattered(
    here: Sharding, result: Sharding, dim: int, parts: int, shape: Shape, itemsize: int
) -> Sent:
    """A sum of which members get one of `parts` of `dim`, and which others with it reduce then."""
    local = here.local_shape(shape)
    rows = -(-shape[dim] // result.tiles[dim])
    sent = retile_elements(here.reduced, local, dim, rows * parts, shape) * itemsize
    after = (*local[:dim], rows, *local[dim + 1 :])
    part = math.prod(after) * itemsize
    sent += sent_bytes("reduce_scatter", part * parts, parts)
    across = math.prod(s.tiles for s in here.unreduced) // parts
    if across > 1:
        sent += sent_bytes("all_reduce", part, across)
    return sent + standard_elements(result, after, shape) * itemsize, 1 + (across > 1)


def _covers_evenly(members: int, groups: int, num_devices: int) -> bool:
    return (num_devices - members * groups) % members == 0


@functools.lru_cache(maxsize=16384)
def retile_elements(sharding: Sharding, local: Shape, dim: int, size: int, shape: Shape) -> int:
    """Elements that a device sends to have tiles of `size` rows along `dim`."""
    if local[dim] == size or sharding.splits[dim] is None:
        return 0
    windows = retiling(sharding.tiles[dim], local[dim], size, shape[dim])
    others = math.prod(n for d, n in enumerate(local) if d != dim)
    return plan_windows(windows).sent * others


def standard_elements(sharding: Sharding, local: Shape, shape: Shape) -> int:
    """Elements that a device sends to give its tile the size that the sharding prescribes."""
    return _evened_out(sharding, local, sharding.local_shape(shape), shape)[0]


def _evened_out(
    sharding: Sharding, local: Shape, wanted: Sequence[int], shape: Shape
) -> tuple[int, Shape]:
    sent = 0
    for dim, size in enumerate(wanted):
        sent += retile_elements(sharding, local, dim, size, shape)
        local = (*local[:dim], size, *local[dim + 1 :])
    return sent, local


@functools.lru_cache(maxsize=65536)
def step_bytes(kind: str, here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    """What a device sends in one step of a reshard, from standard tiles to standard tiles."""
    return _SENT[kind](here, target, shape, itemsize)


def _slice(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    local, sent = here.local_shape(shape), 0
    for dim, (old, new) in enumerate(zip(here.splits, target.splits, strict=True)):
        if old is new or new is None:
            continue
        rows = -(-shape[dim] // new.tiles)
        factor = new.tiles // (old.tiles if old else 1)
        sent += retile_elements(here, local, dim, rows * factor, shape)
        local = (*local[:dim], rows, *local[dim + 1 :])
        here = here.replace(dim, new)
    return sent * itemsize


def _permute(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    return math.prod(here.local_shape(shape)) * itemsize


def _exchange(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    kept, members = kept_tiles(here, target), group_size(here, target)
    local = list(here.local_shape(shape))
    for dim, (t, k) in enumerate(zip(target.tiles, kept, strict=True)):
        if t > k:
            local[dim] = t // k * -(-shape[dim] // t)
    sent, before = _evened_out(here, here.local_shape(shape), local, shape)
    groups = math.prod(here.tiles) * here.replicas // members
    moved = exchanged(math.prod(before) * itemsize, members, groups, here.num_devices)
    after = tuple(
        n // (t // k) * (h // k)
        for n, t, h, k in zip(before, target.tiles, here.tiles, kept, strict=True)
    )
    return (sent + standard_elements(target, after, shape)) * itemsize + moved


def _gather(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    local = here.local_shape(shape)
    (dim,) = [d for d in range(here.rank) if here.splits[d] is not target.splits[d]]
    members = here.tiles[dim] // target.tiles[dim]
    groups = math.prod(here.tiles) * here.replicas // members
    sent = gathered(math.prod(local) * itemsize, members, groups, here.num_devices)
    after = (*local[:dim], local[dim] * members, *local[dim + 1 :])
    return sent + standard_elements(target, after, shape) * itemsize


def _route(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    return sum(r.sent for r in plan_boxes(here, target, shape)) * itemsize


def _spread(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> int:
    local, devices = here.local_shape(shape), here.num_devices
    if mostly_held(here):
        return sent_bytes("all_gather", math.prod(local) * itemsize, devices)
    padded = math.prod(n * t for n, t in zip(local, here.tiles, strict=True))
    return sent_bytes("all_reduce", padded * itemsize, devices)


def mostly_held(here: Sharding) -> bool:
    """Whether so few devices have no tile that a gather from all sends less than a sum."""
    return here.num_devices < 2 * math.prod(here.tiles)


_SENT = {
    "slice": _slice,
    "permute": _permute,
    "exchange": _exchange,
    "gather": _gather,
    "route": _route,
    "spread": _spread,
}
