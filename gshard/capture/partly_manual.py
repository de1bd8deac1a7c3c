"""`jax.shard_map` over some axes of a mesh: manual along those, partitioned along the others.

Such a region is a function of each device's part along the manual axes. Here it becomes a function
of all parts at once, stacked in a leading dim for each manual axis: `jax.vmap` with the name of the
axis. The collectives of the region become sums, permutations and so on along that dim, which is
split over its axis. The rest of the region is partitioned like any other program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.extend.core import primitives as p
from jax.sharding import PartitionSpec

from gshard._jax import batching
from gshard.tensors.manual import axis_names_of, without_types
from gshard.tensors.meshes import entries_of

Sizes = dict[str, int]  # of the manual axes
Annotate = Callable[[Any, tuple[str, ...]], Any]  # splits the leading dims of a stack over axes


def on_stacks(
    body: ClosedJaxpr,
    sizes: Sizes,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    annotate: Annotate,
) -> Callable[..., list[Any]]:
    """The region as a function of its logical operands."""

    def region(*operands: Any) -> list[Any]:
        stacks = [
            annotate(_stack(x, spec, sizes), _axes(spec, sizes)) if any(spec) else x
            for x, spec in zip(operands, in_specs, strict=True)
        ]
        called: Callable[..., Any] = jaxpr_as_fun(body)
        for name, size in reversed(sizes.items()):
            mapped = [0 if name in _axes(spec, sizes) else None for spec in in_specs]
            called = jax.vmap(called, mapped, axis_name=name, axis_size=size)
        results = called(*stacks)
        distinct = [_distinct(y, spec, sizes) for y, spec in zip(results, out_specs, strict=True)]
        return [
            _logical(annotate(y, _axes(spec, sizes)), spec, sizes) if any(spec) else y
            for y, spec in zip(distinct, out_specs, strict=True)
        ]

    return region


def _axes(spec: PartitionSpec, sizes: Sizes) -> tuple[str, ...]:
    """The manual axes in a spec, in the order of their dims in a stack."""
    named = {name for entry in entries_of(spec) for name in entry}
    return tuple(name for name in sizes if name in named)


def _places(spec: PartitionSpec, rank: int, sizes: Sizes) -> list[int]:
    """Where each axis of a spec is if it is a dim of its own, before the dim that it splits."""
    order = [x for dim, names in enumerate(entries_of(spec, rank)) for x in (*names, dim)]
    return [order.index(name) for name in _axes(spec, sizes)]


def _stack(x: Any, spec: PartitionSpec, sizes: Sizes) -> Any:
    """All parts of a tensor, with a leading dim for each axis of its spec."""
    shape: list[int] = []
    for n, names in zip(x.shape, entries_of(spec, x.ndim), strict=True):
        tiles = [sizes[name] for name in names]
        shape += [*tiles, n // math.prod(tiles)]
    places = _places(spec, x.ndim, sizes)
    return jnp.moveaxis(x.reshape(shape), places, range(len(places)))


def _distinct(stack: Any, spec: PartitionSpec, sizes: Sizes) -> Any:
    """A stack without the axes that its spec omits: all parts are equal along them."""
    named = _axes(spec, sizes)
    for dim, name in reversed(list(enumerate(sizes))):
        if name not in named:
            stack = lax.index_in_dim(stack, 0, dim, keepdims=False)
    return stack


def _logical(stack: Any, spec: PartitionSpec, sizes: Sizes) -> Any:
    """The tensor that a stack has the parts of: the inverse of `_stack`."""
    more = len(_axes(spec, sizes))
    rank = stack.ndim - more
    parts = zip(stack.shape[more:], entries_of(spec, rank), strict=True)
    shape = [n * math.prod(sizes[name] for name in names) for n, names in parts]
    return jnp.moveaxis(stack, range(more), _places(spec, rank, sizes)).reshape(shape)


# `ppermute` over the axis `name`: zeros where nothing arrives.
permute_p = Primitive("permute_parts")
permute_p.def_abstract_eval(lambda x, **_: x)


def _permute_stack(
    axis_data: Any, operands: Any, dims: Any, *, name: str, pairs: tuple[tuple[int, int], ...]
) -> Any:
    """Over the axis that becomes a dim: one slice of that dim for each run of neighbours."""
    (x,), (dim,) = operands, dims
    if axis_data.name != name:
        return permute_p.bind(x, name=name, pairs=pairs), dim
    if dim is None:
        x, dim = jnp.broadcast_to(x, (axis_data.size, *x.shape)), 0
    source = {to: at for at, to in pairs}
    slices, first = [], 0
    for end in range(1, axis_data.size + 1):
        at = source.get(first)
        goes_on = source.get(end) == (None if at is None else at + end - first)
        if end < axis_data.size and goes_on:
            continue
        start = 0 if at is None else at
        rows = lax.slice_in_dim(x, start, start + end - first, axis=dim)
        slices.append(jnp.zeros_like(rows) if at is None else rows)
        first = end
    return lax.concatenate(slices, dim), dim


batching.fancy_primitive_batchers[permute_p] = _permute_stack


def for_stacks(eqn: JaxprEqn) -> tuple[Primitive, dict[str, Any]] | None:
    """A collective in a form that `jax.vmap` supports; None for any other equation."""
    if eqn.primitive is not p.ppermute_p:
        return without_types(eqn)
    (name,) = axis_names_of(eqn.params["axis_name"])
    return permute_p, {"name": name, "pairs": tuple(map(tuple, eqn.params["perm"]))}
