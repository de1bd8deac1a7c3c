"""What moving data along the axes of a mesh takes: seconds by kind of collective and bytes.

`Rates` prices the collectives that a lowered program is likely to have. `LowerBoundRates` prices no
more than any program pays: a value may be moved along several mesh axes with one collective or with
one after the other, in any order, and may be combined with others.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gshard.autosharding.cost import (
    NONE,
    MeshShape,
    Spec,
    local_elements,
    mesh_shapes,
    specs_of,
    tiles_of,
)
from gshard.autosharding.solver.problem import Bools, Floats, Ints
from gshard.forecast.collective import collective_terms, reach
from gshard.forecast.hardware import Hardware
from gshard.moving.costs import LATENCIES


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

# Bytes by which the likely rate of an axis is measured, and of which the latency is nothing.
_SAMPLE, _LARGE = 1 << 24, 1 << 40

Axes = tuple[int, ...]


class MeshRates:
    """A mesh of devices of a machine, and its collectives along some of its axes."""

    def __init__(self, hardware: Hardware, mesh: MeshShape) -> None:
        self.hardware, self.mesh = hardware, mesh
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


class Rates(MeshRates):
    """Likely rates: collectives along single mesh axes, one after the other.

    Small collectives may be combined into one of up to `LATENCIES` times the bytes that are sent in
    the latency of one. Where that is assumed (`combined`), each pays its part of a latency.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, combined: bool = False) -> None:
        super().__init__(hardware, mesh)
        self.combined = combined
        self.most = LATENCIES * hardware.cost_model.latency  # bytes of combined collectives

    def seconds(self, kind: str, axis: int, size: float) -> float:
        """A collective on an operand of `size` bytes on each device."""
        if self.mesh[axis] == 1:
            return 0.0
        return float(self._all_seconds(kind, axis, np.array(size)))

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
                sizes = self._local_elements(shape, now) * itemsize
                seconds = self._all_seconds(kind, axis, sizes)
                if kind == "all_gather" and not self.combined:
                    seconds = np.where(self._uneven(shape, now), _UNEVEN * seconds, seconds)
                total += np.where(moves, seconds, 0.0)
                now[..., axis] = np.where(moves, t, now[..., axis])
        return total

    def sums(self, partial: PartialSum, spec: Spec) -> float:
        """Seconds to add up partial results for a spec: first where the sum is cut on the way."""
        now, total = partial.made, 0.0
        for axis in sorted(partial.axes, key=lambda axis: spec[axis] == NONE):
            size = local_elements(partial.shape, now, self.mesh) * partial.itemsize
            kind = "all_reduce" if spec[axis] == NONE else "reduce_scatter"
            total += self.seconds(kind, axis, size)
            now = (*now[:axis], spec[axis], *now[axis + 1 :])
        return total

    def _all_seconds(self, kind: str, axis: int, sizes: Floats) -> Floats:
        """`seconds` of many collectives at once."""
        latency, per_byte = self.terms(kind, (axis,), _SAMPLE)
        part = np.ones(sizes.shape)
        if self.combined:
            part = np.minimum(1.0, sizes / self.most)
        return np.where(self.mesh[axis] == 1, 0.0, latency * part + per_byte * sizes)

    def _uneven(self, shape: tuple[int, ...], specs: Ints) -> Bools:
        """Whether a dim does not divide into tiles, under each of many specs."""
        found = np.zeros(specs.shape[:-1], dtype=bool)
        for dim, length in enumerate(shape):
            found |= length % np.where(specs == dim, self.mesh, 1).prod(-1) != 0
        return found

    def _local_elements(self, shape: tuple[int, ...], specs: Ints) -> Floats:
        """The elements of a tile under each of many specs, padding included."""
        total = np.ones(specs.shape[:-1])
        for dim, length in enumerate(shape):
            tiles = np.where(specs == dim, self.mesh, 1).prod(-1)
            total *= -(-length // tiles)
        return total


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


class LowerBoundRates(MeshRates):
    """Collectives along the axes of a mesh: the least latency, and the fewest seconds per byte.

    A collective of more than `largest` bytes, or one that exchanges, has a latency of its own;
    others may be combined. With no such limit (infinite), nothing has one.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, largest: float) -> None:
        super().__init__(hardware, mesh)
        self.largest = largest

    @functools.cache  # noqa: B019  (one per mesh, for as long as it is looked at)
    def reshards(self, shape: tuple[int, ...], itemsize: int) -> Floats:
        """Seconds from each spec of a tensor to each other one.

        Cut first, which sends nothing; then move axes between dims; then gather. Or gather all that
        moves.
        """
        specs = np.array(specs_of(shape, self.mesh)).reshape(-1, len(self.mesh))
        source, target = np.broadcast_arrays(specs[:, None], specs[None])
        cut = np.where(source == NONE, target, source) != NONE
        held = math.prod(shape) * itemsize / np.where(cut, self.mesh, 1).prod(-1)
        moved = (source != NONE) & (target != NONE) & (source != target)
        gathered = (source != NONE) & (target == NONE)
        exchanged = self._exchanges(source, target, moved, held) + self._gathers(gathered, held)
        return np.minimum(exchanged, self._gathers(moved | gathered, held))

    def sums(self, partial: PartialSum, spec: Spec) -> float:
        """Seconds to add up partial results for a spec: to scatter them over all axes and to gather
        them again over those that the spec does not use. Small ones pay no latency here."""
        size, every = self._tile(partial), self._nontrivial_axes(partial)
        if not every:
            return 0.0
        kept = tuple(a for a in every if spec[a] == NONE)
        left = size / math.prod(self.mesh[a] for a in every if a not in kept)
        kind = "all_reduce" if kept == every else "reduce_scatter"
        sent = size * self._scattering(every) + (left * self._scattering(kept) if kept else 0.0)
        return sent + float(self._min_latency(kind, every, np.array(size), partial.share))

    @functools.cache  # noqa: B019  (one per mesh, for as long as it is looked at)
    def _per_byte(self, kind: str, axes: Axes, shrinks: bool) -> float:
        """The fewest seconds per byte along some axes, in any number of steps; a step may leave a
        part to the next one, one for each of its devices."""
        found = []
        for part in _parts(axes):
            later = self._per_byte(kind, _without(axes, part), shrinks)
            parts = math.prod(self.mesh[a] for a in part) if shrinks else 1
            found.append(self.terms(kind, part, _LARGE)[1] + later / parts)
        return min(found, default=0.0)

    def _tile(self, partial: PartialSum) -> float:
        """Bytes that a device has of partial results."""
        tiles = tiles_of(partial.made, self.mesh, len(partial.shape))
        return partial.itemsize * math.prod(partial.shape) / math.prod(tiles)

    def _nontrivial_axes(self, partial: PartialSum) -> Axes:
        """The axes with several devices that partial results are summed over."""
        return tuple(a for a in sorted(partial.axes) if self.mesh[a] > 1)

    def _exchanges(self, source: Floats, target: Floats, moved: Bools, held: Floats) -> Floats:
        """Moves of axes from dim to dim: those between the same dims may be one, and all of them
        may be one permutation of tiles."""
        total, count = np.zeros(held.shape), np.zeros(held.shape)
        for axes in self._subsets():
            first = axes[0]
            alike = moved & (source == source[..., first : first + 1])
            alike &= target == target[..., first : first + 1]
            inside = np.isin(np.arange(len(self.mesh)), axes)
            together = (alike == inside).all(-1)
            seconds = held * self._exchanging(axes) + self._min_latency("all_to_all", axes, held)
            total += np.where(together, seconds, 0.0)
            count += together * len(axes)
        slope, latency = self._permuting
        return np.where(count > 1, np.minimum(total, held * slope + latency), total)

    def _gathers(self, gathered: Bools, held: Floats) -> Floats:
        """Gathers along some axes of tiles that hold so many bytes each."""
        total = np.zeros(held.shape)
        for axes in self._subsets():
            chosen = (gathered == np.isin(np.arange(len(self.mesh)), axes)).all(-1)
            result = held * math.prod(self.mesh[a] for a in axes)
            seconds = result * self._scattering(axes) + self._min_latency(
                "all_gather", axes, result
            )
            total += np.where(chosen, seconds, 0.0)
        return total

    def _min_latency(self, kind: str, axes: Axes, sizes: Floats, share: float = 1.0) -> Floats:
        """The least latencies of what moves along some axes, in any number of steps, without those
        that may be combined with others.

        `sizes` are of the largest step: of the operand, or of what is gathered; a `share` is sent.
        """
        if not axes:
            return np.zeros(sizes.shape)
        exchanged = kind == "all_to_all"
        apart = (share * sizes > (0.0 if exchanged else self.largest)) & math.isfinite(self.largest)
        found = []
        for step in _parts(axes):
            left = sizes if exchanged else sizes / math.prod(self.mesh[a] for a in step)
            later = self._min_latency(kind, _without(axes, step), left, share)
            found.append(self.terms(kind, step, 1)[0] * apart + later)
        return np.min(found, axis=0)

    def _subsets(self) -> Iterator[Axes]:
        """All sets of axes with several devices, but the empty one."""
        return _parts([axis for axis, size in enumerate(self.mesh) if size > 1])

    def _scattering(self, axes: Axes) -> float:
        """Seconds per byte of a ReduceScatter along some axes; of an AllGather, of its result."""
        return self._per_byte("reduce_scatter", axes, shrinks=True)

    def _exchanging(self, axes: Axes) -> float:
        """The same of an AllToAll, per byte that a device has."""
        return self._per_byte("all_to_all", axes, shrinks=False)

    @functools.cached_property
    def _permuting(self) -> tuple[float, float]:
        """Seconds per byte, and latency, of a permutation between neighbours along some axis."""
        efficiency, found = self.hardware.efficiency, []
        for axis in (axis for axis, size in enumerate(self.mesh) if size > 1):
            after = np.roll(self.ids, -1, axis)
            pairs = tuple(zip(self.ids.ravel().tolist(), after.ravel().tolist(), strict=True))
            sent, waited = collective_terms(
                self.topology, "collective_permute", _LARGE, pairs=pairs
            )
            found.append((sent / efficiency.links / _LARGE, waited + efficiency.operator_seconds))
        slopes, latencies = zip(*found, strict=True) if found else ((0.0,), (0.0,))
        return min(slopes), min(latencies)


def _parts(axes: Sequence[int]) -> Iterator[Axes]:
    """The sets of some of these axes, but the empty one."""
    for count in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, count)


def _without(axes: Axes, part: Axes) -> Axes:
    return tuple(a for a in axes if a not in part)
