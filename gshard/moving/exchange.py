"""Exchanges (AllToAll within groups): between which shardings there is one, and its groups.

Each dim keeps its major tiles, as far as the two shardings agree. Devices that share the kept tiles
exchange minor parts of some dims for minor parts of others.
"""

from __future__ import annotations

import math

import numpy as np

from gshard.graph.caching import cached
from gshard.tensors.sharding import Sharding


@cached
def divisors(n: int) -> list[int]:
    """The divisors of a tile count, the count itself last."""
    return [k for k in range(1, n + 1) if n % k == 0]


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
