"""Who sends what to whom: point to point, and in exchanges.

CollectivePermutes send exactly what is missing, between any two tilings of a tensor: of different
tile counts on one dim, on other devices, or on fewer of them. That takes as many rounds as a device
has partners, so it is used where that number is small.

In an exchange (AllToAll within groups) each dim keeps its major tiles, as far as the two shardings
agree, and devices that share the kept tiles exchange minor parts of some dims for those of others.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving.collectives import collective_permute
from gshard.moving.row_windows import in_rounds
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Split, divisors
from gshard.tensors.tile import Tile

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A box of the tensor, from its first row to its end row in every dim."""

    sender: int
    receiver: int
    low: Shape
    high: Shape


@dataclass(frozen=True)
class BoxRound:
    """One permute of equal boxes: for each device, its source and target offsets."""

    pairs: tuple[tuple[int, int], ...]
    box: Shape
    send_start: np.ndarray  # [devices, dims] local row of the source tile
    receive_start: np.ndarray  # [devices, dims] local row of the target tile; dropped where < -box

    @property
    def is_remote(self) -> bool:
        """Whether anything is sent."""
        return any(s != d for s, d in self.pairs)

    @property
    def sent(self) -> int:
        """How many elements a device sends."""
        return math.prod(self.box) if self.is_remote else 0


@cached
def plan_boxes(source: Sharding, target: Sharding, shape: Shape) -> tuple[BoxRound, ...]:
    """The rounds that send every device its part of the tensor under `target`.

    The first round is local: what a device already has.
    """
    pieces = _pieces(source, target, shape)
    distance = target.tile_index[[p.receiver for p in pieces]]
    distance = distance - source.tile_index[[p.sender for p in pieces]]
    order = sorted(range(len(pieces)), key=lambda i: (distance[i], pieces[i].receiver))
    rounds = in_rounds(pieces[i] for i in order)
    assert rounds is not None
    return tuple(_round(part, source, target, shape) for part in rounds)


