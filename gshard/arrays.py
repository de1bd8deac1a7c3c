"""Where local programs meet global arrays: placing arguments, and wrapping results.

A sharding that divides, on devices in a regular order, is a `NamedSharding` of the program's mesh:
its arrays are ordinary `jax.Array`s and go in and out as they are. Any other tiling travels as a
*stack*: the tiles of all devices, one after the other along the first dim. Where such a tiling
divides it is unwrapped into an ordinary array on the way out, without moving anything; where it
does not, it stays a stack inside an `UnevenArray`.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.sharding import Sharding, Split
from gshard.tile import Tile, garbage


class UnevenArray:
    """A tensor that does not divide by its tiles, and stays split between calls.

    `np.asarray` and `jnp.asarray` give its logical value; so does arithmetic. `gshard.jit` takes
    it as it is.
    """

    def __init__(self, stack: jax.Array, sharding: Sharding, shape: tuple[int, ...]):
        self.stack = stack
        self.sharding = sharding
        self.shape = shape

    dtype = property(lambda self: self.stack.dtype)
    ndim = property(lambda self: len(self.shape))
    size = property(lambda self: math.prod(self.shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    weak_type = False

    def block_until_ready(self) -> UnevenArray:
        """Wait until the value is there."""
        self.stack.block_until_ready()
        return self

    def logical(self) -> jax.Array:
        """The value as an ordinary array, whole on every device."""
        mesh = self.stack.sharding.mesh  # type: ignore[attr-defined]
        unstack = jax.jit(
            functools.partial(_unstack, sharding=self.sharding, shape=self.shape),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        return unstack(self.stack)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if self.stack.is_fully_addressable:
            value = _unstack(np.asarray(self.stack), self.sharding, self.shape)
        else:
            value = np.asarray(self.logical())
        return value if dtype is None else value.astype(dtype)

    def __jax_array__(self) -> jax.Array:
        return self.logical()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logical(), name)

    def __getitem__(self, index) -> jax.Array:
        return self.logical()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __repr__(self) -> str:
        return f"UnevenArray(shape={self.shape}, dtype={self.dtype}, {self.sharding})"


def _on_logical_value(op, swapped: bool = False):
    def method(self, other):
        left, right = self.logical(), other.logical() if isinstance(other, UnevenArray) else other
        return op(right, left) if swapped else op(left, right)

    return method


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow", "lt", "le", "gt", "ge"):
    setattr(UnevenArray, f"__{_name}__", _on_logical_value(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(UnevenArray, f"__r{_name}__", _on_logical_value(getattr(operator, _name), swapped=True))
setattr(UnevenArray, "__neg__", lambda self: -self.logical())  # noqa: B010


def is_key(value: Any) -> bool:
    """Whether these are random keys, which NumPy does not know."""
    return jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key)


def _unstack(stack, sharding: Sharding, shape: tuple[int, ...]):
    """The logical value of a stack: the tiles side by side, padding cut off."""
    local = sharding.local_shape(shape)
    tiles = stack.reshape(sharding.num_devices, *local)[sharding.devices[..., 0].ravel()]
    grid = tiles.reshape(*sharding.tiles, *local)
    rank = len(shape)
    sides = grid.transpose([a for d in range(rank) for a in (d, rank + d)])
    whole = sides.reshape(sharding.padded_shape(shape))
    return whole[tuple(slice(0, n) for n in shape)]


def _stack(value, sharding: Sharding):
    """The stack of a logical value; devices that hold nothing repeat the first tile."""
    if is_key(value):
        raw = jax.random.key_data(value)
        more = (None,) * (raw.ndim - value.ndim)
        stack = _stack(raw, Sharding((*sharding.splits, *more), sharding.num_devices))
        return jax.random.wrap_key_data(stack, impl=jax.random.key_impl(value))
    shape = value.shape
    local, padded = sharding.local_shape(shape), sharding.padded_shape(shape)
    numpy = np if isinstance(value, np.ndarray) else jnp
    pads = [(0, b - a) for a, b in zip(shape, padded, strict=True)]
    value = numpy.pad(value, pads, constant_values=numpy.asarray(garbage(value.dtype)))
    rank = len(shape)
    sides = value.reshape([n for t, l in zip(sharding.tiles, local, strict=True) for n in (t, l)])
    grid = sides.transpose([2 * d for d in range(rank)] + [2 * d + 1 for d in range(rank)])
    tiles = grid.reshape(math.prod(sharding.tiles), *local)[np.maximum(sharding.tile_index, 0)]
    return tiles.reshape(sharding.num_devices * local[0], *local[1:])


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
        return jax.device_put(_stack(value, self.sharding), wanted)

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
    return jax.jit(functools.partial(_stack, sharding=sharding), out_shardings=wanted)


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
    for axes in _mesh_shapes(shardings, num_devices):
        found = [_port(s, tuple(n), axes) for s, n in zip(shardings, shapes, strict=True)]
        stacks = sum(p.stacked for p in found)
        if best is None or stacks < best[0]:
            best = (stacks, axes, found)
        if stacks == 0:
            break
    assert best
    return best[1], best[2]


def axis_names(axes: Sequence[int]) -> tuple[str, ...]:
    """The names of a mesh's axes."""
    return tuple(f"axis{i}" for i in range(len(axes))) if len(axes) > 1 else ("devices",)


def _mesh_shapes(shardings: Sequence[Sharding], num_devices: int):
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


def _port(sharding: Sharding, shape: tuple[int, ...], axes: tuple[int, ...]) -> Port:
    if 0 in shape:
        return Port(sharding, shape, PartitionSpec(), False)
    spec = partition_spec(sharding, axes) if sharding.is_even(shape) else None
    if spec is None:
        names = axis_names(axes)
        return Port(sharding, shape, PartitionSpec(names if len(names) > 1 else names[0]), True)
    return Port(sharding, shape, spec, False)


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
