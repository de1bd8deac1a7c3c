"""The cheapest way from one sharding to another (sections 3.3.1 and 3.3.2).

A plan is a path of steps, each at most one collective: slice locally (free), permute tiles between
devices, exchange parts of dims (AllToAll), gather a dim, or route point to point. A search over
intermediate shardings finds the path on which a device sends the fewest bytes. Steps only depend on
which device holds which tile, so any device order works.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gshard.moving.boxes import plan_boxes
from gshard.moving.costs import MAX_ROUNDS, MAX_STATES, STEP_COST, timed
from gshard.moving.exchange import can_exchange, divisors, exchange_bytes, group_size, kept_tiles
from gshard.moving.sent import mostly_held, step_bytes
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import itemsize_of

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Hop:
    """One move to `target`; `bytes` is what a device sends for it."""

    kind: str  # "slice", "permute", "exchange", "gather", "route"
    target: Sharding
    bytes: int


def reshard_cost(
    source: Sharding, target: Sharding, shape: Sequence[int], dtype: Any, part: float = 1.0
) -> float:
    """The time to reshard, latency included, as bytes that could be sent in that time.

    Only a `part` of the bytes is sent if a value is recomputed from narrower ones.
    """
    if source == target or 0 in shape or not part:
        return 0.0
    if source.ragged is not None or target.ragged is not None:
        return _ragged_cost(source, target, shape, dtype)
    steps = plan_reshard(source, target, shape, dtype)
    sent = [s for s in steps if s.bytes or s.kind != "slice"]
    return timed(sum(s.bytes for s in sent) * part, len(sent))


def _ragged_cost(source: Sharding, target: Sharding, shape: Sequence[int], dtype: Any) -> float:
    """The cost where rows are ragged: all that devices hold are moved, garbage included."""
    held = list(shape)
    for dim, splits in enumerate(zip(source.splits, target.splits, strict=True)):
        for split in splits:
            if split and split.ragged:
                held[dim] = split.tiles * split.rows(shape[dim])
    return reshard_cost(source.even, target.even, held, dtype)


def plan_reshard(
    source: Sharding, target: Sharding, shape: Sequence[int], dtype: Any
) -> tuple[Hop, ...]:
    """The cheapest steps from `source` to `target`."""
    return _plan(source, target, tuple(shape), itemsize_of(dtype))


@functools.lru_cache(maxsize=16384)
def _plan(source: Sharding, target: Sharding, shape: Shape, itemsize: int) -> tuple[Hop, ...]:
    least = _missing(source, target, shape) * itemsize
    direct = [(step,) for step in _direct(source, target, shape, itemsize)]
    for steps in direct:
        if steps[0].bytes <= least and _sent(source, steps, shape, itemsize) == steps:
            return steps
    found = _search(source, target, shape, itemsize)
    exact = [_sent(source, steps, shape, itemsize) for steps in (found, *direct)]
    return min(exact, key=lambda steps: sum(s.bytes for s in steps))


def _sent(source: Sharding, steps: Sequence[Hop], shape: Shape, itemsize: int) -> tuple[Hop, ...]:
    """The steps with the bytes that they really send, with uneven tiles evened out."""
    found = []
    for step in steps:
        sent = step_bytes(step.kind, source, step.target, shape, itemsize)
        found.append(Hop(step.kind, step.target, sent))
        source = step.target
    return tuple(found)


def _search(source: Sharding, target: Sharding, shape: Shape, itemsize: int) -> tuple[Hop, ...]:
    """A* from `source`; after a limit of shardings, the best path so far."""
    counter = itertools.count()  # ties are broken by age, so that the plan is deterministic
    queue: list[tuple[float, int, float, Sharding, tuple[Hop, ...]]]
    queue = [(0.0, next(counter), 0.0, source, ())]
    best: dict[Sharding, float] = {source: 0.0}
    arrived: tuple[Hop, ...] = ()
    visited: set[Sharding] = set()
    while queue and len(visited) < MAX_STATES:
        _, _, spent, here, path = heapq.heappop(queue)
        if here == target:
            return path
        if here in visited:
            continue
        visited.add(here)
        for step in _steps(here, target, shape, itemsize):
            sent = step.bytes
            if here.idle:  # groups that omit devices may take other collectives
                sent = step_bytes(step.kind, here, step.target, shape, itemsize)
            total = spent + sent + STEP_COST * (step.kind != "slice")
            if total < min(best.get(step.target, math.inf), best.get(target, math.inf)):
                best[step.target] = total
                estimate = total + _missing(step.target, target, shape) * itemsize
                heapq.heappush(queue, (estimate, next(counter), total, step.target, (*path, step)))
                if step.target == target:
                    arrived = (*path, step)
    return arrived or tuple(_through_whole(source, target, shape, itemsize))


def _missing(here: Sharding, target: Sharding, shape: Shape) -> float:
    """A lower bound: elements of its tile in `target` that a device does not have yet.

    No step brings a device more than its cost, so the device that lacks most bounds the rest.
    """
    have, wanted = np.ones(here.num_devices), np.ones(here.num_devices)
    for n, a, b in zip(shape, here.splits, target.splits, strict=True):
        if a or b:
            shared, own = _shared_rows(a, b, n, here.num_devices)
            have, wanted = have * shared, wanted * own
        else:
            have, wanted = have * n, wanted * n
    missing = wanted - have
    return float(missing.max(where=target.tile_index >= 0, initial=0))


@functools.lru_cache(maxsize=16384)
def _shared_rows(
    here: Split | None, target: Split | None, n: int, num_devices: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many of its rows in `target` each device has, and how many it wants."""
    low_a, high_a = _rows(here, n, num_devices)
    low_b, high_b = _rows(target, n, num_devices)
    shared = np.minimum(high_a, high_b) - np.maximum(low_a, low_b)
    return np.maximum(shared, 0), high_b - low_b


