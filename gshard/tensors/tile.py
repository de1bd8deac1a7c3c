"""`Tile`: one device's part of a tensor, with masks for its padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import ShapedArray

from gshard.graph.caching import cached
from gshard.tensors.devices import Place
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding


@dataclass(eq=False, slots=True)
class Value:
    """A value of the program: its variable, and how it can be recomputed (`moving.recompute`)."""

    var: Any
    made: Any = None


class HeldRows(NamedTuple):
    """Which rows of a lookup a device has; the others are zeros here. A mask over some dims."""

    mask: Any
    dims: tuple[int, ...]

    def select(self, array: Array, dims: Sequence[int], otherwise: float) -> Array:
        """`array`, of which these dims are the mask's, with another value for the other rows."""
        mask = lax.broadcast_in_dim(self.mask, array.shape, dims)
        return lax.select(mask, array, lax.full_like(array, otherwise))


@dataclass(eq=False, slots=True)  # not frozen: those take five times as long to make
class Tile:
    """A device's part of a tensor of logical `shape`.

    Along a split dim tile c starts at row c * array.shape[dim]. That size is the sharding's
    `ceil(size / tiles)`, except temporarily: a reshard or a reshape may leave larger tiles for
    `moving.halo` to even out. `origin` is the operator that left a value unreduced, for the
    reason of the collective that will reduce it, and `held` the rows of it that are not zero. Tiles
    of one `value` under several shardings have it in common; what an operator computes on the way
    to its results has none. Ways are chosen on tiles that are `blank`: without elements. One whose
    padding is masked along a dim alone knows that, and itself `unmasked`.
    """

    array: Array
    sharding: Sharding
    shape: tuple[int, ...]
    origin: str = ""
    held: HeldRows | None = None
    value: Value | None = None
    unmasked: tuple[int, Tile] | None = None

    @staticmethod
    def blank(
        sharding: Sharding, shape: tuple[int, ...], dtype: Any, origin: str = "", held: Any = None
    ) -> Tile:
        """A tile without elements."""
        array: Any = local_type(sharding.local_shape(shape), dtype)
        return Tile(array, sharding, shape, origin, held)

    def without_elements(self) -> Tile:
        """The same tile, blank."""
        held = self.held and HeldRows(None, self.held.dims)
        return Tile.blank(self.sharding, self.shape, self.array.dtype, self.origin, held)

    @property
    def is_blank(self) -> bool:
        """Whether it has no elements."""
        return type(self.array) is ShapedArray

    def of(self, value: Value | None) -> Tile:
        """The same tile, of this value."""
        return Tile(self.array, self.sharding, self.shape, self.origin, self.held, value)

    def holding(self, array: Array) -> Tile:
        """Other elements, under the same sharding."""
        return Tile(array, self.sharding, self.shape, self.origin, self.held)

    @property
    def is_standard(self) -> bool:
        """Whether the local shape is the one that the sharding prescribes."""
        return self.array.shape == self.sharding.local_shape(self.shape)

    @property
    def is_unreduced(self) -> bool:
        """Whether the value is the sum of what devices hold."""
        return bool(self.sharding.unreduced)

    @property
    def nbytes(self) -> int:
        """The size of the local array."""
        return byte_size(self.array.shape, self.array.dtype)

    def padded_dims(self) -> list[int]:
        """The dims along which some device holds padding; rows of ragged tiles are not masked."""
        return [
            d
            for d, (split, local, n) in enumerate(
                zip(self.sharding.splits, self.array.shape, self.shape, strict=True)
            )
            if split and local * split.tiles != n and not split.ragged
        ]

    def offset(self, place: Place, dim: int) -> Array | int:
        """The logical index of the first local row along `dim`."""
        split = self.sharding.splits[dim]
        if split is None:
            return 0
        return place.lookup(split.own * self.array.shape[dim])

    def is_padding(self, place: Place, dim: int) -> Array:
        """A mask of the local shape that is true where a row along `dim` is padding."""
        rows = lax.broadcasted_iota(jnp.int32, self.array.shape, dim)
        return rows >= self.shape[dim] - self.offset(place, dim)

    def masked(self, place: Place, value: Array | float, dims: list[int] | None = None) -> Tile:
        """This tile with `value` in its padding along `dims` (default: all dims)."""
        array = self.array
        masked = self.padded_dims() if dims is None else set(dims) & set(self.padded_dims())
        for dim in masked:
            fill = jnp.broadcast_to(jnp.asarray(value, array.dtype), array.shape)
            array = lax.select(self.is_padding(place, dim), fill, array)
        before = (next(iter(masked)), self) if len(masked) == 1 else None
        return Tile(array, self.sharding, self.shape, unmasked=before)


Tiles = list[Tile]
Arrays = Sequence[Array]


def rows_within(shape: Sequence[int], dim: int, first: Array | int, low: Any, high: Any) -> Array:
    """A mask of `shape`: the rows along `dim` from `low` to `high`, counted from `first` on."""
    row = lax.broadcasted_iota(jnp.int32, shape, dim)
    row = row if isinstance(first, int) and first == 0 else row + first
    return (row >= low) & (row < high)


@cached
def local_type(shape: tuple[int, ...], dtype: Any, weak: bool = False, **more: Any) -> ShapedArray:
    """The type of a local array."""
    return ShapedArray(shape, dtype, weak, **more)


@cached
def itemsize_of(dtype: Any) -> int:
    """Bytes of an element; a random key counts as the integers in it."""
    return 8 if is_key_type(dtype) else np.dtype(dtype).itemsize


def row_bytes(shape: Sequence[int], dim: int, dtype: Any) -> int:
    """Bytes of one row along `dim` of an array."""
    return math.prod(n for d, n in enumerate(shape) if d != dim) * itemsize_of(dtype)


@cached
def byte_size(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array."""
    return math.prod(shape) * itemsize_of(dtype)


def size_of(var: Any) -> int:
    """Bytes of a variable's value; none for what is no array."""
    aval = var.aval
    return byte_size(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0
