"""Ports between global arrays and per-device programs: placing arguments, wrapping results.

A sharding that divides, on devices in a regular order, is a `NamedSharding` of the program's mesh:
its arrays are ordinary `jax.Array`s and are passed as they are. Any other tiling is passed as a
*stack*: the tiles of all devices, concatenated along the first dim. A result whose tiling divides
is unwrapped into an ordinary array without moving data; otherwise it stays a stack inside an
`UnevenArray`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard import _jax
from gshard.capture.placement import DeviceOrder, other_layout
from gshard.capture.stage import Captured
from gshard.graph import bodies
from gshard.graph.caching import cached
from gshard.moving.available import Seen
from gshard.planning.plan import Plan
from gshard.propagation.propagate import Propagated
from gshard.tensors import keys
from gshard.tensors.devices import Place
from gshard.tensors.meshes import AnyMesh, expressed, make_mesh, named_on, ordinary
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile
from gshard.tensors.uneven import UnevenArray, stack, unstack


@dataclass(frozen=True)
class Port:
    """How one argument or result is passed to or from the per-device program.

    `label` is the sharding in terms of the user's own mesh, where that can express it.
    """

    sharding: Sharding
    shape: tuple[int, ...]
    spec: PartitionSpec
    stacked: bool
    label: NamedSharding | None = None

    @property
    def physical_shape(self) -> tuple[int, ...]:
        """The shape of the global array that is passed."""
        if not self.stacked:
            return self.shape
        local = self.sharding.local_shape(self.shape)
        return (local[0] * self.sharding.num_devices, *local[1:])

    @functools.cached_property
    def uneven(self) -> bool:
        """Whether the user sees an `UnevenArray`."""
        return self.stacked and not self.sharding.is_even(self.shape)

    # ------------------------------------------------------------ inside of the program

    def enter(self, array: jax.Array) -> Tile:
        """The tile of this device, inside of the program."""
        if 0 in self.shape:  # passed replicated: XLA does not split empty arrays
            array = jnp.zeros(self.sharding.local_shape(self.shape), array.dtype)
        return Tile(array, self.sharding, self.shape)

    def leave(self, tile: Tile, aval: Any) -> jax.Array:
        """The output for a result's tile, with the weak type of `aval`, which no operator keeps."""
        assert tile.array.dtype == aval.dtype, (tile, aval)
        out = jnp.zeros(self.shape, aval.dtype) if 0 in self.shape else tile.array
        weak = getattr(aval, "weak_type", False)
        return out if weak == jax.typeof(out).weak_type else with_weak_type(out, weak)

    def whole_in(self, value: jax.Array) -> jax.Array:
        """A logical value as an input, for programs of logical values."""
        return stack(value, self.sharding) if self.stacked else value

    def whole_out(self, value: jax.Array) -> jax.Array:
        """The logical value of an output."""
        return unstack(value, self.sharding, self.shape) if self.stacked else value

    # ------------------------------------------------------------ outside of it

    def named(self, mesh: AnyMesh) -> NamedSharding:
        """JAX's sharding of the array that is passed."""
        return NamedSharding(mesh, self.spec)

    def struct(self, mesh: Mesh, dtype: Any) -> jax.ShapeDtypeStruct:
        """An array that needs no move here; one that does not divide is replicated."""
        if self.label is not None:
            sharding = self.label
        elif not self.stacked:
            sharding = self.named(mesh)
        elif self.sharding.is_even(self.shape):
            sharding = ordinary(mesh, self.sharding)
        else:
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)

    def put(self, mesh: Mesh, value: Any) -> jax.Array:
        """`value` as an input; an array already in place is not moved."""
        wanted = self.named(mesh)
        if isinstance(value, UnevenArray):
            placed = in_place(value.stack.sharding, wanted, value.ndim)
            if self.stacked and value.tiling == self.sharding and placed:
                return value.stack
            value = value.logical()
        if isinstance(value, jax.Array):
            here = value.sharding
            if not self.stacked and in_place(here, wanted, value.ndim):
                return value
            if other_layout(value) is not None:  # JAX would send some of its bytes as they are
                value = _copier(here)(value)
            if self.stacked and here == ordinary(mesh, self.sharding):
                return _rewrap(mesh, self.sharding, value)
            value = _on_all_devices(mesh, value)
            if self.stacked and not value.is_fully_addressable:
                return _stacker(self.sharding, wanted)(value)
            if value.is_fully_addressable and not wanted.is_fully_addressable:
                if keys.is_key(value) and not self.stacked:
                    return _spread_key(value, wanted)
                value = np.asarray(value)
        if not self.stacked:
            return _placed(value, wanted)
        value = value if keys.is_key(value) else np.asarray(value)
        return _placed(stack(value, self.sharding), wanted)

    def get(self, mesh: Mesh, value: jax.Array) -> jax.Array:
        """What the user sees of an output."""
        if value.dtype == jax.dtypes.float0:  # float0, the gradient of an integer: a NumPy array
            return value if not self.stacked else value[tuple(map(slice, self.shape))]
        if self.label is not None and self.label != value.sharding:
            return _relabelled(value, self.label)
        if not self.stacked:
            return value
        if self.uneven:
            return UnevenArray(value, self.sharding, self.shape)
        wanted = ordinary(mesh, self.sharding)
        made = _with_tiles_of(value, wanted, self.shape)
        return _weakly_typed(wanted)(made) if jax.typeof(value).weak_type else made


