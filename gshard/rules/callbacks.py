"""What cannot be split: calls out of the program, effects, and collectives of other systems.

A pure function that gshard cannot look into (a callback, a foreign function) runs whole on every
device, and the gathers before it say so. A function with side effects runs on one device, and the
others receive its results. What has no meaning in a partitioned program is refused, by the name of
the primitive and the user's line.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard import _jax
from gshard.devices import Place
from gshard.factors import Factors
from gshard.moving import collectives
from gshard.rule import Context, Doc, Rule, bind_local, register
from gshard.sharding import Sharding
from gshard.source import source_of
from gshard.tile import Tile


def whole_dims(eqn: JaxprEqn) -> Factors:
    """No dim can be split."""
    return Factors(
        tuple(((),) * len(getattr(a.aval, "shape", ())) for a in eqn.invars),
        tuple(((),) * len(getattr(v.aval, "shape", ())) for v in eqn.outvars),
        {},
    )


def _gathered(ctx: Context, eqn: JaxprEqn, tiles: list[Tile]) -> list[Tile]:
    reason = f"{eqn.primitive.name} sees whole arrays only"
    return [
        ctx.reshard(t, Sharding.replicated(t.sharding.rank, ctx.place.num_devices), reason)
        for t in tiles
    ]


def _everywhere(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """A pure function: every device calls it with the whole and keeps its part of the result."""
    if eqn.params.get("has_side_effect"):
        _refuse(eqn, "it has side effects, which every device would repeat")
    arrays = bind_local(ctx, eqn, _gathered(ctx, eqn, tiles), [])
    return [
        Tile(a, Sharding.replicated(a.ndim, ctx.place.num_devices), tuple(v.aval.shape))
        for a, v in zip(arrays, eqn.outvars, strict=True)
    ]


def _once(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    """Side effects: the first device calls, and the others take part in a sum to get the result."""
    if eqn.params.get("ordered"):
        _refuse(eqn, "effects of several devices cannot be kept in order; leave out ordered=True")
    ready = _gathered(ctx, eqn, tiles)

    def call(*arrays):
        whole = [Tile(a, t.sharding, t.shape) for a, t in zip(arrays, ready, strict=True)]
        return list(bind_local(ctx, eqn, whole, []))

    def skip(*arrays):
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    called = lax.cond(ctx.place.device_id() == 0, call, skip, *(t.array for t in ready))
    reason = f"{eqn.primitive.name} runs on the first device only"
    return [
        Tile(
            _from_first(ctx.place, a, reason),
            Sharding.replicated(a.ndim, ctx.place.num_devices),
            a.shape,
        )
        for a in called
    ]


def _from_first(place: Place, x: jax.Array, reason: str) -> jax.Array:
    """The first device's value, where the others have zeros; as integers no bit of it changes."""
    if x.dtype == jnp.bool_:
        return _from_first(place, x.astype(jnp.int8), reason).astype(jnp.bool_)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(_from_first(place, x.real, reason), _from_first(place, x.imag, reason))
    bits = x
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))
    everyone = [list(range(place.num_devices))]
    total = collectives.all_reduce(place, bits, everyone, "sum", reason)
    return total if total.dtype == x.dtype else lax.bitcast_convert_type(total, x.dtype)


def _refuse(eqn: JaxprEqn, why: str) -> None:
    raise NotImplementedError(
        f"{source_of(eqn)}: gshard cannot partition {eqn.primitive.name!r}: {why}"
    )


def refused(why: str) -> Rule:
    """A rule for what has no meaning in a partitioned program."""

    def refuse(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]):
        _refuse(eqn, why)
        return []

    return Rule(whole_dims, partition=refuse, doc=Doc(refused=why))


_COLLECTIVE = (
    "axis names belong to shard_map; inside of gshard.jit use auto_to_manual_spmd_partition "
    "and gshard's collectives"
)
_COLLECTIVES = (
    p.all_gather_p,
    p.all_to_all_p,
    p.axis_index_p,
    p.pmax_p,
    p.pmin_p,
    p.ppermute_p,
    p.psum_p,
    p.ragged_all_to_all_p,
    *_jax.private_primitives("lax.parallel", "pbroadcast_p", "reduce_scatter_p"),
    *_jax.private_primitives("lax.parallel", "psum_invariant_p", "all_gather_invariant_p"),
    *_jax.private_primitives("shard_map", "shard_map_p"),
)
_REFS = (p.get_p, p.swap_p, *_jax.private_primitives("state.primitives", "addupdate_p"))

register(
    Rule(
        whole_dims,
        partition=_everywhere,
        doc=Doc(gather="every dim: AllGather, then it runs whole on every device"),
    ),
    *_jax.private_primitives("callback", "pure_callback_p"),
    *_jax.private_primitives("ffi", "ffi_call_p"),
)
register(
    Rule(
        whole_dims,
        partition=_once,
        doc=Doc(
            gather="every dim: AllGather, then it runs on the first device; AllReduce of the result"
        ),
    ),
    *_jax.private_primitives("callback", "io_callback_p"),
    *_jax.private_primitives("debugging", "debug_callback_p", "debug_print_p"),
)
register(Rule(whole_dims, doc=Doc(free="a scalar")), p.empty2_p)
register(refused(_COLLECTIVE), *_COLLECTIVES)
register(refused("mutable references live on one device; pass values instead"), *_REFS)
register(
    refused("tokens order the effects of one device; use values or optimization_barrier"),
    p.after_all_p,
    p.create_token_p,
)
register(refused("it stands for a derivative that was not taken"), p.custom_lin_p)
