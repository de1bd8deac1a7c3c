"""What moving data along the axes of a mesh takes: seconds by kind of collective and bytes."""

from __future__ import annotations

import functools
import math

import numpy as np

from gshard.autosharding.memory import Bools, Floats, Ints
from gshard.autosharding.specs import NONE, MeshShape, Spec, local_elements, specs_of
from gshard.autosharding.sums import PartialSum
from gshard.forecast.collective import collective_terms, reach
from gshard.forecast.hardware import Hardware
from gshard.moving.costs import LATENCIES

# What gathering tiles of unequal sizes takes: in two steps, with rows evened out in between.
_UNEVEN = 2.0

_SAMPLE = 1 << 24  # bytes by which the rate of an axis is measured


class Rates:
    """Collectives along single mesh axes of a machine: latency, and seconds per byte.

    Small collectives may be combined into one of up to `LATENCIES` times the bytes that are sent in
    the latency of one. Where that is assumed (`combined`), each pays its part of a latency.
    """

    def __init__(self, hardware: Hardware, mesh: MeshShape, combined: bool = False) -> None:
        self.hardware, self.mesh, self.combined = hardware, mesh, combined
        topology = hardware.topology(math.prod(mesh))
        ids = np.arange(math.prod(mesh)).reshape(mesh)
        self.most = LATENCIES * hardware.cost_model.latency  # bytes of combined collectives
        self.terms: dict[tuple[str, int], tuple[float, float]] = {}
        for axis, size in enumerate(mesh):
            rows = np.moveaxis(ids, axis, -1).reshape(-1, size)
            groups = tuple(tuple(int(i) for i in row) for row in rows)
            efficiency = hardware.efficiency
            skew = efficiency.skew_seconds * reach(topology, groups)
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                sent, waited = collective_terms(topology, kind, _SAMPLE, groups)
                latency = waited + efficiency.operator_seconds + skew
                self.terms[kind, axis] = latency, sent / efficiency.links / _SAMPLE

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
        latency, per_byte = self.terms[kind, axis]
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
