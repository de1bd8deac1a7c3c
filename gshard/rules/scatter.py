"""Scatter: updates of windows at run-time indices.

Batch dims, full windows and indexed dims split for free: a device applies the updates that hit its
own rows. Updates split by their indices leave partial results, or are gathered, whichever
sends less. An embedding's gradient is both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard._jax import scatter_sub_p
from gshard.graph.reason import Reason
from gshard.moving.partial import combine
from gshard.moving.reductions import identity
from gshard.rules.base.rule import Context, Doc, Rule, Way, linear_in, register
from gshard.rules.base.unreduced import as_unreduced, scattered
from gshard.rules.base.ways import by_factors
from gshard.rules.indexing import IndexedWindows, roles_of, without
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Tile, Tiles

_KINDS = {
    p.scatter_add_p: "sum",
    scatter_sub_p: "sum",
    p.scatter_mul_p: "prod",
    p.scatter_min_p: "min",
    p.scatter_max_p: "max",
}


def scatter_factors(eqn: JaxprEqn) -> Factors:
    """The operand's dims are the result's; updates split by their indices leave partial results.

    Unless the updates overwrite: then their order matters, and every device that holds a row
    applies all of them. (If they are promised not to overlap there are fewer of them than rows, so
    to gather them is cheaper than to combine partial results.)
    """
    roles = roles_of(eqn)
    dtype = eqn.outvars[0].aval.dtype
    kind = _KINDS.get(eqn.primitive)
    if jnp.issubdtype(dtype, jnp.complexfloating) and kind in ("min", "max"):
        kind = None
    operand = list(without("k" if is_key_type(dtype) else "", roles.operand))
    ordered = "" if kind else "io"
    indices, updates = without(ordered, roles.indices), without(ordered, roles.windows)
    reduced = {n: kind for n in (*indices, *updates) if kind and n and n[0] in "io"}
    return Factors.of(eqn, [operand, indices, updates], [operand], reduced)


def scatter_ways(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int
) -> Iterator[Way]:
    """By factors; partial results do not need the operand until they are combined."""
    for way in by_factors(eqn, scatter_factors(eqn), shardings, targets):
        partial = (targets[0], *way.operands[1:])
        yield way._replace(operands=partial) if way.kind else way


def run_scatter(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """Apply the updates that hit this device's rows, to the operand or to identities."""
    roles, (target,) = roles_of(eqn), targets
    name, shape = eqn.primitive.name, tiles[0].shape
    if 0 in tiles[2].shape:
        return tiles[:1]
    layout, kind, reason = way.how, way.kind, Reason("operand", name)
    factors, chosen = layout.factors, layout.chosen
    indices, updates = (
        ctx.reshard(t, sharding, reason)
        for t, sharding in zip(tiles[1:], way.operands[1:], strict=True)
    )
    if not kind:
        operand = ctx.reshard(tiles[0], way.operands[0], reason)
        return [_update(eqn, IndexedWindows(ctx, roles, chosen, operand, indices), updates)]
    neutral = identity(kind, tiles[0].array.dtype)
    ((here, local),) = layout.results
    nothing = Tile(jnp.full(local, neutral), here, shape, name)
    cut = [d for d, n in enumerate(roles.windows) if n in factors.reduced and chosen[n]]
    updates = updates.masked(ctx.place, neutral, cut)
    stays = ctx.stays_unreduced(eqn.outvars[0], nothing, kind)
    start = unreduced_start(ctx.place, tiles[0], here, stays)
    windows = IndexedWindows(ctx, roles, chosen, start or nothing, indices)
    part = replace(_update(eqn, windows, updates), origin=name)
    if start:
        return [part]
    part = combine(ctx.place, part, kind, target)
    part = ctx.reshard(part, target, Reason("result", name))
    operand = ctx.reshard(tiles[0], target, Reason("operand", name))
    return [Tile(_merge(kind, operand.array, part.array), target, shape)]


def unreduced_start(place: Place, operand: Tile, sharding: Sharding, stays: bool) -> Tile | None:
    """The operand unreduced as `sharding` is, to which each device adds its own updates.

    It is so already, or the result `stays` unreduced; None if the updates are combined first.
    """
    if operand.sharding is sharding and operand.is_standard:
        return operand
    if operand.is_unreduced or not stays:
        return None
    return as_unreduced(place, operand, sharding)


def _merge(kind: str, operand: jax.Array, part: jax.Array) -> jax.Array:
    """The operand with combined updates; rows without updates are bit-exact."""
    if kind == "sum":
        return lax.select(part == 0, operand, operand + part)
    by = {"prod": lax.mul, "min": lax.min, "max": lax.max, "or": lax.bitwise_or}
    by["and"] = lax.bitwise_and
    return by[kind](operand, part)


def _update(eqn: JaxprEqn, windows: IndexedWindows, updates: Tile) -> Tile:
    """The tile after the updates, or parts of updates, that hit it; the others are out of range."""
    operand, indices, sizes = windows.operand, windows.indices, windows.sizes
    padded = bool(indices.padded_dims())
    params = eqn.params | {
        "indices_are_sorted": eqn.params["indices_are_sorted"] and not padded,
        "unique_indices": eqn.params["unique_indices"] and not padded,
    }
    if not windows.cut:
        x = eqn.primitive.bind(operand.array, indices.array, updates.array, **params)
        return Tile(x, operand.sharding, operand.shape)
    starts, inside = windows.starts
    for d in windows.cut:
        starts[d] += sizes[d] - 1
    if eqn.params["mode"] != GatherScatterMode.CLIP:
        nowhere = jnp.full_like(inside, -1, jnp.int32)
        starts = {d: lax.select(inside, start, nowhere) for d, start in starts.items()}
    dn = eqn.params["dimension_numbers"]
    params |= {
        "dimension_numbers": dn._replace(scatter_dims_to_operand_dims=tuple(starts)),
        "indices_are_sorted": False,
        "mode": GatherScatterMode.FILL_OR_DROP,
    }
    # Behind a barrier: XLA fuses a dynamic slice with the read of a single update's window, and
    # then reads the value of an update that is out of range from beyond the slice.
    x = lax.optimization_barrier(windows.with_margins)
    x = eqn.primitive.bind(x, jnp.stack([*starts.values()], axis=-1), updates.array, **params)
    for d in windows.cut:
        first = sizes[d] - 1
        x = lax.slice_in_dim(x, first, first + operand.array.shape[d], axis=d)
    return Tile(x, operand.sharding, operand.shape)


_LINEAR = linear_in((0, 2), run=scattered)
for _primitive in (*_KINDS, p.scatter_p):
    _combined = "AllReduce or ReduceScatter of the result, or " * (_primitive in _KINDS)
    _rule = Rule(
        scatter_factors,
        ways=scatter_ways,
        run=run_scatter,
        linear=_LINEAR if _primitive in (p.scatter_add_p, scatter_sub_p) else None,
        doc=Doc(
            free="batch dims, full windows, dims looked up in",
            gather=f"indices: {_combined}AllGather of the updates",
        ),
    )
    register(_rule, _primitive)
