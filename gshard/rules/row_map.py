"""Row maps: concatenations, and the compositions of them with slices, pads and updates.

The result is painted with windows of the operands (`graph.row_map`). Along a split dim, every tile
of the result fetches the rows that it needs; operands that are unsplit there send nothing. Along
unsplit dims windows are painted on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import stack_p, unstack_p
from gshard.graph.reason import Reason
from gshard.graph.row_map import Axis, Layer, entire
from gshard.moving.plan import plan_reshard, reshard_cost, whole_along
from gshard.moving.row_windows import Move, plan_fetch
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import (
    RULES,
    Context,
    Doc,
    Rule,
    Way,
    cheapest,
    linear_in_all,
    no_order,
    register,
)
from gshard.rules.base.unreduced import made_alike, stacked
from gshard.rules.base.ways import least
from gshard.rules.painting import Painting, affine, are_apart
from gshard.rules.slicing import filled
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, row_bytes


def stack_factors(eqn: JaxprEqn) -> Factors:
    """The dim along which tensors are stacked, or unstacked, is unsplit; the others are free."""
    rank = max(len(a.aval.shape) for a in (*eqn.invars, *eqn.outvars))
    stack = [None if d == eqn.params["axis"] else f"d{d}" for d in range(rank)]
    parts = [name for name in stack if name]
    operands, results = (
        [stack if len(a.aval.shape) == rank else parts for a in atoms]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Factors.of(eqn, operands, results)


def row_map_factors(eqn: JaxprEqn) -> Factors:
    """Every dim passes its splits on; operands with fewer rows than tiles stay unsplit."""
    shape, moving = eqn.outvars[0].aval.shape, _moving(eqn, _layers(eqn))
    names = [f"d{i}" for i in range(len(shape))]
    tensors = [a.aval.shape for a in eqn.invars if a.aval.shape]
    operands = [names if a.aval.shape else [] for a in eqn.invars]
    resized = [
        f for d, f in enumerate(names) if d in moving or any(s[d] != shape[d] for s in tensors)
    ]
    return Factors.of(eqn, operands, [names], resized=resized)


def _layers(eqn: JaxprEqn) -> Sequence[Layer]:
    if eqn.primitive is row_map_p:
        return eqn.params["layers"]
    dim, at, layers = eqn.params["dimension"], 0, []
    for number, a in enumerate(eqn.invars):
        rows = a.aval.shape[dim]
        if rows:
            layers.append(entire(number, a.aval.shape).along(dim, Axis(at, rows, dim)))
        at += rows
    return layers


def _moving(eqn: JaxprEqn, layers: Sequence[Layer]) -> list[int]:
    """The dims along which some layer is not all rows of its source, in their places."""
    shapes = [a.aval.shape for a in eqn.invars]
    return [
        d
        for d, n in enumerate(eqn.outvars[0].aval.shape)
        if not all(layer.keeps(d, n, shapes[layer.source]) for layer in layers)
    ]


# ---------------------------------------------------------------- how it runs


def _row_map(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
    shape, layers = tuple(eqn.outvars[0].aval.shape), _layers(eqn)
    if 0 in shape:
        empty = jnp.zeros(targets[0].local_shape(shape), tiles[0].array.dtype)
        return [Tile(empty, targets[0], shape)]
    way = cheapest(ctx, eqn, RULES[eqn.primitive], tiles, targets)
    (result,), reason = way.results, Reason("operand", _name(eqn))
    ready = {
        n: ctx.reshard(tiles[n], way.operands[n], reason)
        for n in dict.fromkeys(layer.source for layer in layers)
    }
    painting = Painting(ctx, result, shape, _moving(eqn, layers), _name(eqn), eqn.invars)
    return [Tile(painting.run(layers, ready), result, shape)]


def _name(eqn: JaxprEqn) -> str:
    return "concatenate" if eqn.primitive is p.concatenate_p else "row_map"


# ---------------------------------------------------------------- ways


def _towards(here: Sharding, target: Sharding) -> Sharding:
    for dim in range(here.rank):
        here = filled(here, dim, target)
    return here


def row_map_ways(
    eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding], limit: int
) -> Sequence[Way]:
    """Fetch rows of split dims, or first gather these or move their splits to another dim.

    The last takes an AllToAll for each operand and one for the result. It is the only way if it
    sends fewer bytes in no more steps.
    """
    (target,), layers = targets, _layers(eqn)
    moving = _moving(eqn, layers)
    used = dict.fromkeys(layer.source for layer in layers if not layer.is_constant)
    options = dict.fromkeys([target, *(_towards(shardings[i], target) for i in used)])
    whole = [s.unsplit(moving) for s in options]

    def way(result: Sharding) -> Way:
        return _way(eqn, shardings, layers, moving, result)

    usual = [way(s) for s in dict.fromkeys([*options, *whole])]
    moved = dict.fromkeys(m for s in options for d in moving for m in whole_along(s, d)[1:])
    if not moved or len(moving) > 1:
        return usual
    best = least(usual, eqn, shardings, targets)
    sent, steps = _totals(best, eqn, shardings, targets)
    for other in map(way, moved):
        total = _totals(other, eqn, shardings, targets)
        if total[0] < sent and total[1] <= steps:
            best, sent = other, total[0]
    return [best] if best.results[0] in moved else usual


def _way(
    eqn: JaxprEqn,
    shardings: Sequence[Sharding],
    layers: Sequence[Layer],
    moving: list[int],
    result: Sharding,
) -> Way:
    """With a result that is split like that; `Way.how` is the number of collectives inside."""
    aval = eqn.outvars[0].aval
    sources, sent, steps = list(shardings), 0.0, 0
    for i in dict.fromkeys(layer.source for layer in layers if not layer.is_constant):
        shape, here = eqn.invars[i].aval.shape, shardings[i]
        sources[i] = result.unsplit(moving)
        if any(result.splits[d] for d in moving):
            own = [layer for layer in layers if layer.source == i]
            inside, number = _fetched(own, moving, shape, aval, result)
            gathered, aligned = (
                reshard_cost(here, there, shape, aval.dtype) for there in (sources[i], result)
            )
            if aligned + inside < gathered:
                sources[i], sent, steps = result, sent + inside, steps + number
    return Way(tuple(sources), (result,), steps, sent=sent)


def _fetched(
    layers: Sequence[Layer], moving: list[int], shape: Sequence[int], aval: Any, result: Sharding
) -> tuple[float, int]:
    """The bytes that a device sends for the layers of a source, and in how many collectives."""
    sent, steps, now = 0.0, 0, list(result.local_shape(shape))
    after = result.local_shape(aval.shape)
    cut = [d for d in moving if result.splits[d]]
    for dim in cut:
        split, row = result.splits[dim], row_bytes(now, dim, aval.dtype)
        assert split
        starts = np.arange(split.tiles) * after[dim]
        moves = [
            Move(f := layer.base[dim], f + layer.axes[dim].rows, layer.axes[dim].at - f)
            for layer in layers
        ]
        runs = all(layer.axes[dim].is_run for layer in layers)
        if runs and len(cut) == 1 and are_apart(moves):
            plan = plan_fetch(split.tiles, shape[dim], starts, after[dim], moves)
            sent, steps = sent + plan.sent * row, steps + plan.steps
        else:
            for axis, base in dict.fromkeys((n.axes[dim], n.base[dim]) for n in layers):
                if axis.is_run:
                    move = Move(base, base + axis.rows, axis.at - base)
                    rows = plan_fetch(split.tiles, shape[dim], starts, after[dim], [move]).sent
                else:
                    rows = affine(axis, base, aval.shape[dim]).sent(shape[dim], split.tiles)
                sent, steps = sent + rows * row, steps + 1
        now[dim] = after[dim]
    return sent, steps


def _totals(
    way: Way, eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding]
) -> tuple[float, int]:
    """The bytes that a way sends, and in how many collectives."""
    sent, steps = way.sent, way.how
    atoms, before = (*eqn.invars, *eqn.outvars), (*shardings, *way.results)
    for atom, here, there in zip(atoms, before, (*way.operands, *targets), strict=True):
        if here is not there:
            hops = plan_reshard(here, there, atom.aval.shape, atom.aval.dtype)
            moved = [hop.bytes for hop in hops if hop.kind != "slice"]
            sent, steps = sent + sum(moved), steps + len(moved)
    return sent, steps


def _linear(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear in all tensors jointly, if there is nothing else but zeros."""
    tensors = [n for n, a in enumerate(eqn.invars) if a.aval.shape]
    others = [a for a in eqn.invars if not a.aval.shape]
    zeros = all(isinstance(a, Literal) and a.val == 0 for a in others)
    return (tensors,) if zeros else ()


