"""Operators that cannot be split: callbacks, effects, and collectives of other systems.

A pure function that gshard cannot inspect (a callback, a foreign function) runs on replicated
operands on every device; the gathers before it are listed. A function with side effects runs on one
device, and the others receive its results. Operators without a meaning in a partitioned program are
rejected, with the name of the primitive and the user's line.

Primitives without a rule run on replicated operands too. That is correct for every function of
arrays, and slow for large ones: `gshard.register_rule` registers a rule, and
`gshard.jit(..., strict=True)` makes the primitive an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard import _jax
from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.graph.regions import bodies, walk
from gshard.graph.source import because, on_behalf_of, source_of
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes, timed
from gshard.rules.base.rule import (
    RULES,
    Context,
    Doc,
    Rule,
    Way,
    bind_local,
    region,
    register,
    rule,
)
from gshard.rules.base.ways import replicated_way
from gshard.tensors.factors import no_factors
from gshard.tensors.manual import MANUAL
from gshard.tensors.meshes import ordinary
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, byte_size
from gshard.tensors.uneven import UnevenSharding


def run_replicated(ctx: Context, eqn: JaxprEqn, tiles: Tiles, reason: Reason) -> Tiles:
    """On replicated operands: a pure function runs on every device, and each keeps its part.

    With side effects only the first device runs it, and a sum gives the others the results.
    """
    if eqn.effects:
        arrays = _run_once(ctx, eqn, gathered(ctx, tiles, reason))
    else:
        with because(reason):
            arrays = bind_local(ctx, eqn, gathered(ctx, tiles, reason), [])
    return [
        Tile(a, Sharding.replicated(a.ndim, ctx.place.num_devices), v.aval.shape)
        for a, v in zip(arrays, eqn.outvars, strict=True)
    ]


def _run_once(ctx: Context, eqn: JaxprEqn, tiles: Tiles) -> Arrays:
    def call(*arrays: jax.Array) -> list[jax.Array]:
        return list(bind(eqn, arrays))

    def skip(*arrays: jax.Array) -> list[jax.Array]:
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]

    called = lax.cond(ctx.place.device_id() == 0, call, skip, *(t.array for t in tiles))
    everyone = [list(range(ctx.place.num_devices))]
    why = Reason("step", "", f"{eqn.primitive.name} runs on the first device only")
    return [collectives.merge_disjoint(ctx.place, a, everyone, why) for a in called]


def gathered(ctx: Context, tiles: Tiles, reason: Reason) -> Tiles:
    """All operands replicated."""
    return [
        ctx.reshard(t, Sharding.replicated(t.sharding.rank, ctx.place.num_devices), reason)
        for t in tiles
    ]


def call_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """On replicated operands; results of side effects are summed by all devices."""
    for way in replicated_way(eqn, shardings, targets, limit):
        sizes = [byte_size(v.aval.shape, v.aval.dtype) for v in eqn.outvars if eqn.effects]
        count = way.results[0].num_devices if sizes else 1
        sent = sum(sent_bytes("all_reduce", n, count) for n in sizes)
        yield way._replace(sent=timed(sent, len(sizes)))


def _call(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    why = f"{eqn.primitive.name} needs replicated operands"
    if eqn.primitive not in RULES:
        where = "on the first device" if eqn.effects else "replicated on every device"
        why = f"{eqn.primitive.name} has no rule and runs {where}; gshard.register_rule adds one"
        why += _untraceable(eqn)
    return run_replicated(ctx, eqn, tiles, Reason("step", "", why))


@rule(
    *_jax.private_primitives("debugging", "inspect_sharding_p"),
    factors=no_factors,
    ways=lambda eqn, shardings, targets, limit: [Way(tuple(shardings), ())],
    doc=Doc(free="every dim"),
)
def _inspect(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
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
    def refused(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
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
    *_jax.private_primitives("callback", "io_callback_p"),
    *_jax.private_primitives("debugging", "debug_callback_p", "debug_print_p"),
)
register(Rule(no_factors, doc=Doc(free="a scalar")), p.empty2_p)
refuse(_COLLECTIVE, *_COLLECTIVES)
refuse(
    "tokens order the effects of one device; use values or optimization_barrier",
    p.after_all_p,
    p.create_token_p,
)
refuse("it is the placeholder of a derivative that was not taken", p.custom_lin_p)


# ---------------------------------------------------------------- primitives without a rule


def unknown_rule(eqn: JaxprEqn, strict: bool) -> Rule:
    """The rule of a primitive without a registered rule."""
    name = eqn.primitive.name
    if strict:
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard has no rule for the primitive {name!r}, and strict=True "
            "does not allow it to run replicated on every device; add one with gshard.register_rule"
            f"{_untraceable(eqn)}"
        )
    _check(eqn)
    return Rule(no_factors, ways=call_ways, run=_call)


def implementation(eqn: JaxprEqn) -> ClosedJaxpr | Exception | None:
    """The program of the Python function that implements a primitive, if it has one.

    Where that cannot be traced, it is the error that it raised.
    """
    function = _jax.python_implementation(eqn.primitive)
    if function is None:
        return None
    try:
        return traced(eqn, lambda eqn, *args: function(*args, **eqn.params))
    except Exception as error:  # any error: it is the user's code
        return error


def traced(eqn: JaxprEqn, fn: Callable[..., Any]) -> ClosedJaxpr:
    """The program of `fn(eqn, *operands)`, attributed to the user's line."""
    avals = [a.aval for a in eqn.invars]
    with on_behalf_of(eqn):
        return jax.make_jaxpr(lambda *args: fn(eqn, *args))(*avals)


def _untraceable(eqn: JaxprEqn) -> str:
    """Why a primitive was not replaced by its implementation, to be added to a message."""
    error = None if eqn.effects else implementation(eqn)
    if not isinstance(error, Exception):
        return ""
    first = f"{type(error).__name__}: {error}".partition("\n")[0]
    return f" (its Python implementation cannot be traced: {first})"


def _check(eqn: JaxprEqn) -> None:
    """Only functions of arrays can run on every device, each by itself."""
    name = eqn.primitive.name
    avals = [a.aval for a in (*eqn.invars, *eqn.outvars)]
    strange = [a for a in avals if not isinstance(a, ShapedArray)]
    if any(isinstance(a, _jax.AbstractRef) for a in strange):
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot run {name!r} on a reference: it supports only reads "
            "and writes; read it first (ref[...]), and write the result back"
        )
    if strange:
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot run the primitive {name!r}: it takes or returns "
            f"{strange[0]}, which is not an array and cannot be copied to every device; keep it "
            f"out of gshard.jit, or give the primitive a rule with gshard.register_rule"
            f"{_untraceable(eqn)}"
        )
    if eqn.effects and not _jax.allowed_in_branches(eqn.effects):
        raise NotImplementedError(
            f"{source_of(eqn)}: gshard cannot run the primitive {name!r}: it has the effects "
            f"{set(eqn.effects)}, which are not supported in a partitioned program; keep "
            "it out of gshard.jit, or give the primitive a rule with gshard.register_rule"
        )
    if any(e.primitive in MANUAL for body in bodies(eqn) for e in walk(body)):
        raise NotImplementedError(
            f"{source_of(eqn)}: the primitive {name!r} has no rule, so it runs unchanged, but "
            "there is a manual region inside it; put the region around it instead"
        )
