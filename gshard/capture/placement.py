"""JAX's shardings as annotations: those of arguments, meshes and `in_shardings`.

Read are the `sharding` of an array or `ShapeDtypeStruct`, a `NamedSharding`, a `PartitionSpec`, and
sharding constraints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.extend.core import Jaxpr, Literal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard._jax import context_mesh, is_default_layout
from gshard.capture.calls import called_with, names_in_order
from gshard.graph.caching import cached
from gshard.tensors.annotate import Annotation, annotate, annotate_p, reading_devices
from gshard.tensors.meshes import entries_of, is_own, sharding_of, sharding_of_slices
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.uneven import UnevenArray


@dataclass(frozen=True)
class DeviceOrder:
    """The devices of a program, numbered in this order, or a number of abstract devices."""

    devices: tuple[jax.Device, ...] | int

    @property
    def count(self) -> int:
        """The number of devices."""
        return self.devices if isinstance(self.devices, int) else len(self.devices)

    @property
    def first(self) -> jax.Device | None:
        """The first device; None where they are abstract."""
        return None if isinstance(self.devices, int) else self.devices[0]

    @functools.cached_property
    def numbers(self) -> Mapping[Any, int]:
        """The number of each device; abstract ones have none."""
        found = () if isinstance(self.devices, int) else self.devices
        return {d: i for i, d in enumerate(found)}

    @functools.cached_property
    def numbers_in_meshes(self) -> Mapping[Any, int]:
        """The number of each device that a mesh in the program may name.

        With a number of abstract devices, the first so many of the machine's, where it has them: a
        program with a mesh of its own is checked and forecast as it is.
        """
        if not isinstance(self.devices, int):
            return self.numbers
        found = jax.devices()[: self.devices]
        return {d: i for i, d in enumerate(found)} if len(found) == self.devices else {}

    def sharding(self, given: Any, rank: int) -> tuple[Sharding, tuple[int, ...]]:
        """gshard's sharding for one of JAX's, and the dims that it leaves open."""
        if isinstance(given, Sharding):
            if given.num_devices != self.count:
                raise ValueError(
                    f"the sharding {given} is for {given.num_devices} devices, not for {self.count}"
                )
            return given, ()
        if isinstance(given, PartitionSpec):
            if (mesh := context_mesh()) is None:
                raise ValueError(
                    f"{given} names the axes of a mesh, and no mesh is set: use jax.set_mesh"
                )
            given = NamedSharding(mesh, given)
        if isinstance(given, NamedSharding):
            return sharding_of(given, rank, self.numbers_in_meshes, self.count)
        if len(given.device_set) == 1:
            return Sharding.replicated(rank, self.count), tuple(range(rank))
        raise TypeError(
            f"{type(given).__name__} is not a sharding that gshard can read; it reads a "
            "NamedSharding, a PartitionSpec under jax.set_mesh, and gshard.Sharding"
        )

    def annotation(self, given: Any, rank: int, name: str) -> Annotation:
        """One of JAX's shardings, or formats, as an annotation."""
        layout = None
        if isinstance(given, Format):
            layout, given = _checked_layout(given, rank, name), given.sharding
        sharding, open_dims = Sharding.replicated(rank, self.count), tuple(range(rank))
        if given is not None:
            sharding, open_dims = self.sharding(given, rank)
        return Annotation.of_sharding(name, sharding, open_dims, _axes_of(given, rank), layout)

    def held(self, value: Any) -> Sharding | None:
        """The current sharding of an argument; None if it is on one device, or on other devices."""
        if isinstance(value, UnevenArray):
            return self._renumbered(value.tiling, value.mesh.devices.ravel())
        given = getattr(value, "sharding", None)
        if not isinstance(given, jax.sharding.Sharding) or given.num_devices == 1:
            return None
        rank = len(value.shape)
        if isinstance(given, NamedSharding):
            if not isinstance(given.mesh, Mesh):
                return sharding_of(given, rank, self.numbers, self.count)[0]
            if any(d not in self.numbers for d in given.mesh.devices.flat):
                return None
            return _sharding_held(given, rank, self)
        slices = given.devices_indices_map(tuple(value.shape))
        return sharding_of_slices(slices, rank, self.numbers, self.count)

    def _renumbered(self, tiling: Sharding, devices: Sequence[jax.Device]) -> Sharding | None:
        """The same tiles on the same devices, by this order's numbers."""
        if not self.numbers.keys() >= set(devices) or len(devices) != self.count:
            return None
        to = np.array([self.numbers[d] for d in devices])
        splits: list[Split | None] = []
        for split in tiling.splits:
            coords = np.empty(self.count, np.int64)
            coords[to] = split.coords if split else 0
            splits.append(Split.of(coords))
        return Sharding(tuple(splits), self.count)


@cached
def device_order(devices: tuple[jax.Device, ...] | int) -> DeviceOrder:
    """These devices, always as the same object."""
    return DeviceOrder(devices)


@cached
def _sharding_held(given: NamedSharding, rank: int, order: DeviceOrder) -> Sharding:
    return sharding_of(given, rank, order.numbers, order.count)[0]


def _axes_of(given: Any, rank: int) -> tuple[str, ...]:
    """The names of the mesh axes that each dim is split over; () without a `PartitionSpec`."""
    spec = given if isinstance(given, PartitionSpec) else getattr(given, "spec", None)
    named = () if spec is None else map(" and ".join, entries_of(spec, rank))
    return tuple(named)[:rank]


