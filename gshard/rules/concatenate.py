"""Concatenate, stack, unstack."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import stack_p, unstack_p
from gshard.graph.reason import Reason
from gshard.moving.halo import align, rows_put
from gshard.moving.plan import plan_reshard, reshard_cost, whole_along
from gshard.moving.recompute import fetch
from gshard.moving.row_windows import Move, Runs, Windows, plan_fetch
from gshard.rules.base.primitives import concatenate_slices_p
from gshard.rules.base.rule import (
    RULES,
    Context,
    Doc,
    Rule,
    Way,
    cheapest,
    linear_in_all,
    no_order,
    register,
)
from gshard.rules.base.unreduced import joined
from gshard.rules.base.ways import least
from gshard.rules.slicing import filled
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, row_bytes


def stack_factors(eqn: JaxprEqn) -> Factors:
    """The dim along which tensors are stacked, or unstacked, is unsplit; the others are free."""
    rank = max(len(a.aval.shape) for a in (*eqn.invars, *eqn.outvars))
    stack = [None if d == eqn.params["axis"] else f"d{d}" for d in range(rank)]
    parts = [name for name in stack if name]
    operands, results = (
        [stack if len(a.aval.shape) == rank else parts for a in atoms]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Factors.of(eqn, operands, results)


def concatenate_factors(eqn: JaxprEqn) -> Factors:
    """Every dim passes its splits on; operands with fewer rows than tiles stay unsplit."""
    names = [f"d{i}" for i in range(len(eqn.outvars[0].aval.shape))]
    resized = [names[eqn.params["dimension"]]]
    return Factors.of(eqn, [names] * len(eqn.invars), [names], resized=resized)


Used = Mapping[int, list[Move]]  # for each operand, which of its rows the result has, and where


def _used(eqn: JaxprEqn) -> Used:
    dim, used, at = eqn.params["dimension"], dict[int, list[Move]](), 0
    windows = eqn.params.get("windows")
    for operand, start, limit in windows or [
        (i, 0, a.aval.shape[dim]) for i, a in enumerate(eqn.invars)
    ]:
        if start < limit:
            used.setdefault(operand, []).append(Move(start, limit, at - start))
        at += limit - start
    return used


def _concatenate(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """If the dim is split, every tile of the result fetches the rows that it needs.

    Operands that are unsplit there send nothing.
    """
    dim, used, shape = eqn.params["dimension"], _used(eqn), tuple(eqn.outvars[0].aval.shape)
    if 0 in shape:
        empty = jnp.zeros(targets[0].local_shape(shape), tiles[0].array.dtype)
        return [Tile(empty, targets[0], shape)]
    way = cheapest(ctx, eqn, RULES[eqn.primitive], tiles, targets)
    (result,), reason = way.results, Reason("operand", "concatenate")
    ready = {i: ctx.reshard(tiles[i], way.operands[i], reason) for i in used}
    split = result.splits[dim]
    if split is None:
        parts = [(q.first + q.by, q, ready[i].array) for i, own in used.items() for q in own]
        pieces = [
            lax.slice_in_dim(x, q.first, q.end, axis=dim)
            for _, q, x in sorted(parts, key=lambda part: part[0])
        ]
        return [Tile(lax.concatenate(pieces, dim), result, shape)]
    return [Tile(_joined(ctx, ready, used, dim, split, shape[dim]), result, shape)]


def _joined(
    ctx: Context, ready: Mapping[int, Tile], used: Used, dim: int, split: Split, size: int
) -> jax.Array:
    """The tile of the result, along a split dim of `size` rows."""
    place, rows = ctx.place, -(-size // split.tiles)
    starts = np.arange(split.tiles) * rows

    def fetched(i: int) -> Iterator[tuple[jax.Array, list[Move]]]:
        """The rows that come from one operand, and the parts that they are."""
        reason = Reason("step", "concatenate", f"rows of operand {i} to their tiles")
        tile, parts = ready[i], used[i]
        if tile.sharding.splits[dim] is split and len(parts) > 1:
            windows = Windows.of(Runs.of(tile, dim), tile.array.shape[dim], starts, rows, parts)
            yield align(place, tile.array, tile.sharding, dim, windows, reason), parts
            return
        for part in parts:
            yield fetch(place, tile, dim, starts - part.by, rows, reason, part[:2], split), [part]

    def over(below: jax.Array, above: jax.Array, parts: list[Move]) -> jax.Array:
        """`above` in the rows that the parts become, `below` in all others."""
        index = lax.broadcasted_iota(jnp.int32, below.shape, dim) + place.lookup(split.own * rows)
        inside = [(index >= q.first + q.by) & (index < q.end + q.by) for q in parts]
        return lax.select(functools.reduce(jnp.logical_or, inside), above, below)

    def written(below: jax.Array, source: jax.Array, part: Move) -> jax.Array:
        """`below` with a part of `source` in the rows of the one tile that it goes into."""
        number, first = divmod(part.first + part.by, rows)
        new = lax.slice_in_dim(source, part.first, part.end, axis=dim)
        there = lax.slice_in_dim(below, first, first + new.shape[dim], axis=dim)
        return rows_put(below, place.where(split.own == number, new, there), first, dim)

    joined: jax.Array | None = None
    for i in sorted(used, key=lambda i: -sum(q.end - q.first for q in used[i])):
        single = all((q.first + q.by) // rows == (q.end + q.by - 1) // rows for q in used[i])
        if joined is not None and single and ready[i].sharding.splits[dim] is None:
            for part in used[i]:
                joined = written(joined, ready[i].array, part)
            continue
        for array, parts in fetched(i):
            joined = array if joined is None else over(joined, array, parts)
    assert joined is not None
    return joined


def _towards(here: Sharding, target: Sharding) -> Sharding:
    for dim in range(here.rank):
        here = filled(here, dim, target)
    return here


def concatenate_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Sequence[Way]:
    """Fetch rows of a split dim, or first gather it or move its split to another dim.

    The last takes an AllToAll for each operand and one for the result. It is the only way if it
    sends fewer bytes in no more steps.
    """
    (target,), dim, used = targets, eqn.params["dimension"], _used(eqn)
    options = dict.fromkeys([target, *(_towards(shardings[i], target) for i in used)])
    whole = [s.replace(dim, None) for s in options]
    usual = [_way(eqn, shardings, used, s) for s in dict.fromkeys([*options, *whole])]
    moved = dict.fromkeys(m for s in options for m in whole_along(s, dim)[1:])
    if not moved:
        return usual
    best = least(usual, eqn, shardings, targets)
    sent, steps = _totals(best, eqn, shardings, targets)
    for way in [_way(eqn, shardings, used, s) for s in moved]:
        other = _totals(way, eqn, shardings, targets)
        if other[0] < sent and other[1] <= steps:
            best, sent = way, other[0]
    return [best] if best.results[0] in moved else usual


def _way(eqn: JaxprEqn, shardings: Sequence[Sharding], used: Used, result: Sharding) -> Way:
    """With a result that is split like that; `Way.how` is the number of collectives inside."""
    dim, aval = eqn.params["dimension"], eqn.outvars[0].aval
    split, local = result.splits[dim], result.local_shape(aval.shape)
    row = row_bytes(local, dim, aval.dtype)
    sources, sent, steps = list(shardings), 0, 0
    for i, own in used.items():
        here, shape = shardings[i], eqn.invars[i].aval.shape
        sources[i] = result.replace(dim, None)
        if split:
            starts = np.arange(split.tiles) * local[dim]
            plan = plan_fetch(split.tiles, shape[dim], starts, local[dim], own)
            gathered, aligned = (
                reshard_cost(here, there, shape, aval.dtype) for there in (sources[i], result)
            )
            if aligned + plan.sent * row < gathered:
                sources[i], sent, steps = result, sent + plan.sent * row, steps + plan.steps
    return Way(tuple(sources), (result,), steps, sent=sent)


def _totals(
    way: Way, eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding]
) -> tuple[float, int]:
    """The bytes that a way sends, and in how many collectives."""
    sent, steps = way.sent, way.how
    atoms, before = (*eqn.invars, *eqn.outvars), (*shardings, *way.results)
    for atom, here, there in zip(atoms, before, (*way.operands, *targets), strict=True):
        if here is not there:
            hops = plan_reshard(here, there, atom.aval.shape, atom.aval.dtype)
            moved = [hop.bytes for hop in hops if hop.kind != "slice"]
            sent, steps = sent + sum(moved), steps + len(moved)
    return sent, steps


_JOINED = Doc(free="other dims", halo="the dim itself: the rows that change tiles")
register(
    Rule(
        concatenate_factors,
        partition=_concatenate,
        ways=concatenate_ways,
        ordered=no_order,
        linear=linear_in_all,
        on_unreduced=joined,
        doc=_JOINED,
    ),
    p.concatenate_p,
    concatenate_slices_p,
)
register(
    Rule(
        stack_factors,
        linear=linear_in_all,
        on_unreduced=joined,
        doc=Doc(free="the operands' dims"),
    ),
    stack_p,
)
register(
    Rule(
        stack_factors,
        doc=Doc(
            free="the results' dims", gather="the other: AllGather, every device needs all rows"
        ),
    ),
    unstack_p,
)
