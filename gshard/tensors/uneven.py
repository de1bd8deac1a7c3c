"""`UnevenArray`: a result that does not divide by its tiles, and stays split between calls.

`gshard.jit` takes the tiles without moving them. So do elementwise operators between arrays of one
tiling and with scalars: `u * 2 + u` is split like `u`. For everything else in JAX it is a
replicated array: its tiles are gathered, with a warning that names the line.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.layout import Format
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard._jax import register_array_type
from gshard.graph.caching import cached
from gshard.graph.readable import table
from gshard.graph.source import here, warn_once
from gshard.tensors import keys, padding
from gshard.tensors.sharding import Sharding


class UnevenSharding(jax.sharding.Sharding):  # type: ignore[misc]  # of JAX's C++ code
    """The sharding of an `UnevenArray`, split by `tiling`, which no sharding of JAX can express.

    JAX passes such an array to other programs `gathered`, and makes arrays like it
    (`jnp.zeros_like`) replicated. So what JAX reads is that of a replicated array;
    `tiling.local_shape` has the shape of a tile.
    """

    def __init__(self, mesh: Mesh, tiling: Sharding):
        super().__init__()
        self.mesh = mesh
        self.tiling = tiling
        self.gathered = NamedSharding(mesh, PartitionSpec())

    is_fully_replicated = False

    def with_memory_kind(self, kind: str) -> Any:
        """Not supported: the tiles are in the devices' default memory."""
        raise NotImplementedError(f"an UnevenArray is in its devices' own memory, not in {kind!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnevenSharding):
            return False
        return (self.mesh, self.tiling) == (other.mesh, other.tiling)

    def __hash__(self) -> int:
        return hash((self.mesh, self.tiling))

    def __repr__(self) -> str:
        return f"UnevenSharding({self.tiling})"


class UnevenArray(jax.Array):
    """A tensor that does not divide by its tiles, split by `tiling`.

    `stack` has the tiles of all devices, concatenated along the first dim.
    """

    __slots__ = ("_shape", "stack", "tiling")
    __hash__ = None  # type: ignore[assignment]  # as for other arrays
    __array_priority__ = 100

    def __init__(self, stack: jax.Array, tiling: Sharding, shape: tuple[int, ...]):
        self.stack = stack
        self.tiling = tiling
        self._shape = shape

    shape = property(lambda self: self._shape)
    ndim = property(lambda self: len(self._shape))
    size = property(lambda self: math.prod(self._shape))
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    itemsize = property(lambda self: self.dtype.itemsize)
    aval = property(lambda self: ShapedArray(self._shape, self.dtype, weak_type=self.weak_type))
    weak_type = property(lambda self: jax.typeof(self.stack).weak_type)  # keys have no other
    committed = _committed = True
    is_fully_replicated = False

    @property
    def mesh(self) -> Mesh:
        """The devices that hold its tiles, in their order."""
        mesh = self.stack.sharding.mesh  # type: ignore[attr-defined]
        assert isinstance(mesh, Mesh)
        return mesh

    @property
    def sharding(self) -> UnevenSharding:
        """Where its tiles are."""
        return UnevenSharding(self.mesh, self.tiling)

    device = sharding
    format = property(lambda self: Format(self.stack.format.layout, self.sharding))

    def logical(self) -> jax.Array:
        """The value as an ordinary array, replicated on all devices."""
        return _unstacker(self.tiling, self._shape, self.sharding.gathered)(self.stack)

    def gathered(self) -> jax.Array:
        """The logical value for an operation of JAX, with a warning."""
        message = (
            f"a gshard.UnevenArray of shape {self._shape} ({self.tiling}) is gathered for an "
            f"operation outside of gshard.jit, {self.nbytes:,} bytes on each device; move the "
            "operation into gshard.jit, or call .logical() to gather it without this warning"
        )
        warn_once(here(), message, GatheredWarning)
        return self.logical()

    def _beside(self, other: Any) -> Any:
        """The operand for `other` in an operator on tiles; None if its tiling differs."""
        if isinstance(other, UnevenArray):
            alike = (other.tiling, other.shape, other.mesh) == (self.tiling, self.shape, self.mesh)
            return other.stack if alike else None
        number = isinstance(other, (bool, int, float, complex, np.generic))
        return other if number or getattr(other, "shape", None) == () else None

    def block_until_ready(self) -> UnevenArray:
        """Wait until the value is there."""
        self.stack.block_until_ready()
        return self

    def copy(self) -> UnevenArray:
        """Another array with the same value and tiling."""
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

    def __dlpack__(self, **options: Any) -> Any:
        """The logical value on the first device, gathered, for other libraries."""
        return self.addressable_data(0).__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        first: Any = self.stack.addressable_data(0)
        return first.__dlpack_device__()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.gathered(), name)

    def __len__(self) -> int:
        if not self._shape:
            raise TypeError("len() of unsized object")
        return self._shape[0]

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.gathered())

    def __repr__(self) -> str:
        if not self.is_fully_addressable:
            return f"UnevenArray(shape={self.shape}, dtype={self.dtype}, {self.tiling})"
        prefix = "UnevenArray("
        shown = np.array2string(np.asarray(self), prefix=prefix, separator=", ")
        return f"{prefix}{shown}, dtype={self.dtype}, {self.tiling})"

    def _repr_html_(self) -> str:
        """What it is and how it is split, without its values: for notebooks."""
        local = self.tiling.local_shape(self._shape)
        held = math.prod(local) * self.dtype.itemsize
        sizes = (" x ".join(map(str, shape)) for shape in (self._shape, local))
        row = (*sizes, str(self.dtype), str(self.tiling), f"{held:,} of {self.nbytes:,}")
        heads = ("shape", "on each device, padded", "dtype", "sharding", "bytes on each device")
        return table(heads, [row], "gshard.UnevenArray")

    def __str__(self) -> str:
        return str(np.asarray(self)) if self.is_fully_addressable else repr(self)


