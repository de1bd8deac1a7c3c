"""ReduceWindow and SelectAndScatter: pooling, and its gradients (appendix, "Convolution").

Split dims exchange halos as in a convolution, and rows outside of the tensor are the identity. A
sum, maximum or minimum whose window spans most of a split dim (global pooling) is reduced in parts:
every device applies a part of the window to all results, and the parts are combined.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.costs import WIDE_WINDOW
from gshard.moving.halo import window
from gshard.moving.partial import identity
from gshard.rules.base.rule import Context, Doc, Rule, Way, register
from gshard.rules.base.ways import by_factors
from gshard.rules.window import NOTHING, Reach, bring, of_device, reach_of
from gshard.tensors.factors import Factors, Shape
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile

_KINDS = {p.reduce_window_sum_p: "sum", p.reduce_window_max_p: "max", p.reduce_window_min_p: "min"}
_OPS = {"sum": lax.add, "max": lax.max, "min": lax.min}


def window_factors(eqn: JaxprEqn) -> Factors:
    """Every dim passes through, possibly resized; init values are scalars."""
    names = [f"d{i}" for i in range(len(eqn.outvars[0].aval.shape))]
    operands = [names if a.aval.shape or not names else [] for a in eqn.invars]
    results: list[list[str | None]] = [[*names] for _ in eqn.outvars]
    reduced = {names[d]: _KINDS[eqn.primitive] for d in _in_parts(eqn)}
    for d in _in_parts(eqn):
        results[0][d] = None
    return Factors.of(eqn, operands, results, reduced, resized=names)


def _in_parts(eqn: JaxprEqn) -> list[int]:
    """The dims along which a device reduces a part of the window."""
    if eqn.primitive not in _KINDS:
        return []
    sizes = zip(
        eqn.params["window_dimensions"],
        eqn.params["base_dilation"],
        eqn.outvars[0].aval.shape,
        strict=True,
    )
    return [d for d, (w, base, n) in enumerate(sizes) if base == 1 and w >= WIDE_WINDOW * n > 0]


def window_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Iterable[Way]:
    """Splits are kept, at the cost of halos."""
    factors = window_factors(eqn)
    return by_factors(eqn, factors, shardings, targets, kept=list(factors.sizes))


# ---------------------------------------------------------------- reduce_window


def reduce_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """One of the reductions with a primitive of its own."""
    (tile,), kind = tiles, _KINDS[eqn.primitive]
    neutral = identity(kind, tile.array.dtype)
    if 0 in shapes[0]:
        return [jnp.zeros(shapes[0], tile.array.dtype)]
    parts = [d for d in _in_parts(eqn) if tile.sharding.splits[d]]
    if parts:
        return [_reduce_parts(ctx, eqn, tile, parts, shapes[0])]
    (tile,), padding, reaches = _bring_all(ctx, eqn, [tile], [neutral], shapes[0])
    params = eqn.params | {"padding": padding}
    return [_own(ctx, eqn.primitive.bind(tile.array, **params), reaches, shapes[0])]


def gather_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """`select_and_gather_add`: the tangents of the largest (or smallest) elements."""
    dtype = tiles[1].array.dtype
    if 0 in shapes[0]:
        return [jnp.zeros(shapes[0], dtype)]
    kind = "max" if eqn.params["select_prim"] is p.ge_p else "min"
    fills = [jnp.zeros((), dtype), identity(kind, dtype)]
    tiles, padding, reaches = _bring_all(ctx, eqn, tiles, fills, shapes[0])
    params = eqn.params | {"padding": padding}
    out = eqn.primitive.bind(*(t.array for t in tiles), **params)
    return [_own(ctx, out, reaches, shapes[0])]


def generic_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """Any computation, without an identity: a flag marks rows that exist."""
    params = eqn.params
    half = len(tiles) // 2
    operands, inits = tiles[:half], [t.array for t in tiles[half:]]
    if 0 in shapes[0]:
        return [jnp.zeros(shapes[0], t.array.dtype) for t in operands]
    moved, padding, reaches = _bring_all(ctx, eqn, operands, [None] * half, shapes[0])
    arrays = [t.array for t in moved]
    there = _rows_there(ctx, moved[0], reaches)
    if there is None:
        out = eqn.primitive.bind(*arrays, *inits, **(params | {"padding": padding}))
        return [_own(ctx, x, reaches, shapes[0]) for x in out]

    def computation(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        (*xs, x_there), (*ys, y_there) = left, right
        both = jax.core.eval_jaxpr(params["jaxpr"], params["consts"], *xs, *ys)
        one = [lax.select(x_there, x, y) for x, y in zip(xs, ys, strict=True)]
        kept = [lax.select(x_there & y_there, b, o) for b, o in zip(both, one, strict=True)]
        return (*kept, x_there | y_there)

    *out, _ = lax.reduce_window(
        (*arrays, there),
        (*inits, jnp.asarray(True)),
        computation,
        params["window_dimensions"],
        params["window_strides"],
        padding,
        params["base_dilation"],
        params["window_dilation"],
    )
    return [_own(ctx, x, reaches, shapes[0]) for x in out]


_Reaches = list[tuple[int, Reach, Split]]


def _reaches(eqn: JaxprEqn, sharding: Sharding, local: Shape) -> _Reaches:
    found = []
    p_, shape = eqn.params, eqn.outvars[0].aval.shape
    for d, split in enumerate(sharding.splits):
        if split:
            taps = (p_["window_dimensions"][d] - 1) * p_["window_dilation"][d]
            where = p_["padding"][d][0], p_["base_dilation"][d]
            reach = reach_of(split.tiles, local[d], shape[d], p_["window_strides"][d], taps, *where)
            found.append((d, reach, split))
    return found


def _bring_all(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], fills: Sequence[jax.Array | None], local: Shape
) -> tuple[list[Tile], tuple[tuple[int, int], ...], _Reaches]:
    """The operands with their halos, and the padding that is left to the operator."""
    reaches = _reaches(eqn, tiles[0].sharding, local)
    padding = list(eqn.params["padding"])
    for dim, reach, _ in reaches:
        padding[dim] = reach.padding
        reason = _why(eqn, dim)
        tiles = [
            bring(ctx.place, t, dim, reach.starts, reach.rows, fill, reason)
            for t, fill in zip(tiles, fills, strict=True)
        ]
    return tiles, tuple(padding), reaches


def _rows_there(ctx: Context, tile: Tile, reaches: _Reaches) -> jax.Array | None:
    """Which rows of a tile with halos are rows of the tensor; None if all are."""
    there = None
    for dim, reach, split in reaches:
        if ((reach.starts >= 0) & (reach.starts + reach.rows <= tile.shape[dim])).all():
            continue
        start = ctx.place.lookup(of_device(reach.starts, split))
        index = lax.broadcasted_iota(jnp.int32, tile.array.shape, dim) + start
        inside = (index >= 0) & (index < tile.shape[dim])
        there = inside if there is None else there & inside
    return there


def _own(ctx: Context, out: jax.Array, reaches: _Reaches, local: Shape) -> jax.Array:
    """The device's own rows of what it computed."""
    for dim, reach, split in reaches:
        out = window(ctx.place, out, dim, of_device(reach.lead, split), local[dim])
    return out


