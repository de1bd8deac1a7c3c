"""UnevenArray: a result that does not divide by its tiles, and stays split between calls.

To JAX it is an array like any other: its logical value, whole on every device, is made when
something other than `gshard.jit` asks for it. `gshard.jit` takes the tiles as they lie.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard import keys, padding
from gshard._jax import register_array_type
from gshard.sharding import Sharding


class UnevenArray(jax.Array):
    """A tensor that does not divide by its tiles, cut as `tiling` says.

    `stack` holds the tiles of all devices, one after the other along the first dim. Everything
    else about it is that of the logical value, `sharding` too: whole on every device.
    """

    __slots__ = ("_shape", "stack", "tiling")
    __hash__ = None  # type: ignore[assignment]  # as for other arrays
    __array_priority__ = 100

    def __init__(self, stack: jax.Array, tiling: Sharding, shape: tuple[int, ...]):
        self.stack = stack
        self.tiling = tiling
        self._shape = shape

    shape = property(lambda self: self._shape)
    dtype = property(lambda self: self.stack.dtype)
    ndim = property(lambda self: len(self._shape))
    size = property(lambda self: math.prod(self._shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    itemsize = property(lambda self: self.dtype.itemsize)
    aval = property(lambda self: ShapedArray(self._shape, self.dtype, weak_type=self.weak_type))
    weak_type = property(lambda self: jax.typeof(self.stack).weak_type)  # keys have no other
    committed = _committed = True
    is_fully_replicated = True

    @property
    def mesh(self) -> Mesh:
        """The devices that hold its tiles, in their order."""
        mesh = self.stack.sharding.mesh  # type: ignore[attr-defined]
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def sharding(self) -> NamedSharding:
        """How JAX sees it: whole on every device. `tiling` says where the tiles are."""
        return NamedSharding(self.mesh, PartitionSpec())

    device = sharding
    is_fully_addressable = property(lambda self: self.stack.is_fully_addressable)
    addressable_shards = property(lambda self: self.logical().addressable_shards)
    global_shards = property(lambda self: self.logical().global_shards)
    format = property(lambda self: self.logical().format)

    def devices(self) -> set[jax.Device]:
        """The devices that hold its tiles."""
        return self.stack.devices()

    def addressable_data(self, index: int) -> jax.Array:
        """The logical value, as one of the devices has it."""
        return self.logical().addressable_data(index)

    def logical(self) -> jax.Array:
        """The value as an ordinary array, whole on every device."""
        whole = _unstacker(self.tiling, self._shape, self.sharding)
        return whole(self.stack)

    def block_until_ready(self) -> UnevenArray:
        """Wait until the value is there."""
        self.stack.block_until_ready()
        return self

    def copy_to_host_async(self) -> None:
        """Begin to copy it to the host."""
        self.stack.copy_to_host_async()

    def delete(self) -> None:
        """Give its memory back."""
        self.stack.delete()

    def is_deleted(self) -> bool:
        """Whether its memory was given back, as by donation."""
        return self.stack.is_deleted()

    def copy(self) -> UnevenArray:
        """Another array with the same value, cut in the same way."""
        return UnevenArray(self.stack.copy(), self.tiling, self._shape)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[str, Any]) -> UnevenArray:
        return self.copy()

    def __reduce__(self) -> Any:
        return jnp.asarray, (np.asarray(self),)  # as other arrays: by value

    def __array__(
        self, dtype: Any = None, context: None = None, copy: bool | None = None
    ) -> np.ndarray:
        if self.stack.is_fully_addressable:
            value = unstack(np.asarray(self.stack), self.tiling, self._shape)
        else:
            value = np.asarray(self.logical())
        return value if dtype is None else value.astype(dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.logical(), name)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.logical()[index]

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return self._shape[0]

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.logical())

    def __reversed__(self) -> Iterator[jax.Array]:
        return reversed(self.logical())

    def __repr__(self) -> str:
        if not self.is_fully_addressable:
            return f"UnevenArray(shape={self.shape}, dtype={self.dtype}, {self.tiling})"
        prefix = "UnevenArray("
        shown = np.array2string(np.asarray(self), prefix=prefix, separator=", ")
        return f"{prefix}{shown}, dtype={self.dtype}, {self.tiling})"

    def __str__(self) -> str:
        return str(np.asarray(self)) if self.is_fully_addressable else repr(self)


register_array_type(UnevenArray, lambda x: x.aval, lambda x: x.logical())


@functools.lru_cache(maxsize=1024)
def _unstacker(tiling: Sharding, shape: tuple[int, ...], wanted: NamedSharding) -> Any:
    return jax.jit(functools.partial(unstack, tiling=tiling, shape=shape), out_shardings=wanted)


def unstack(stack: Any, tiling: Sharding, shape: tuple[int, ...]) -> Any:
    """The logical value of a stack: the tiles side by side, padding cut off."""
    local = tiling.local_shape(shape)
    tiles = stack.reshape(tiling.num_devices, *local)[tiling.devices[..., 0].ravel()]
    grid = tiles.reshape(*tiling.tiles, *local)
    rank = len(shape)
    sides = grid.transpose([a for d in range(rank) for a in (d, rank + d)])
    whole = sides.reshape(tiling.padded_shape(shape))
    return whole[tuple(slice(0, n) for n in shape)]


def stack(value: Any, tiling: Sharding) -> Any:
    """The stack of a logical value; devices that hold nothing repeat the first tile."""
    if keys.is_key(value):
        raw = jax.random.key_data(value)
        more = (None,) * (raw.ndim - value.ndim)
        tiles = stack(raw, Sharding((*tiling.splits, *more), tiling.num_devices))
        return jax.random.wrap_key_data(tiles, impl=jax.random.key_impl(value))
    shape = value.shape
    local, padded = tiling.local_shape(shape), tiling.padded_shape(shape)
    numpy = np if isinstance(value, np.ndarray) else jnp
    pads = [(0, b - a) for a, b in zip(shape, padded, strict=True)]
    value = numpy.pad(value, pads, constant_values=numpy.asarray(padding.garbage(value.dtype)))
    rank = len(shape)
    sides = value.reshape([n for t, l in zip(tiling.tiles, local, strict=True) for n in (t, l)])
    grid = sides.transpose([2 * d for d in range(rank)] + [2 * d + 1 for d in range(rank)])
    tiles = grid.reshape(math.prod(tiling.tiles), *local)[np.maximum(tiling.tile_index, 0)]
    return tiles.reshape(tiling.num_devices * local[0], *local[1:])
