"""Sorting, and the largest k.

Along an unsplit dim, a sort is local. Along a split dim the cheapest of three ways is taken: move
the split to another dim, sort, and move it back (sends the tile twice); columnsort (about 3 times,
only for tiles that are long enough); or gather the dim (tiles - 1 times). The first and the last
are splits of factors of which one cannot be split (`Factors.unsplit`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.columnsort import columnsort, rows_needed, rows_sent
from gshard.moving.costs import cost_model, passes, sent_bytes, timed, worked
from gshard.moving.halo import groups_along, standard_elements
from gshard.moving.reductions import flipped, identity
from gshard.rules.base.rule import Context, Doc, Way, on_moved, rule
from gshard.rules.base.ways import by_factors
from gshard.tensors import padding
from gshard.tensors.factors import Factors, ordered_dims
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, itemsize_of


def sort_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Sorts along an unsplit dim, and columnsorts: `Way.how` is the length of their columns."""
    dim, shape, factors = eqn.params["dimension"], eqn.invars[0].aval.shape, ordered_dims(eqn)
    for way in by_factors(eqn, factors.unsplit([f"d{dim}"]), shardings, targets):
        work = _work(eqn, way.operands[0].local_shape(shape), dim)
        yield way._replace(how=None, work=work)
    for way in by_factors(eqn, factors, shardings, targets):
        here = way.operands[0]
        split = here.splits[dim]
        if split is None or 0 in shape:
            continue
        rows = rows_needed(-(-shape[dim] // split.tiles), split.tiles)
        if rows is not None and not split.idle:
            work, sent = _columnsort_cost(eqn, here, dim, rows)
            yield way._replace(how=rows, work=work, sent=sent)


@rule(
    p.sort_p,
    factors=ordered_dims,
    ways=sort_ways,
    doc=Doc(
        free="other dims",
        gather="the sorted dim: 2 AllToAlls with another dim (twice the tile), columnsort "
        "(3 times the tile), or AllGather, whichever is cheapest",
    ),
)
def _sort(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    (here, *_), rows = way.operands, way.how
    if rows is not None:
        return _sort_columns(ctx, eqn, tiles, here, rows)
    reason = Reason("step", "sort", "its dim must be unsplit")
    arrays = _sorted(eqn, [ctx.reshard(t, here, reason).array for t in tiles])
    return [Tile(a, here, t.shape) for a, t in zip(arrays, tiles, strict=True)]


def _sorted(eqn: JaxprEqn, arrays: Arrays) -> Arrays:
    """Local arrays sorted; floats by their bits as integers, if that is faster.

    These have the same order except for NaN, -0.0 and subnormal numbers: if there are any, floats
    are compared.
    """
    x, *others = arrays
    width = 8 * itemsize_of(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else 0
    if others or width < 16 or not cost_model().calls_to_compare:
        return bind(eqn, arrays)
    integer = jnp.dtype(f"int{width}")

    def as_integers(bits: jax.Array) -> jax.Array:
        (found,) = bind(eqn, [flipped(bits)])
        return lax.bitcast_convert_type(flipped(found), x.dtype)

    def as_floats(bits: jax.Array) -> jax.Array:
        (found,) = bind(eqn, [lax.bitcast_convert_type(bits, x.dtype)])
        return found

    bits = lax.bitcast_convert_type(x, integer)
    size = bits & jnp.iinfo(integer).max
    tiny, infinite = (
        np.asarray(limit, x.dtype).view(integer) for limit in (jnp.finfo(x.dtype).tiny, np.inf)
    )
    strange = jnp.any(((size < tiny) & (bits != 0)) | (size > infinite))
    return [lax.cond(strange, as_floats, as_integers, bits)]


def _work(eqn: JaxprEqn, local: Sequence[int], dim: int, sorts: int = 1) -> float:
    touched = math.prod(local) * sum(itemsize_of(a.aval.dtype) for a in eqn.invars)
    return worked(touched=sorts * touched * passes(local[dim]))


def _columnsort_cost(eqn: JaxprEqn, here: Sharding, dim: int, rows: int) -> tuple[float, float]:
    """The local work of a columnsort, and what it sends."""
    shape = eqn.invars[0].aval.shape
    local = list(here.local_shape(shape))
    padded = rows * here.tiles[dim] != shape[dim]
    local[dim] = rows
    width = sum(itemsize_of(a.aval.dtype) for a in eqn.invars)
    inside = rows_sent(rows, here.tiles[dim]) * math.prod(local) // rows
    after = standard_elements(here, tuple(local), shape)  # rows shift between tiles at the end
    index = _index_type(eqn, shape[dim])
    sent = inside * (width + padded + (0 if index is None else index.itemsize)) + after * width
    return _work(eqn, local, dim, sorts=4), timed(sent, (3 + padded) * len(eqn.invars))


def _index_type(eqn: JaxprEqn, rows: int) -> np.dtype | None:
    """The type of an index, which is sent; None if equal keys cannot be told apart."""
    keys_alone = eqn.params["num_keys"] == len(eqn.invars)
    if keys_alone and all(jnp.issubdtype(a.aval.dtype, jnp.integer) for a in eqn.invars):
        return None
    return np.dtype(np.uint16 if rows <= 2**16 else np.int32)


def _sort_columns(ctx: Context, eqn: JaxprEqn, tiles: Tiles, here: Sharding, rows: int) -> Tiles:
    """Columnsort, stable because the index in the operand is the last key.

    Padding comes last because a padding flag is the first key.
    """
    dim, num_keys = eqn.params["dimension"], eqn.params["num_keys"]
    split, place = here.splits[dim], ctx.place
    assert split
    ready = [ctx.reshard(t, here, Reason("operand", "sort")) for t in tiles]
    whole_rows = [padding.pad_end(t.array, dim, rows) for t in ready]
    columns = [jnp.moveaxis(x, dim, 0) for x in whole_rows]
    own, size = ready[0].array.shape[dim], ready[0].shape[dim]
    row = lax.broadcasted_iota(jnp.int32, columns[0].shape, 0)
    index = row + ready[0].offset(place, dim)
    beyond = ((row >= own) | (index >= size)).astype(jnp.uint8)
    first = [beyond] if rows * split.tiles != size else []
    dtype = _index_type(eqn, size)
    last = [] if dtype is None else [index.astype(dtype)]
    keys = len(first) + num_keys + len(last)
    operands = [*first, *columns[:num_keys], *last, *columns[num_keys:]]
    sort = functools.partial(lax.sort, dimension=0, is_stable=False, num_keys=keys)
    reason = Reason("step", "sort", f"columnsort over {split.tiles} tiles")
    in_front = here.project([dim, *(d for d in range(here.rank) if d != dim)])
    done = columnsort(place, operands, sort, in_front, reason)
    kept = done[len(first) : len(first) + num_keys] + done[keys:]
    return [
        ctx.reshard(Tile(jnp.moveaxis(x, 0, dim), here, t.shape), here, reason)
        for x, t in zip(kept, ready, strict=True)
    ]


def top_k_dims(eqn: JaxprEqn) -> Factors:
    """All dims but the one that is searched, which only the operand has at that size."""
    dim = _searched(eqn)
    rank = len(eqn.invars[0].aval.shape)
    names = [f"d{i}" for i in range(rank)]
    kept = [None if i == dim else names[i] for i in range(rank)]
    return Factors.of(eqn, [names], [kept, kept], ordered=())


def _searched(eqn: JaxprEqn) -> int:
    rank = len(eqn.invars[0].aval.shape)
    return eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1)) % rank


def top_k_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """The searched dim unsplit, or the best k of each tile of it sent to all devices."""
    k, dim, aval = eqn.params["k"], _searched(eqn), eqn.invars[0].aval
    for way in by_factors(eqn, top_k_dims(eqn), shardings, targets):
        (here,) = way.operands
        split, itemsize = here.splits[dim], itemsize_of(aval.dtype)
        if split:
            local = here.local_shape(aval.shape)
            found = min(k, local[dim])
            fewer = found * (itemsize + 4) < local[dim] * itemsize
            # A device without a tile takes no part in the gather, and would have no result.
            if fewer and not split.idle and _from_candidates(eqn):
                candidates = math.prod(local) // local[dim] * found * (itemsize + 4)
                sent = timed(sent_bytes("all_gather", candidates, split.tiles))
                way = way._replace(sent=sent)
            else:  # as many bytes to gather what is searched
                way = way._replace(operands=(here.replace(dim, None),))
        yield way


@rule(
    p.top_k_p,
    p.approx_top_k_p,
    factors=top_k_dims,
    ways=top_k_ways,
    doc=Doc(
        free="other dims",
        gather="the searched dim: AllGather of k candidates per tile, or of the operand where "
        "approx_top_k leaves the order of equal elements open",
    ),
)
@on_moved
def _top_k(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """The best k of each tile are candidates for the best k of all.

    Candidates are in the order of their tiles, so equal ones are still in the order of their
    indices, and the first of them wins as in JAX.
    """
    k, dim, (tile,), (here,) = eqn.params["k"], _searched(eqn), tiles, way.operands
    split, whole = here.splits[dim], here.replace(dim, None)
    if split is None or 0 in tile.shape or k == 0:
        values, indices = eqn.primitive.bind(tile.array, **eqn.params)
    else:
        found = min(k, tile.array.shape[dim])
        searched = tile.masked(ctx.place, identity("max", tile.array.dtype), [dim]).array
        values, indices = eqn.primitive.bind(searched, **{**eqn.params, "k": found})
        indices = indices + tile.offset(ctx.place, dim)
        groups = groups_along(here, dim)
        reason = Reason("step", eqn.primitive.name, f"candidates of {split.tiles} tiles")
        values, indices = (
            collectives.all_gather(ctx.place, x, dim, groups, reason) for x in (values, indices)
        )
        values, winners = eqn.primitive.bind(values, **eqn.params)
        indices = jnp.take_along_axis(indices, winners, axis=dim)
    return [
        Tile(a, whole, tuple(v.aval.shape))
        for a, v in zip((values, indices), eqn.outvars, strict=True)
    ]


def _from_candidates(eqn: JaxprEqn) -> bool:
    """Whether the best k of all are among the best k of each tile, the first of equal ones first.

    `approx_top_k` may return another number than k, which the shape of the operand decides; and XLA
    keeps equal elements in order only for the largest float32, elsewhere it sorts as it pleases.
    """
    if eqn.primitive is p.top_k_p:
        return True
    params, dtype = eqn.params, eqn.invars[0].aval.dtype
    whole = params["aggregate_to_topk"] and params["reduction_input_size_override"] < 0
    return whole and params["is_max_k"] and dtype == jnp.float32
