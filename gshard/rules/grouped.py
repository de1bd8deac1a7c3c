"""Ragged rows (`gshard.rules.base.ragged_rows`): how they are exchanged, by index or as they are.

Every row is sent once, by an AllToAll.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard.graph.reason import Reason
from gshard.moving.by_index import RowTransfers, found_in, send_rows
from gshard.moving.costs import sent_bytes, timed
from gshard.moving.partial import combine, combine_cost, reducing_groups
from gshard.moving.plan import reshard_cost
from gshard.rules.base.ragged_rows import Bounds, ExpertGroups, bounds, put_rows_p, take_rows_p
from gshard.rules.base.rule import Context, Doc, Way, rule
from gshard.rules.indexing import roles_of
from gshard.tensors import padding
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets, compatible
from gshard.tensors.tile import Tile, Tiles, byte_size

_ROUNDS = "repeated for overflow, if the numbers are unbalanced"


def take_factors(eqn: JaxprEqn) -> Factors:
    """Dims of a row are free; the rows are exchanged between devices."""
    inside = [f"w{d}" for d in range(1, len(eqn.outvars[0].aval.shape))]
    nothing = [[None] * len(a.aval.shape) for a in eqn.invars[1:]]
    return Factors.of(eqn, [[None, *inside], *nothing], [[None, *inside]])


def put_factors(eqn: JaxprEqn) -> Factors:
    """Dims of a row are free; rows that others are put into are split like the result's."""
    inside = [f"w{d}" for d in range(1, len(eqn.outvars[0].aval.shape))]
    x = ["d", *inside]
    indices: list[str | None] = [None] * len(eqn.invars[3].aval.shape)
    return Factors.of(eqn, [x, [None], [None, *inside], indices], [x], ordered=())


def take_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Rows are exchanged, or all of a small tensor is gathered: `Way.how` is whether it is."""
    source, target = eqn.params["source"], eqn.params["target"]
    groups, x, aval, out = source or target, shardings[0], eqn.invars[0].aval, eqn.outvars[0].aval
    there = _row_sharding(groups, targets[0], targets[0], bool(target))
    indices = [Sharding.replicated(s.rank, s.num_devices) for s in shardings[1:]]
    whole, row = there.replace(0, None), there.local_shape(out.shape)[1:]
    share = byte_size((groups.share, *row), aval.dtype)
    if not source and reshard_cost(x, whole, aval.shape, aval.dtype) <= share:
        yield Way((whole, *indices), (there,), how=True)
        return
    here = _row_sharding(groups, x, there, bool(source))
    count = groups.rows if target else out.shape[0]
    sent = _exchanged(groups, count, here.local_shape(aval.shape)[1:], aval.dtype)
    yield Way((here, *indices), (there,), how=False, sent=sent)


def _exchanged(groups: ExpertGroups, count: int, row: Sequence[int], dtype: Any) -> float:
    """The cost of the AllToAll of so many rows in all, if numbers are balanced."""
    tiles = groups.parts.tiles
    size = byte_size((tiles * -(-count // tiles**2), *row), dtype)
    return timed(sent_bytes("all_to_all", size, tiles))


@rule(
    take_rows_p,
    factors=take_factors,
    ways=take_ways,
    doc=Doc(free="dims of a row", gather="rows to and from experts: AllToAll by index"),
)
def _take(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """Rows by index, exchanged between devices."""
    x, shape, dtype = tiles[0], tuple(eqn.outvars[0].aval.shape), tiles[0].array.dtype
    source, target, fill = (eqn.params[k] for k in ("source", "target", "fill"))
    groups: ExpertGroups = source or target
    limits = limits_of(ctx, groups, tiles[1])
    (there,) = way.results
    local = there.local_shape(shape)
    unfilled = padding.filled(local, dtype) if fill is None else jnp.full(local, fill, dtype)
    into = Tile(unfilled, there, shape)
    count = groups.rows if target else shape[0]
    wanted = (
        _replicated(ctx, tiles[2]).reshape(-1) if len(tiles) > 2 else lax.iota(jnp.int32, count)
    )
    rows = source.rows if source else x.shape[0]
    inside = jnp.full(count, True) if fill is None else (wanted >= 0) & (wanted < rows)
    wanted = jnp.clip(wanted, 0, rows - 1).astype(jnp.int32)
    x = ctx.reshard(x, way.operands[0], Reason("operand", "take_rows"))
    if way.how:
        return [_taken_here(ctx, limits if target else None, x, wanted, inside, into)]
    begins = _places(groups, limits, x, source, wanted)
    ends = _places(groups, limits, into, target, lax.iota(jnp.int32, count))

    transfers = RowTransfers(inside, *begins, *ends)
    return [_sent(ctx, groups, x, transfers, into, adds=False)]


def _taken_here(
    ctx: Context, limits: Bounds | None, table: Tile, wanted: jax.Array, inside: jax.Array,
    into: Tile,
) -> Tile:  # fmt: skip
    """Rows of a replicated table."""
    (split, *_), size = into.sharding.splits, into.array.shape[0]
    assert split
    number = ctx.place.coord(split)
    begin = limits.starts[number] if limits else number * size
    mine = jnp.minimum(begin + lax.iota(jnp.int32, size), wanted.size - 1)
    found = lax.broadcast_in_dim(inside[mine], into.array.shape, (0,))
    return into.holding(jnp.where(found, table.array[wanted[mine]], into.array))


def put_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Rows are exchanged, or summed on each device first (`Way.how`), where those are fewer."""
    source, target = eqn.params["source"], eqn.params["target"]
    groups, out, aval = source or target, eqn.outvars[0].aval, eqn.invars[2].aval
    there = _row_sharding(groups, targets[0], targets[0], bool(target))
    rows = _row_sharding(groups, shardings[2], there, bool(source))
    sizes, indices = (Sharding.replicated(s.rank, s.num_devices) for s in shardings[1::2])
    row = rows.local_shape(aval.shape)[1:]
    share = byte_size((groups.share, *row), aval.dtype)
    if source and eqn.params["adds"] and 2 * byte_size(out.shape, aval.dtype) <= share:
        parts = rows.replace(0, None).unreduced_over([groups.parts])
        sent = combine_cost(parts, "sum", targets[0], out)
        yield Way((targets[0], sizes, rows, indices), (targets[0],), how=parts, sent=sent)
        return
    sent = _exchanged(groups, eqn.invars[3].aval.size, row, aval.dtype)
    yield Way((there, sizes, rows, indices), (there,), sent=sent)


