"""Data formatting (section 3.3.3): operators that change which rows a dim has, or their order.

Every such operator works dim by dim (`changes`), and unchanged dims cost nothing. What is left to
decide is under which sharding the dims change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import split_p, tile_p
from gshard.graph.reason import Reason
from gshard.moving.costs import sent_bytes
from gshard.moving.partial import combine_cost
from gshard.moving.plan import plan_reshard
from gshard.rules.base.rule import (
    Context,
    Doc,
    Rule,
    Way,
    in_cheapest_way,
    linear_in_all,
    register,
)
from gshard.rules.base.ways import price, ways_of
from gshard.rules.changes import Change, Repeat, pad_rows, reverse_rows, slice_rows
from gshard.tensors.factors import Factors, Shape
from gshard.tensors.sharding import Sharding, compatible
from gshard.tensors.tile import Tile, byte_size, row_bytes

Changes = Mapping[int, Change]  # of some dims
# For every result, of an equation and its operands; without these where changes are only priced
ChangesOf = Callable[..., Sequence[Changes]]


def change_ways(
    eqn: JaxprEqn,
    shardings: Sequence[Sharding],
    targets: Sequence[Sharding],
    limit: int,
    changes_of: ChangesOf,
) -> Iterator[Way]:
    """The ways to change dims, which differ in the sharding under which they change.

    Either the operand keeps its splits, or it takes the result's, or the dims that change are
    gathered. An unsplit dim is sliced like the result, which is free. The rows of a slice may be
    collected on every device.
    """
    here, *others = shardings
    every = list(zip(changes_of(eqn), eqn.outvars, targets, strict=True))
    sources = (s for changes, _, target in every for s in _sources(here, changes, target))
    for source in dict.fromkeys(sources):
        results, sent = [], 0.0
        for changes, var, target in every:
            after = {
                result: _sent(eqn.invars[0].aval, changes, var.aval.shape, source, result)
                for result in _results(source, changes, target)
            }
            aval = var.aval
            best = min(after, key=lambda r: after[r] + combine_cost(r, "", target, aval))
            results.append(best)
            sent += after[best]
        yield Way((source, *others), tuple(results), sent=sent)


def change_dims(
    ctx: Context, tile: Tile, changes: Changes, result: Sharding, shape: Shape, name: str
) -> Tile:
    """`tile` with some of its dims changed, so that its shape is `shape`, under `result`."""
    if 0 in (*tile.shape, *shape):
        (value, *_) = [c.value for c in changes.values() if c.value is not None] or [0]
        full = jnp.full(result.local_shape(shape), value, tile.array.dtype)
        return Tile(full, result, shape)
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


def _sources(here: Sharding, changes: Changes, target: Sharding) -> Iterator[Sharding]:
    """Shardings of the operand under which dims can change."""
    for source in (here, here.unsplit(changes), target):
        for dim in range(here.rank):
            if dim not in changes:
                source = filled(source, dim, target)
        yield source


def _results(source: Sharding, changes: Changes, target: Sharding) -> Iterator[Sharding]:
    """Shardings of the result, of an operand whose dims change under `source`."""
    result = source
    for dim in changes:
        result = filled(result, dim, target)
    yield result
    for dim, change in changes.items():
        split = source.splits[dim]
        if split and not target.splits[dim] and change.collectable and not split.idle:
            result = result.replace(dim, None)
    yield result


def filled(sharding: Sharding, dim: int, target: Sharding) -> Sharding:
    """`sharding`, with the target's split on an unsplit dim, if compatible."""
    if sharding.splits[dim] or not target.splits[dim]:
        return sharding
    more = sharding.replace(dim, target.splits[dim])
    return more if compatible(more.splits) else sharding


def _order(changes: Changes, before: Shape, after: Shape, source: Sharding) -> list[int]:
    """The dims in the order that sends least: first those that shrink for free."""

    def rank(dim: int) -> tuple[bool, float]:
        ratio = after[dim] / before[dim]
        return bool(source.splits[dim]) or ratio > 1, ratio

    return sorted(changes, key=rank)


def _sent(aval: Any, changes: Changes, shape: Shape, source: Sharding, result: Sharding) -> float:
    """The bytes of the rows that change tiles."""
    if 0 in (*aval.shape, *shape):
        return 0.0
    total = 0.0
    now = list(source.local_shape(aval.shape))
    after = result.local_shape(shape)
    for dim in _order(changes, aval.shape, shape, source):
        row = row_bytes(now, dim, aval.dtype)
        split = source.splits[dim]
        if split and result.splits[dim]:
            total += changes[dim].sent(aval.shape[dim], split.tiles) * row
        elif split:
            total += sent_bytes("all_reduce", shape[dim] * row, split.tiles)
        now[dim] = after[dim]
    return total


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
    """A slice; the operand is gathered first if all slices of it along these dims send more."""
    (tile,), (changes,) = tiles, _slices(eqn)
    here, dtype = tile.sharding, tile.array.dtype
    whole = here.unsplit(changes)

    def sent(other: JaxprEqn) -> float:
        """What a slice sends by itself."""
        (cuts,), wanted = _slices(other), [ctx.sharding(other.outvars[0])]
        if cuts.keys() != changes.keys() or 0 in other.outvars[0].aval.shape:
            return 0.0
        ways = ways_of(_SLICE, other, [here], wanted, ctx.memory_limit)
        return min(price(w, other, [here], wanted) for w in ways if not _gathers(w, here, cuts))

    if byte_size(whole.local_shape(tile.shape), dtype) <= ctx.memory_limit:
        gathered = sum(step.bytes for step in plan_reshard(here, whole, tile.shape, dtype))
        if 0 < gathered < ctx.over_slices(eqn.invars[0], (here, *changes), sent):
            tile = ctx.reshard(tile, whole, Reason("operand", "slice"))
    return _SLICE.partition(ctx, eqn, [tile], targets)


