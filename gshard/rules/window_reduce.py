"""ReduceWindow and SelectAndScatter: pooling, and its gradients (appendix, "Convolution").

Split dims exchange halos as in a convolution, and rows outside of the tensor are the identity. A
sum, maximum or minimum whose window spans most of a split dim (global pooling) is reduced in parts:
every device reduces those rows of each window that it has, and the parts are combined.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.moving.costs import WIDE_WINDOW
from gshard.moving.halo import window
from gshard.moving.reductions import identity
from gshard.rules.base.rule import Context, Doc, Rule, Way, register
from gshard.rules.base.ways import by_factors
from gshard.rules.reduction import of_existing
from gshard.rules.window import (
    NOTHING,
    Reach,
    Reaches,
    bring,
    existing,
    halo_cost,
    own_results,
    reach_of,
)
from gshard.tensors.factors import Factors, Shape, Shapes
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles

POOLS = {p.reduce_window_sum_p: "sum", p.reduce_window_max_p: "max", p.reduce_window_min_p: "min"}
WINDOWED = (p.conv_general_dilated_p, *POOLS)  # they fetch what they need of a row map's operand
_REDUCES = (*POOLS, p.reduce_window_p, p.select_and_gather_add_p)
_REDUCE = {"sum": lax.reduce_sum, "max": lax.reduce_max, "min": lax.reduce_min}


def window_factors(eqn: JaxprEqn) -> Factors:
    """Every dim passes through, possibly resized; init values are scalars."""
    names = [f"d{i}" for i in range(len(eqn.outvars[0].aval.shape))]
    operands = [names if a.aval.shape or not names else [] for a in eqn.invars]
    results: list[list[str | None]] = [[*names] for _ in eqn.outvars]
    reduced = {names[d]: POOLS[eqn.primitive] for d in _in_parts(eqn)}
    for d in _in_parts(eqn):
        results[0][d] = None
    return Factors.of(eqn, operands, results, reduced, resized=names)


def _in_parts(eqn: JaxprEqn) -> list[int]:
    """The dims along which a device reduces a part of the window."""
    if eqn.primitive not in POOLS:
        return []
    sizes = zip(
        eqn.params["window_dimensions"],
        eqn.params["base_dilation"],
        eqn.outvars[0].aval.shape,
        strict=True,
    )
    return [d for d, (w, base, n) in enumerate(sizes) if base == 1 and w >= WIDE_WINDOW * n > 0]


def window_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Splits are kept, at the cost of halos."""
    factors = window_factors(eqn)
    for way in by_factors(eqn, factors, shardings, targets, kept=list(factors.sizes)):
        (local, *_), here = [shape for _, shape in way.how.results], way.operands[0]
        yield way._replace(sent=_sent(eqn, here, local))


def _sent(eqn: JaxprEqn, here: Sharding, local: Shape) -> float:
    """What devices send so that each has the rows under its windows."""
    if any(0 in shape for shape in (local, *(a.aval.shape for a in eqn.invars))):
        return 0.0
    reaches: Sequence[Reaches]
    if eqn.primitive in _REDUCES:
        count = len(eqn.invars) // (2 if eqn.primitive is p.reduce_window_p else 1)
        reaches = [_reaches(eqn, here.unsplit(_in_parts(eqn)), local)] * count
    else:
        reaches = _sources_first(eqn, *_selected(eqn, here, local))
    return sum(halo_cost(here, a, r) for a, r in zip(eqn.invars, reaches, strict=False))


# ---------------------------------------------------------------- reduce_window