@rule(
    put_rows_p,
    factors=put_factors,
    ways=put_ways,
    doc=Doc(free="dims of a row", gather="rows to and from experts: AllToAll by index"),
)
def _put(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """Rows written to a tensor by index, or added to it."""
    source, target, adds, clip = (eqn.params[k] for k in ("source", "target", "adds", "clip"))
    groups: ExpertGroups = source or target
    limits = limits_of(ctx, groups, tiles[1])
    wanted = _replicated(ctx, tiles[3]).reshape(-1)
    count = target.rows if target else tiles[0].shape[0]
    inside = jnp.full(wanted.size, True) if clip else (wanted >= 0) & (wanted < count)
    wanted = jnp.clip(wanted, 0, count - 1).astype(jnp.int32)
    rows = ctx.reshard(tiles[2], way.operands[2], Reason("operand", "put_rows"))

    if way.how:
        return [_added_here(ctx, groups, limits, tiles[0], rows, wanted, inside, targets[0])]
    into = ctx.reshard(tiles[0], way.operands[0], Reason("operand", "put_rows"))
    begins = _places(groups, limits, rows, source, lax.iota(jnp.int32, wanted.size))
    ends = _places(groups, limits, into, target, wanted)
    transfers = RowTransfers(inside, *begins, *ends)
    return [_sent(ctx, groups, rows, transfers, into, adds)]


def _added_here(
    ctx: Context, groups: ExpertGroups, limits: Bounds, x: Tile, rows: Tile, wanted: jax.Array,
    inside: jax.Array, target: Sharding,
) -> Tile:  # fmt: skip
    """Rows added to a tensor with fewer rows than are sent: every device sums its own first."""
    whole = rows.sharding.replace(0, None)
    number = ctx.place.coord(groups.parts)
    row = limits.starts[number] + lax.iota(jnp.int32, rows.array.shape[0])
    here = (row < limits.starts[number + 1]) & inside[jnp.minimum(row, wanted.size - 1)]
    at = jnp.where(here, wanted[jnp.minimum(row, wanted.size - 1)], x.shape[0])
    nothing = jnp.zeros(whole.local_shape(x.shape), rows.array.dtype)
    added, parts = nothing.at[at].add(rows.array, mode="drop"), whole.unreduced_over([groups.parts])
    part = Tile(added, parts, x.shape, "put_rows")
    sums = combine(ctx.place, part, "sum", target)
    sums = ctx.reshard(sums, target, Reason("result", "put_rows"))
    into = ctx.reshard(x, target, Reason("operand", "put_rows"))
    return sums.holding(into.array + sums.array)


def _sent(
    ctx: Context, groups: ExpertGroups, x: Tile, transfers: RowTransfers, into: Tile, adds: bool
) -> Tile:
    """`into`, with the rows of `x` that are sent there."""

    def put(into: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
        return (into.at[at].add if adds else into.at[at].set)(rows, mode="drop")

    parts = groups.parts
    between = reducing_groups(into.sharding.replace(0, None).unreduced_over([parts]))
    why = f"rows to and from {groups.count} groups on {parts.tiles} devices; {_ROUNDS}"
    reason = Reason("step", "", why)
    number = ctx.place.coord(parts)
    array = send_rows(
        ctx.place, x.array, transfers, number, parts.tiles, between, into.array, put, reason
    )
    return into.holding(array)


def _row_sharding(
    groups: ExpertGroups, rows: Sharding, others: Sharding, by_groups: bool
) -> Sharding:
    """A sharding whose rows are split over the devices of the groups, like `rows` if possible.

    Dims of a row are split as in `others`, if compatible.
    """
    split = rows.splits[0]
    if by_groups:
        split = groups.ragged
    elif split is None or split.ragged or _numbers(split, groups.parts) is None:
        split = groups.parts
    splits = (split, *others.splits[1:])
    if not compatible(splits) or not compatible((groups.parts, *others.splits[1:])):
        splits = (split, *(None,) * (others.rank - 1))
    return Sharding(splits, others.num_devices)


def _numbers(split: Split, parts: Split) -> np.ndarray | None:
    """The part that a device with each tile of `split` holds, if that is one and the same."""
    if split.tiles != parts.tiles or split.idle:
        return None
    numbers = np.zeros(split.tiles, np.int32)
    numbers[split.coords] = parts.coords
    return numbers if (numbers[split.coords] == parts.coords).all() else None


def _places(
    groups: ExpertGroups, limits: Bounds, tile: Tile, by: ExpertGroups | None, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where rows of a tensor are: the number of the part, and the row there."""
    if by:
        return found_in(limits.starts, rows)
    (split, *_), size = tile.sharding.splits, tile.array.shape[0]
    numbers = _numbers(split, groups.parts) if split else None
    assert numbers is not None
    return jnp.asarray(numbers)[rows // size], rows % size


def limits_of(ctx: Context, groups: ExpertGroups, sizes: Tile) -> Bounds:
    """The bounds of groups and devices, computed once for the same sizes."""
    known, key = ctx.place.bounds, (groups, sizes.value)
    if key not in known:
        known[key] = bounds(groups, _replicated(ctx, sizes))
    return known[key]


def _replicated(ctx: Context, tile: Tile) -> jax.Array:
    replicated = Sharding.replicated(tile.sharding.rank, tile.sharding.num_devices)
    return ctx.reshard(tile, replicated, Reason("step", "", "every device needs all indices")).array


# ---------------------------------------------------------------- which equations are by rows


def takes_rows(eqn: JaxprEqn) -> dict[str, Any] | None:
    """How a gather takes entire rows of the leading dim, one for each index; else None."""
    if eqn.primitive is not p.gather_p or not _of_rows(eqn):
        return None
    fills = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP
    return {"fill": eqn.params["fill_value"] if fills else None}


def puts_rows(eqn: JaxprEqn) -> bool:
    """Whether a scatter updates entire rows of the leading dim, one for each index."""
    return not any(isinstance(a, Literal) for a in eqn.invars) and _of_rows(eqn)


def _of_rows(eqn: JaxprEqn) -> bool:
    """Whether a gather or scatter has an entire row of the leading dim for each index."""
    if len(eqn.invars[1].aval.shape) != 2:
        return False
    roles = roles_of(eqn)
    rows = roles.index_map == (0,) and roles.operand[:1] == ("k0",)
    inside = all(n[0] == "w" for n in roles.operand[1:])
    return rows and inside and roles.windows == ("i0", *roles.operand[1:])
