"""Data formatting (section 3.3.3): operators that change which rows a dim has, or their order.

Every such operator works dim by dim (`changes`), and unchanged dims cost nothing. What is left to
decide is under which sharding the dims change.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import split_p, tile_p
from gshard.graph.reason import Reason
from gshard.moving.plan import plan_reshard, reshard_cost
from gshard.operators.rule import Context, Doc, Rule, linear_in_all, register
from gshard.rules.changes import Change, Pad, Repeat, Reverse, Slice
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, compatible
from gshard.tensors.tile import Tile, byte_size, itemsize_of


def change_dims(
    ctx: Context, tile: Tile, changes: Mapping[int, Change], target: Sharding, name: str
) -> Tile:
    """`tile` with some of its dims changed, in the way that sends the fewest bytes.

    Either the operand keeps its splits, or it takes the result's, or the dims that change are
    gathered. An unsplit dim is sliced like the result, which is free. The rows of a slice may be
    collected on every device.
    """
    shape = list(tile.shape)
    for dim, change in changes.items():
        shape[dim] = change.result(shape[dim])
    if 0 in shape:
        return Tile(jnp.zeros(target.local_shape(shape), tile.array.dtype), target, tuple(shape))
    source, result = min(
        _candidates(tile.sharding, changes, target),
        key=lambda way: _cost(tile, changes, shape, way[0], way[1], target),
    )
    tile = ctx.reshard(tile, source, Reason("operand", name))
    for dim in _order(changes, tile.shape, shape, tile.sharding):
        reason = Reason("step", name, f"rows of dim {dim} between tiles")
        change, split = changes[dim], result.splits[dim]
        if split is None and tile.sharding.splits[dim]:
            array = change.collected(ctx, tile, dim, reason)
        else:
            array = change.run(ctx, tile, dim, split, reason)
        after = (*tile.shape[:dim], shape[dim], *tile.shape[dim + 1 :])
        tile = Tile(array, tile.sharding.replace(dim, split), after)
    return tile


def _candidates(
    here: Sharding, changes: Mapping[int, Change], target: Sharding
) -> list[tuple[Sharding, Sharding]]:
    """Shardings for operand and result between which the dims can change."""
    whole = here
    for dim in changes:
        whole = whole.replace(dim, None)
    found = []
    for source in (here, whole, target):
        for dim in range(here.rank):
            if dim not in changes:
                source = filled(source, dim, target)
        result = source
        for dim in changes:
            result = filled(result, dim, target)
        found.append((source, result))
        for dim, change in changes.items():
            split = source.splits[dim]
            if split and not target.splits[dim] and change.collectable and not split.idle:
                result = result.replace(dim, None)
        found.append((source, result))
    return list(dict.fromkeys(found))


def filled(sharding: Sharding, dim: int, target: Sharding) -> Sharding:
    """`sharding`, with the target's split on an unsplit dim, if compatible."""
    if sharding.splits[dim] or not target.splits[dim]:
        return sharding
    more = sharding.replace(dim, target.splits[dim])
    return more if compatible(more.splits) else sharding


def _order(
    changes: Mapping[int, Change], before: Sequence[int], after: Sequence[int], source: Sharding
) -> list[int]:
    """The dims in the order that sends least: first those that shrink for free."""

    def rank(dim: int) -> tuple[bool, float]:
        ratio = after[dim] / before[dim]
        return bool(source.splits[dim]) or ratio > 1, ratio

    return sorted(changes, key=rank)


def _cost(
    tile: Tile,
    changes: Mapping[int, Change],
    shape: Sequence[int],
    source: Sharding,
    result: Sharding,
    target: Sharding,
) -> float:
    dtype = tile.array.dtype
    total = reshard_cost(tile.sharding, source, tile.shape, dtype)
    now = list(source.local_shape(tile.shape))
    after = result.local_shape(shape)
    for dim in _order(changes, tile.shape, shape, source):
        row = math.prod(n for d, n in enumerate(now) if d != dim) * itemsize_of(dtype)
        split = source.splits[dim]
        if split and result.splits[dim]:
            total += changes[dim].sent(tile.shape[dim], split.tiles) * row
        elif split:
            total += 2 * shape[dim] * row * (split.tiles - 1) // split.tiles
        now[dim] = after[dim]
    return total + reshard_cost(result, target, tuple(shape), dtype)


def changed_dims(eqn: JaxprEqn) -> Factors:
    """Every dim passes its splits on, if it changes, to a dim that has a row for every tile."""
    shape = eqn.invars[0].aval.shape
    names = [f"d{i}" for i in range(len(shape))]
    resized = [
        name
        for i, name in enumerate(names)
        if any(v.aval.shape[i] != shape[i] for v in eqn.outvars)
    ]
    operands = [names, *([] for _ in eqn.invars[1:])]
    return Factors.of(eqn, operands, [names] * len(eqn.outvars), resized=resized)


