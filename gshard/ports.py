"""Where local programs meet global arrays: placing arguments, and wrapping results.

A sharding that divides, on devices in a regular order, is a `NamedSharding` of the program's mesh:
its arrays are ordinary `jax.Array`s and go in and out as they are. Any other tiling travels as a
*stack*: the tiles of all devices, one after the other along the first dim. Where such a tiling
divides it is unwrapped into an ordinary array on the way out, without moving anything; where it
does not, it stays a stack inside an `UnevenArray`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.keys import is_key
from gshard.meshes import axis_names, mesh_shapes, partition_spec
from gshard.sharding import Sharding
from gshard.tile import Tile
from gshard.uneven import UnevenArray, stack


@dataclass(frozen=True)
class Port:
    """How one argument or result crosses into the per-device program."""

    sharding: Sharding
    shape: tuple[int, ...]
    spec: PartitionSpec
    stacked: bool

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape of the global array that crosses."""
        if not self.stacked:
            return self.shape
        local = self.sharding.local_shape(self.shape)
        return (local[0] * self.sharding.num_devices, *local[1:])

    def enter(self, array: jax.Array) -> Tile:
        """The tile of this device, inside of the program."""
        if 0 in self.shape:  # crosses whole: XLA does not split what is empty
            array = jnp.zeros(self.sharding.local_shape(self.shape), array.dtype)
        return Tile(array, self.sharding, self.shape)

    def leave(self, tile: Tile) -> jax.Array:
        """What crosses of a result."""
        return jnp.zeros(self.shape, tile.array.dtype) if 0 in self.shape else tile.array

    def named(self, mesh: Mesh) -> NamedSharding:
        """How JAX calls the sharding of the array that crosses."""
        return NamedSharding(mesh, self.spec)

    def struct(self, mesh: Mesh, dtype: Any) -> jax.ShapeDtypeStruct:
        """The ordinary array that crosses here without moving; one that is uneven crosses whole."""
        if not self.stacked:
            sharding = self.named(mesh)
        elif self.sharding.is_even(self.shape):
            sharding = _ordinary(mesh, self.sharding)
        else:
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)

    def put(self, mesh: Mesh, value: Any) -> jax.Array:
        """`value` as the array that crosses; nothing moves if it is in place."""
        wanted = self.named(mesh)
        if isinstance(value, UnevenArray):
            if self.stacked and value.sharding == self.sharding and value.stack.sharding == wanted:
                return value.stack
            value = value.logical()
        if isinstance(value, jax.Array):
            if value.sharding == wanted and not self.stacked:
                return value
            if self.stacked and value.sharding == _ordinary(mesh, self.sharding):
                return _rewrap(mesh, self.sharding, value)
            value = _on_all_devices(mesh, value)
            if self.stacked and not value.is_fully_addressable:
                return _stacker(self.sharding, wanted)(value)
            if value.is_fully_addressable and not wanted.is_fully_addressable:
                if is_key(value) and not self.stacked:
                    return _spread_key(value, wanted)
                value = np.asarray(value)
        if not self.stacked:
            return jax.device_put(value, wanted)
        value = value if is_key(value) else np.asarray(value)
        return jax.device_put(stack(value, self.sharding), wanted)

    def get(self, mesh: Mesh, value: jax.Array) -> jax.Array | UnevenArray:
        """What the user sees of an array that crossed."""
        if not self.stacked:
            return value
        if not self.sharding.is_even(self.shape):
            return UnevenArray(value, self.sharding, self.shape)
        wanted = _ordinary(mesh, self.sharding)
        held = {s.device: s.data for s in value.addressable_shards}
        tiles = [held[d] for d in wanted.mesh.devices.ravel() if d in held]
        return jax.make_array_from_single_device_arrays(
            self.shape, wanted, tiles, dtype=value.dtype
        )


def _spread_key(key: jax.Array, wanted: NamedSharding) -> jax.Array:
    """A random key that every process has, as one array of all of them."""
    raw = jax.device_put(np.asarray(jax.random.key_data(key)), wanted)
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(key))


def _rewrap(mesh: Mesh, sharding: Sharding, value: jax.Array) -> jax.Array:
    """An ordinary array that `Port.get` made, as the stack it came from: nothing moves."""
    tiles = {s.device: s.data for s in value.addressable_shards}
    tile = sharding.local_shape(value.shape)
    spare = np.zeros(tile, value.dtype)  # for devices that hold nothing
    local = [
        tiles[d] if d in tiles else jax.device_put(spare, d)
        for d in mesh.devices.ravel()
        if d.process_index == jax.process_index()
    ]
    shape = (tile[0] * sharding.num_devices, *tile[1:])
    stacked = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_single_device_arrays(shape, stacked, local)


def _on_all_devices(mesh: Mesh, value: jax.Array) -> jax.Array:
    """An array that lies on some of the devices only, of several processes: known to them all.

    JAX moves arrays between processes only if all devices take part on both sides.
    """
    holding = value.sharding.device_set
    one_process = len({d.process_index for d in mesh.devices.flat}) == 1
    if one_process or not isinstance(value.sharding, NamedSharding) or len(holding) == mesh.size:
        return value
    number = {d: i for i, d in enumerate(mesh.devices.flat)}
    if not holding <= number.keys():
        return value
    grid = np.vectorize(number.__getitem__)(value.sharding.mesh.devices)
    sharding = Sharding.of_assignment(grid[..., 0], mesh.size)
    return UnevenArray(_rewrap(mesh, sharding, value), sharding, value.shape).logical()


@functools.lru_cache(maxsize=256)
def _stacker(sharding: Sharding, wanted: NamedSharding):
    return jax.jit(functools.partial(stack, sharding=sharding), out_shardings=wanted)


@functools.lru_cache(maxsize=4096)
def _ordinary(mesh: Mesh, sharding: Sharding) -> NamedSharding:
    """A tiling in any device order, as a NamedSharding with a mesh of its own."""
    names = tuple(f"dim{d}" for d in range(sharding.rank))
    devices = mesh.devices.ravel()[sharding.devices]
    return NamedSharding(Mesh(devices, (*names, "copies")), PartitionSpec(*names))


def ports(
    shardings: Sequence[Sharding], shapes: Sequence[tuple[int, ...]], num_devices: int
) -> tuple[tuple[int, ...], list[Port]]:
    """The mesh that suits most of the arrays that cross, and how each of them does."""
    best: tuple[int, tuple[int, ...], list[Port]] | None = None
    for axes in mesh_shapes(shardings, num_devices):
        found = [_port(s, tuple(n), axes) for s, n in zip(shardings, shapes, strict=True)]
        stacks = sum(p.stacked for p in found)
        if best is None or stacks < best[0]:
            best = (stacks, axes, found)
        if stacks == 0:
            break
    assert best
    return best[1], best[2]


def _port(sharding: Sharding, shape: tuple[int, ...], axes: tuple[int, ...]) -> Port:
    if 0 in shape:
        return Port(sharding, shape, PartitionSpec(), False)
    spec = partition_spec(sharding, axes) if sharding.is_even(shape) else None
    if spec is None:
        names = axis_names(axes)
        return Port(sharding, shape, PartitionSpec(names if len(names) > 1 else names[0]), True)
    return Port(sharding, shape, spec, False)
