"""Sorting, and the largest k.

Along an unsplit dim, a sort is local. Along a split dim the cheapest of three ways is taken: move
the split to another dim, sort, and move it back (sends the tile twice); columnsort (about 3 times,
only for tiles that are long enough); or gather the dim (tiles - 1 times).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.columnsort import columnsort, rows_needed
from gshard.moving.costs import machine
from gshard.moving.partial import identity, reducing_groups
from gshard.moving.plan import reshard_cost, whole_along
from gshard.operators.choose import choose, shard_dims
from gshard.operators.rule import Context, Doc, Rule, register
from gshard.tensors import padding
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, itemsize_of


def sort_dims(eqn: JaxprEqn) -> Factors:
    """All operands and results have the same dims; the sorted one keeps its split too."""
    names = [f"d{i}" for i in range(len(eqn.invars[0].aval.shape))]
    return Factors.of(eqn, [names] * len(eqn.invars), [names] * len(eqn.outvars))


def _sort(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    dim, factors = eqn.params["dimension"], sort_dims(eqn)
    chosen = choose(eqn, factors, [t.sharding for t in tiles], targets)
    here = shard_dims(factors.operands[0], chosen, factors, targets[0].num_devices)
    split = here.splits[dim]
    if split is None or 0 in tiles[0].shape:
        return _sort_locally(ctx, eqn, tiles, here)
    ways: list[tuple[float, Sharding | None]] = [
        (_cost(eqn, tiles, targets, way, dim), way) for way in whole_along(here, dim)
    ]
    rows = rows_needed(-(-tiles[0].shape[dim] // split.tiles), split.tiles)
    if rows is not None and not split.idle:
        ways.append((_columnsort_cost(eqn, tiles, targets, here, dim, rows), None))
    _, best = min(ways, key=lambda way: way[0])
    if best is not None:
        return _sort_locally(ctx, eqn, tiles, best)
    assert rows is not None
    return _sort_columns(ctx, eqn, tiles, here, rows)


def _sort_locally(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], here: Sharding) -> list[Tile]:
    """Sort along an unsplit dim; padding of other dims is sorted separately."""
    ready = [ctx.reshard(t, here, Reason("step", "sort", "its dim must be unsplit")) for t in tiles]
    arrays = _sorted(eqn, [t.array for t in ready])
    return [Tile(a, here, t.shape) for a, t in zip(arrays, tiles, strict=True)]


def _sorted(eqn: JaxprEqn, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """Local arrays sorted; floats by their bits as integers, if that is faster.

    These have the same order except for NaN, -0.0 and subnormal numbers: if there are any, floats
    are compared.
    """
    x, *others = arrays
    width = 8 * itemsize_of(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else 0
    if others or width < 16 or not machine().calls_to_compare:
        return bind(eqn, arrays)
    integer = jnp.dtype(f"int{width}")

    def flipped(bits: jax.Array) -> jax.Array:
        """Of negative floats, the integers in order; and back."""
        return bits ^ ((bits >> (width - 1)) & jnp.iinfo(integer).max)

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


def _cost(
    eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding], way: Sharding, dim: int
) -> float:
    """Bytes for resharding operands and results, and the time of the sort."""
    moved = sum(
        reshard_cost(t.sharding, way, t.shape, t.array.dtype)
        + reshard_cost(way, target, t.shape, t.array.dtype)
        for t, target in zip(tiles, targets, strict=True)
    )
    return moved + _work(tiles, way.local_shape(tiles[0].shape), dim)


def _work(tiles: list[Tile], local: Sequence[int], dim: int, sorts: int = 1) -> float:
    touched = math.prod(local) * sum(itemsize_of(t.array.dtype) for t in tiles)
    return sorts * touched * max(1.0, math.log2(max(local[dim], 1))) / machine().memory_per_byte


def _columnsort_cost(
    eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding], here: Sharding, dim: int, rows: int
) -> float:
    local = list(here.local_shape(tiles[0].shape))
    padded = rows * here.tiles[dim] != tiles[0].shape[dim]
    local[dim] = rows
    width = sum(itemsize_of(t.array.dtype) for t in tiles) + padded + 4 * _needs_index(eqn)
    sent = 3 * math.prod(local) * width + (3 + padded) * len(tiles) * machine().latency
    ends = sum(
        reshard_cost(t.sharding, here, t.shape, t.array.dtype)
        + reshard_cost(here, target, t.shape, t.array.dtype)
        for t, target in zip(tiles, targets, strict=True)
    )
    uneven = rows != -(-tiles[0].shape[dim] // here.tiles[dim])
    shifted = math.prod(local) * sum(itemsize_of(t.array.dtype) for t in tiles) * uneven
    return sent + ends + shifted + _work(tiles, local, dim, sorts=4)


def _needs_index(eqn: JaxprEqn) -> bool:
    """Whether equal keys can be told apart, so that their order matters."""
    return eqn.params["num_keys"] < len(eqn.invars) or not all(
        jnp.issubdtype(a.aval.dtype, jnp.integer) for a in eqn.invars
    )


def _sort_columns(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], here: Sharding, rows: int
) -> list[Tile]:
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
    first: list[jax.Array] = []
    if rows * split.tiles != size:
        first = [((row >= own) | (index >= size)).astype(jnp.uint8)]
    last = [index] if _needs_index(eqn) else []
    keys = len(first) + num_keys + len(last)
    operands = [*first, *columns[:num_keys], *last, *columns[num_keys:]]

    def sort(arrays: list[jax.Array]) -> list[jax.Array]:
        return list(lax.sort(arrays, dimension=0, is_stable=False, num_keys=keys))

    groups = reducing_groups(here.replace(dim, None).unreduced_over([split]))
    reason = Reason("step", "sort", f"columnsort over {split.tiles} tiles")
    done = columnsort(place, operands, sort, here, dim, groups, reason)
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
    return Factors.of(eqn, [names], [kept, kept])


def _searched(eqn: JaxprEqn) -> int:
    rank = len(eqn.invars[0].aval.shape)
    return eqn.params.get("axis", eqn.params.get("reduction_dimension", rank - 1)) % rank


def _top_k(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    """The best k of each tile are candidates for the best k of all.

    Candidates are in the order of their tiles, so equal ones are still in the order of their
    indices, and the first of them wins as in JAX.
    """
    (tile,), k, dim = tiles, eqn.params["k"], _searched(eqn)
    factors, count = top_k_dims(eqn), targets[0].num_devices
    chosen = choose(eqn, factors, [tile.sharding], targets)
    here = shard_dims(factors.operands[0], chosen, factors, count)
    split = here.splits[dim]
    if split:
        rows = here.local_shape(tile.shape)[dim]
        found = min(k, rows)
        candidate = itemsize_of(tile.array.dtype) + 4
        if found * candidate >= rows * itemsize_of(tile.array.dtype) or not _from_candidates(eqn):
            here = here.replace(dim, None)  # as many bytes to gather what is searched
    whole = here.replace(dim, None)
    tile = ctx.reshard(tile, here, Reason("operand", eqn.primitive.name))
    if here.splits[dim] is None or 0 in tile.shape or k == 0:
        values, indices = eqn.primitive.bind(tile.array, **eqn.params)
    else:
        assert split
        searched = tile.masked(ctx.place, identity("max", tile.array.dtype), [dim]).array
        values, indices = eqn.primitive.bind(searched, **{**eqn.params, "k": found})
        indices = indices + tile.offset(ctx.place, dim)
        groups = reducing_groups(whole.unreduced_over([split]))
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


register(
    Rule(
        sort_dims,
        partition=_sort,
        doc=Doc(
            free="other dims",
            gather="the sorted dim: 2 AllToAlls with another dim (twice the tile), columnsort "
            "(3 times the tile), or AllGather, whichever is cheapest",
        ),
    ),
    p.sort_p,
)
register(
    Rule(
        top_k_dims,
        partition=_top_k,
        doc=Doc(
            free="other dims",
            gather="the searched dim: AllGather of k candidates per tile, or of the operand where "
            "approx_top_k leaves the order of equal elements open",
        ),
    ),
    p.top_k_p,
    p.approx_top_k_p,
)
