"""UnevenArray: a result that does not divide by its tiles, and stays split between calls."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from gshard import padding
from gshard.keys import is_key
from gshard.sharding import Sharding


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
        whole = jax.jit(
            functools.partial(unstack, sharding=self.sharding, shape=self.shape),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )
        return whole(self.stack)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if self.stack.is_fully_addressable:
            value = unstack(np.asarray(self.stack), self.sharding, self.shape)
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


def unstack(stack, sharding: Sharding, shape: tuple[int, ...]):
    """The logical value of a stack: the tiles side by side, padding cut off."""
    local = sharding.local_shape(shape)
    tiles = stack.reshape(sharding.num_devices, *local)[sharding.devices[..., 0].ravel()]
    grid = tiles.reshape(*sharding.tiles, *local)
    rank = len(shape)
    sides = grid.transpose([a for d in range(rank) for a in (d, rank + d)])
    whole = sides.reshape(sharding.padded_shape(shape))
    return whole[tuple(slice(0, n) for n in shape)]


def stack(value, sharding: Sharding):
    """The stack of a logical value; devices that hold nothing repeat the first tile."""
    if is_key(value):
        raw = jax.random.key_data(value)
        more = (None,) * (raw.ndim - value.ndim)
        tiles = stack(raw, Sharding((*sharding.splits, *more), sharding.num_devices))
        return jax.random.wrap_key_data(tiles, impl=jax.random.key_impl(value))
    shape = value.shape
    local, padded = sharding.local_shape(shape), sharding.padded_shape(shape)
    numpy = np if isinstance(value, np.ndarray) else jnp
    pads = [(0, b - a) for a, b in zip(shape, padded, strict=True)]
    value = numpy.pad(value, pads, constant_values=numpy.asarray(padding.garbage(value.dtype)))
    rank = len(shape)
    sides = value.reshape([n for t, l in zip(sharding.tiles, local, strict=True) for n in (t, l)])
    grid = sides.transpose([2 * d for d in range(rank)] + [2 * d + 1 for d in range(rank)])
    tiles = grid.reshape(math.prod(sharding.tiles), *local)[np.maximum(sharding.tile_index, 0)]
    return tiles.reshape(sharding.num_devices * local[0], *local[1:])
