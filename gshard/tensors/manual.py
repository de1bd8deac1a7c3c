"""The primitives of manual regions (`gshard.manual`): into one, out of one, and inside.

The ones for users are linear and differentiable: a collective's transpose sends cotangents back
along the same routes. `jax.shard_map` becomes such a region (`capture.flatten`), in which
collectives are over groups of devices.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive

from gshard._jax import ad, batching
from gshard.tensors.annotate import Annotation, widen

# Parts have copies where a tensor is not split over all devices. `copies` are those that receive a
# part, and whose parts are summed: "all", or "first", one of each part.
to_manual_p = Primitive("auto_to_manual")
to_auto_p = Primitive("manual_to_auto")
partition_id_p = Primitive("partition_id")
collective_p = Primitive("manual_collective")
# On values of a manual region: `primitive` with `settings`, over groups of devices, or their pairs.
over_groups_p = Primitive("lower_named_axes")
over_groups_p.multiple_results = True
# This device's row of `table`.
row_of_device_p = Primitive("row_of_device")

# What makes values of a manual region, and what reads them.
MAKES_MANUAL = (to_manual_p, partition_id_p, collective_p, over_groups_p, row_of_device_p)
MANUAL = (*MAKES_MANUAL, to_auto_p)


@to_manual_p.def_abstract_eval
def _to_manual_aval(x: Any, *, annotation: Any, copies: str) -> ShapedArray:
    return ShapedArray(annotation.sharding.local_shape(x.shape), x.dtype)


@to_auto_p.def_abstract_eval
def _to_auto_aval(x: Any, *, shape: tuple[int, ...], **_: Any) -> ShapedArray:
    return ShapedArray(shape, x.dtype)


partition_id_p.def_abstract_eval(lambda: ShapedArray((), jnp.int32))


@collective_p.def_abstract_eval
def _collective_aval(x: Any, *, kind: str, dim: int, groups: Any) -> ShapedArray:
    shape = list(x.shape)
    if kind == "all_gather":
        shape[dim] *= len(groups[0])
    elif kind == "reduce_scatter":
        shape[dim] //= len(groups[0])
    return ShapedArray(shape, x.dtype)


def _to_manual_transpose(ct: Any, x: Any, **params: Any) -> list[Any]:
    return [to_auto_p.bind(ct, shape=x.aval.shape, **params)]


def _to_auto_transpose(ct: Any, x: Any, *, shape: Any, **params: Any) -> list[Any]:
    return [to_manual_p.bind(ct, **params)]


def _collective_transpose(ct: Any, x: Any, *, kind: str, dim: int, groups: Any) -> list[Any]:
    if kind == "collective_permute":
        groups = tuple((d, s) for s, d in groups)
    back = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(kind, kind)
    return [collective_p.bind(ct, kind=back, dim=dim, groups=groups)]


def _batch_to_manual(args: Any, dims: Any, *, annotation: Annotation, **params: Any) -> Any:
    (x,), (dim,) = args, dims
    return to_manual_p.bind(x, annotation=widen(annotation, dim), **params), dim


def _batch_to_auto(
    args: Any, dims: Any, *, annotation: Annotation, shape: tuple[int, ...], **params: Any
) -> Any:
    (x,), (dim,) = args, dims
    shape = (*shape[:dim], x.shape[dim], *shape[dim:])
    return to_auto_p.bind(x, annotation=widen(annotation, dim), shape=shape, **params), dim


def _batch_collective(args: Any, dims: Any, *, kind: str, dim: int, groups: Any) -> Any:
    (x,), (at,) = args, dims
    x = jnp.moveaxis(x, at, x.ndim - 1)  # last, so that the other dims keep their numbers
    return collective_p.bind(x, kind=kind, dim=dim, groups=groups), x.ndim - 1


ad.deflinear2(to_manual_p, _to_manual_transpose)
ad.deflinear2(to_auto_p, _to_auto_transpose)
ad.deflinear2(collective_p, _collective_transpose)
batching.primitive_batchers[to_manual_p] = _batch_to_manual
batching.primitive_batchers[to_auto_p] = _batch_to_auto
batching.primitive_batchers[collective_p] = _batch_collective
