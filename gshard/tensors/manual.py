"""The primitives of manual regions (`gshard.manual`): into one, out of one, and inside.

The ones for users are linear and differentiable: a collective's transpose sends cotangents back
along the same routes. `jax.shard_map` becomes such a region (`capture.flatten`), in which
collectives are over groups of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard._jax import ad, batching, private_primitives, shard_map_p
from gshard.graph.source import source_of
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


ad.deflinear2(to_manual_p, lambda ct, x, **to: [to_auto_p.bind(ct, shape=x.aval.shape, **to)])
ad.deflinear2(to_auto_p, lambda ct, x, *, shape, **to: [to_manual_p.bind(ct, **to)])
ad.deflinear2(collective_p, _collective_transpose)
batching.primitive_batchers[to_manual_p] = _batch_to_manual
batching.primitive_batchers[to_auto_p] = _batch_to_auto
batching.primitive_batchers[collective_p] = _batch_collective


# ------------------------------------------------------------ collectives over named axes of a mesh

(_reduce_scatter_p,) = private_primitives("lax.parallel", "reduce_scatter_p")
_SAME = {  # replacements for types that do not track varying axes
    **dict.fromkeys(private_primitives("lax.parallel", "psum_invariant_p"), p.psum_p),
    **dict.fromkeys(private_primitives("lax.parallel", "all_gather_invariant_p"), p.all_gather_p),
}
_NOTHING = (
    *private_primitives("lax.parallel", "pvary_p", "pcast_p", "pbroadcast_p"),
    *private_primitives("core", "pvary_p"),
)
_REDUCING = (p.psum_p, p.pmax_p, p.pmin_p)
_MOVING = (p.all_gather_p, p.all_to_all_p, p.ragged_all_to_all_p, _reduce_scatter_p)


@dataclass(frozen=True)
class NamedAxes:
    """The axes of the user's mesh, as a grid of device numbers."""

    names: tuple[str, ...]
    grid: np.ndarray

    def groups(self, over: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The devices that differ along these axes only, in the order of the axes."""
        unknown = [name for name in over if name not in self.names]
        if unknown:
            raise NameError(f"the axis {unknown[0]!r} is not one of the mesh's: {self.names}")
        dims = [self.names.index(name) for name in over]
        last = np.moveaxis(self.grid, dims, range(-len(dims), 0))
        size = int(np.prod([self.grid.shape[d] for d in dims]))
        return tuple(map(tuple, last.reshape(-1, size).tolist()))

    def index(self, over: Sequence[str]) -> tuple[int, ...]:
        """For each device, its number along these axes."""
        number = np.zeros(self.grid.size, np.int64)
        for group in self.groups(over):
            number[list(group)] = np.arange(len(group))
        return tuple(number.tolist())


def lower_named_axes(eqn: JaxprEqn, axes: NamedAxes) -> tuple[Primitive, dict[str, Any]] | None:
    """A collective over named axes as one over groups; None for any other equation."""
    primitive = _SAME.get(eqn.primitive, eqn.primitive)
    params = dict(eqn.params)
    if primitive in _REDUCING:
        over = params["axes"]
        if not all(isinstance(name, str) for name in over):
            raise NotImplementedError(
                f"{source_of(eqn)}: {primitive.name} over {over}: a reduction over a named axis of "
                "jax.shard_map and over dims of jax.vmap at once; take one after the other"
            )
        settings: tuple[tuple[str, Any], ...] = ()
    elif primitive in _MOVING:
        over = axis_names_of(params.pop("axis_name"))
        settings = tuple(sorted((k, v) for k, v in params.items() if k != "axis_index_groups"))
    elif primitive is p.ppermute_p:
        groups = axes.groups(axis_names_of(params["axis_name"]))
        pairs = [(group[s], group[d]) for group in groups for s, d in params["perm"]]
        return over_groups_p, {"primitive": primitive, "settings": (), "groups": tuple(pairs)}
    elif primitive is p.axis_index_p:
        return row_of_device_p, {"table": axes.index(axis_names_of(params["axis_name"]))}
    else:
        return None
    groups = axes.groups(over)
    inner = params.get("axis_index_groups")
    if inner is not None:
        groups = tuple(tuple(g[i] for i in part) for g in groups for part in inner)
    return over_groups_p, {"primitive": primitive, "settings": settings, "groups": groups}


def without_types(eqn: JaxprEqn) -> tuple[Primitive, dict[str, Any]] | None:
    """A collective with varying-axes types, as the one without."""
    same = _SAME.get(eqn.primitive)
    return same and (same, {**eqn.params, "axis_index_groups": None})


def is_type_only(eqn: JaxprEqn) -> bool:
    """Whether an equation only changes the varying axes of types."""
    return eqn.primitive in _NOTHING


def axis_names_of(names: Any) -> tuple[str, ...]:
    """The names in a parameter that has one or several."""
    return (names,) if isinstance(names, str) else tuple(names)


def is_shard_map(eqn: JaxprEqn) -> bool:
    """Whether this is a region of `jax.shard_map`."""
    return eqn.primitive is shard_map_p
