"""Reductions: a kept dim is free, a reduced one leaves partial results to combine.

Cumulative operators along a split dim are a parallel prefix that sends one row per device: every
device scans its own tile, the tiles' totals are gathered, and the total of all previous tiles is
combined into each tile. Padding is masked with the operator's identity, because in a reverse scan
it comes first.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes, timed
from gshard.moving.halo import groups_along
from gshard.moving.partial import reducing_groups
from gshard.moving.reductions import identity, sortable, sortable_bytes
from gshard.rules.base.rule import (
    Context,
    Doc,
    Rule,
    RunWay,
    Way,
    bind_local,
    linear_in_all,
    on_moved,
    register,
    rule,
)
from gshard.rules.base.ways import by_factors
from gshard.tensors.factors import Factors, Shapes, ordered_dims
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, itemsize_of, row_bytes


def reduce_factors(eqn: JaxprEqn, kind: str) -> Factors:
    """Reduced dims are `k`, kept dims pass through; init values are scalars."""
    axes = eqn.params.get("axes", eqn.params.get("dimensions"))
    rank = len(eqn.invars[0].aval.shape)
    names = [f"k{d}" if d in axes else f"d{d}" for d in range(rank)]
    kept = [n for n in names if n[0] == "d"]
    operands = [names if len(a.aval.shape) == rank else [] for a in eqn.invars]
    reduced = {n: kind for n in names if n[0] == "k"}
    return Factors.of(eqn, operands, [kept] * len(eqn.outvars), reduced, ordered=())


def _reduce_tiles(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    """The reduction without the dims of which a tile has one row.

    A split leaves such dims behind (one group of tokens per device, one expert), and with one of
    them the library that reduces for XLA on CPUs takes ten times as long for a sum of products.
    """
    (x,) = (t.array for t in tiles)
    if 1 not in x.shape:
        return bind_local(ctx, eqn, tiles, shapes)
    long = [d for d, size in enumerate(x.shape) if size != 1]
    axes = tuple(n for n, d in enumerate(long) if d in eqn.params["axes"])
    kept = [size for d, size in enumerate(x.shape) if d not in eqn.params["axes"]]
    y = lax.reshape(x, [x.shape[d] for d in long])
    if axes:
        (y,) = bind(eqn, [y], axes=axes)
    return [lax.reshape(y, kept)]


_KINDS = {
    p.reduce_sum_p: "sum",
    p.reduce_max_p: "max",
    p.reduce_min_p: "min",
    p.reduce_prod_p: "prod",
    p.reduce_and_p: "and",
    p.reduce_or_p: "or",
    p.reduce_xor_p: "xor",
}


_AS_MAXIMUM = functools.partial(reduce_factors, kind="max")

# The results of an operator on tiles, combined over groups of devices
Combined = Callable[[Context, JaxprEqn, Tiles, collectives.Members], Arrays]


def reduce_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Every split of the dims; `Way.how` is the result while parts of it are to be combined."""
    for way in by_factors(eqn, _AS_MAXIMUM(eqn), shardings, targets):
        partial, sent = way.results[0], 0.0
        if partial.unreduced:
            sent = _combined_bytes(eqn, partial)
        yield way._replace(
            results=tuple([r.reduced for r in way.results]), how=partial, kind="", sent=sent
        )


def _combined_bytes(eqn: JaxprEqn, partial: Sharding) -> float:
    """What devices send to combine their results: as `_arg_reduce` or as `_generic_reduce` does."""
    groups, count = reducing_groups(partial), partial.num_devices
    between = len(groups[0]), len(groups), count
    local = [math.prod(partial.local_shape(v.aval.shape)) for v in eqn.outvars]
    of_results = [n * itemsize_of(v.aval.dtype) for n, v in zip(local, eqn.outvars, strict=True)]
    if eqn.primitive is p.reduce_p:  # with a flag for each element
        sizes = [local[0], *of_results]
        sent = sum(collectives.sent_in_groups("all_gather", size, *between) for size in sizes)
    else:  # the winners, in integers that have their order, and indices
        keys = local[0] * sortable_bytes(eqn.invars[0].aval.dtype)[0]
        sizes = [keys, *of_results]
        sent = sum(sent_bytes("all_reduce", size, len(groups[0])) for size in sizes)
    number = len(sizes)
    if partial.reduced.is_replicated and any(s.idle for s in partial.unreduced):
        sent += sum(sent_bytes("all_reduce", size, count) for size in of_results)
        number += len(of_results)
    return timed(sent, number)