def _reduce_parts(
    ctx: Context, eqn: JaxprEqn, tile: Tile, parts: list[int], local: Shape
) -> jax.Array:
    """The reduction over this device's part of the window, for all results along `parts`.

    Parts differ by one element at most: all devices reduce the smaller number, and those with one
    more add it on.
    """
    place, kind = ctx.place, _KINDS[eqn.primitive]
    neutral = identity(kind, tile.array.dtype)
    params, shape = eqn.params, eqn.outvars[0].aval.shape
    sizes, padding = list(params["window_dimensions"]), list(params["padding"])
    halos = _reaches(eqn, tile.sharding, local)
    choices: list[list[tuple[int, int, int, np.ndarray | None]]] = []
    for dim, reach, split in halos:
        if dim not in parts:
            tile = bring(place, tile, dim, reach.starts, reach.rows, neutral, _why(eqn, dim))
            padding[dim] = reach.padding
            continue
        dilation, low = params["window_dilation"][dim], padding[dim][0]
        each, more = divmod(sizes[dim], split.tiles)
        number = np.arange(split.tiles)
        starts = (number * each + np.minimum(number, more)) * dilation - low
        results = (shape[dim] - 1) * params["window_strides"][dim] + 1
        rows = results + max(0, each - (more == 0)) * dilation
        tile = bring(place, tile, dim, starts, rows, neutral, _why(eqn, dim))
        options: list[tuple[int, int, int, np.ndarray | None]] = []
        if each:
            options.append((dim, each, 0, None))
        if more:
            options.append((dim, 1, each * dilation, of_device(number < more, split)))
        choices.append(options)
    total = None
    for combination in itertools.product(*choices):
        value = tile.array
        for dim, size, skip, holders in combination:
            sizes[dim], padding[dim] = size, (0, 0)
            length = (shape[dim] - 1) * params["window_strides"][dim] + 1
            length += (size - 1) * params["window_dilation"][dim]
            value = lax.slice_in_dim(value, skip, skip + length, axis=dim)
            if holders is not None:
                others = jnp.full(value.shape, neutral)
                value = lax.select(jnp.full(value.shape, place.lookup(holders) == 1), value, others)
        how = {"window_dimensions": tuple(sizes), "padding": tuple(padding)}
        value = eqn.primitive.bind(value, **(params | how))
        total = value if total is None else _OPS[kind](total, value)
    assert total is not None
    return _own(ctx, total, [h for h in halos if h[0] not in parts], local)