def _slice(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    (tile,) = tiles
    changes = _slices(eqn)
    if _is_gathered_for_all(ctx, eqn, tile, changes):
        whole = functools.reduce(lambda s, d: s.replace(d, None), changes, tile.sharding)
        tile = ctx.reshard(tile, whole, Reason("operand", "slice"))
    return [change_dims(ctx, tile, changes, targets[0], "slice")]


def _slices(eqn: JaxprEqn) -> dict[int, Slice]:
    """What a slice does to the dims that it cuts."""
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides, shape = eqn.params["strides"] or (1,) * len(starts), eqn.invars[0].aval.shape
    return {
        d: Slice(int(a), int(b), int(s))
        for d, (a, b, s) in enumerate(zip(starts, limits, strides, strict=True))
        if (a, b) != (0, shape[d]) or s != 1
    }


def _is_gathered_for_all(
    ctx: Context, eqn: JaxprEqn, tile: Tile, changes: Mapping[int, Slice]
) -> bool:
    """Whether all slices of a tensor along the same dims send more than a gather of it would."""
    here, dtype = tile.sharding, tile.array.dtype
    whole = functools.reduce(lambda s, d: s.replace(d, None), changes, here)
    if byte_size(whole.local_shape(tile.shape), dtype) > ctx.memory_limit:
        return False

    def sent(other: JaxprEqn) -> float:
        """What a slice sends by itself."""
        cuts, target = _slices(other), ctx.sharding(other.outvars[0])
        shape = other.outvars[0].aval.shape
        if cuts.keys() != changes.keys() or 0 in shape:
            return 0.0
        ways = [way for way in _candidates(here, cuts, target) if way[0] == here]
        return min(_cost(tile, cuts, shape, *way, target) for way in ways)

    gathered = sum(step.bytes for step in plan_reshard(here, whole, tile.shape, dtype))
    return 0 < gathered < ctx.over_slices(eqn.invars[0], (here, *changes), sent)


def _split(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    (tile,) = tiles
    dim = eqn.params["axis"]
    ends = np.cumsum(eqn.params["sizes"]).tolist()
    return [
        change_dims(ctx, tile, {dim: Slice(end - int(size), end)}, target, "split")
        for size, end, target in zip(eqn.params["sizes"], ends, targets, strict=True)
    ]


def _pad(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    tile, value = tiles
    shape = tuple(eqn.outvars[0].aval.shape)
    if 0 in tile.shape:
        full = jnp.broadcast_to(value.array, targets[0].local_shape(shape))
        return [Tile(full, targets[0], shape)]
    changes = {
        d: Pad(int(low), int(high), int(interior), value.array)
        for d, (low, high, interior) in enumerate(eqn.params["padding_config"])
        if low or high or interior
    }
    return [change_dims(ctx, tile, changes, targets[0], "pad")]


def _rev(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    changes = {d: Reverse() for d in eqn.params["dimensions"]}
    return [change_dims(ctx, tiles[0], changes, targets[0], "rev")]


def _tile(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    changes = {d: Repeat(int(n)) for d, n in enumerate(eqn.params["reps"]) if n != 1}
    return [change_dims(ctx, tiles[0], changes, targets[0], "tile")]


def _linear_pad(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear if it pads with zeros."""
    value = eqn.invars[1]
    return ((0,),) if isinstance(value, Literal) and value.val == 0 else ()


_CUT = Doc(
    free="dims that stay as they are",
    halo="others: the rows that change tiles",
    gather="few rows to all devices: AllReduce of them; to many tiles: ReduceScatter of them",
)
register(Rule(changed_dims, partition=_slice, linear=linear_in_all, doc=_CUT), p.slice_p)
register(Rule(changed_dims, partition=_split, doc=_CUT), split_p)
_MOVED = Doc(free="dims that stay as they are", halo="others: the rows that change tiles")
register(Rule(changed_dims, partition=_pad, linear=_linear_pad, doc=_MOVED), p.pad_p)
register(Rule(changed_dims, partition=_rev, linear=linear_in_all, doc=_MOVED), p.rev_p)
_REPEATED = Doc(
    free="dims that stay as they are",
    halo="others: the rows that a tile of the result has",
    gather="as many copies as tiles: AllGather, every device needs all rows",
)
register(Rule(changed_dims, partition=_tile, doc=_REPEATED), tile_p)