def route(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    """`tile` under `target`."""
    rounds, local = plan_boxes(tile.sharding, target, tile.shape), target.local_shape(tile.shape)
    moved = [
        d
        for d, (a, b) in enumerate(zip(tile.sharding.splits, target.splits, strict=True))
        if a or b
    ]
    margin = [
        max((r.box[d] for r in rounds), default=0) if d in moved else 0 for d in range(target.rank)
    ]
    buffer = padding.filled(
        [l + 2 * m for l, m in zip(local, margin, strict=True)], tile.array.dtype
    )
    for step in rounds:
        piece = lax.dynamic_slice(tile.array, _starts(place, step.send_start), step.box)
        if step.is_remote:
            piece = collective_permute(place, piece, step.pairs, reason)
        # A device that receives nothing writes zeros into the margin, which is dropped.
        start = np.where(
            step.receive_start < -np.array(step.box), -np.array(margin), step.receive_start
        )
        buffer = lax.dynamic_update_slice(buffer, piece, _starts(place, start + np.array(margin)))
    inside = lax.slice(buffer, margin, [m + l for m, l in zip(margin, local, strict=True)])
    return Tile(inside, target, tile.shape)


def _starts(place: Place, table: np.ndarray) -> list[jax.Array]:
    return [place.start(table[:, d]) for d in range(table.shape[1])]


def _pieces(source: Sharding, target: Sharding, shape: Shape) -> list[Box]:
    """Every box that a device needs, with a device that has it: itself if possible.

    The holders of a tile take turns.
    """
    before, after, holders = source.local_shape(shape), target.local_shape(shape), defaultdict(list)
    for device, index in enumerate(source.tile_index.tolist()):
        if index >= 0:
            holders[index].append(device)
    coords = [s.coords if s else np.zeros(target.num_devices, int) for s in target.splits]
    pieces: list[Box] = []
    served: dict[int, int] = defaultdict(int)
    for device in np.flatnonzero(target.tile_index >= 0).tolist():
        low = [int(c[device]) * l for c, l in zip(coords, after, strict=True)]
        high = [min(a + l, n) for a, l, n in zip(low, after, shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        spans = [
            range(a // l, min((b - 1) // l, t - 1) + 1)
            for a, b, l, t in zip(low, high, before, source.tiles, strict=True)
        ]
        for where in itertools.product(*spans):
            index = int(np.ravel_multi_index(where, source.tiles)) if where else 0
            candidates = holders[index]
            if device in candidates:
                sender = device
            else:
                sender = candidates[served[index] % len(candidates)]
                served[index] += 1
            lo = tuple(max(a, w * l) for a, w, l in zip(low, where, before, strict=True))
            hi = tuple(min(b, (w + 1) * l) for b, w, l in zip(high, where, before, strict=True))
            pieces.append(Box(sender, device, lo, hi))
    return pieces


def _round(part: Sequence[Box], source: Sharding, target: Sharding, shape: Shape) -> BoxRound:
    rank, devices = source.rank, source.num_devices
    before, after = source.local_shape(shape), target.local_shape(shape)
    box = tuple(max(p.high[d] - p.low[d] for p in part) for d in range(rank))
    send = np.zeros((devices, rank), np.int32)
    receive = np.full((devices, rank), np.iinfo(np.int32).min // 2, np.int32)
    for p in part:
        for d in range(rank):
            origin = _first_row(source.splits[d], p.sender, before[d])
            landing = _first_row(target.splits[d], p.receiver, after[d])
            send[p.sender, d] = min(p.low[d] - origin, before[d] - box[d])
            receive[p.receiver, d] = origin + send[p.sender, d] - landing
    pairs = tuple((p.sender, p.receiver) for p in sorted(part, key=lambda p: p.receiver))
    return BoxRound(pairs, box, send, receive)


def _first_row(split: Split | None, device: int, rows: int) -> int:
    return int(split.coords[device]) * rows if split else 0


# ---------------------------------------------------------------- exchanges


@cached
def kept_tiles(here: Sharding, target: Sharding) -> tuple[int, ...]:
    """Per dim, the number of major tiles that both shardings have in common."""
    kept = []
    for a, b in zip(here.splits, target.splits, strict=True):
        both = divisors(math.gcd(a.tiles, b.tiles)) if a and b else ()
        shared = [k for k in both if a and b and a.major(k) is b.major(k)]
        kept.append(max(shared, default=1))
    return tuple(kept)


def can_exchange(here: Sharding, target: Sharding) -> bool:
    """Whether there are groups of devices that turn `here` into `target` by one AllToAll.

    Each dim either grows or shrinks, and as many parts are given as taken. Then there are groups,
    whoever holds what: take the devices that share the kept parts as edges, from the part that one
    gives to the part that it takes. Equally many devices hold each tile before and after, so every
    part has equally many edges, and such a graph falls into perfect matchings (Koenig, 1916).
    """
    kept = kept_tiles(here, target)
    if any(a > k < b for a, b, k in zip(here.tiles, target.tiles, kept, strict=True)):
        return False
    given = math.prod(t // k for t, k in zip(target.tiles, kept, strict=True))
    if given == 1 or given != group_size(here, target):
        return False
    if not here.idle and not target.idle:
        return True
    return bool(((here.tile_index < 0) == (target.tile_index < 0)).all())


@cached
def exchange_groups(here: Sharding, target: Sharding) -> tuple[tuple[int, ...], ...]:
    """Groups of devices that turn `here` into `target` among themselves, where they can.

    Members share the kept part of every dim. Each part to give away along the dims that grow is
    held by one member, and each part to receive along the dims that shrink belongs to one member;
    members are in the order of the parts that they receive.
    """
    kept = kept_tiles(here, target)
    majors = [s.major(k) if s else None for s, k in zip(here.splits, kept, strict=True)]
    block = Sharding(tuple(majors), here.num_devices).tile_index
    gives, takes = _minor_parts(here, kept), _minor_parts(target, kept)
    size = group_size(here, target)
    block = np.where(here.tile_index < 0, -1, block)
    by_block = np.lexsort((takes, block))
    rows = by_block[block[by_block] >= 0].reshape(-1, size)
    numbers = np.arange(size)
    if (takes[rows] == numbers).all() and (np.sort(gives[rows], axis=1) == numbers).all():
        return tuple(map(tuple, rows.tolist()))
    groups: list[tuple[int, ...]] = []
    for b in range(int(block.max()) + 1):
        remaining = np.flatnonzero(block == b).tolist()
        while remaining:
            group = _matching(remaining, gives, takes, size)
            groups.append(tuple(sorted(group, key=lambda d: takes[d])))
            taken = set(group)
            remaining = [d for d in remaining if d not in taken]
    return tuple(sorted(groups))


def _minor_parts(sharding: Sharding, kept: tuple[int, ...]) -> np.ndarray:
    """For every device the number of its part of a kept tile."""
    pairs = zip(sharding.splits, kept, strict=True)
    minors = [s.minor(s.tiles // k) if s else None for s, k in pairs]
    return Sharding(tuple(minors), sharding.num_devices).tile_index


def group_size(here: Sharding, target: Sharding) -> int:
    """How many devices exchange parts with each other."""
    return math.prod(t // k for t, k in zip(here.tiles, kept_tiles(here, target), strict=True))


def _matching(devices: list[int], gives: np.ndarray, takes: np.ndarray, size: int) -> list[int]:
    """Among `devices`, one for each part to give that are also one for each part to take."""
    options: list[list[int]] = [[] for _ in range(size)]
    for d in devices:
        options[gives[d]].append(d)
    owner: dict[int, int] = {}  # part to take -> device

    def assign(give: int, seen: set[int]) -> bool:
        for device in options[give]:
            take = int(takes[device])
            if take in seen:
                continue
            seen.add(take)
            if take not in owner or assign(int(gives[owner[take]]), seen):
                owner[take] = device
                return True
        return False

    for give in range(size):
        found = assign(give, set())
        assert found, "tiles that are not held equally often"
    return list(owner.values())


@cached
def orders_of_parts(
    here: Sharding, kept: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> dict[tuple[int, ...], list[int]]:
    """In which order members hold the parts to give away, and the devices for which that is so."""
    gives = _minor_parts(here, kept)
    orders: dict[tuple[int, ...], list[int]] = {}
    for group in groups:
        order = tuple(np.argsort(gives[list(group)]).tolist())
        orders.setdefault(order, []).extend(group)
    return orders