def _on_unreduced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """Along unsplit dims, every device paints with what it has."""
    layers, shape = _layers(eqn), tuple(eqn.outvars[0].aval.shape)
    tensors = [t for t in tiles if t.shape]
    parts = made_alike(ctx, tensors) if all(t.is_unreduced for t in tensors) else None
    moving = _moving(eqn, layers)
    if parts is None or 0 in shape or any(parts[0].sharding.splits[d] for d in moving):
        return None
    ready = dict(zip([n for n, t in enumerate(tiles) if t.shape], parts, strict=True))
    every = {n: ready.get(n, t) for n, t in enumerate(tiles)}
    array = Painting(ctx, parts[0].sharding, shape, moving, _name(eqn)).run(layers, every)
    return Tile(array, parts[0].sharding, shape, tensors[0].origin)


_JOINED = Doc(free="other dims", halo="the dim itself: the rows that change tiles")
register(
    Rule(
        row_map_factors,
        partition=_row_map,
        ways=row_map_ways,
        ordered=no_order,
        linear=_linear,
        on_unreduced=_on_unreduced,
        doc=_JOINED,
    ),
    p.concatenate_p,
    row_map_p,
)
register(
    Rule(
        stack_factors,
        linear=linear_in_all,
        on_unreduced=stacked,
        doc=Doc(free="the operands' dims"),
    ),
    stack_p,
)
register(
    Rule(
        stack_factors,
        doc=Doc(
            free="the results' dims", gather="the other: AllGather, every device needs all rows"
        ),
    ),
    unstack_p,
)