def reduce_local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    """The windows of a device's own results, over tiles with halos.

    A computation without an identity gets a flag for rows that exist.
    """
    (local, *_), params, generic = shapes, eqn.params, eqn.primitive is p.reduce_window_p
    count = len(tiles) // 2 if generic else len(tiles)
    tiles, inits = tiles[:count], [t.array for t in tiles[count:]]
    if 0 in local:
        return [jnp.zeros(local, v.aval.dtype) for v in eqn.outvars]
    parts = [dim for dim in _in_parts(eqn) if tiles[0].sharding.splits[dim]]
    for dim in parts:
        tiles, params = [_over_own_rows(ctx, eqn, tiles[0], dim)], _without(params, dim)
    reaches = _reaches(eqn, tiles[0].sharding, local)
    padding = list(params["padding"])
    for dim, reach, _ in reaches:
        padding[dim] = reach.padding
    outside = zip(tiles, _outside(eqn, tiles), strict=True)
    tiles = [bring(ctx, eqn, tile, reaches, fill) for tile, fill in outside]
    params = params | {"padding": tuple(padding)}
    arrays = [t.array for t in tiles]
    flags = [existing(ctx, tiles[0], dim, reach.starts) for dim, reach, _ in reaches if generic]
    there = [flag for flag in flags if flag is not None]
    if there:
        out = _reduce_existing(params, arrays, inits, functools.reduce(lax.bitwise_and, there))
    elif parts and params == functools.reduce(_without, range(len(local)), params):
        out = arrays  # every window was reduced in parts
    else:
        out = bind(eqn, [*arrays, *inits], **params)
    return [own_results(ctx, x, reaches, local) for x in out]


def _outside(eqn: JaxprEqn, tiles: Tiles) -> Sequence[jax.Array | None]:
    """For each operand what rows outside of the tensor are: the identity, for tangents zero."""
    if eqn.primitive is p.reduce_window_p:
        return [None] * len(tiles)
    dtype = tiles[0].array.dtype
    if eqn.primitive in POOLS:
        return [identity(POOLS[eqn.primitive], dtype)]
    return [jnp.zeros((), dtype), _least(eqn, dtype)]


def _least(eqn: JaxprEqn, dtype: Any) -> jax.Array:
    """What a selection never selects."""
    return identity("max" if eqn.params["select_prim"] is p.ge_p else "min", dtype)


def _reaches(eqn: JaxprEqn, sharding: Sharding, local: Shape) -> Reaches:
    found = []
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    for d, split in enumerate(sharding.splits):
        if split:
            taps = (params["window_dimensions"][d] - 1) * params["window_dilation"][d]
            where = taps, params["padding"][d][0], params["base_dilation"][d]
            stride = params["window_strides"][d]
            found.append((d, reach_of(split.tiles, local[d], shape[d], stride, *where), split))
    return found


def _reduce_existing(
    params: Mapping[str, Any], arrays: Arrays, inits: Arrays, there: jax.Array
) -> Arrays:
    """The reduction over rows that are `there`; a window without any is of another device."""
    compute = functools.partial(jax.core.eval_jaxpr, params["jaxpr"], params["consts"])
    _, *out = lax.reduce_window(
        (there, *arrays),
        (jnp.asarray(True), *inits),
        of_existing(compute),
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params["base_dilation"],
        params["window_dilation"],
    )
    return out


def _over_own_rows(ctx: Context, eqn: JaxprEqn, tile: Tile, dim: int) -> Tile:
    """For every window along `dim` the reduction of those of its rows that this device has.

    Padding is the identity, as along any dim that is reduced.
    """
    kind, params, shape = POOLS[eqn.primitive], eqn.params, list(tile.array.shape)
    stride, dilation = params["window_strides"][dim], params["window_dilation"][dim]
    count, taps = eqn.outvars[0].aval.shape[dim], params["window_dimensions"][dim]
    low = params["padding"][dim][0]
    shape.insert(dim, count)
    others = [d for d in range(len(shape)) if d != dim]
    x = lax.broadcast_in_dim(tile.array, shape, others)
    if (count, taps, low, dilation) != (1, tile.shape[dim], 0, 1):
        row = lax.broadcasted_iota(jnp.int32, shape, dim + 1) + tile.offset(ctx.place, dim)
        begin = lax.broadcasted_iota(jnp.int32, shape, dim) * stride - low
        inside = (row >= begin) & (row <= begin + (taps - 1) * dilation)
        if dilation > 1:
            inside &= (row - begin) % dilation == 0
        x = lax.select(inside, x, lax.full(shape, identity(kind, x.dtype)))
    result = (*tile.shape[:dim], count, *tile.shape[dim + 1 :])
    return Tile(_REDUCE[kind](x, (dim + 1,)), tile.sharding.replace(dim, None), result)


