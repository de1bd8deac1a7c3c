"""Loops and branches: bodies are partitioned like any program, with one sharding per carry.

In propagation, the value that enters a loop, the value in its body, the one that the body returns
and the one that leaves the loop share their splits (`graph.regions.links`). Remaining differences
are resharded at the loop's border.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.graph.reason import Reason
from gshard.graph.regions import Loop
from gshard.moving.nodes import planned_bytes
from gshard.rules.base.rule import Context, Doc, Rule, region, register
from gshard.rules.base.unreduced import as_unreduced
from gshard.rules.base.uses import accumulators, leaving, linear_carries
from gshard.tensors.factors import no_factors
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, byte_size


@dataclass(frozen=True)
class _TiledScan:
    """A scan on tiles: its body, constants, carries and scanned inputs.

    The results of the body with the numbers in `sums` may be unreduced, and pay that share.
    """

    closed: ClosedJaxpr
    consts: list[Tile]
    carry: list[Tile]
    xs: list[Tile]
    sums: Mapping[int, float]

    def run_once(
        self, ctx: Context, carried: Sequence[jax.Array], slices: Sequence[jax.Array]
    ) -> list[Tile]:
        """The results of the body."""
        arguments = [
            *self.consts,
            *(replace(t, array=a) for a, t in zip(carried, self.carry, strict=True)),
            *(
                Tile(a, replace(t.sharding, splits=t.sharding.splits[1:]), t.shape[1:])
                for a, t in zip(slices, self.xs, strict=True)
            ),
        ]
        return ctx.run_body(self.closed, arguments, self.sums)


class _Trial:
    """A trial plan of a loop's body, discarded after it is measured: values, results, bytes."""

    def __init__(self, ctx: Context, loop: _TiledScan):
        inner, self.results = ctx.inner(), list[Tile]()

        def run(carried: Sequence[jax.Array], slices: Sequence[jax.Array]) -> list[jax.Array]:
            self.results += loop.run_once(inner, carried, slices)
            return [t.array for t in self.results]

        slices = [jax.ShapeDtypeStruct(t.array.shape[1:], t.array.dtype) for t in loop.xs]
        self.jaxpr = jax.make_jaxpr(run)([t.array for t in loop.carry], slices).jaxpr
        self.values = inner.values