def _placed(value: Any, wanted: NamedSharding) -> jax.Array:
    """A value of this process, or the same value of all of them, as one array.

    `jax.device_put` compares the values of several processes first. That is a collective of its
    own, in which a call would wait for a missing process where no recorder sees it.
    """
    if isinstance(value, np.ndarray) and not wanted.is_fully_addressable:
        return jax.make_array_from_callback(value.shape, wanted, value.__getitem__)
    return jax.device_put(value, wanted)


@cached
def _weakly_typed(sharding: NamedSharding) -> Any:
    """A function that makes an array weakly typed, which JAX's own constructors cannot."""
    return jax.jit(functools.partial(with_weak_type, weak=True), out_shardings=sharding)


def with_weak_type(array: jax.Array, weak: bool) -> jax.Array:
    """The same array, weakly typed or not."""
    params = {"new_dtype": array.dtype, "weak_type": weak, "sharding": None}
    return convert_element_type_p.bind(array, **params)


def laid_out(array: Any, layout: Any) -> jax.Array:
    """The array in this memory layout: itself, if it has it, or if any will do (None)."""
    own = None if keys.is_key(array) else array.format.layout
    if own is None or layout is None:
        return array
    # `==` would compare the bits of an element, which JAX gives for programs and not for arrays.
    parts = [(known.major_to_minor, known.tiling or ()) for known in (own, layout)]
    return array if parts[0] == parts[1] else jax.device_put(array, Format(layout, array.sharding))


def in_place(here: Any, wanted: NamedSharding, rank: int) -> bool:
    """Whether two shardings place an array alike, however they are written."""
    return here == wanted or here.is_equivalent_to(wanted, rank)


def _relabelled(value: jax.Array, label: NamedSharding) -> jax.Array:
    """The same array under an equivalent sharding: no data moves."""
    if keys.is_key(value) or value.weak_type:  # `make_array` does not support keys; they are small
        return jax.device_put(value, label)
    return _with_tiles_of(value, label, value.shape)


def _with_tiles_of(value: jax.Array, wanted: NamedSharding, shape: tuple[int, ...]) -> jax.Array:
    """An array of this shape and sharding, of which each device holds what it has of `value`."""
    held = {s.device: s.data for s in value.addressable_shards}
    tiles = [held[d] for d in wanted.mesh.devices.flat if d in held]
    return jax.make_array_from_single_device_arrays(shape, wanted, tiles, dtype=value.dtype)


def _spread_key(key: jax.Array, wanted: NamedSharding) -> jax.Array:
    """A random key that every process has, as one global array."""
    raw = jax.device_put(np.asarray(jax.random.key_data(key)), wanted)
    return jax.random.wrap_key_data(raw, impl=jax.random.key_impl(key))


