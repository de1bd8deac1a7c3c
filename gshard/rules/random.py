"""Random numbers: the same numbers as without partitioning, generated without communication.

A counter-based generator hashes an element's index with the key, so a device can make any part of
a draw by itself: it counts from its own offsets. JAX's generators take their counters from one
primitive, `iota_2x32_shape`. Here they run on local shapes, with that primitive replaced by the
counters of the logical shape. Generators that do not count (`rbg`, and threefry with
`jax_threefry_partitionable` off) mix all elements: every device draws everything and keeps its
part. Under vmap `rbg` mixes the keys too, so they are gathered: a few bytes each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard._jax import (
    gamma_one,
    iota_2x32_shape_p,
    prng_impl,
    random_clone_p,
    random_unwrap_p,
    random_wrap_p,
)
from gshard.graph.evaluate import bind, evaluate
from gshard.graph.reason import Reason
from gshard.graph.regions import called, walk
from gshard.graph.source import because
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes, timed
from gshard.rules.base.rule import Context, Doc, Rule, Way, bind_local, on_moved, register, rule
from gshard.rules.base.ways import by_factors, replicated_way
from gshard.rules.callbacks import run_replicated
from gshard.rules.layout import bitcast_factors
from gshard.tensors.factors import Factors, Shape, Shapes, all_dims, made_dims, no_factors
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, byte_size

Draw = Callable[[Array], Array]  # what a generator makes of one key's integers

_COUNTS = iota_2x32_shape_p
_MIXES = p.rng_bit_generator_p  # under vmap the first key draws for all the others
_COUNTING = ("threefry2x32", "threefry4x32", "philox2x32", "philox4x32", "rbg")


def drawn_dims(eqn: JaxprEqn) -> Factors:
    """The keys' dims, then those of what each key draws: all free."""
    (keys,), rank = eqn.invars, len(eqn.outvars[0].aval.shape)
    names = [f"d{i}" for i in range(rank)]
    return Factors.of(eqn, [names[: len(keys.aval.shape)]], [names])


def gamma_dims(eqn: JaxprEqn) -> Factors:
    """The keys' dims are the first of the shape parameter's; the result has the latter's."""
    keys, alpha = eqn.invars
    names = [f"d{i}" for i in range(len(alpha.aval.shape))]
    return Factors.of(eqn, [names[: len(keys.aval.shape)], names], [names])


def draw_of(eqn: JaxprEqn, shape: Shape) -> Draw:
    """What an operator draws from each key: bits, or new keys."""
    impl = prng_impl(eqn.invars[0].aval.dtype)
    if eqn.primitive is p.random_bits_p:
        return lambda key: impl.random_bits(key, eqn.params["bit_width"], shape)
    return lambda key: impl.split(key, shape)


def _mixes(eqn: JaxprEqn) -> bool:
    """Whether keys draw together."""
    keys = eqn.invars[0].aval
    data = jax.ShapeDtypeStruct((*keys.shape, *prng_impl(keys.dtype).key_shape), jnp.uint32)
    return bool(keys.shape) and _uses(_traced(draw_of(eqn, (2,)), len(keys.shape), data), _MIXES)


def drawn_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """The result as it is wanted, and other operands like it; keys that mix are replicated."""
    (target,), rank = targets, len(eqn.invars[0].aval.shape)
    mixes = Sharding.replicated(rank, target.num_devices) if _mixes(eqn) else None
    keys = mixes or target.project(range(rank))
    yield Way((keys, *[target] * (len(shardings) - 1)), (target,))


_OWN = Doc(free="every dim: a device makes its own part")