@region(p.scan_p, doc=Doc(free="as its body", gather="the dim it runs over: AllGather"))
def _scan(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    params, scan = eqn.params, Loop.of(eqn)
    assert scan is not None
    (closed,), n_carry, first_xs = scan.bodies, scan.carry, scan.consts + scan.carry
    body = closed.jaxpr
    ready = [
        ctx.reshard(t, w if i < first_xs else _stacked(w), Reason("operand", "scan"))
        for i, (t, w) in enumerate(zip(tiles, map(ctx.sharding, body.invars), strict=True))
    ]
    carry = ready[scan.consts : first_xs]
    sums = {**leaving(scan, ctx.unreduced), **_split_stacks(ctx, scan)}
    loop = _TiledScan(closed, ready[: scan.consts], carry, ready[first_xs:], sums)
    loop = _accumulating(ctx, scan, loop)
    made: list[Tile] = []

    def step(
        carried: Sequence[jax.Array], slices: Sequence[jax.Array]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        inner = ctx.inner()
        results = loop.run_once(inner, carried, slices)
        after = [
            r if c.is_unreduced else inner.reshard(r, c.sharding, Reason("carried value", "scan"))
            for r, c in zip(results[:n_carry], loop.carry, strict=True)
        ]
        for r, c in zip(after, loop.carry, strict=True):
            assert r.sharding is c.sharding, (r, c)
        made[:] = [
            _summed_if_large(inner, r, v, params["length"])
            for r, v in zip(results[n_carry:], body.outvars[n_carry:], strict=True)
        ]
        return [t.array for t in after], [t.array for t in made]

    last, stacked = lax.scan(
        step,
        [t.array for t in loop.carry],
        [t.array for t in loop.xs],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    finished = [replace(t, array=a) for a, t in zip(last, loop.carry, strict=True)]
    return finished + [
        replace(t, array=a, sharding=_stacked(t.sharding), shape=(params["length"], *t.shape))
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


def _accumulating(ctx: Context, scan: Loop, loop: _TiledScan) -> _TiledScan:
    """The loop with unreduced carried values, where its body adds to them or is linear in them.

    Stacks of results may be unreduced anyway, where that sends less: they take more memory.

    How the body makes them is known when it has been planned, so a trial plan is made. Unreduced
    values take as much memory as those in the body do, which is within the memory limit.
    """
    added, linear = accumulators(scan), linear_carries(scan)
    if not added and not linear:
        return loop
    values = _Trial(ctx, loop).values
    carry, kept = list(loop.carry), {i: s for i, s in loop.sums.items() if i not in added}
    for i, variables in added.items():
        parts = [None if isinstance(v, Literal) else values.get(v) for v in variables]
        part, *others = parts
        if part is None or any(t is None or t.sharding is not part.sharding for t in others):
            continue
        if start := _unreduced_start(ctx, carry[i], part):
            carry[i], kept[i] = start, loop.sums[i]
    accumulated = replace(loop, carry=carry, sums=kept)
    rest = dict.fromkeys(linear - kept.keys(), 1 / max(scan.runs, 1))
    return _linear(ctx, accumulated, rest) if rest else accumulated


def _unreduced_start(ctx: Context, carried: Tile, like: Tile) -> Tile | None:
    """A carried value before the loop, unreduced as a value of the body is; None where that fails.

    Not if it is partitioned by hand, or a scalar is added, or it would exceed the memory limit.
    """
    wanted = like.sharding
    if not wanted.unreduced or wanted.manual or wanted.rank != len(carried.shape):
        return None
    local = byte_size(wanted.local_shape(carried.shape), carried.array.dtype)
    if local > max(ctx.memory_limit, carried.nbytes):
        return None
    start = as_unreduced(ctx.place, carried, wanted)
    if start is None:
        moved = ctx.reshard(carried, wanted.reduced, Reason("operand", "scan"))
        start = as_unreduced(ctx.place, moved, wanted)
    return replace(start, origin=like.origin) if start else None


def _linear(ctx: Context, loop: _TiledScan, linear: Mapping[int, float]) -> _TiledScan:
    """The loop with those `linear` carried values unreduced that its body leaves so, if it pays.

    The body sends less then, and each of them is reduced once, after the loop.
    """
    carry, more = list(loop.carry), True
    while more:  # one that is unreduced may leave others so
        trial = _Trial(ctx, replace(loop, carry=carry, sums={**loop.sums, **linear}))
        more = False
        for i in linear:
            if not carry[i].is_unreduced and (
                start := _unreduced_start(ctx, carry[i], trial.results[i])
            ):
                carry[i], more = start, True
    changed = {i: share for i, share in linear.items() if carry[i].is_unreduced}
    if not changed:
        return loop
    found = replace(loop, carry=carry, sums={**loop.sums, **changed})
    after = _Trial(ctx, found)
    if any(after.results[i].sharding is not carry[i].sharding for i in changed):
        return loop
    # In every run, a share of an AllReduce of each.
    last = sum(2 * carry[i].nbytes * share for i, share in changed.items())
    before = planned_bytes(_Trial(ctx, loop).jaxpr)
    return found if planned_bytes(after.jaxpr) + last < before else loop


def _split_stacks(ctx: Context, scan: Loop) -> dict[int, float]:
    """The results whose stacks are split along the loop: one ReduceScatter sums all of a stack."""
    body = scan.bodies[0].jaxpr
    return {
        i: 1.0
        for i, v in enumerate(scan.eqn.outvars)
        if i >= scan.carry
        and ctx.sharding(v).splits[0]
        and not isinstance(body.outvars[i], Literal)
    }


def _stacked(sharding: Sharding) -> Sharding:
    """The sharding of a stack of such tensors: the scanned dim is unsplit."""
    return replace(sharding, splits=(None, *sharding.splits))


@region(p.while_p, doc=Doc(free="as its body"))
def _while(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
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

    def carried(arrays: Sequence[jax.Array]) -> list[Tile]:
        return [Tile(a, t.sharding, t.shape) for a, t in zip(arrays, carry, strict=True)]

    def go_on(arrays: Sequence[jax.Array]) -> jax.Array:
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

    def step(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        inner = ctx.inner()
        results = inner.run_body(body, [*body_consts, *carried(arrays)])
        return [
            inner.reshard(r, c.sharding, Reason("carried value", "while")).array
            for r, c in zip(results, carry, strict=True)
        ]

    return carried(lax.while_loop(go_on, step, [t.array for t in carry]))


@region(p.cond_p, doc=Doc(free="as its branches"))
def _cond(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
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
        arrays = lax.platform_dependent(*arguments, **by_name)
    else:
        replicated = Sharding.replicated(0, index.sharding.num_devices)
        number = ctx.reshard(index, replicated, Reason("index", "cond")).array.astype(jnp.int32)
        arrays = lax.switch(number, branches, *arguments)
    return [
        Tile(a, t, tuple(v.aval.shape))
        for a, t, v in zip(arrays, targets, eqn.outvars, strict=True)
    ]


register(
    Rule(no_factors, doc=Doc(free="a scalar")),
    *private_primitives("lax.control_flow.conditionals", "platform_index_p"),
)