def _by_devices(combined: Combined) -> RunWay:
    """Splits are chosen as for a maximum; `combined` reduces where a reduced dim is split."""

    @on_moved
    @functools.wraps(combined)
    def run(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
        partial, here = way.how, way.results[0]
        if not partial.unreduced:
            arrays = bind_local(ctx, eqn, tiles, [])
        else:
            groups = reducing_groups(partial)
            arrays = combined(ctx, eqn, tiles, groups)
            if here.is_replicated and any(s.idle for s in partial.unreduced):
                arrays = [_from_one(ctx, eqn, a, groups[0][0]) for a in arrays]
        shapes = [tuple(v.aval.shape) for v in eqn.outvars]
        return [Tile(a, here, shape) for a, shape in zip(arrays, shapes, strict=True)]

    return run


def _from_one(ctx: Context, eqn: JaxprEqn, array: jax.Array, device: int) -> jax.Array:
    """The result of `device` on all devices: those without a part of the operand have none."""
    reason = Reason("step", eqn.primitive.name, "the result for idle devices")
    mine = jnp.where(ctx.place.device_id() == device, array, jnp.zeros_like(array))
    everyone = [list(range(ctx.place.num_devices))]
    return collectives.merge_disjoint(ctx.place, mine, everyone, reason)


@rule(
    p.argmax_p,
    p.argmin_p,
    factors=_AS_MAXIMUM,
    ways=reduce_ways,
    doc=Doc(
        free="kept dims",
        gather="the reduced dim: two AllReduces, of the winners and of their indices",
    ),
)
@_by_devices
def _arg_reduce(ctx: Context, eqn: JaxprEqn, tiles: Tiles, groups: collectives.Members) -> Arrays:
    """argmax, argmin: reduce values, then the first index of the winner."""
    kind = "max" if eqn.primitive is p.argmax_p else "min"
    (tile,), (dim,), index_dtype = tiles, eqn.params["axes"], eqn.params["index_dtype"]
    masked = tile.masked(ctx.place, identity(kind, tile.array.dtype), [dim])
    (local,) = bind_local(ctx, eqn, [masked], [])
    value = jnp.take_along_axis(masked.array, jnp.expand_dims(local, dim), axis=dim)
    index = local + jnp.asarray(tile.offset(ctx.place, dim), index_dtype)
    reason = Reason("step", eqn.primitive.name, f"winners of {len(groups[0])} devices")
    keys, _ = sortable(jnp.squeeze(value, dim), kind)
    best = collectives.all_reduce(ctx.place, keys, groups, kind, reason)
    none = jnp.asarray(jnp.iinfo(index_dtype).max, index_dtype)
    mine = jnp.where(keys == best, index, none)
    return [collectives.all_reduce(ctx.place, mine, groups, "min", reason)]


def of_existing(compute: Callable[..., Arrays]) -> Callable[[Arrays, Arrays], Arrays]:
    """`compute` on elements behind a flag, which says whether there are any: else the others."""

    def paired(a: Arrays, b: Arrays) -> Arrays:
        both = zip(compute(*a[1:], *b[1:]), a[1:], b[1:], strict=True)
        one = [(c, lax.select(a[0], x, y)) for c, x, y in both]
        return (a[0] | b[0], *(lax.select(a[0] & b[0], c, other) for c, other in one))

    return paired


@rule(
    p.reduce_p,
    factors=_AS_MAXIMUM,
    ways=reduce_ways,
    doc=Doc(free="kept dims", gather="reduced dims: AllGather of the partial results"),
)
@_by_devices
def _generic_reduce(
    ctx: Context, eqn: JaxprEqn, tiles: Tiles, groups: collectives.Members
) -> Arrays:
    """`reduce` with any computation: without an identity, padding is marked by a flag.

    Elements become pairs (is there one?, value), for which (False, anything) is the identity. The
    init value takes part once, at the end.
    """
    count = len(eqn.outvars)
    dims, values = tuple(eqn.params["dimensions"]), tiles[:count]
    inits = [t.array for t in tiles[count:]]
    paired = of_existing(jaxpr_as_fun(eqn.params["jaxpr"]))

    def fold(elements: Arrays, over: Sequence[int]) -> Arrays:
        return lax.reduce(tuple(elements), (jnp.asarray(False), *inits), paired, over)

    flags = functools.reduce(
        jnp.logical_and,
        [~values[0].is_padding(ctx.place, d) for d in values[0].padded_dims() if d in dims],
        jnp.ones(values[0].array.shape, bool),
    )
    folded = fold([flags, *(v.array for v in values)], dims)
    reason = Reason("step", eqn.primitive.name, f"partial results of {len(groups[0])} devices")
    gathered = [collectives.all_gather(ctx.place, part[None], 0, groups, reason) for part in folded]
    firsts = [
        jnp.broadcast_to(first, (1, *part.shape[1:]))
        for first, part in zip([jnp.asarray(True), *inits], gathered, strict=True)
    ]
    _, *results = fold([jnp.concatenate(p) for p in zip(firsts, gathered, strict=True)], (0,))
    return results


for _primitive, _kind in _KINDS.items():
    _rule = Rule(
        functools.partial(reduce_factors, kind=_kind),
        _reduce_tiles,
        linear=linear_in_all if _primitive is p.reduce_sum_p else None,
        doc=Doc(free="kept dims", gather="reduced dims: AllReduce or ReduceScatter of the result"),
    )
    register(_rule, _primitive)


# ---------------------------------------------------------------- cumulative operators

_COMBINE = {
    p.cumsum_p: ("sum", lax.add),
    p.cumprod_p: ("prod", lax.mul),
    p.cummax_p: ("max", lax.max),
    p.cummin_p: ("min", lax.min),
    p.cumlogsumexp_p: ("max", jnp.logaddexp),  # minus infinity adds nothing, as for a maximum
}


def cumulative_ways(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int
) -> Iterator[Way]:
    """Every split of the dims; along its own dim, the totals of all tiles are gathered."""
    dim, aval = eqn.params["axis"], eqn.invars[0].aval
    for way in by_factors(eqn, ordered_dims(eqn), shardings, targets):
        (here,) = way.operands
        split = here.splits[dim]
        if split and 0 not in aval.shape:
            total = row_bytes(here.local_shape(aval.shape), dim, aval.dtype)
            way = way._replace(sent=sent_bytes("all_gather", total, split.tiles))
        yield way


@rule(
    *_COMBINE,
    factors=ordered_dims,
    ways=cumulative_ways,
    doc=Doc(free="other dims", gather="the dim it runs along: AllGather of one row per tile"),
)
@on_moved
def _cumulative(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
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