def _rewrap(mesh: Mesh, sharding: Sharding, value: jax.Array) -> jax.Array:
    """An ordinary array that `Port.get` made, as its stack again: no data moves."""
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
    """An array on some of the devices of several processes, made available to all of them.

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


@cached
def _copier(sharding: Any) -> Any:
    """A function that copies an array into the default memory layout."""
    return jax.jit(jnp.copy, out_shardings=sharding)


@cached
def _stacker(sharding: Sharding, wanted: NamedSharding) -> Any:
    return jax.jit(functools.partial(stack, tiling=sharding), out_shardings=wanted)


def ports(
    shardings: Sequence[Sharding],
    shapes: Sequence[tuple[int, ...]],
    order: DeviceOrder,
    user_mesh: Mesh | None,
) -> tuple[AnyMesh, list[Port]]:
    """The mesh of a program, by which most arrays are passed as they are, and all their ports."""
    like = None if user_mesh is None else user_mesh.devices.shape
    like = like if like and math.prod(like) == order.count else None
    axes, specs = expressed(shardings, shapes, order.count, like)
    mesh = make_mesh(axes, order.devices)
    stacked = PartitionSpec(mesh.axis_names if len(axes) > 1 else mesh.axis_names[0])
    found = []
    for sharding, shape, spec in zip(shardings, shapes, specs, strict=True):
        label = None
        if user_mesh is not None and spec is not None and 0 not in shape:
            label = named_on(user_mesh, sharding, order.numbers)
        passed = stacked if spec is None else spec
        found.append(Port(sharding, shape, passed, spec is None, label))
    return mesh, found


Local = Callable[[Place, Sequence[Tile]], list[Tile]]  # the per-device program, on tiles


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A plan, and the ports that convert its arguments and results.

    `mapped` is a function of global arrays: a `shard_map` whose body is the plan before
    any pass improved it. `consts` are the values that the user's function closes over; they are
    the first arguments.
    """

    flat: ClosedJaxpr
    found: Propagated
    mesh: Any  # of real devices, or an abstract one
    consts: tuple[Any, ...]
    into: tuple[Port, ...]
    out_of: tuple[Port, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    mapped: ClosedJaxpr
    plan: Plan
    seen: Seen


def arrange(
    local: Local,
    flat: ClosedJaxpr,
    found: Propagated,
    captured: Captured,
    order: DeviceOrder,
    user_mesh: Mesh | None,
    seen: Seen,
) -> Arrangement:
    """The plan of `local` as a function of global arrays, with results of the user's types."""
    jaxpr, count, shardings = flat.jaxpr, order.count, found.shardings
    entering = (*jaxpr.constvars, *jaxpr.invars)
    inputs = [shardings[v] for v in entering]
    outputs = [
        Sharding((None,) * v.aval.ndim, count) if isinstance(v, Literal) else shardings[v]
        for v in jaxpr.outvars
    ]
    shapes = [tuple(v.aval.shape) for v in (*entering, *jaxpr.outvars)]
    mesh, crossing = ports([*inputs, *outputs], shapes, order, user_mesh)
    into, out_of = tuple(crossing[: len(inputs)]), tuple(crossing[len(inputs) :])

    def on_device(*arrays: jax.Array) -> list[jax.Array]:
        opaque = arrays[0] if captured.variant.opaque_first else None
        place = Place(mesh.axis_names, count, opaque=opaque)
        tiles = [p.enter(a) for p, a in zip(into, arrays, strict=True)]
        results = zip(out_of, local(place, tiles), captured.types, strict=True)
        return [p.leave(t, aval) for p, t, aval in results]

    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(p.spec for p in into),
        out_specs=[p.spec for p in out_of],
        check_vma=False,
    )
    consts = (*flat.consts, *captured.closed_over)
    structs = [
        jax.ShapeDtypeStruct(
            p.physical_shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)
        )
        for p, v in zip(into, entering, strict=True)
    ]
    with _jax.without_mesh():
        mapped = jax.make_jaxpr(step)(*structs)
    (mapping,) = [eqn for eqn in mapped.jaxpr.eqns if eqn.primitive is _jax.shard_map_p]
    (planned,) = bodies(mapping)
    return Arrangement(
        flat, found, mesh, consts, into, out_of, tuple(structs), mapped, Plan(planned, count), seen
    )
