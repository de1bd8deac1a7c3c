"""Conversion between shardings and JAX's `NamedSharding`s.

Devices are numbered in the order in which `gshard.jit` was given them, or in that of the user's
mesh. `sharding_of` reads a `NamedSharding`; `spec_on` writes one for a given mesh.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from gshard.graph.caching import cached
from gshard.tensors.sharding import Sharding, Split

Numbers = Mapping[Any, int]  # the number of each device
AnyMesh: TypeAlias = Mesh | AbstractMesh
_OWN = "gshard"  # prefix of the names of axes that gshard makes


def axis_names(axes: Sequence[int]) -> tuple[str, ...]:
    """The names of the axes of a mesh that gshard makes."""
    return tuple(f"{_OWN}{i}" for i in range(len(axes)))


def is_own(mesh: AnyMesh) -> bool:
    """Whether gshard made the mesh; its names mean nothing to the user."""
    return all(str(name).startswith(_OWN) for name in mesh.axis_names)


def make_mesh(axes: Sequence[int], devices: Sequence[jax.Device] | int) -> AnyMesh:
    """The mesh of a program, of real devices in order or of abstract devices."""
    names, types = axis_names(axes), (AxisType.Auto,) * len(axes)
    if isinstance(devices, int):
        return AbstractMesh(tuple(axes), names, types)
    return Mesh(np.asarray(devices).reshape(axes), names, types)


def mesh_shapes(shardings: Sequence[Sharding], num_devices: int) -> Iterator[tuple[int, ...]]:
    """Candidate shapes: one axis of all devices, then grids that the tile counts suggest."""
    yield (num_devices,)
    sizes = sorted({t for s in shardings for t in (*s.tiles, s.replicas) if 1 < t < num_devices})
    for count in (2, 3):
        for grid in itertools.permutations([n for n in sizes for _ in range(count)], count):
            if math.prod(grid) == num_devices:
                yield grid
    primes = prime_factors(num_devices)
    yield from sorted(set(itertools.islice(itertools.permutations(primes), 5040)))


def prime_factors(n: int) -> list[int]:
    """The prime factors of `n`: the finest grid of that many devices."""
    found, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
        divisor += 1
    return found


# ---------------------------------------------------------------- from gshard to JAX


def expressed(
    shardings: Sequence[Sharding],
    shapes: Sequence[Sequence[int]],
    num_devices: int,
    like: tuple[int, ...] | None = None,
) -> tuple[tuple[int, ...], list[PartitionSpec | None]]:
    """The axes of a mesh that can express most of the shardings, and each of these on it.

    `like` are the axes of the user's mesh, which are tried first.
    """
    best: tuple[int, tuple[int, ...], list[PartitionSpec | None]] | None = None
    for axes in itertools.chain([like] if like else [], mesh_shapes(shardings, num_devices)):
        specs = [partition_spec(s, n, axes) for s, n in zip(shardings, shapes, strict=True)]
        missing = specs.count(None)
        if best is None or missing < best[0]:
            best = (missing, axes, specs)
        if missing == 0:
            break
    assert best
    return best[1], best[2]


def partition_spec(
    sharding: Sharding, shape: Sequence[int], axes: tuple[int, ...]
) -> PartitionSpec | None:
    """The spec on a mesh that gshard makes; None if the sharding is irregular or does not divide.

    XLA does not split empty arrays: they are replicated.
    """
    if 0 in shape:
        return PartitionSpec()
    grid = np.arange(math.prod(axes)).reshape(axes)
    return spec_on(sharding, grid, axis_names(axes)) if sharding.is_even(shape) else None


def spec_on(sharding: Sharding, grid: np.ndarray, names: Sequence[str]) -> PartitionSpec | None:
    """The sharding in terms of the axes `names` of a grid of device numbers, if that is possible.

    None if the tiles do not follow the axes.
    """
    if grid.size != sharding.num_devices:
        return None
    raw = np.ascontiguousarray(grid, np.int64)
    found = [_axes_of(split, raw.tobytes(), raw.shape) for split in sharding.splits]
    entries = [e for e in found if e is not None]
    if len(entries) < len(found):
        return None
    while entries and not entries[-1]:
        entries.pop()
    return PartitionSpec(
        *(
            None if not e else names[e[0]] if len(e) == 1 else tuple(names[i] for i in e)
            for e in entries
        )
    )


@cached
def _axes_of(split: Split | None, raw: bytes, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh axes, major to minor, that a split runs along."""
    if split is None:
        return ()
    grid = split.coords[np.frombuffer(raw, np.int64)].reshape(axes)
    origin = (0,) * len(axes)
    weights = []
    for i, n in enumerate(axes):
        unit = tuple(int(j == i) for j in range(len(axes))) if n > 1 else origin
        weights.append(int(grid[unit] - grid[origin]))
    chosen = sorted((i for i, w in enumerate(weights) if w > 0), key=lambda i: -weights[i])
    expected = np.zeros(axes, np.int64)
    stride = 1
    for i in reversed(chosen):
        expected += stride * np.indices(axes)[i]
        stride *= axes[i]
    return tuple(chosen) if (expected == grid).all() else None


