"""Operators that cannot be split: callbacks, effects, and collectives of other systems.

A pure function that gshard cannot inspect (a callback, a foreign function) runs on replicated
operands on every device; the gathers before it are listed. A function with side effects runs on one
device, and the others receive its results. Operators without a meaning in a partitioned program are
rejected, with the name of the primitive and the user's line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard import _jax
from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.graph.source import because, source_of
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes, timed
from gshard.rules.base.rule import Context, Doc, Rule, Way, bind_local, region, register, rule
from gshard.rules.base.ways import replicated_way
from gshard.tensors.factors import no_factors
from gshard.tensors.meshes import ordinary
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, byte_size
from gshard.tensors.uneven import UnevenSharding


def run_everywhere(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], reason: Reason) -> list[Tile]:
    """A pure function: every device calls it on replicated operands and keeps its part."""
    with because(reason):
        arrays = bind_local(ctx, eqn, gathered(ctx, tiles, reason), [])
    return [_whole(ctx, a, v) for a, v in zip(arrays, eqn.outvars, strict=True)]


def run_once(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], reason: Reason) -> list[Tile]:
    """Side effects: the first device calls it, and a sum gives the others the result."""
    ready = gathered(ctx, tiles, reason)

    def call(*arrays: jax.Array) -> list[jax.Array]:
        return list(bind(eqn, arrays))

    def skip(*arrays: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    called = lax.cond(ctx.place.device_id() == 0, call, skip, *(t.array for t in ready))
    everyone = [list(range(ctx.place.num_devices))]
    why = Reason("step", "", f"{eqn.primitive.name} runs on the first device only")
    return [
        _whole(ctx, collectives.merge_disjoint(ctx.place, a, everyone, why), v)
        for a, v in zip(called, eqn.outvars, strict=True)
    ]


def gathered(ctx: Context, tiles: list[Tile], reason: Reason) -> list[Tile]:
    """All operands replicated."""
    return [
        ctx.reshard(t, Sharding.replicated(t.sharding.rank, ctx.place.num_devices), reason)
        for t in tiles
    ]


def _whole(ctx: Context, array: jax.Array, var: Any) -> Tile:
    return Tile(array, Sharding.replicated(array.ndim, ctx.place.num_devices), var.aval.shape)


def once_way(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Iterator[Way]:
    """Side effects: replicated operands, and results that all devices sum."""
    for way in replicated_way(eqn, shardings, targets, limit):
        sizes = [byte_size(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
        count = way.results[0].num_devices if sizes else 1
        yield way._replace(
            sent=timed(sum(sent_bytes("all_reduce", n, count) for n in sizes), len(sizes))
        )


def call_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Iterator[Way]:
    """On replicated operands, on the first device or on all."""
    return (once_way if _is_once(eqn) else replicated_way)(eqn, shardings, targets, limit)


def _is_once(eqn: JaxprEqn) -> bool:
    return eqn.primitive in _EFFECTS or bool(eqn.params.get("has_side_effect"))


def _call(
    ctx: Context, eqn: JaxprEqn, way: Way, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    reason = Reason("step", "", f"{eqn.primitive.name} needs replicated operands")
    return (run_once if _is_once(eqn) else run_everywhere)(ctx, eqn, tiles, reason)


@rule(
    *_jax.private_primitives("debugging", "inspect_sharding_p"),
    factors=no_factors,
    ways=lambda eqn, shardings, targets, limit: [Way(tuple(shardings), ())],
    doc=Doc(free="every dim"),
)
def _inspect(
    ctx: Context, eqn: JaxprEqn, way: Way, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """`jax.debug.inspect_array_sharding`: says the plan's sharding when the program is compiled."""
    (tile,) = tiles
    made = ordinary if tile.sharding.is_even(tile.shape) else UnevenSharding

    def say(inside: Any) -> None:  # of the tile: what XLA says of it has the mesh
        eqn.params["callback"](made(inside.mesh, tile.sharding))

    eqn.primitive.bind(tile.array, callback=say)
    return []


def refuse(why: str, *primitives: Primitive) -> None:
    """Reject operators without a meaning in a partitioned program."""

    @region(*primitives, doc=Doc(refused=why))
    def refused(
        ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
    ) -> list[Tile]:
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot partition {eqn.primitive.name!r}: {why}"
        )


_COLLECTIVE = (
    "axis names belong to jax.shard_map; call it inside of a function that jax.shard_map runs, or "
    "use gshard.manual's collectives inside a manual region"
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
)
_EFFECTS = (
    *_jax.private_primitives("callback", "io_callback_p"),
    *_jax.private_primitives("debugging", "debug_callback_p", "debug_print_p"),
)

register(
    Rule(
        no_factors,
        ways=call_ways,
        run=_call,
        doc=Doc(gather="every dim: AllGather, then it runs replicated on every device"),
    ),
    *_jax.private_primitives("callback", "pure_callback_p"),
    *_jax.private_primitives("ffi", "ffi_call_p"),
)
register(
    Rule(
        no_factors,
        ways=call_ways,
        run=_call,
        doc=Doc(
            gather="every dim: AllGather, then it runs on the first device; AllReduce of the result"
        ),
    ),
    *_EFFECTS,
)
register(Rule(no_factors, doc=Doc(free="a scalar")), p.empty2_p)
refuse(_COLLECTIVE, *_COLLECTIVES)
refuse(
    "tokens order the effects of one device; use values or optimization_barrier",
    p.after_all_p,
    p.create_token_p,
)
refuse("it is the placeholder of a derivative that was not taken", p.custom_lin_p)
