"""Reductions: a kept dim is free, a reduced one leaves partial results to combine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxpr_as_fun
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.ordered import sortable
from gshard.moving.partial import reducing_groups
from gshard.moving.reductions import identity
from gshard.rules.base.rule import (
    RULES,
    Context,
    Doc,
    Rule,
    bind_local,
    cheapest,
    linear_in_all,
    no_order,
    register,
)
from gshard.tensors.factors import Factors, Shape
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

Arrays = Sequence[jax.Array]


def reduce_factors(eqn: JaxprEqn, kind: str) -> Factors:
    """Reduced dims are `k`, kept dims pass through; init values are scalars."""
    axes = eqn.params.get("axes", eqn.params.get("dimensions"))
    rank = len(eqn.invars[0].aval.shape)
    names = [f"k{d}" if d in axes else f"d{d}" for d in range(rank)]
    kept = [n for n in names if n[0] == "d"]
    operands = [names if len(a.aval.shape) == rank else [] for a in eqn.invars]
    reduced = {n: kind for n in names if n[0] == "k"}
    return Factors.of(eqn, operands, [kept] * len(eqn.outvars), reduced)


def _reduce_tiles(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
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


def _partition_custom(
    ctx: Context,
    eqn: JaxprEqn,
    tiles: list[Tile],
    targets: list[Sharding],
    prepare: Callable[[list[Tile]], Any],
    finish: Callable[[Any, collectives.Members], Sequence[jax.Array]],
) -> list[Tile]:
    """Choose splits as for a maximum, reduce locally with `prepare`, combine with `finish`."""
    way = cheapest(ctx, eqn, RULES[eqn.primitive], tiles, targets)
    reason = Reason("operand", eqn.primitive.name)
    ready = [ctx.reshard(t, s, reason) for t, s in zip(tiles, way.operands, strict=True)]
    partial, here = way.results[0], way.results[0].reduced
    if not partial.unreduced:
        arrays = bind_local(ctx, eqn, ready, [])
    else:
        groups = reducing_groups(partial)
        arrays = finish(prepare(ready), groups)
        if here.is_replicated and any(s.idle for s in partial.unreduced):
            arrays = [_from_one(ctx, eqn, a, groups[0][0]) for a in arrays]
    return [Tile(a, here, tuple(v.aval.shape)) for a, v in zip(arrays, eqn.outvars, strict=True)]


def _from_one(ctx: Context, eqn: JaxprEqn, array: jax.Array, device: int) -> jax.Array:
    """The result of `device` on all devices: those without a part of the operand have none."""
    reason = Reason("step", eqn.primitive.name, "the result for idle devices")
    mine = jnp.where(ctx.place.device_id() == device, array, jnp.zeros_like(array))
    everyone = [list(range(ctx.place.num_devices))]
    return collectives.merge_disjoint(ctx.place, mine, everyone, reason)


def _arg_reduce(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """argmax, argmin: reduce values, then the first index of the winner."""
    kind = "max" if eqn.primitive is p.argmax_p else "min"
    (dim,) = eqn.params["axes"]
    index_dtype = eqn.params["index_dtype"]

    def prepare(ready: list[Tile]) -> tuple[jax.Array, jax.Array]:
        (tile,) = ready
        masked = tile.masked(ctx.place, identity(kind, tile.array.dtype), [dim])
        (local,) = bind_local(ctx, eqn, [masked], [])
        value = jnp.take_along_axis(masked.array, jnp.expand_dims(local, dim), axis=dim)
        return jnp.squeeze(value, dim), local + jnp.asarray(
            tile.offset(ctx.place, dim), index_dtype
        )

    def finish(
        parts: tuple[jax.Array, jax.Array], groups: collectives.Members
    ) -> Sequence[jax.Array]:
        value, index = parts
        reason = Reason("step", eqn.primitive.name, f"winners of {len(groups[0])} devices")
        keys, _ = sortable(value, kind)
        best = collectives.all_reduce(ctx.place, keys, groups, kind, reason)
        none = jnp.asarray(jnp.iinfo(index_dtype).max, index_dtype)
        mine = jnp.where(keys == best, index, none)
        return [collectives.all_reduce(ctx.place, mine, groups, "min", reason)]

    return _partition_custom(ctx, eqn, tiles, targets, prepare, finish)


def _generic_reduce(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """`reduce` with any computation: without an identity, padding is marked by a flag.

    Elements become pairs (is there one?, value), for which (False, anything) is the identity. The
    init value takes part once, at the end.
    """
    count = len(eqn.outvars)
    dims = tuple(eqn.params["dimensions"])
    compute = jaxpr_as_fun(eqn.params["jaxpr"])

    def paired(a: Arrays, b: Arrays) -> Arrays:
        both = compute(*a[1:], *b[1:])
        has = a[0] | b[0]
        values = [
            jnp.where(a[0] & b[0], c, jnp.where(a[0], x, y))
            for c, x, y in zip(both, a[1:], b[1:], strict=True)
        ]
        return (has, *values)

    def fold(flags: jax.Array, values: Arrays, inits: Arrays, over: Sequence[int]) -> Arrays:
        nothing = (jnp.asarray(False), *inits)
        return lax.reduce((flags, *values), nothing, paired, over)

    def prepare(ready: list[Tile]) -> tuple[Arrays, list[Tile]]:
        values, inits = ready[:count], ready[count:]
        flags = functools.reduce(
            jnp.logical_and,
            [~values[0].is_padding(ctx.place, d) for d in values[0].padded_dims() if d in dims],
            jnp.ones(values[0].array.shape, bool),
        )
        return fold(flags, [v.array for v in values], [i.array for i in inits], dims), inits

    def finish(
        parts: tuple[Arrays, list[Tile]], groups: collectives.Members
    ) -> Sequence[jax.Array]:
        folded, inits = parts
        reason = Reason("step", eqn.primitive.name, f"partial results of {len(groups[0])} devices")
        gathered = [
            collectives.all_gather(ctx.place, part[None], 0, groups, reason) for part in folded
        ]
        scalars = [i.array for i in inits]
        firsts = [jnp.ones((1, *gathered[0].shape[1:]), bool)] + [
            jnp.broadcast_to(s, (1, *g.shape[1:]))
            for s, g in zip(scalars, gathered[1:], strict=True)
        ]
        flags, *values = (jnp.concatenate(pair) for pair in zip(firsts, gathered, strict=True))
        _, *results = fold(flags, values, scalars, (0,))
        return results

    return _partition_custom(ctx, eqn, tiles, targets, prepare, finish)


def _register() -> None:
    for primitive, kind in _KINDS.items():
        doc = Doc(free="kept dims", gather="reduced dims: AllReduce or ReduceScatter of the result")
        register(
            Rule(
                functools.partial(reduce_factors, kind=kind),
                _reduce_tiles,
                linear=linear_in_all if primitive is p.reduce_sum_p else None,
                doc=doc,
            ),
            primitive,
        )
    register(
        Rule(
            functools.partial(reduce_factors, kind="max"),
            partition=_arg_reduce,
            ordered=no_order,
            doc=Doc(
                free="kept dims",
                gather="the reduced dim: two AllReduces, of the winners and of their indices",
            ),
        ),
        p.argmax_p,
        p.argmin_p,
    )
    register(
        Rule(
            functools.partial(reduce_factors, kind="max"),
            partition=_generic_reduce,
            ordered=no_order,
            doc=Doc(free="kept dims", gather="reduced dims: AllGather of the partial results"),
        ),
        p.reduce_p,
    )


_register()
