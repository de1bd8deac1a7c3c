"""Loops and branches: bodies are partitioned like any program, with one sharding per carry.

In propagation, the value that enters a loop, the value in its body, the one that the body returns
and the one that leaves the loop share their splits (`graph.regions.links`). Remaining differences
are resharded at the loop's border.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.graph.reason import Reason
from gshard.graph.regions import Loop
from gshard.rules.base.rule import Context, Doc, Rule, region, register
from gshard.rules.base.unreduced import moved_to
from gshard.tensors.factors import no_factors
from gshard.tensors.sharding import Sharding, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, byte_size


@region(p.scan_p, doc=Doc(free="as its body", gather="the dim it runs over: AllGather"))
def _scan(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    params, scan, reason = eqn.params, Loop.of(eqn), Reason("operand", "scan")
    assert scan is not None
    (closed,), n_carry, first_xs = scan.bodies, scan.carry, scan.consts + scan.carry
    body, length = closed.jaxpr, params["length"]
    ready = [
        ctx.reshard(t, w if i < first_xs else _stacked(w), reason)
        for i, (t, w) in enumerate(zip(tiles, map(ctx.sharding, body.invars), strict=True))
    ]
    consts, carry, xs = ready[: scan.consts], ready[scan.consts : first_xs], ready[first_xs:]
    found = ctx.carried(scan)
    for i, here in found.forms.items():
        carry[i] = replace(moved_to(ctx, carry[i], here, reason), origin=found.origins[i])
    made: Tiles = []

    def step(carried: Arrays, slices: Arrays) -> tuple[list[jax.Array], list[jax.Array]]:
        inner = ctx.inner()
        entering = [t.holding(a) for a, t in zip(carried, carry, strict=True)]
        rows = [
            Tile(a, replace(t.sharding, splits=t.sharding.splits[1:]), t.shape[1:])
            for a, t in zip(slices, xs, strict=True)
        ]
        results = inner.run_body(closed, [*consts, *entering, *rows], found.sums)
        after = [
            moved_to(inner, r, c.sharding, Reason("carried value", "scan"))
            for r, c in zip(results[:n_carry], carry, strict=True)
        ]
        made[:] = [
            _summed_if_large(inner, r, v, length)
            for r, v in zip(results[n_carry:], body.outvars[n_carry:], strict=True)
        ]
        return [t.array for t in after], [t.array for t in made]

    last, stacked = ctx.control.scan(
        step,
        [t.array for t in carry],
        [t.array for t in xs],
        length=length,
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    finished = [t.holding(a) for a, t in zip(last, carry, strict=True)]
    return finished + [
        Tile(a, _stacked(t.sharding), (length, *t.shape), t.origin)
        for a, t in zip(stacked, made, strict=True)
    ]


def _summed_if_large(ctx: Context, tile: Tile, var: Any, length: int) -> Tile:
    """A result of a body; reduced, if a stack of unreduced ones would exceed the limit."""
    if not tile.is_unreduced:
        return tile
    least = byte_size(ctx.sharding(var).local_shape(tile.shape), tile.array.dtype)
    if length * tile.nbytes <= max(ctx.memory_limit, length * least):
        return tile
    return ctx.reshard(tile, ctx.sharding(var), Reason("result", "scan"))


def _stacked(sharding: Sharding) -> Sharding:
    """The sharding of a stack of such tensors: the scanned dim is unsplit."""
    return replace(sharding, splits=(None, *sharding.splits))


@region(p.while_p, doc=Doc(free="as its body"))
def _while(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    params = eqn.params
    cond, body = params["cond_jaxpr"], params["body_jaxpr"]
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    reason = Reason("operand", "while")
    wanted = [
        *(ctx.sharding(v) for v in cond.jaxpr.invars[:n_cond]),
        *(ctx.sharding(v) for v in body.jaxpr.invars),
    ]
    ready = [ctx.reshard(t, w, reason) for t, w in zip(tiles, wanted, strict=True)]
    cond_consts, body_consts, carry = (
        ready[:n_cond],
        ready[n_cond : n_cond + n_body],
        ready[n_cond + n_body :],
    )

    def carried(arrays: Arrays) -> Tiles:
        return [Tile(a, t.sharding, t.shape) for a, t in zip(arrays, carry, strict=True)]

    def go_on(arrays: Arrays) -> jax.Array:
        inner = ctx.inner()
        inputs = [
            inner.reshard(t, ctx.sharding(v), Reason("condition", "while"))
            for t, v in zip(carried(arrays), cond.jaxpr.invars[n_cond:], strict=True)
        ]
        (again,) = inner.run_body(cond, [*cond_consts, *inputs])
        # All devices have to decide alike, or their collectives would deadlock.
        return inner.reshard(
            again, Sharding.replicated(0, again.sharding.num_devices), reason
        ).array

    def step(arrays: Arrays) -> list[jax.Array]:
        inner = ctx.inner()
        results = inner.run_body(body, [*body_consts, *carried(arrays)])
        return [
            inner.reshard(r, c.sharding, Reason("carried value", "while")).array
            for r, c in zip(results, carry, strict=True)
        ]

    return carried(ctx.control.while_loop(go_on, step, [t.array for t in carry]))


@region(p.cond_p, doc=Doc(free="as its branches"))
def _cond(ctx: Context, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    index, *operands = tiles
    arguments = [t.array for t in operands]

    def branch(closed: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
        def call(*arrays: jax.Array) -> list[jax.Array]:
            inner = ctx.inner()
            inputs = [
                inner.reshard(
                    Tile(a, t.sharding, t.shape), ctx.sharding(v), Reason("operand", "cond")
                )
                for a, t, v in zip(arrays, operands, closed.jaxpr.invars, strict=True)
            ]
            results = inner.run_body(closed, inputs)
            return [
                inner.reshard(r, target, Reason("result", "cond")).array
                for r, target in zip(results, targets, strict=True)
            ]

        return call

    branches = [branch(b) for b in eqn.params["branches"]]
    platforms = eqn.params.get("branches_platforms")
    if platforms:  # the branches of `lax.platform_dependent`: the others may not even compile
        named = zip(platforms, branches, strict=True)
        by_name = {name or "default": b for names, b in named for name in names or (None,)}
        arrays = ctx.control.platform_dependent(*arguments, **by_name)
    else:
        replicated = Sharding.replicated(0, index.sharding.num_devices)
        number = ctx.reshard(index, replicated, Reason("index", "cond")).array
        arrays = ctx.control.switch(number, branches, *arguments)
    return [
        Tile(a, t, tuple(v.aval.shape))
        for a, t, v in zip(arrays, targets, eqn.outvars, strict=True)
    ]


register(
    Rule(no_factors, doc=Doc(free="a scalar")),
    *private_primitives("lax.control_flow.conditionals", "platform_index_p"),
)