def _rows(split: Split | None, n: int, num_devices: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the end row that each device holds."""
    if split is None:
        return np.zeros(num_devices), np.full(num_devices, n)
    rows = -(-n // split.tiles)
    low = np.minimum(split.coords * rows, n)
    return low, np.where(split.coords < 0, low, np.minimum(low + rows, n))


def _through_whole(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Hop]:
    """The fallback for unrelated tilings: gather everything, then slice."""
    if here.idle:
        step = _spread(here, shape, itemsize)
        yield step
        here = step.target
    for dim, split in enumerate(here.splits):
        if split:
            local = math.prod(here.local_shape(shape)) * itemsize
            here = here.replace(dim, None)
            yield Hop("gather", here, local * (split.tiles - 1))
    yield Hop("slice", target, 0)


def _direct(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Hop]:
    """The steps that lead directly to `target`."""
    local = math.prod(here.local_shape(shape)) * itemsize
    if here.idle or target.idle:
        return
    if here.tiles == target.tiles:
        yield Hop("permute", target, local)
    kept = kept_tiles(here, target)
    if kept == here.tiles:
        yield Hop("slice", target, 0)
    gathered = [d for d, (a, b) in enumerate(zip(here.tiles, kept, strict=True)) if a > b]
    if kept == target.tiles and len(gathered) == 1:
        yield Hop("gather", target, local * (here.tiles[gathered[0]] // kept[gathered[0]] - 1))
    if can_exchange(here, target):
        size = group_size(here, target)
        yield Hop("exchange", target, exchange_bytes(here, target, shape, itemsize, size))


def _steps(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Hop]:
    """The steps from `here` that can be on a good path to `target`."""
    local = math.prod(here.local_shape(shape)) * itemsize
    if here.idle or target.idle:
        yield from _idle_steps(here, target, shape, itemsize)
        if here.idle != target.idle:
            return
    if here.idle and here.tiles == target.tiles:
        yield Hop("permute", target, local)
    yield from _direct(here, target, shape, itemsize)
    for between in _predecessors(target):
        if between.tiles == here.tiles and between != here:
            yield Hop("permute", between, local)
    alike = _cut_alike(here, target)
    if alike:
        yield Hop("slice", alike, 0)
    for dim, split in enumerate(here.splits):
        for finer in _finer(split, target, dim):
            new = here.replace(dim, finer)
            if finer is not split and compatible(new.splits):
                yield Hop("slice", new, 0)
        if not split:
            continue
        for keep in divisors(split.tiles)[:-1]:
            gathered = here.replace(dim, split.major(keep))
            if not (here.idle and gathered.is_replicated):
                yield Hop("gather", gathered, local * (split.tiles // keep - 1))
            for other in range(here.rank):
                if other == dim:
                    continue
                for moved in _appended(
                    here.splits[other], split, split.tiles // keep, target.splits[other]
                ):
                    new = gathered.replace(other, moved)
                    if compatible(new.splits) and can_exchange(here, new):
                        size = split.tiles // keep
                        sent = exchange_bytes(here, new, shape, itemsize, size)
                        yield Hop("exchange", new, sent)
    if _misaligned(here, target):
        routed = _routed(here, target, shape, itemsize)
        if routed:
            yield routed


def _idle_steps(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Hop]:
    """Steps for tilings with idle devices: slice where everything is held, else send."""
    if here.is_replicated:
        yield Hop("slice", target, 0)
        return
    routed = _routed(here, target, shape, itemsize)
    if routed:
        yield routed
    yield _spread(here, shape, itemsize)


def _spread(here: Sharding, shape: Shape, itemsize: int) -> Hop:
    """A replicated copy for all devices of what some devices hold."""
    whole = Sharding.replicated(here.rank, here.num_devices)
    if mostly_held(here):
        tile = math.prod(here.local_shape(shape))
        return Hop("spread", whole, tile * (here.num_devices - 1) * itemsize)
    return Hop("spread", whole, 2 * math.prod(shape) * itemsize)


def _routed(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Hop | None:
    rounds = plan_boxes(here, target, shape)
    if len(rounds) > MAX_ROUNDS + 1:
        return None
    sent = sum(r.sent for r in rounds) * itemsize
    return Hop("route", target, sent + STEP_COST * len(rounds))


def _misaligned(here: Sharding, target: Sharding) -> bool:
    """Whether some dim has two tile counts, neither of which divides the other."""
    return any(
        a and b and a.tiles % b.tiles and b.tiles % a.tiles
        for a, b in zip(here.splits, target.splits, strict=True)
    )


def _predecessors(target: Sharding) -> Iterator[Sharding]:
    """Shardings from which one gather or exchange leads to `target`."""
    for dim, split in enumerate(target.splits):
        for other, source in enumerate(target.splits):
            if other == dim or not source:
                continue
            for keep in divisors(source.tiles)[:-1]:
                minor = source.minor(source.tiles // keep)
                if minor:
                    yield target.replace(other, source.major(keep)).replace(
                        dim, split.times(minor) if split else minor
                    )
    spare = copies_as_split(target)
    if spare:
        for dim, split in enumerate(target.splits):
            for count in divisors(spare.tiles)[1:]:
                part = spare.major(count)
                if part:
                    yield target.replace(dim, split.times(part) if split else part)


def whole_along(here: Sharding, dim: int) -> list[Sharding]:
    """Shardings in which `dim` is unsplit: gathered, or its split moved to another dim."""
    split, gathered = here.splits[dim], here.replace(dim, None)
    if split is None or split.idle:
        return [gathered]
    moved = [
        gathered.replace(other, now.times(split) if now else split)
        for other, now in enumerate(here.splits)
        if other != dim
    ]
    return [gathered, *(m for m in moved if compatible(m.splits))]


def copies_as_split(sharding: Sharding) -> Split | None:
    """The copies of each tile as a split that could be added to the tensor."""
    if sharding.replicas == 1:
        return None
    number = np.full(sharding.num_devices, -1)
    flat = sharding.devices.reshape(-1, sharding.replicas)
    number[flat] = np.arange(sharding.replicas)
    return Split.of(number)


def _cut_alike(here: Sharding, target: Sharding) -> Sharding | None:
    """`here` with its copies split to the target's tile counts, so that only a permute is left."""
    if any(b % a for a, b in zip(here.tiles, target.tiles, strict=True)) or here.idle:
        return None
    spare = copies_as_split(here)
    factor = math.prod(target.tiles) // math.prod(here.tiles)
    if factor == 1 or spare is None or spare.tiles % factor:
        return None
    left = spare.major(factor)
    for dim, (a, b) in enumerate(zip(here.tiles, target.tiles, strict=True)):
        if a < b:
            assert left
            part, now = left.major(b // a), here.splits[dim]
            assert part
            here = here.replace(dim, now.times(part) if now else part)
            left = left.minor(left.tiles // (b // a))
    return here


def _finer(split: Split | None, target: Sharding, dim: int) -> list[Split]:
    """Refinements of `split` towards the target."""
    found: list[Split] = []
    wanted = target.splits[dim]
    now = split.tiles if split else 1
    if wanted and wanted.tiles % now == 0 and wanted.major(now) is split:
        found += [_coarser(wanted, k) for k in divisors(wanted.tiles) if k > now and k % now == 0]
    for other in target.splits:
        if other:
            found.append(split.times(other) if split else other)
    return found


def _appended(into: Split | None, split: Split, factor: int, wanted: Split | None) -> list[Split]:
    """`into` refined by the minor `factor` tiles of `split`, in its order or the target's."""
    found = []
    minor = split.minor(factor)
    if minor:
        found.append(into.times(minor) if into else minor)
    now = into.tiles if into else 1
    if wanted and wanted.tiles % (now * factor) == 0 and wanted.major(now) is into:
        found.append(_coarser(wanted, now * factor))
    return found


def _coarser(split: Split, tiles: int) -> Split:
    """Coarser versions of `split`, with more than one tile."""
    part = split.major(tiles)
    assert part
    return part
