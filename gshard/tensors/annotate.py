"""The annotations of the paper's section 3.2: `replicate`, `split` and `shard`.

Each is the identity on values and leaves a mark in the traced program that `gshard.jit` reads.
Under plain `jax.jit`, eagerly, and on one device they have no effect. The mark is linear: the
cotangent of an annotated tensor gets the same annotation.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from jax.extend.core import Primitive
from numpy.typing import ArrayLike

from gshard._jax import ad, batching, mlir
from gshard.graph.caching import cached
from gshard.graph.kinds import ALIASES
from gshard.graph.source import here
from gshard.tensors.meshes import constrained
from gshard.tensors.sharding import Sharding

T = TypeVar("T")  # an array or a tracer
_NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Annotation:
    """What the user asked of one tensor; `on` adds the `sharding` that it is on given devices.

    `assignment` is None for `replicate`; otherwise a device id per tile, row-major, over `tiles`.
    `open_dims` are dims that `vmap` added, which the annotation leaves open. In a flat program
    (`capture.flatten`), and where it came from a `NamedSharding`, the sharding is known. `axes` are
    the names of the mesh axes of each dim, and `layout` is the memory layout, where a `Format` has
    one.
    """

    name: str
    tiles: tuple[int, ...]
    assignment: tuple[int, ...] | None
    open_dims: tuple[int, ...] = ()
    sharding: Sharding | None = None
    axes: tuple[str, ...] = ()
    layout: Any = None
    number: int = field(default=0, compare=False)  # of the call that made it: copies have it too

    @staticmethod
    def of_sharding(
        name: str,
        sharding: Sharding,
        open_dims: tuple[int, ...] = (),
        axes: tuple[str, ...] = (),
        layout: Any = None,
    ) -> Annotation:
        """The annotation that asks for exactly this sharding."""
        return Annotation(name, sharding.tiles, None, open_dims, sharding, axes, layout)

    def on(self, num_devices: int) -> Annotation:
        """With the sharding on `num_devices` devices."""
        return replace(self, sharding=self.resolve(num_devices))

    @cached
    def resolve(self, num_devices: int) -> Sharding:
        """The sharding on `num_devices` devices; a ValueError says what does not fit on them."""
        if self.sharding is not None:
            return self.sharding
        if self.assignment is None:
            return Sharding.replicated(len(self.tiles), num_devices)
        count = len(self.assignment)
        if count > num_devices:
            raise ValueError(
                f"{self} asks for {count} partitions, but there are {num_devices} devices: "
                f"at most {num_devices} partitions are allowed"
            )
        unknown = sorted(d for d in self.assignment if d >= num_devices)
        if unknown:
            raise ValueError(
                f"{self} names the devices {unknown}, but the {num_devices} devices are numbered "
                f"0 to {num_devices - 1}"
            )
        return Sharding.of_assignment(np.reshape(self.assignment, self.tiles), num_devices)

    def __str__(self) -> str:
        return self.name


def replicate(tensor: T) -> T:
    """Annotate `tensor` to be replicated: every device has all of it."""
    return annotate(tensor, Annotation("replicate(tensor)", (1,) * len(_shape(tensor)), None))


def split(tensor: T, split_dimension: int, num_partitions: int) -> T:
    """Annotate `tensor` to be split into `num_partitions` along `split_dimension`.

    Partition i is on device i. With fewer partitions than devices, the other devices hold copies
    if the number of devices is a multiple of the number of partitions, and nothing otherwise.
    """
    rank = len(_shape(tensor))
    call = f"split(tensor, {split_dimension}, {num_partitions})"
    if not -rank <= split_dimension < rank:
        allowed = f"{-rank} to {rank - 1}" if rank else "none: a scalar has no dims to split"
        raise ValueError(
            f"{here()}: {call}: the split dimension {split_dimension} is out of range for a tensor "
            f"of shape {_shape(tensor)}; allowed: {allowed}"
        )
    if num_partitions < 1:
        raise ValueError(f"{here()}: {call}: the number of partitions must be at least 1")
    tiles = [1] * rank
    tiles[split_dimension] = int(num_partitions)
    return annotate(tensor, Annotation(call, tuple(tiles), tuple(range(num_partitions))))


def shard(tensor: T, device_assignment: ArrayLike) -> T:
    """Annotate `tensor` to be split like `device_assignment`, an integer array of the same rank.

    Its shape is the number of partitions along each dim, and each element is the device that
    holds that partition. It may name the devices in any order, and fewer than all: with the
    devices as `mesh = np.arange(8).reshape(2, 4)`, `shard(x, mesh[:, :1])` splits a matrix into two
    row blocks, each copied along a row of the mesh.
    """
    return annotate(tensor, as_annotation(tensor, device_assignment))


def _shape(tensor: Any) -> tuple[int, ...]:
    return np.shape(tensor)


def shard_call(assignment: np.ndarray) -> str:
    """The call of `shard` as text; many devices by the shape of their array."""
    given = f"device_assignment of shape {assignment.shape}"
    return f"shard(tensor, {assignment.tolist() if assignment.size <= 16 else given})"


def as_annotation(tensor: Any, device_assignment: Any) -> Annotation:
    """The annotation that `shard` makes, checked as far as the tensor alone allows."""
    if isinstance(device_assignment, jax.sharding.Sharding | jax.sharding.PartitionSpec):
        raise TypeError(
            f"{here()}: shard(tensor, {device_assignment}): shard takes an array of device ids; "
            "jax.lax.with_sharding_constraint takes JAX's shardings, and gshard.jit follows it"
        )
    assignment = np.asarray(device_assignment)
    call = shard_call(assignment)
    if not np.issubdtype(assignment.dtype, np.integer):
        raise TypeError(f"{here()}: {call}: device ids must be integers, got {assignment.dtype}")
    if assignment.ndim != np.ndim(tensor):
        raise ValueError(
            f"{here()}: {call}: the device assignment has rank {assignment.ndim}, but a tensor of "
            f"shape {np.shape(tensor)} needs rank {np.ndim(tensor)}"
        )
    if assignment.size == 0:
        raise ValueError(f"{here()}: {call}: the device assignment names no device")
    ids, counts = np.unique(assignment, return_counts=True)
    if ids[0] < 0:
        raise ValueError(f"{here()}: {call}: device ids count from 0, got {ids[0]}")
    if counts.max() > 1:
        raise ValueError(
            f"{here()}: {call}: a device can hold one partition only, but the devices "
            f"{ids[counts > 1].tolist()} are named more than once"
        )
    flat = tuple(assignment.ravel().tolist())
    return Annotation(call, assignment.shape, flat)


annotate_p = Primitive("annotate")
annotate_p.def_impl(lambda x, **_: x)
annotate_p.def_abstract_eval(lambda x, **_: x)


# The devices that `gshard.jit` traces for, in order. JAX's caches are keyed by them: an inner
# jitted function may have been traced before, for other devices or outside of `gshard.jit`.
_tracing_for = jax.make_user_context(None)

# The platform that the traced program is for: "cpu", "gpu" or "tpu"; None: JAX's default.
_platform = jax.make_user_context(None)
_hardware = jax.make_user_context(None)  # a `gshard.forecast.Hardware`, if one is given
# The stages of pipelines whose program leaves their number open; 0: as many as they choose.
in_stages = jax.make_user_context(0)

# The devices for which annotations become sharding constraints for XLA: where a function of
# `gshard.jit` is called inside `jax.jit`, or transformed.
_constraining = jax.make_user_context(None)

# The annotations of the current trace. Tracers can only be identified by identity, and must not
# be kept alive beyond their trace.
_annotated: contextvars.ContextVar[list[tuple[weakref.ref[Any], Annotation]] | None] = (
    contextvars.ContextVar("gshard_annotated", default=None)
)


class Devices(Protocol):
    """The devices of a program, in order, or a number of abstract devices."""

    @property
    def devices(self) -> tuple[jax.Device, ...] | int:
        """The devices."""
        ...

    @property
    def count(self) -> int:
        """How many devices there are."""
        ...


@contextlib.contextmanager
def tracing_for(
    devices: Devices, platform: str | None = None, hardware: Any = None
) -> Iterator[None]:
    """A context in which `gshard.jit` traces for these devices, this platform and hardware."""
    token = _annotated.set([])
    try:
        with _tracing_for(devices), _platform(platform), _hardware(hardware), _constraining(None):
            yield
    finally:
        _annotated.reset(token)


def devices_of_trace() -> int:
    """The number of devices that the current trace is for; 1 outside of `gshard.jit`."""
    return _tracing_for.value.count if is_tracing_for_gshard() else 1


def hardware_of_trace() -> Any:
    """The hardware that the current trace is for, if `gshard.jit` was given one."""
    return _hardware.value


def target_platform() -> str:
    """The platform that the program being traced is for: "cpu", "gpu" or "tpu".

    Models choose their kernels by this and not by the machine that traces them. Outside of
    `gshard.jit` it is JAX's default backend. JAX's caches of traced functions are keyed by it.
    """
    return _platform.value or jax.default_backend()


def is_tracing_for_gshard() -> bool:
    """Whether `gshard.jit` is tracing, and will read the annotations."""
    return _tracing_for.value is not None


def constraining(devices: Devices) -> contextlib.AbstractContextManager[None]:
    """A context in which annotations become constraints for XLA's partitioner."""
    return _constraining(devices)


