"""Mixing manual and automatic partitioning (section 3.2).

Between `auto_to_manual_spmd_partition` and `manual_to_auto_spmd_partition` the user computes on the
local shapes of a device, with its `partition_id` and the collectives of this module, while the rest
of the program is partitioned automatically. Outside of `gshard.jit` there is one partition, the
entire tensor: both functions are the identity, and the collectives have one member.

Everything here is linear and differentiable: the transpose of a collective sends cotangents back
along the same routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from gshard.graph.source import here
from gshard.tensors.annotate import annotation_of, as_annotation, devices_of_trace
from gshard.tensors.manual import collective_p, partition_id_p, to_auto_p, to_manual_p

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "auto_to_manual_spmd_partition",
    "collective_permute",
    "manual_to_auto_spmd_partition",
    "partition_id",
    "reduce_scatter",
]

Groups = Sequence[Sequence[int]] | None
T = TypeVar("T", bound=jax.Array | np.ndarray[Any, Any])


def auto_to_manual_spmd_partition(tensor: T, device_assignment: ArrayLike | None = None) -> T:
    """This device's part of `tensor`, in its local shape, padding included.

    The tensor is split by its annotation, or like `device_assignment`.
    """
    count = devices_of_trace()
    if count == 1:
        return tensor
    if device_assignment is None:
        annotation = annotation_of(tensor)
    else:
        annotation = as_annotation(tensor, device_assignment)
    if annotation is None:
        raise ValueError(
            f"{here()}: auto_to_manual_spmd_partition: the tensor has no annotation, so its local "
            "shape is not known; pass the result of split(), shard() or replicate(), or a "
            "device assignment"
        )
    return to_manual_p.bind(tensor, annotation=annotation.on(count), copies="all")


def manual_to_auto_spmd_partition(
    tensor: T, device_assignment: ArrayLike, full_shape: Sequence[int] | None = None
) -> T:
    """The tensor of which `tensor` is this device's part.

    `device_assignment` says which part each device has, as in `shard`. The logical shape is
    that of the parts concatenated, or `full_shape` where the last ones are padded.
    """
    count = devices_of_trace()
    if count == 1:
        return tensor
    annotation = as_annotation(tensor, device_assignment)
    sharding = annotation.resolve(count)
    shape = tuple(n * t for n, t in zip(tensor.shape, sharding.tiles, strict=True))
    if full_shape is not None:
        shape = tuple(full_shape)
        if sharding.local_shape(shape) != tuple(tensor.shape):
            raise ValueError(
                f"{here()}: manual_to_auto_spmd_partition: a tensor of shape {shape} split like "
                f"{sharding.tiles} has parts of shape {sharding.local_shape(shape)}, but the part "
                f"is {tensor.shape}"
            )
    return to_auto_p.bind(tensor, annotation=annotation.on(count), shape=shape, copies="first")


def partition_id() -> jax.Array:
    """The number of the device that runs this, in a manual region; 0 outside of `gshard.jit`."""
    if devices_of_trace() == 1:
        return jnp.zeros((), jnp.int32)
    return partition_id_p.bind()


def all_reduce(tensor: T, groups: Groups = None) -> T:
    """The sum of the parts of a group (default: all devices)."""
    return _collective(tensor, "all_reduce", groups)


def all_gather(tensor: T, dim: int, groups: Groups = None) -> T:
    """The parts of a group, concatenated along `dim`."""
    return _collective(tensor, "all_gather", groups, dim)


def reduce_scatter(tensor: T, dim: int, groups: Groups = None) -> T:
    """The sum over a group, scattered along `dim`: each member keeps its part."""
    return _collective(tensor, "reduce_scatter", groups, dim)


def all_to_all(tensor: T, groups: Groups = None) -> T:
    """Send row j of the first dim to member j of the group; received rows are in member order."""
    return _collective(tensor, "all_to_all", groups)


def collective_permute(tensor: T, pairs: Sequence[tuple[int, int]]) -> T:
    """Send along (source, destination) pairs; zeros where nothing arrives."""
    if devices_of_trace() == 1:
        return tensor
    fixed = tuple((int(s), int(d)) for s, d in pairs)
    return collective_p.bind(tensor, kind="collective_permute", dim=0, groups=fixed)


def _collective(tensor: T, kind: str, groups: Groups, dim: int = 0) -> T:
    count = devices_of_trace()
    if count == 1:
        return tensor
    listed = groups if groups is not None else [range(count)]
    fixed = tuple(tuple(int(d) for d in g) for g in listed)
    return collective_p.bind(tensor, kind=kind, dim=dim, groups=fixed)
