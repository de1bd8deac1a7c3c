"""Shardings in terms of a mesh's axes: the border to JAX's own `NamedSharding`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import PartitionSpec

from gshard.sharding import Sharding, Split


def axis_names(axes: Sequence[int]) -> tuple[str, ...]:
    """The names of a mesh's axes."""
    return tuple(f"axis{i}" for i in range(len(axes))) if len(axes) > 1 else ("devices",)


def mesh_shapes(shardings: Sequence[Sharding], num_devices: int):
    """The plain row of devices, then the grids that the tile counts suggest."""
    yield (num_devices,)
    sizes = sorted({t for s in shardings for t in (*s.tiles, s.replicas) if 1 < t < num_devices})
    for count in (2, 3):
        for grid in itertools.permutations([n for n in sizes for _ in range(count)], count):
            if math.prod(grid) == num_devices:
                yield grid
    primes = _primes(num_devices)
    yield from sorted(set(itertools.islice(itertools.permutations(primes), 5040)))


def _primes(n: int) -> list[int]:
    found, divisor = [], 2
    while n > 1:
        while n % divisor == 0:
            found.append(divisor)
            n //= divisor
        divisor += 1
    return found


def partition_spec(sharding: Sharding, axes: tuple[int, ...]) -> PartitionSpec | None:
    """The sharding in terms of mesh axes; None where it is not that regular."""
    entries = [_axes_of(split, axes) for split in sharding.splits]
    if any(e is None for e in entries):
        return None
    while entries and not entries[-1]:
        entries.pop()
    names = axis_names(axes)
    return PartitionSpec(
        *(
            None if not e else names[e[0]] if len(e) == 1 else tuple(names[i] for i in e)
            for e in entries
        )
    )


@functools.lru_cache(maxsize=4096)
def _axes_of(split: Split | None, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The mesh axes, major to minor, along which the tile number of a split counts up."""
    if split is None:
        return ()
    grid = split.coords.reshape(axes)
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
