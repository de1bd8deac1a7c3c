"""The meshes that a number of devices can be."""

from __future__ import annotations

from typing import Any

from gshard.autosharding.rates import Rates
from gshard.autosharding.specs import MeshShape, mesh_shapes
from gshard.forecast.hardware import Hardware


def distinct_meshes(machine: Hardware, devices: int) -> list[MeshShape]:
    """Meshes of up to three axes, of those that differ in nothing but the order of axes one."""
    found: dict[Any, MeshShape] = {}
    for mesh in mesh_shapes(devices, 3):
        terms = Rates(machine, mesh).terms
        axes = [
            (size, *(f"{t:.6g}" for (_, at), pair in terms.items() if at == axis for t in pair))
            for axis, size in enumerate(mesh)
        ]
        found.setdefault(tuple(sorted(axes)), mesh)
    return list(found.values())