def named_on(mesh: Mesh, sharding: Sharding, numbers: Numbers) -> NamedSharding | None:
    """The sharding on the user's own mesh, if that can express it."""
    if any(d not in numbers for d in mesh.devices.flat):
        return None
    spec = spec_on(sharding, grid_of(mesh, numbers), mesh.axis_names)
    return None if spec is None else NamedSharding(mesh, spec)


def grid_of(mesh: AnyMesh, numbers: Numbers) -> np.ndarray:
    """The numbers of a mesh's devices, in its shape; abstract ones are counted up."""
    if isinstance(mesh, AbstractMesh):
        return np.arange(mesh.size).reshape(mesh.axis_sizes)
    flat = [numbers[d] for d in mesh.devices.flat]
    return np.array(flat).reshape(mesh.devices.shape)


def constrained(tensor: Any, sharding: Sharding, devices: tuple[jax.Device, ...]) -> Any:
    """`tensor` with the sharding as a constraint for XLA, where it divides and is regular.

    XLA drops a constraint that does not divide, so nothing is lost by leaving it out.
    """
    if not sharding.is_even(tensor.shape):
        return tensor
    named = named_on(_finest(devices), sharding, {d: i for i, d in enumerate(devices)})
    return tensor if named is None else jax.lax.with_sharding_constraint(tensor, named)


@cached
def _finest(devices: tuple[jax.Device, ...]) -> Mesh:
    """The mesh with the most axes, which can express every regular sharding of these devices."""
    mesh = make_mesh(prime_factors(len(devices)) or [1], devices)
    assert isinstance(mesh, Mesh)
    return mesh


@cached
def ordinary(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """A tiling in any device order, as a NamedSharding with a mesh of its own."""
    names = axis_names(sharding.tiles)
    devices = mesh.devices.ravel()[sharding.devices]
    return NamedSharding(Mesh(devices, (*names, f"{_OWN}_copies")), PartitionSpec(*names))


# ---------------------------------------------------------------- from JAX to gshard


def sharding_of(
    named: NamedSharding, rank: int, numbers: Numbers, num_devices: int
) -> tuple[Sharding, tuple[int, ...]]:
    """gshard's sharding for a `NamedSharding`, and the dims that are unconstrained."""
    mesh = named.mesh
    real = () if isinstance(mesh, AbstractMesh) else mesh.devices.flat
    unknown = [d for d in real if d not in numbers]
    if unknown or mesh.size > num_devices:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has {len(unknown) or mesh.size} devices that are not "
            f"among the {num_devices} that gshard.jit runs on; pass devices=mesh.devices.ravel()"
        )
    if len(named.spec) > rank:
        raise ValueError(
            f"{named.spec} has {len(named.spec)} entries, but the tensor has {rank} dims; give at "
            "most one for each dim"
        )
    numbered = grid_of(mesh, numbers).ravel()
    where = np.indices(tuple(mesh.shape.values()))
    axis_number = {name: i for i, name in enumerate(mesh.axis_names)}
    splits: list[Split | None] = []
    for names in entries_of(named.spec, rank):
        index = np.zeros(where.shape[1:], np.int64)
        for name in names:
            index = index * mesh.shape[name] + where[axis_number[name]]
        coords = np.full(num_devices, -1)
        coords[numbered] = index.ravel()
        splits.append(Split.of(coords))
    free = tuple(d for d, e in enumerate(named.spec) if e is PartitionSpec.UNCONSTRAINED)
    return Sharding(tuple(splits), num_devices), free


def entries_of(spec: PartitionSpec, rank: int = 0) -> list[tuple[str, ...]]:
    """The mesh axes that each dim is split over; none where it is unsplit, or unconstrained."""
    found = [(e,) if isinstance(e, str) else e if isinstance(e, tuple) else () for e in spec]
    return [*found, *[()] * (rank - len(found))]


def sharding_of_slices(
    held: Mapping[Any, tuple[slice, ...]], rank: int, numbers: Numbers, num_devices: int
) -> Sharding | None:
    """The sharding of an array of which every device holds these slices; None if irregular."""
    if any(d not in numbers for d in held):
        return None
    splits: list[Split | None] = []
    for dim in range(rank):
        starts = {d: index[dim].start or 0 for d, index in held.items()}
        order = {start: i for i, start in enumerate(sorted(set(starts.values())))}
        coords = np.full(num_devices, -1)
        for device, start in starts.items():
            coords[numbers[device]] = order[start]
        splits.append(Split.of(coords) if len(order) > 1 else None)
    return Sharding(tuple(splits), num_devices)