class GatheredWarning(UserWarning):
    """An operation outside of `gshard.jit` replicated an `UnevenArray`."""


def _delegate(cls: type, to: Callable[[Any], Any], *names: str) -> None:
    """Attributes and methods of a class that are those of `to(self)`."""

    def delegated(name: str) -> property:
        return property(lambda self: getattr(to(self), name))

    for name in names:
        setattr(cls, name, delegated(name))


_delegate(
    UnevenSharding, lambda self: self.gathered, "num_devices", "device_set", "memory_kind",
    "is_fully_addressable", "devices_indices_map", "shard_shape", "_device_assignment",
    "_internal_device_list", "_to_xla_hlo_sharding", "_to_sdy_sharding",
)  # fmt: skip
_delegate(
    UnevenArray, lambda self: self.stack, "dtype", "is_fully_addressable", "devices",
    "copy_to_host_async", "delete", "is_deleted",
)  # fmt: skip
# Libraries that save arrays by shards expect shards of equal shape.
_delegate(
    UnevenArray, lambda self: self.gathered(), "addressable_shards", "global_shards",
    "addressable_data", "__getitem__", "__iter__",
)  # fmt: skip


def _on_tiles(name: str) -> Callable[..., Any]:
    """An elementwise operator or method: on the tiles, if all operands have the same tiling."""

    def called(self: UnevenArray, *others: Any, **settings: Any) -> Any:
        if name in _OPERATORS:
            tiles = [self._beside(other) for other in others]
            if any(other is None for other in tiles):
                return getattr(self.gathered(), name)(*others, **settings)
            others = tuple(tiles)
        result = getattr(self.stack, name)(*others, **settings)
        if result is NotImplemented:
            return result
        return UnevenArray(result, self.tiling, self._shape)

    called.__name__ = name
    return called


_OPERATORS = {
    f"__{name}__"
    for name in (
        "neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "add", "radd", "sub",
        "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod", "pow",
        "rpow", "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift",
    )
}  # fmt: skip
for _name in (*_OPERATORS, "__round__", "astype", "conj", "conjugate", "round"):
    setattr(UnevenArray, _name, _on_tiles(_name))

register_array_type(
    UnevenArray, UnevenSharding, lambda x: x.aval, lambda x: x.gathered(), lambda s: s.gathered
)


@cached
def _unstacker(tiling: Sharding, shape: tuple[int, ...], wanted: NamedSharding) -> Any:
    return jax.jit(functools.partial(unstack, tiling=tiling, shape=shape), out_shardings=wanted)


def unstack(stack: Any, tiling: Sharding, shape: tuple[int, ...]) -> Any:
    """The logical value of a stack: the tiles concatenated, without padding."""
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