def reading_devices() -> Any:
    """The devices for which annotations are read now, by gshard or as constraints by XLA."""
    return _tracing_for.value or _constraining.value


def annotation_of(tensor: Any) -> Annotation | None:
    """The annotation of this tensor in the current trace."""
    return next((a for marked, a in _annotated.get() or () if marked() is tensor), None)


def annotate(tensor: Any, annotation: Annotation) -> Any:
    """`tensor` with this annotation, or with a sharding constraint where XLA partitions."""
    if not hasattr(tensor, "dtype"):
        tensor = np.asarray(tensor)
    order = _constraining.value
    if order is not None:
        marked_at = f"{here()}: {annotation}".removeprefix("unknown: ")  # keywords have no line
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ValueError(
                f"{marked_at} is inside jax.shard_map, where every device has its own "
                "values and XLA partitions nothing; annotate the tensors outside of the region, "
                "and call a function without annotations inside"
            )
        sharding = annotation.resolve(order.count)
        for n, tiles in zip(tensor.shape, sharding.tiles, strict=True):
            if tiles > 1 and not isinstance(n, int):
                raise ValueError(
                    f"{marked_at} splits a dim of the size {n}, which is not known: "
                    "export the function once for each size, or split other dims"
                )
        return constrained(tensor, sharding, order.devices)
    numbered = replace(annotation, number=next(_NUMBERS))
    marked = annotate_p.bind(tensor, annotation=numbered)
    if (known := _annotated.get()) is not None:
        known.append((weakref.ref(marked), annotation))
    return marked


def widen(annotation: Annotation, dim: int) -> Annotation:
    """The annotation with a dim that `vmap` added, left open."""
    sharding = annotation.sharding
    if sharding is not None:
        sharding = sharding.project([*range(dim), None, *range(dim, sharding.rank)])
    return replace(
        annotation,
        tiles=(*annotation.tiles[:dim], 1, *annotation.tiles[dim:]),
        open_dims=(dim, *(d + (d >= dim) for d in annotation.open_dims)),
        sharding=sharding,
        axes=annotation.axes and (*annotation.axes[:dim], "", *annotation.axes[dim:]),
    )


def _batch(args: Any, dims: Any, *, annotation: Annotation) -> Any:
    (x,), (dim,) = args, dims
    return annotate_p.bind(x, annotation=widen(annotation, dim)), dim


ALIASES.add(annotate_p)
ad.deflinear2(annotate_p, lambda ct, _, annotation: [annotate_p.bind(ct, annotation=annotation)])
batching.primitive_batchers[annotate_p] = _batch
mlir.register_lowering(annotate_p, lambda ctx, x, **_: [x])