def _why(eqn: JaxprEqn, dim: int) -> Reason:
    return Reason("step", eqn.primitive.name, f"rows under the windows of dim {dim}")


# ---------------------------------------------------------------- select_and_scatter


def scatter_local(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """Every device selects in all windows that touch its rows, and keeps what falls on them.

    Windows at the border are selected in twice, by both neighbours: no partial results arise, and
    sums have the order that they have without partitioning.
    """
    place, params = ctx.place, eqn.params
    source, operand, *rest = tiles if eqn.primitive is p.select_and_scatter_add_p else _swap(tiles)
    dtype = operand.array.dtype
    if rest:
        fill = zero = rest[0].array
    else:
        fill = identity("max" if params["select_prim"] is p.ge_p else "min", dtype)
        zero = jnp.zeros((), dtype)
    local = shapes[0]
    if 0 in source.shape or 0 in local:
        return [jnp.broadcast_to(zero, local)]
    padding = list(params["padding"])
    own: list[tuple[int, np.ndarray, Split]] = []
    for dim, split in enumerate(operand.sharding.splits):
        if not split:
            continue
        low, stride, size = (
            padding[dim][0],
            params["window_strides"][dim],
            params["window_dimensions"][dim],
        )
        begin = np.arange(split.tiles) * local[dim]
        end = np.minimum(begin + local[dim], operand.shape[dim])
        first = np.maximum(-(-(begin + low - size + 1) // stride), 0)
        last = np.minimum((end - 1 + low) // stride, source.shape[dim] - 1)
        used = (begin < end) & (first <= last)
        count = max(int((last - first + 1)[used].max(initial=1)), 1)
        if rest:  # no value for a window that does not exist: take one more that does
            first = np.minimum(first, source.shape[dim] - count)
        first = np.where(used, first, NOTHING)
        above = np.where(used, first * stride - low, NOTHING)
        rows = (count - 1) * stride + size
        source = bring(place, source, dim, first, count, 0, _why(eqn, dim))
        operand = bring(place, operand, dim, above, rows, fill, _why(eqn, dim))
        padding[dim] = (0, 0)
        own.append((dim, np.where(used, begin - above, -local[dim]), split))  # or all padding
    pair = (source, operand) if not rest else (operand, source)
    arrays = [t.array for t in (*pair, *rest)]
    out = eqn.primitive.bind(*arrays, **(params | {"padding": tuple(padding)}))
    for dim, offset, split in own:
        before = max(0, -int(offset.min()))
        after = max(0, int(offset.max()) + local[dim] - out.shape[dim])
        pads = [(before, after, 0) if d == dim else (0, 0, 0) for d in range(out.ndim)]
        out = lax.pad(out, zero, pads)
        out = window(place, out, dim, of_device(offset + before, split), local[dim])
    return [out]


def _swap(tiles: list[Tile]) -> list[Tile]:
    """`select_and_scatter` has its operand first."""
    return [tiles[1], tiles[0], *tiles[2:]]


# ---------------------------------------------------------------- the table

_LOCAL = {
    **dict.fromkeys(_KINDS, reduce_local),
    p.reduce_window_p: generic_local,
    p.select_and_gather_add_p: gather_local,
    p.select_and_scatter_add_p: scatter_local,
    p.select_and_scatter_p: scatter_local,
}
for primitive, local in _LOCAL.items():
    doc = Doc(
        free="dims without a window",
        halo="others: the rows that windows reach beyond a tile",
        gather="a dim that the window spans: AllReduce of the result" * (primitive in _KINDS),
    )
    register(Rule(window_factors, local, ways=window_ways, doc=doc), primitive)
