"""What a program costs on a mesh. Here: how tensors can be sharded, and what moving data takes.

A spec has for each mesh axis the dim that it cuts, or none. `Rates` gives seconds by kind of
collective and bytes: those that a lowered program is likely to have; `lower_bound` has rates of its
own.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gshard.autosharding.solver.problem import Floats
from gshard.forecast.collective import collective_terms, reach
from gshard.forecast.hardware import Hardware
from gshard.moving.costs import LATENCIES
from gshard.tensors.sharding import Sharding, Split, divisors

MeshShape = tuple[int, ...]
Spec = tuple[int, ...]  # one entry per mesh axis: a dim, or NONE
NONE = -1


def mesh_shapes(devices: int, most_axes: int = 2) -> list[MeshShape]:
    """All ways to write a number of devices as a product, in order, of at most so many factors."""
    found: list[MeshShape] = [] if devices > 1 else [(1,)]
    for first in divisors(devices)[1:]:
        rest = mesh_shapes(devices // first, most_axes - 1) if most_axes > 1 else []
        found += [(first,)] if first == devices else [(first, *shape) for shape in rest]
    return found


@functools.cache
def specs_of(shape: tuple[int, ...], mesh: MeshShape) -> tuple[Spec, ...]:
    """The specs of a tensor in which every tile of a dim has at least one row."""
    choices = itertools.product((NONE, *range(len(shape))), repeat=len(mesh))
    return tuple(s for s in choices if _has_rows(shape, s, mesh))


def _has_rows(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> bool:
    return all(
        size >= tiles for size, tiles in zip(shape, tiles_of(spec, mesh, len(shape)), strict=True)
    )


def tiles_of(spec: Spec, mesh: MeshShape, rank: int) -> tuple[int, ...]:
    """The number of tiles along each dim."""
    tiles = [1] * rank
    for dim, size in zip(spec, mesh, strict=True):
        if dim != NONE:
            tiles[dim] *= size
    return tuple(tiles)


def local_elements(shape: tuple[int, ...], spec: Spec, mesh: MeshShape) -> int:
    """The elements of a tile, padding included."""
    tiles = tiles_of(spec, mesh, len(shape))
    return math.prod(-(-n // t) for n, t in zip(shape, tiles, strict=True))


def sharding_of(spec: Spec, rank: int, mesh: MeshShape) -> Sharding:
    """The sharding over devices that are numbered row by row in the mesh."""
    devices = math.prod(mesh)
    coordinates = np.unravel_index(np.arange(devices), mesh)
    splits: list[Split | None] = []
    for dim in range(rank):
        index = np.zeros(devices, dtype=np.int64)
        for axis, at in enumerate(spec):
            if at == dim:
                index = index * mesh[axis] + coordinates[axis]
        splits.append(Split.of(index))
    return Sharding(tuple(splits), devices)


@dataclasses.dataclass(frozen=True)
class PartialSum:
    """What an operator leaves on each device of a tensor, to be added up over some mesh axes."""

    shape: tuple[int, ...]
    itemsize: int
    made: Spec  # how the partial results are sharded
    axes: tuple[int, ...]
    share: float = 1.0  # the part of it that is summed, at least

    def reduced_specs(self) -> Iterator[Spec]:
        """The specs that a sum may have: each axis that is summed over may cut any dim, or none."""
        anywhere = (NONE, *range(len(self.shape)))
        yield from itertools.product(
            *(anywhere if axis in self.axes else (at,) for axis, at in enumerate(self.made))
        )


# What gathering tiles of unequal sizes takes: in two steps, with rows evened out in between.
_UNEVEN = 2.0

_SAMPLE = 1 << 24  # bytes by which the likely rate of an axis is measured

Axes = tuple[int, ...]


class Rates:
    """Likely rates: collectives along single axes of a mesh of devices, one after the other.

    Small collectives may be combined into one of up to `LATENCIES` times the bytes that are sent in
    the latency of one. Where that is assumed (`combined`), each pays its part of a latency.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, combined: bool = False) -> None:
        self.hardware, self.mesh, self.combined = hardware, mesh, combined
        self.most = LATENCIES * hardware.cost_model.latency  # bytes of combined collectives
        self.topology = hardware.topology(math.prod(mesh))
        self.ids = np.arange(math.prod(mesh)).reshape(mesh)

    @functools.cache  # noqa: B019  (one per mesh, for as long as it is looked at)
    def terms(self, kind: str, axes: Axes, size: int) -> tuple[float, float]:
        """The latency, and seconds per byte, of one collective on operands of so many bytes."""
        last = range(len(self.mesh) - len(axes), len(self.mesh))
        members = math.prod(self.mesh[a] for a in axes)
        rows = np.moveaxis(self.ids, axes, tuple(last)).reshape(-1, members)
        groups = tuple(tuple(int(i) for i in row) for row in rows)
        efficiency = self.hardware.efficiency
        sent, waited = collective_terms(self.topology, kind, size, groups)
        skew = efficiency.skew_seconds * reach(self.topology, groups)
        return waited + efficiency.operator_seconds + skew, sent / efficiency.links / size

    @functools.cache  # noqa: B019  (one per mesh, for as long as it is looked at)
    def reshards(self, shape: tuple[int, ...], itemsize: int) -> Floats:
        """Seconds from each spec of a tensor to each other one.

        Cut first, which sends nothing; then move axes between dims; then gather.
        """
        specs = np.array(specs_of(shape, self.mesh)).reshape(-1, len(self.mesh))
        source, target = np.broadcast_arrays(specs[:, None], specs[None])
        now = np.where(source == NONE, target, source)
        total = np.zeros(now.shape[:2])
        for kind in ("all_to_all", "all_gather"):
            for axis in range(len(self.mesh)):
                s, t = source[..., axis], target[..., axis]
                moves = (s != NONE) & (s != t) & ((t == NONE) == (kind == "all_gather"))
                tiles = [np.where(now == dim, self.mesh, 1).prod(-1) for dim in range(len(shape))]
                rows = [-(-size // parts) for size, parts in zip(shape, tiles, strict=True)]
                seconds = self.seconds(kind, axis, math.prod(rows) * itemsize)
                if kind == "all_gather" and not self.combined:
                    pairs = zip(shape, tiles, strict=True)
                    uneven = np.any([size % parts != 0 for size, parts in pairs], axis=0)
                    seconds = np.where(uneven, _UNEVEN * seconds, seconds)
                total += np.where(moves, seconds, 0.0)
                now[..., axis] = np.where(moves, t, now[..., axis])
        return total

    def sums(self, partial: PartialSum, spec: Spec) -> float:
        """Seconds to add up partial results for a spec: first where the sum is cut on the way."""
        now, total = partial.made, 0.0
        for axis in sorted(partial.axes, key=lambda axis: spec[axis] == NONE):
            size = local_elements(partial.shape, now, self.mesh) * partial.itemsize
            kind = "all_reduce" if spec[axis] == NONE else "reduce_scatter"
            total += float(self.seconds(kind, axis, np.array(size)))
            now = (*now[:axis], spec[axis], *now[axis + 1 :])
        return total

    def seconds(self, kind: str, axis: int, sizes: Floats) -> Floats:
        """Collectives on operands of so many bytes on each device."""
        latency, per_byte = self.terms(kind, (axis,), _SAMPLE)
        part = np.ones(sizes.shape)
        if self.combined:
            part = np.minimum(1.0, sizes / self.most)
        return np.where(self.mesh[axis] == 1, 0.0, latency * part + per_byte * sizes)


def distinct_meshes(machine: Hardware, devices: int) -> list[MeshShape]:
    """Meshes of up to three axes, of those that differ in nothing but the order of axes one."""
    found: dict[Any, MeshShape] = {}
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for mesh in mesh_shapes(devices, 3):
        rates = Rates(machine, mesh)
        axes = [
            (size, *(f"{t:.6g}" for kind in kinds for t in rates.terms(kind, (axis,), _SAMPLE)))
            for axis, size in enumerate(mesh)
        ]
        found.setdefault(tuple(sorted(axes)), mesh)
    return list(found.values())