@rule(p.random_bits_p, p.random_split_p, factors=drawn_dims, ways=drawn_ways, level=0, doc=_OWN)
@on_moved
def _random_draw(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    draw = _draw if eqn.primitive is p.random_bits_p else _split_keys
    return [draw(ctx, eqn, tuple(eqn.params["shape"]), tiles[0], targets[0])]


def _split_keys(ctx: Context, eqn: JaxprEqn, shape: Shape, keys: Tile, target: Sharding) -> Tile:
    """New keys of `shape` from each of `keys`."""
    raw = _draw(ctx, eqn, shape, keys, target)
    wrapped = jax.random.wrap_key_data(raw.array, impl=jax.random.key_impl(keys.array))
    return Tile(wrapped, raw.sharding, raw.shape)


def fold_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterable[Way]:
    """Pointwise, except for a generator that folds by drawing from all keys together."""
    if prng_impl(eqn.invars[0].aval.dtype).name == "unsafe_rbg":
        return replicated_way(eqn, shardings, targets, limit)
    return by_factors(eqn, all_dims(eqn), shardings, targets)


@rule(p.random_fold_in_p, factors=all_dims, ways=fold_ways, level=0, doc=Doc(free="every dim"))
def _fold_in(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    if way.how:
        return way.how.run(ctx, eqn, bind_local, tiles, targets)
    return run_replicated(ctx, eqn, tiles, Reason("step", "unsafe_rbg", "keys mix"))


def _draw(ctx: Context, eqn: JaxprEqn, shape: Shape, keys: Tile, target: Sharding) -> Tile:
    """A draw from every key; only this device's part for counter-based generators."""
    rank = keys.sharding.rank
    impl = prng_impl(keys.array.dtype)
    logical = (*keys.shape, *shape)
    per_draw = Sharding(target.splits[rank:], target.num_devices)
    local = per_draw.local_shape(shape)
    mixes = keys.sharding is not target.project(range(rank)) or _mixes(eqn)
    raw = jax.random.key_data(keys.array)
    program = _traced(draw_of(eqn, local), rank, raw)
    counting = impl.name in _COUNTING and _uses(program, _COUNTS)
    if not mixes and (per_draw.is_replicated or counting):
        counters = functools.partial(_counters, ctx, per_draw, shape)
        (array,) = _counting(program, [raw], counters)
        return Tile(array, target, logical)
    why = f"{impl.name} draws all elements at once, each device does"
    with because(Reason("step", eqn.primitive.name, why)):
        array = _vectorized(draw_of(eqn, shape), rank)(raw)
    here = keys.sharding.extended(len(shape))
    inside = array.shape[len(logical) :]  # keys are split as integers: the caller wraps the result
    drawn = Tile(array, here.extended(len(inside)), (*logical, *inside))
    own = ctx.reshard(drawn, target.extended(len(inside)), Reason("result", eqn.primitive.name))
    return Tile(own.array, target, logical)


def _traced(draw: Draw, rank: int, raw: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(_vectorized(draw, rank))(raw)


def _vectorized(draw: Draw, rank: int) -> Draw:
    for _ in range(rank):
        draw = jax.vmap(draw)
    return draw


def _uses(program: ClosedJaxpr, primitive: Primitive) -> bool:
    """Whether a primitive occurs in a program, or in one inside."""
    return any(eqn.primitive is primitive for eqn in walk(program.jaxpr))


def _counting(
    program: ClosedJaxpr, args: Sequence[Any], counters: Callable[[Shape], Arrays]
) -> list[Any]:
    """Run a program with `counters` instead of JAX's own."""

    def interpret(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive is _COUNTS:
            return counters(tuple(eqn.params["shape"]))
        body = called(eqn)
        return evaluate(body, values, interpret) if body else bind(eqn, values)

    return evaluate(program, args, interpret)


def _counters(ctx: Context, sharding: Sharding, shape: Shape, local: Shape) -> tuple[Array, Array]:
    """The row-major numbers of this device's elements among all, as high and low 32 bits."""
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    starts = np.zeros(sharding.num_devices, np.uint64)
    for split, rows, stride in zip(sharding.splits, local, strides, strict=True):
        if split:
            starts += split.own.astype(np.uint64) * np.uint64(rows * stride)
    high, low = (
        lax.bitcast_convert_type(
            jnp.asarray(ctx.place.lookup(half.view(np.int32)), jnp.int32), jnp.uint32
        )
        for half in ((starts >> np.uint64(32)).astype(np.uint32), starts.astype(np.uint32))
    )
    total = tuple(jnp.broadcast_to(half, local) for half in (high, low))
    for dim, stride in enumerate(strides):
        rows = lax.broadcasted_iota(jnp.uint32, local, dim)
        total = _add(total, _times(rows, stride, local[dim]))
    return total


def _add(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """A sum of 64-bit numbers in two halves; x64 may be off."""
    low = a[1] + b[1]
    return a[0] + b[0] + (low < b[1]).astype(jnp.uint32), low


def _times(rows: Array, stride: int, size: int) -> tuple[Array, Array]:
    """`rows * stride` in 64 bits, where rows < size: by halves of 16 bits if that is large."""
    if size * stride < 2**32:
        return jnp.zeros_like(rows), rows * jnp.uint32(stride)
    high, low = (jnp.uint32(x) for x in divmod(stride, 2**32))
    upper, lower = low >> 16, low & 0xFFFF
    middle = (rows >> 16) * lower + ((rows & 0xFFFF) * lower >> 16)
    carried = ((rows & 0xFFFF) * upper + (middle & 0xFFFF)) >> 16
    return rows * high + (rows >> 16) * upper + (middle >> 16) + carried, rows * low


@rule(p.random_gamma_p, factors=gamma_dims, ways=drawn_ways, level=0, doc=_OWN)
@on_moved
def _random_gamma(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """A key of its own for every element, as JAX has it; then each element draws until accepted."""
    (keys, alpha), (target,) = tiles, targets
    alpha = alpha.masked(ctx.place, 1)
    own = _split_keys(ctx, eqn, alpha.shape[keys.sharding.rank :], keys, target).array

    def one(args: tuple[Array, ...]) -> Array:
        return gamma_one(*args, log_space=eqn.params["log_space"])

    flat = own.reshape(-1), alpha.array.reshape(-1)
    vectorizes = prng_impl(own.dtype).name == "threefry2x32"  # others draw differently under vmap
    samples = jax.vmap(lambda *args: one(args))(*flat) if vectorizes else lax.map(one, flat)
    return [Tile(samples.reshape(alpha.array.shape), target, alpha.shape)]


def _bit_generator_local(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    why = "draws all elements at once, each device does"
    with because(Reason("step", "rng_bit_generator", why)):
        return eqn.primitive.bind(tiles[0].array, **eqn.params)


def uniform_ways(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int
) -> Iterator[Way]:
    """The result as it is wanted, summed over copies of a tile."""
    (target,), aval, sent = targets, eqn.outvars[0].aval, 0.0
    if target.replicas > 1:
        own = byte_size(target.local_shape(aval.shape), aval.dtype)
        sent = timed(sent_bytes("all_reduce", own, target.replicas))
    bounds = tuple([Sharding.replicated(0, s.num_devices) for s in shardings])
    yield Way(bounds, (target,), sent=sent)


@rule(
    p.rng_uniform_p,
    factors=made_dims,
    ways=uniform_ways,
    doc=Doc(free="every dim", gather="copies of a tile: AllReduce"),
)
@on_moved
def _rng_uniform(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """XLA's stateful generator: devices draw different numbers, so copies take the first's."""
    (target,), shape = targets, tuple(eqn.params["shape"])
    array = eqn.primitive.bind(*(t.array for t in tiles), shape=target.local_shape(shape))
    if target.replicas > 1:
        mine = ctx.place.where(target.first_copies, array)
        reason = Reason("step", "rng_uniform", "copies take the numbers of the first")
        array = collectives.merge_disjoint(ctx.place, mine, target.copies, reason)
    return [Tile(array, target, shape)]


@rule(
    iota_2x32_shape_p,
    factors=made_dims,
    ways=lambda eqn, shardings, targets, limit: [Way(tuple(shardings), tuple(targets))],
    level=0,
    doc=Doc(free="every dim"),
)
def _count(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """`iota_2x32_shape`, as where a generator written by hand counts for itself."""
    shape = tuple(eqn.params["shape"])
    return [
        Tile(_counters(ctx, target, shape, target.local_shape(shape))[half], target, shape)
        for half, target in enumerate(targets)
    ]


register(
    Rule(all_dims, level=0, doc=Doc(free="every dim")),
    p.random_seed_p,
    p.threefry2x32_p,
    random_clone_p,
)
register(
    Rule(bitcast_factors, level=0, doc=Doc(free="every dim; a key stays in one piece")),
    random_wrap_p,
    random_unwrap_p,
)
register(
    Rule(
        no_factors,
        local=_bit_generator_local,
        doc=Doc(free="every device draws everything and keeps its part"),
    ),
    p.rng_bit_generator_p,
)
