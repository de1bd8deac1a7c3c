"""The cheapest way from one sharding to another (sections 3.3.1 and 3.3.2).

A plan is a path of steps (`moving.steps`), each at most one collective. A search over intermediate
shardings finds the path on which a device sends the fewest bytes. Steps only depend on which device
holds which tile, so any device order works.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from gshard.graph.caching import cached
from gshard.graph.reason import Reason
from gshard.moving.costs import MAX_ROUNDS, MAX_STATES, STEP_COST, timed
from gshard.moving.halo import standardized
from gshard.moving.nodes import TensorNode, communicate
from gshard.moving.routes import can_exchange, kept_tiles, plan_boxes
from gshard.moving.steps import (
    Exchange,
    Gather,
    Permute,
    Route,
    Slice,
    SpreadStep,
    Step,
    can_permute,
    copies_as_split,
)
from gshard.tensors.devices import Place
from gshard.tensors.keys import as_integers, is_key
from gshard.tensors.sharding import Sharding, Split, compatible, divisors, towards
from gshard.tensors.tile import Tile, itemsize_of

Shape = tuple[int, ...]


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
        """Its steps, one after the other."""
        return _resharded(place, Tile(array, self.sharding, self.shape), self.target, self.reason)

    def __str__(self) -> str:
        return f"{self.sharding} -> {self.target}"


def reshard(place: Place, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    """`tile` under `target`: a node of the plan."""
    if tile.sharding == target and tile.is_standard:
        return tile
    node = Reshard(reason, tile.sharding, target, tile.shape)
    return Tile(communicate(node, tile.array, place), target, tile.shape)


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
        tile = step.run(place, tile, reason)
    return tile.array


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
    sent = [s for s in plan_reshard(source, target, shape, dtype) if s.bytes or s.rounds]
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
) -> tuple[Step, ...]:
    """The cheapest steps from `source` to `target`."""
    return _plan(source, target, tuple(shape), itemsize_of(dtype))


@cached
def _plan(source: Sharding, target: Sharding, shape: Shape, itemsize: int) -> tuple[Step, ...]:
    least = _missing(source, target, shape) * itemsize
    direct = [(step,) for step in _direct(source, target, shape, itemsize)]
    for steps in direct:
        if steps[0].bytes <= least:
            return steps
    found = (_search(source, target, shape, itemsize), *direct)
    return min(found, key=lambda steps: sum(s.bytes for s in steps))


def _search(source: Sharding, target: Sharding, shape: Shape, itemsize: int) -> tuple[Step, ...]:
    """A* from `source`; after a limit of shardings, the best path so far."""
    counter = itertools.count()  # ties are broken by age, so that the plan is deterministic
    queue: list[tuple[float, int, float, Sharding, tuple[Step, ...]]]
    queue = [(0.0, next(counter), 0.0, source, ())]
    best: dict[Sharding, float] = {source: 0.0}
    arrived: tuple[Step, ...] = ()
    visited: set[Sharding] = set()
    while queue and len(visited) < MAX_STATES:
        _, _, spent, here, path = heapq.heappop(queue)
        if here == target:
            return path
        if here in visited:
            continue
        visited.add(here)
        for step in _steps(here, target, shape, itemsize):
            total = spent + step.bytes + STEP_COST * step.rounds
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


@cached
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


def _through_whole(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Step]:
    """The fallback for unrelated tilings: gather everything, then slice."""
    whole = Sharding.replicated(here.rank, here.num_devices)
    if here.idle:
        yield SpreadStep(here, whole, shape, itemsize)
        here = whole
    for dim in [d for d, split in enumerate(here.splits) if split]:
        gathered = here.replace(dim, None)
        yield Gather(here, gathered, shape, itemsize)
        here = gathered
    yield Slice(here, target, shape, itemsize)


def _direct(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Step]:
    """The steps that lead directly to `target`."""
    if here.idle or target.idle:
        return
    if can_permute(here, target):
        yield Permute(here, target, shape, itemsize)
    kept = kept_tiles(here, target)
    if kept == here.tiles:
        yield Slice(here, target, shape, itemsize)
    gathered = [d for d, (a, b) in enumerate(zip(here.tiles, kept, strict=True)) if a > b]
    if kept == target.tiles and len(gathered) == 1:
        yield Gather(here, target, shape, itemsize)
    if can_exchange(here, target):
        yield Exchange(here, target, shape, itemsize)


def _steps(here: Sharding, target: Sharding, shape: Shape, itemsize: int) -> Iterator[Step]:
    """The steps from `here` that can be on a good path to `target`."""

    def to(kind: type[Step], sharding: Sharding) -> Step:
        return kind(here, sharding, shape, itemsize)

    def few_rounds() -> bool:
        return len(plan_boxes(here, target, shape)) <= MAX_ROUNDS + 1

    if here.idle or target.idle:
        if here.is_replicated:
            yield to(Slice, target)
        else:
            if few_rounds():
                yield to(Route, target)
            yield to(SpreadStep, Sharding.replicated(here.rank, here.num_devices))
        if here.idle != target.idle:
            return
    if here.idle and can_permute(here, target):
        yield to(Permute, target)
    yield from _direct(here, target, shape, itemsize)
    for between in _predecessors(target):
        if between != here and can_permute(here, between):
            yield to(Permute, between)
        elif between != here and can_exchange(here, between):
            yield to(Exchange, between)
    if (spare := copies_as_split(here)) and not here.idle:
        yield from (to(Slice, _refined(here, dim, spare)) for dim in range(here.rank))
    for dim, split in enumerate(here.splits):
        for finer in _finer(split, target, dim):
            new = here.replace(dim, finer)
            if finer is not split and compatible(new.splits):
                yield to(Slice, new)
        if split is None:
            continue
        for keep in divisors(split.tiles)[:-1]:
            gathered = here.replace(dim, split.major(keep))
            if not (here.idle and gathered.is_replicated):
                yield to(Gather, gathered)
            for other, now in enumerate(here.splits):
                wanted = target.splits[other]
                for moved in _appended(now, split, split.tiles // keep, wanted):
                    new = gathered.replace(other, moved)
                    if other != dim and compatible(new.splits) and can_exchange(here, new):
                        yield to(Exchange, new)
    if _misaligned(here, target) and few_rounds():
        yield to(Route, target)


def _misaligned(here: Sharding, target: Sharding) -> bool:
    """Whether some dim has two tile counts, neither of which divides the other."""
    return any(
        a and b and a.tiles % b.tiles and b.tiles % a.tiles
        for a, b in zip(here.splits, target.splits, strict=True)
    )


@cached
def _predecessors(target: Sharding) -> tuple[Sharding, ...]:
    """Shardings from which one gather or exchange leads to `target`."""
    return tuple(dict.fromkeys(_before(target)))


def _before(target: Sharding) -> Iterator[Sharding]:
    for dim in range(target.rank):
        for other, source in enumerate(target.splits):
            if other == dim or not source:
                continue
            for keep in divisors(source.tiles)[:-1]:
                minor = source.minor(source.tiles // keep)
                if minor:
                    yield _refined(target.replace(other, source.major(keep)), dim, minor)
    spare = copies_as_split(target)
    parts = [spare.major(count) for count in divisors(spare.tiles)[1:]] if spare else []
    yield from (_refined(target, dim, part) for dim in range(target.rank) for part in parts if part)


def _refined(sharding: Sharding, dim: int, part: Split) -> Sharding:
    """The sharding with every tile of `dim` split by `part`."""
    split = sharding.splits[dim]
    return sharding.replace(dim, split.times(part) if split else part)


def whole_along(here: Sharding, dim: int) -> list[Sharding]:
    """Shardings in which `dim` is unsplit: gathered, or its split moved to another dim."""
    split, gathered = here.splits[dim], here.replace(dim, None)
    if split is None or split.idle:
        return [gathered]
    moved = [_refined(gathered, other, split) for other in range(here.rank) if other != dim]
    return [gathered, *(m for m in moved if compatible(m.splits))]


def _finer(split: Split | None, target: Sharding, dim: int) -> list[Split]:
    """Refinements of `split` towards the target."""
    others = [split.times(other) if split else other for other in target.splits if other]
    return [*towards(split, target.splits[dim]), *others]


def _appended(into: Split | None, split: Split, factor: int, wanted: Split | None) -> list[Split]:
    """`into` refined by the minor `factor` tiles of `split`, in its order or the target's."""
    minor, tiles = split.minor(factor), factor * (into.tiles if into else 1)
    found = [into.times(minor) if into and minor else minor]
    found += [finer for finer in towards(into, wanted) if finer.tiles == tiles]
    return [finer for finer in found if finer]