def _checked_layout(given: Format, rank: int, name: str) -> Any:
    order = getattr(given.layout, "major_to_minor", None)
    if order is not None and sorted(order) != list(range(rank)):
        raise ValueError(
            f"{name} has the layout {given.layout} for a value of rank {rank}; allowed is an order "
            f"of its dims, such as Layout({tuple(range(rank))})"
        )
    return given.layout


def with_shardings(
    fun: Callable[..., Any], arguments: Any, results: Any, static: Sequence[int] = ()
) -> Callable[..., Any]:
    """`fun` with annotations on its arguments and results, by trees of shardings or prefixes.

    They are those of `in_shardings` and `out_shardings`; None leaves a value open. As in `jax.jit`,
    arguments that are `static`, by number, have no sharding.
    """
    for name, given in (("in_shardings", arguments), ("out_shardings", results)):
        for leaf in jax.tree.leaves(given, is_leaf=_is_sharding):
            if not _is_sharding(leaf):
                raise TypeError(
                    f"{name} has {leaf!r}, and takes trees of NamedSharding, PartitionSpec, "
                    "Format, gshard.Sharding or None"
                )
    if arguments is None and results is None:
        return fun

    @functools.wraps(fun)
    def annotated(*args: Any, **kwargs: Any) -> Any:
        if arguments is not None:
            fixed = {n % len(args) for n in static if -len(args) <= n < len(args)}
            dynamic = tuple(a for i, a in enumerate(args) if i not in fixed)
            with called_with(fun, args, {}):
                marked = iter(_annotated(dynamic, arguments, "in_shardings"))
            args = tuple(a if i in fixed else next(marked) for i, a in enumerate(args))
        return _annotated(fun(*args, **kwargs), results, "out_shardings")

    return annotated


def _annotated(values: Any, given: Any, name: str) -> Any:
    order = reading_devices()
    if given is None or order is None:  # no annotation, or no reader of annotations
        return values
    try:
        each = jax.tree.broadcast(given, values, is_leaf=_is_sharding)
    except ValueError as error:
        raise ValueError(f"{name} does not match the values it is for: {error}") from None

    count = len(jax.tree.leaves(values)) if name == "in_shardings" else 0
    paths = iter(names_in_order(count))

    def mark(tensor: Any, sharding: Any) -> Any:
        path = next(paths, "") if tensor is not None else ""
        if sharding is None:
            return tensor
        rank = np.ndim(tensor)
        placed = sharding.sharding if isinstance(sharding, Format) else sharding
        spec = getattr(placed, "spec", placed)  # without the mesh, which is long
        try:
            annotation = order.annotation(sharding, rank, f"{name}: {spec}")
        except ValueError as error:
            raise ValueError(f"{name}{path and f' of {path}'}: {error}") from None
        return annotate(tensor, annotation)

    return jax.tree.map(mark, values, each, is_leaf=lambda x: x is None)


def _is_sharding(x: Any) -> bool:
    return x is None or isinstance(x, (PartitionSpec, jax.sharding.Sharding, Sharding, Format))


def layouts(
    jaxpr: Jaxpr, leaves: Sequence[Any], order: DeviceOrder
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The memory layouts of a traced function's arguments and results; None: the default.

    They are those of `in_shardings` and `out_shardings`. An argument without one keeps its own,
    where it is on all devices: it is not copied.
    """
    marks = [eqn for eqn in jaxpr.eqns if eqn.primitive is annotate_p]
    ends = [(atom, mark) for mark in marks for atom in (*mark.invars, *mark.outvars)]
    wanted = {a: m.params["annotation"].layout for a, m in ends if not isinstance(a, Literal)}
    arguments = zip(jaxpr.invars[len(jaxpr.invars) - len(leaves) :], leaves, strict=True)
    return (
        tuple(wanted.get(v) or _kept_layout(x, order.count) for v, x in arguments),
        tuple(None if isinstance(v, Literal) else wanted.get(v) for v in jaxpr.outvars),
    )


def other_layout(array: Any) -> Any:
    """The memory layout of an array; None: the default."""
    given = getattr(array, "format", None)  # keys have none
    of = None if given is None else jax.ShapeDtypeStruct(array.shape, array.dtype)
    if given is None or is_default_layout(given.layout, given.sharding, of):
        return None
    return given.layout


def _kept_layout(value: Any, devices: int) -> Any:
    """The layout of an array, if it is on so many devices."""
    value = value.stack if isinstance(value, UnevenArray) else value
    placed = getattr(value, "sharding", None)
    return None if placed is None or placed.num_devices != devices else other_layout(value)


def mesh_of(values: Iterable[Any]) -> Mesh | None:
    """The user's mesh: the one that is set, or the largest that arguments and shardings name.

    One device, which most arrays are on, does not determine where a program runs.
    """
    mesh = context_mesh()
    if mesh is not None:
        return mesh
    best: Mesh | None = None
    for value in values:
        given = value if isinstance(value, NamedSharding) else getattr(value, "sharding", None)
        if not isinstance(given, NamedSharding) or isinstance(value, UnevenArray):
            continue
        mesh = given.mesh
        if isinstance(mesh, Mesh) and not is_own(mesh):
            best = mesh if best is None or mesh.size > best.size else best
    return best if best is not None and best.size > 1 else None
