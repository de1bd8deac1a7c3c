"""What moving data along the axes of a mesh takes: seconds by kind of collective and bytes."""

from __future__ import annotations

import functools
import math

import numpy as np

from gshard.autosharding.memory import Floats
from gshard.autosharding.specs import NONE, MeshShape, Spec, local_elements, specs_of
from gshard.forecast.collective import collective_terms, reach
from gshard.forecast.hardware import Hardware
from gshard.moving.costs import LATENCIES

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
        self.most = LATENCIES * hardware.machine.latency  # bytes of combined collectives
        self.terms: dict[tuple[str, int], tuple[float, float]] = {}
        for axis, size in enumerate(mesh):
            rows = np.moveaxis(ids, axis, -1).reshape(-1, size)
            groups = tuple(tuple(int(i) for i in row) for row in rows)
            reached = hardware.reached
            skew = reached.skew_seconds * reach(topology, groups)
            for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
                sent, waited = collective_terms(topology, kind, _SAMPLE, groups)
                latency = waited + reached.operator_seconds + skew
                self.terms[kind, axis] = latency, sent / reached.links / _SAMPLE

    def seconds(self, kind: str, axis: int, size: float) -> float:
        """A collective on an operand of `size` bytes on each device."""
        if self.mesh[axis] == 1:
            return 0.0
        latency, per_byte = self.terms[kind, axis]
        part = min(1.0, size / self.most) if self.combined else 1.0
        return latency * part + per_byte * size

    @functools.cache  # noqa: B019  (one per mesh, for as long as it is looked at)
    def reshards(self, shape: tuple[int, ...], itemsize: int) -> Floats:
        """Seconds from each spec of a tensor to each other one."""
        specs = specs_of(shape, self.mesh)
        table = np.zeros((len(specs), len(specs)))
        for i, source in enumerate(specs):
            for j, target in enumerate(specs):
                if i != j:
                    table[i, j] = self._reshard(shape, itemsize, source, target)
        return table

    def _reshard(self, shape: tuple[int, ...], itemsize: int, source: Spec, target: Spec) -> float:
        """Cut first, which sends nothing; then move axes between dims; then gather."""
        now = tuple(t if s == NONE else s for s, t in zip(source, target, strict=True))
        total = 0.0
        for axis, (s, t) in enumerate(zip(source, target, strict=True)):
            if NONE not in (s, t) and s != t:
                size = local_elements(shape, now, self.mesh) * itemsize
                total += self.seconds("all_to_all", axis, size)
                now = (*now[:axis], t, *now[axis + 1 :])
        for axis, (s, t) in enumerate(zip(source, target, strict=True)):
            if s != NONE and t == NONE:
                size = local_elements(shape, now, self.mesh) * itemsize
                total += self.seconds("all_gather", axis, size)
                now = (*now[:axis], NONE, *now[axis + 1 :])
        return total