def _without(params: Mapping[str, Any], dim: int) -> dict[str, Any]:
    """The same windows, of one row along `dim`."""
    single: dict[str, Any] = dict.fromkeys(
        ("window_dimensions", "window_strides", "window_dilation", "base_dilation"), 1
    )
    return {**params} | {
        name: (*params[name][:dim], one, *params[name][dim + 1 :])
        for name, one in (single | {"padding": (0, 0)}).items()
    }


# ---------------------------------------------------------------- select_and_scatter


def scatter_local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    """Every device selects in all windows that touch its rows, and keeps what falls on them.

    Windows at the border are selected in twice, by both neighbours: no partial results arise, and
    sums have the order that they have without partitioning.
    """
    params = eqn.params
    (source, operand), rest = _sources_first(eqn, *tiles[:2]), tiles[2:]
    dtype = operand.array.dtype
    zero = rest[0].array if rest else jnp.zeros((), dtype)
    fill = zero if rest else _least(eqn, dtype)
    local = shapes[0]
    if 0 in source.shape or 0 in local:
        return [jnp.broadcast_to(zero, local)]
    padding = list(params["padding"])
    windows, under = _selected(eqn, operand.sharding, local)
    source, operand = bring(ctx, eqn, source, windows, 0), bring(ctx, eqn, operand, under, fill)
    for dim, *_ in windows:
        padding[dim] = (0, 0)
    arrays = [t.array for t in (*_sources_first(eqn, source, operand), *rest)]
    out = eqn.primitive.bind(*arrays, **(params | {"padding": tuple(padding)}))
    for dim, below, split in under:
        out = window(ctx.place, out, dim, below.lead[split.own], local[dim], zero)
    return [out]


def _selected(eqn: JaxprEqn, sharding: Sharding, local: Shape) -> tuple[Reaches, Reaches]:
    """The windows that touch a device's rows, as rows of the source; and the rows under them.

    `lead` is where its own rows are among those, or, if it has none, out of all of them.
    """
    params, windows, under, exist = eqn.params, [], [], len(eqn.invars) > 2
    source, operand = (a.aval.shape for a in _sources_first(eqn, *eqn.invars[:2]))
    for dim, split in enumerate(sharding.splits):
        if not split:
            continue
        low, stride = params["padding"][dim][0], params["window_strides"][dim]
        size = params["window_dimensions"][dim]
        begin = np.arange(split.tiles) * local[dim]
        end = np.minimum(begin + local[dim], operand[dim])
        first = np.maximum(-(-(begin + low - size + 1) // stride), 0 if exist else -size)
        last = np.minimum((end - 1 + low) // stride, source[dim] - 1)
        used = (begin < end) & (first <= last)
        count = max(int((last - first + 1)[used].max(initial=1)), 1)
        if exist:  # no value for a window that does not, as zero for a sum: one more that does
            first = np.minimum(first, source[dim] - count)
        first = np.where(used, first, NOTHING)
        above = np.where(used, first * stride - low, NOTHING)
        rows, lead = (count - 1) * stride + size, np.where(used, begin - above, -local[dim])
        windows.append((dim, Reach(first, count, (0, 0), lead, count), split))
        under.append((dim, Reach(above, rows, (0, 0), lead, rows), split))
    return windows, under


def _sources_first(eqn: JaxprEqn, one: Any, other: Any) -> tuple[Any, Any]:
    """A pair in the order of the operands; `select_and_scatter` has its source second."""
    return (one, other) if eqn.primitive is p.select_and_scatter_add_p else (other, one)


# ---------------------------------------------------------------- the table

for primitive in (*_REDUCES, p.select_and_scatter_add_p, p.select_and_scatter_p):
    local = reduce_local if primitive in _REDUCES else scatter_local
    doc = Doc(
        free="dims without a window",
        halo="others: the rows that windows reach beyond a tile",
        gather="a dim that the window spans: AllReduce of the result" * (primitive in POOLS),
    )
    register(Rule(window_factors, local, ways=window_ways, doc=doc), primitive)
