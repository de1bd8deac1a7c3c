"""Cumulative operators: along a split dim, a parallel prefix that sends one row per device.

Every device scans its own tile, the tiles' totals are gathered (one row per device), and the total
of all previous tiles is combined into each tile. Padding is masked with the operator's identity,
because in a reverse scan it comes first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes
from gshard.moving.halo import groups_along
from gshard.moving.reductions import identity
from gshard.rules.base.rule import Context, Doc, Way, on_moved, rule
from gshard.rules.base.ways import by_factors
from gshard.tensors.factors import Factors, all_dims
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, row_bytes

_COMBINE = {
    p.cumsum_p: ("sum", lax.add),
    p.cumprod_p: ("prod", lax.mul),
    p.cummax_p: ("max", lax.max),
    p.cummin_p: ("min", lax.min),
    p.cumlogsumexp_p: ("max", jnp.logaddexp),  # minus infinity adds nothing, as for a maximum
}


def cumulative_dims(eqn: JaxprEqn) -> Factors:
    """All dims; along its own, rows have an order."""
    return replace(all_dims(eqn), ordered=frozenset({f"d{eqn.params['axis']}"}))


def cumulative_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Iterator[Way]:
    """Every split of the dims; along its own dim, the totals of all tiles are gathered."""
    dim, aval = eqn.params["axis"], eqn.invars[0].aval
    for way in by_factors(eqn, all_dims(eqn), shardings, targets):
        (here,) = way.operands
        split = here.splits[dim]
        if split and 0 not in aval.shape:
            total = row_bytes(here.local_shape(aval.shape), dim, aval.dtype)
            way = way._replace(sent=sent_bytes("all_gather", total, split.tiles))
        yield way


@rule(
    *_COMBINE,
    factors=cumulative_dims,
    ways=cumulative_ways,
    doc=Doc(free="other dims", gather="the dim it runs along: AllGather of one row per tile"),
)
@on_moved
def _cumulative(
    ctx: Context, eqn: JaxprEqn, way: Way, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    (tile,), (kind, combine) = tiles, _COMBINE[eqn.primitive]
    dim, reverse, here = eqn.params["axis"], eqn.params["reverse"], tile.sharding
    split = here.splits[dim]
    if split is None or 0 in tile.shape:
        return [Tile(eqn.primitive.bind(tile.array, **eqn.params), here, tile.shape)]
    nothing = identity(kind, tile.array.dtype)
    local = eqn.primitive.bind(tile.masked(ctx.place, nothing, [dim]).array, **eqn.params)
    end = 0 if reverse else local.shape[dim] - 1
    total = lax.slice_in_dim(local, end, end + 1, axis=dim)
    groups = groups_along(here, dim)
    reason = Reason("step", eqn.primitive.name, f"the totals of {split.tiles} tiles")
    totals = collectives.all_gather(ctx.place, total, dim, groups, reason)
    scanned = eqn.primitive.bind(totals, **eqn.params)
    # The previous tiles end at this one's neighbour; the first has none.
    number = ctx.place.coord(split)
    edge = jnp.broadcast_to(nothing, total.shape)
    rows = [scanned, edge] if reverse else [edge, scanned]
    before = lax.dynamic_slice_in_dim(lax.concatenate(rows, dim), number + reverse, 1, dim)
    first = number == (split.tiles - 1 if reverse else 0)
    result = jnp.where(first, local, combine(jnp.broadcast_to(before, local.shape), local))
    return [Tile(result, here, tile.shape)]
