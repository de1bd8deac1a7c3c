"""Ragged rows (`gshard.operators.ragged_rows`): how they are dispatched, multiplied and combined.

Rows are exchanged by index, each once, by an AllToAll. The product itself is local. Only if a
device would have more rows than its capacity, they are in equal shares, and the groups' matrices
(or the sums that become their gradients) pass around a ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.reason import Reason
from gshard.graph.source import unlikely
from gshard.moving import collectives
from gshard.moving.by_index import RowTransfers, found_in, send_rows
from gshard.moving.partial import combine, mask_for, reducing_groups
from gshard.moving.plan import reshard_cost
from gshard.operators.ragged_rows import (
    Bounds,
    ExpertGroups,
    bounds,
    grouped_dot_p,
    put_rows_p,
    take_rows_p,
)
from gshard.operators.rule import Context, Doc, Rule, no_order, register
from gshard.operators.ways import Assignment, by_factors, least, shard_dims
from gshard.rules.contraction import dot_work, ragged_factors, ring_of
from gshard.tensors import padding
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import Identity, Tile, byte_size

_ROUNDS = "repeated for overflow, if the numbers are unbalanced"
_OVERFLOW = "if a device has more rows than its capacity"


# ---------------------------------------------------------------- rows that are exchanged


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
    return Factors.of(eqn, [x, [None], [None, *inside], indices], [x])


def _take(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    """Rows by index, exchanged between devices."""
    x, shape, dtype = tiles[0], tuple(eqn.outvars[0].aval.shape), tiles[0].array.dtype
    source, target, fill = (eqn.params[k] for k in ("source", "target", "fill"))
    groups: ExpertGroups = source or target
    limits = _limits(ctx, groups, tiles[1])
    there = _row_sharding(groups, targets[0], targets[0], bool(target))
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
    whole = there.replace(0, None)
    share = byte_size((groups.share, *local[1:]), dtype)
    if not source and reshard_cost(x.sharding, whole, x.shape, dtype) <= share:
        table = ctx.reshard(x, whole, Reason("operand", "take_rows"))
        return [_taken_here(ctx, limits if target else None, table, wanted, inside, into)]
    x = ctx.reshard(
        x, _row_sharding(groups, x.sharding, there, bool(source)), Reason("operand", "take_rows")
    )
    begins = _places(groups, limits, x, source, wanted)
    ends = _places(groups, limits, into, target, lax.iota(jnp.int32, count))

    return [_sent(ctx, groups, x, RowTransfers(inside, *begins, *ends), into, _set_rows)]


def reshard_ragged(ctx: Context, tile: Tile, target: Sharding, reason: Reason) -> Tile:
    """`tile` under another sharding, where rows are ragged before or after."""
    dim = tile.sharding.ragged if tile.sharding.ragged is not None else target.ragged
    assert dim is not None
    here, there = tile.sharding.splits[dim], target.splits[dim]
    if here is there:  # other dims are moved, with all rows that the devices hold
        assert here
        held = (*tile.shape[:dim], here.tiles * here.rows(tile.shape[dim]), *tile.shape[dim + 1 :])
        even = Tile(tile.array, tile.sharding.replace(dim, here.even), held)
        moved = ctx.reshard(even, target.replace(dim, here.even), reason)
        return Tile(moved.array, target, tile.shape)
    order = (dim, *(d for d in range(len(tile.shape)) if d != dim))
    if here and here.ragged:
        tile = _exchanged(ctx, here, _transposed(tile, order), there=False)
        tile = _transposed(tile, _inverse(order))
    if there and there.ragged:
        tile = ctx.reshard(tile, target.replace(dim, there.even), reason)
        tile = _transposed(
            _exchanged(ctx, there, _transposed(tile, order), there=True), _inverse(order)
        )
    return ctx.reshard(tile, target, reason)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(d) for d in range(len(order)))


def _transposed(tile: Tile, order: tuple[int, ...]) -> Tile:
    shape = tuple(tile.shape[d] for d in order)
    return Tile(lax.transpose(tile.array, order), tile.sharding.project(order), shape)


def _exchanged(ctx: Context, split: Split, x: Tile, there: bool) -> Tile:
    """All rows of `x`, exchanged so that they are `split`, which is ragged, or back."""
    groups, limits = ctx.place.known[split]
    source, target = (None, groups) if there else (groups, None)
    sharding = _row_sharding(groups, x.sharding, x.sharding, there)
    into = Tile(padding.filled(sharding.local_shape(x.shape), x.array.dtype), sharding, x.shape)
    rows = lax.iota(jnp.int32, groups.rows)
    begins = _places(groups, limits, x, source, rows)
    ends = _places(groups, limits, into, target, rows)
    transfers = RowTransfers(jnp.full(groups.rows, True), *begins, *ends)
    return _sent(ctx, groups, x, transfers, into, _set_rows)


def _set_rows(into: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
    return into.at[at].set(rows, mode="drop")


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
    return replace(into, array=jnp.where(found, table.array[wanted[mine]], into.array))


def _put(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    """Rows written to a tensor by index, or added to it."""
    source, target, adds, clip = (eqn.params[k] for k in ("source", "target", "adds", "clip"))
    groups: ExpertGroups = source or target
    limits = _limits(ctx, groups, tiles[1])
    wanted = _replicated(ctx, tiles[3]).reshape(-1)
    count = target.rows if target else tiles[0].shape[0]
    inside = jnp.full(wanted.size, True) if clip else (wanted >= 0) & (wanted < count)
    wanted = jnp.clip(wanted, 0, count - 1).astype(jnp.int32)
    there = _row_sharding(groups, targets[0], targets[0], bool(target))
    rows = ctx.reshard(
        tiles[2],
        _row_sharding(groups, tiles[2].sharding, there, bool(source)),
        Reason("operand", "put_rows"),
    )

    def put(into: jax.Array, rows: jax.Array, at: jax.Array) -> jax.Array:
        return (into.at[at].add if adds else into.at[at].set)(rows, mode="drop")

    share = byte_size((groups.share, *rows.array.shape[1:]), rows.array.dtype)
    small = 2 * byte_size(tiles[0].shape, rows.array.dtype) <= share
    if small and source and adds:
        return [_added_here(ctx, groups, limits, tiles[0], rows, wanted, inside, targets[0])]
    into = ctx.reshard(tiles[0], there, Reason("operand", "put_rows"))
    begins = _places(groups, limits, rows, source, lax.iota(jnp.int32, wanted.size))
    ends = _places(groups, limits, into, target, wanted)
    return [_sent(ctx, groups, rows, RowTransfers(inside, *begins, *ends), into, put)]


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
    return replace(sums, array=into.array + sums.array)


def _sent(
    ctx: Context,
    groups: ExpertGroups,
    x: Tile,
    transfers: RowTransfers,
    into: Tile,
    put: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> Tile:
    """`into`, with the rows of `x` that are sent there."""
    parts = groups.parts
    between = reducing_groups(into.sharding.replace(0, None).unreduced_over([parts]))
    why = f"rows to and from {groups.count} groups on {parts.tiles} devices; {_ROUNDS}"
    reason = Reason("step", "", why)
    number = ctx.place.coord(parts)
    array = send_rows(
        ctx.place, x.array, transfers, number, parts.tiles, between, into.array, put, reason
    )
    return replace(into, array=array)


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
    groups: ExpertGroups,
    limits: Bounds,
    tile: Tile,
    by_groups: ExpertGroups | None,
    rows: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Where rows of a tensor are: the number of the part, and the row there."""
    if by_groups:
        return found_in(limits.starts, rows)
    (split, *_), size = tile.sharding.splits, tile.array.shape[0]
    numbers = _numbers(split, groups.parts) if split else None
    assert numbers is not None
    return jnp.asarray(numbers)[rows // size], rows % size


def _limits(ctx: Context, groups: ExpertGroups, sizes: Tile) -> Bounds:
    """The bounds of groups and devices, computed once for the same sizes."""
    whole = _replicated(ctx, sizes)
    key = (groups, Identity(whole))
    if key not in ctx.place.known:
        ctx.place.known[key] = bounds(groups, whole)
        ctx.place.known[groups.ragged] = groups, ctx.place.known[key]
    return ctx.place.known[key]


def _replicated(ctx: Context, tile: Tile) -> jax.Array:
    replicated = Sharding.replicated(tile.sharding.rank, tile.sharding.num_devices)
    return ctx.reshard(tile, replicated, Reason("step", "", "every device needs all indices")).array


# ---------------------------------------------------------------- products


def grouped_factors(eqn: JaxprEqn) -> Factors:
    """The factors of a `ragged_dot` whose rows `t` may be split; its groups are, like the rows."""
    return ragged_factors(eqn, rows="t")


def _grouped_dot(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """Each device multiplies its rows with its own groups' matrices, or sums its groups' rows."""
    groups: ExpertGroups = eqn.params["groups"]
    factors, (lhs, rhs, sizes) = grouped_factors(eqn), tiles
    chosen = _chosen(eqn, factors, tiles, targets)
    limits = _limits(ctx, groups, sizes)
    of_groups = eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions
    ready = []
    for number, (tile, dims) in enumerate(zip((lhs, rhs), factors.operands, strict=False)):
        wanted = shard_dims(dims, chosen, factors, targets[0].num_devices)
        for dim in of_groups if number else ():
            wanted = wanted.replace(dim, groups.split)
        tile = ctx.reshard(tile, wanted, Reason("operand", "ragged_dot"))
        tile = tile.masked(ctx.place, 0, list(of_groups)) if number and of_groups else tile
        ready.append(mask_for(ctx.place, tile, dims, factors))
    here = shard_dims(factors.results[0], chosen, factors, targets[0].num_devices)
    shape = tuple(eqn.outvars[0].aval.shape)
    reduced = [s for f in factors.reduced if (s := chosen[f])]
    own, first = ctx.place.coord(groups.parts), ctx.place.coord(groups.split)
    dot = _Local(eqn, groups, limits, own, first)
    if of_groups:
        array = _rows_times_groups(ctx, dot, ready[0], ready[1], of_groups[0])
    else:
        here = here.replace(0, groups.split)
        array = _sums_of_groups(ctx, dot, ready[0], ready[1], here)
        copies = groups.parts.minor(groups.parts.tiles // groups.split.tiles)
        if copies and groups.parts is not groups.split:
            reduced.append(copies)
    done = Tile(array, here.unreduced_over(reduced), shape, "ragged_dot")
    stays = bool(reduced) and ctx.stays_unreduced(eqn.outvars[0], done, "sum")
    return [done if stays else combine(ctx.place, done, "sum", targets[0])]


def _chosen(
    eqn: JaxprEqn, factors: Factors, tiles: list[Tile], targets: list[Sharding]
) -> Assignment:
    rows = eqn.params["groups"].ragged
    shardings = [t.sharding for t in tiles]
    ways = by_factors(eqn, factors, shardings, targets, kept=("t",))
    chosen: Assignment = least(ways, eqn, shardings, targets).how.chosen
    if chosen["t"] is rows:
        return chosen
    return {f: rows if f == "t" else None for f in chosen}


@dataclass(frozen=True)
class _Local:
    """A `ragged_dot` on this device: its rows are a window of the sorted ones.

    `own` is the number of the device's part of the rows, `first` that of its tile of groups.
    """

    eqn: JaxprEqn
    groups: ExpertGroups
    limits: Bounds
    own: jax.Array | int
    first: jax.Array | int

    def sizes(self, number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """How many of the rows each group of a tile has, and where the first of them is."""
        groups, limits = self.groups, self.limits
        low, high = limits.starts[self.own], limits.starts[self.own + 1]
        members = number * groups.per_tile + jnp.arange(groups.per_tile + 1)
        edges = jnp.clip(limits.first[jnp.minimum(members, groups.count)], low, high) - low
        return jnp.diff(edges), edges[0]

    def product(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """The product as the user asked for it."""
        params = {k: v for k, v in self.eqn.params.items() if k != "groups"}
        return lax.ragged_dot_general(lhs, rhs, sizes, **params)


def _rows_times_groups(ctx: Context, dot: _Local, lhs: Tile, rhs: Tile, dim: int) -> jax.Array:
    """Every row times its group's matrix."""
    tiles = dot.groups.split.tiles
    pairs = ring_of(rhs.sharding, dim)
    reason = Reason(
        "step", "ragged_dot", f"matrices of {dot.groups.count} groups in a ring, {_OVERFLOW}"
    )

    def on_own_rows() -> jax.Array:
        return dot.product(lhs.array, rhs.array, dot.sizes(dot.first)[0])

    def multiply(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        passing, total = carry
        sizes, begin = dot.sizes((dot.first + i) % tiles)
        part = jnp.roll(dot.product(jnp.roll(lhs.array, -begin, 0), passing, sizes), begin, 0)
        row = lax.broadcasted_iota(jnp.int32, part.shape, 0)
        total = jnp.where((row >= begin) & (row < begin + jnp.sum(sizes)), part, total)
        return collectives.collective_permute(ctx.place, passing, pairs, reason), total

    def in_a_ring() -> jax.Array:
        total = jnp.zeros_like(jax.eval_shape(on_own_rows))
        with unlikely():
            return lax.fori_loop(0, tiles, multiply, (rhs.array, total))[1]

    return lax.cond(~dot.limits.overflow, on_own_rows, in_a_ring)


def _sums_of_groups(ctx: Context, dot: _Local, lhs: Tile, rhs: Tile, here: Sharding) -> jax.Array:
    """For every group the product of its rows on both sides, summed over them."""
    tiles = dot.groups.split.tiles
    pairs = ring_of(here, 0)
    reason = Reason(
        "step", "ragged_dot", f"sums over {dot.groups.count} groups in a ring, {_OVERFLOW}"
    )

    def on_own_rows() -> jax.Array:
        return dot.product(lhs.array, rhs.array, dot.sizes(dot.first)[0])

    def part(number: jax.Array | int) -> jax.Array:
        sizes, begin = dot.sizes(number)
        first, second = (jnp.roll(t.array, -begin, 0) for t in (lhs, rhs))
        return dot.product(first, second, sizes)

    def multiply(i: jax.Array, total: jax.Array) -> jax.Array:
        total = total + part((dot.first + 1 + i) % tiles)
        return collectives.collective_permute(ctx.place, total, pairs, reason)

    def in_a_ring() -> jax.Array:
        total = jnp.zeros_like(jax.eval_shape(on_own_rows))
        with unlikely():
            total = lax.fori_loop(0, tiles - 1, multiply, total)
        return total + part(dot.first)

    return lax.cond(~dot.limits.overflow, on_own_rows, in_a_ring)


register(
    Rule(
        take_factors,
        partition=_take,
        doc=Doc(free="dims of a row", gather="rows to and from experts: AllToAll by index"),
    ),
    take_rows_p,
)
register(
    Rule(
        put_factors,
        partition=_put,
        ordered=no_order,
        doc=Doc(free="dims of a row", gather="rows to and from experts: AllToAll by index"),
    ),
    put_rows_p,
)
register(
    Rule(
        grouped_factors,
        partition=_grouped_dot,
        ordered=no_order,
        work=dot_work,
        doc=Doc(free="rows by group, and all dims of a row that are not contracted"),
    ),
    grouped_dot_p,
)