def _slices(eqn: JaxprEqn, *tiles: Tile) -> list[Changes]:
    """What a slice does to the dims that it cuts."""
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides, shape = eqn.params["strides"] or (1,) * len(starts), eqn.invars[0].aval.shape
    return [
        {
            d: slice_rows(int(a), int(b), int(s))
            for d, (a, b, s) in enumerate(zip(starts, limits, strides, strict=True))
            if (a, b) != (0, shape[d]) or s != 1
        }
    ]


def _gathers(way: Way, here: Sharding, changes: Iterable[int]) -> bool:
    """Whether the operand's dims that change are not split as they are here."""
    return any(way.operands[0].splits[dim] != here.splits[dim] for dim in changes)


def _splits(eqn: JaxprEqn, *tiles: Tile) -> list[Changes]:
    ends = np.cumsum(eqn.params["sizes"]).tolist()
    return [
        {eqn.params["axis"]: slice_rows(end - int(size), end)}
        for size, end in zip(eqn.params["sizes"], ends, strict=True)
    ]


def _pads(eqn: JaxprEqn, *tiles: Tile) -> list[Changes]:
    shape, value = eqn.invars[0].aval.shape, tiles[1].array if tiles else 0
    return [
        {
            d: pad_rows(shape[d], int(low), int(high), int(interior), value)
            for d, (low, high, interior) in enumerate(eqn.params["padding_config"])
            if low or high or interior
        }
    ]


def _reversals(eqn: JaxprEqn, *tiles: Tile) -> list[Changes]:
    shape = eqn.invars[0].aval.shape
    return [{d: reverse_rows(shape[d]) for d in eqn.params["dimensions"]}]


def _repeats(eqn: JaxprEqn, *tiles: Tile) -> list[Changes]:
    shape = eqn.outvars[0].aval.shape
    return [{d: Repeat(shape[d]) for d, n in enumerate(eqn.params["reps"]) if n != 1}]


def change_rule(changes_of: ChangesOf, **rest: Any) -> Rule:
    """The rule of an operator that changes dims of its first operand."""

    @in_cheapest_way
    def changed(
        ctx: Context, eqn: JaxprEqn, way: Way, tiles: list[Tile], targets: list[Sharding]
    ) -> list[Tile]:
        return [
            change_dims(ctx, tiles[0], changes, result, v.aval.shape, eqn.primitive.name)
            for changes, v, result in zip(
                changes_of(eqn, *tiles), eqn.outvars, way.results, strict=True
            )
        ]

    def on_unreduced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
        """Along unsplit dims, every device changes what it has."""
        (tile, *others), (changes,) = tiles, changes_of(eqn, *tiles)
        free = tile.is_standard and not any(tile.sharding.splits[d] for d in changes)
        if not free or 0 in eqn.outvars[0].aval.shape or any(t.is_unreduced for t in others):
            return None
        here, shape, name = tile.sharding.reduced, eqn.outvars[0].aval.shape, eqn.primitive.name
        done = change_dims(ctx, replace(tile, sharding=here), changes, here, shape, name)
        return replace(tile, array=done.array, shape=done.shape)

    return Rule(
        changed_dims,
        partition=changed,
        ways=functools.partial(change_ways, changes_of=changes_of),
        on_unreduced=on_unreduced,
        ordered=lambda eqn: {f"d{d}" for changes in changes_of(eqn) for d in changes},
        **rest,
    )


def _linear_pad(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear if it pads with zeros."""
    value = eqn.invars[1]
    return ((0,),) if isinstance(value, Literal) and value.val == 0 else ()


_CUT = Doc(
    free="dims that stay as they are",
    halo="others: the rows that change tiles",
    gather="few rows to all devices: AllReduce of them; to many tiles: ReduceScatter of them",
)
_SLICE = change_rule(_slices, linear=linear_in_all, doc=_CUT)
register(replace(_SLICE, partition=_slice), p.slice_p)
register(change_rule(_splits, doc=_CUT), split_p)
_MOVED = Doc(free="dims that stay as they are", halo="others: the rows that change tiles")
register(change_rule(_pads, linear=_linear_pad, doc=_MOVED), p.pad_p)
register(change_rule(_reversals, linear=linear_in_all, doc=_MOVED), p.rev_p)
_REPEATED = Doc(
    free="dims that stay as they are",
    halo="others: the rows that a tile of the result has",
    gather="as many copies as tiles: AllGather, every device needs all rows",
)
register(change_rule(_repeats, doc=_REPEATED), tile_p)
