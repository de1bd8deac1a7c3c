"""Row maps: slices, pads, reversals, concatenations, and the compositions of them with updates.

The result is painted with windows of the operands (`graph.row_map`). Along a split dim, every tile
of the result fetches the rows that it needs, or all tiles collect them; operands that are unsplit
there send nothing. Along unsplit dims windows are painted on every device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import tile_p
from gshard.graph.reason import Reason
from gshard.graph.row_map import Layer
from gshard.moving.costs import sent_bytes, timed
from gshard.moving.plan import plan_reshard, reshard_cost, whole_along
from gshard.moving.row_windows import plan_fetch
from gshard.rules.axis_rows import moves_of
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import Context, Doc, Linear, Rule, Way, register, rule
from gshard.rules.base.unreduced import made_alike
from gshard.rules.base.ways import least, price
from gshard.rules.painting import Painting, RowMap
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Shardings, Targets, compatible
from gshard.tensors.tile import Tile, Tiles, byte_size, row_bytes

RowMapOf = Callable[[JaxprEqn], RowMap]


@rule(tile_p, doc=Doc(free="dims that are not repeated", halo="as copies that are concatenated"))
def tile_factors(eqn: JaxprEqn) -> Factors:
    """The dims that are not repeated are free."""
    names = [f"d{d}" if n == 1 else None for d, n in enumerate(eqn.params["reps"])]
    return Factors.of(eqn, [names], [names])


def row_map_factors(eqn: JaxprEqn, of: RowMapOf) -> Factors:
    """Every dim passes its splits on; operands with fewer rows than tiles stay unsplit."""
    row_map = of(eqn)
    names = [f"d{i}" for i in range(len(row_map.shape))]
    tensors = [a.aval.shape for a in eqn.invars if a.aval.shape]
    operands = [names if a.aval.shape else [] for a in eqn.invars]
    resized = [
        f
        for d, f in enumerate(names)
        if d in row_map.moving or any(s[d] != row_map.shape[d] for s in tensors)
    ]
    return Factors.of(eqn, operands, [names], resized=resized, ordered=())


# ---------------------------------------------------------------- ways


def row_map_ways(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int, of: RowMapOf
) -> Sequence[Way]:
    """Fetch rows of split dims, or collect them, or first gather or move the splits of operands.

    The last takes an AllToAll for each operand and one for the result. It is the only way if it
    sends fewer bytes in no more steps.
    """
    (target,), row_map = targets, of(eqn)
    moving, sources = row_map.moving, row_map.sources
    if 0 in row_map.shape:
        return [Way(tuple(shardings), (target,))]
    options = {target: None}
    for number in sources:
        options[_towards(shardings[number], target)] = None
        options[_towards(shardings[number].unsplit(moving), target)] = None
    options |= dict.fromkeys([s.unsplit(moving) for s in options])

    def way(result: Sharding) -> Way:
        return _way(row_map, shardings, result, target, eqn.outvars[0].aval)

    usual = [way(result) for result in options]
    whole = (result.unsplit(moving) for result in options)  # which may be there for others
    gathered = [
        Way(tuple(here if n in sources else s for n, s in enumerate(shardings)), (result,), 0)
        for result, here in zip(options, whole, strict=True)
    ]
    usual += [way for way in gathered if way not in usual]
    if len(moving) != 1 or len(row_map.layers) == 1:
        return usual
    moved = dict.fromkeys(m for s in options for m in whole_along(s, moving[0])[1:])
    if not moved:
        return usual
    best = least(usual, eqn, shardings, targets)
    sent, steps = _totals(best, eqn, shardings, targets)
    for other in map(way, moved):
        total = _totals(other, eqn, shardings, targets)
        if total[0] < sent and total[1] <= steps:
            best, sent = other, total[0]
    return [best] if best.results[0] in moved else usual


def _towards(here: Sharding, target: Sharding, dims: Iterable[int] | None = None) -> Sharding:
    """`here`, with the target's splits on unsplit dims (of some), where they are compatible."""
    for dim in range(len(target.splits)) if dims is None else dims:
        split = target.splits[dim]
        if split and not here.splits[dim]:
            more = here.replace(dim, split)
            here = more if compatible(more.splits) else here
    return here


def _way(
    row_map: RowMap, shardings: Shardings, result: Sharding, target: Sharding, aval: Any
) -> Way:
    """With a result that is split like that; `Way.how` is the number of collectives inside."""
    operands, sent, steps = list(shardings), 0.0, 0
    for number, layers in row_map.sources.items():
        shape, here = row_map.operands[number].aval.shape, shardings[number]
        operands[number] = result.unsplit(row_map.moving)
        used = [d for d in row_map.moving if (split := here.splits[d]) and not split.idle]
        kept = _towards(result, here, used)  # its splits where the result has none
        if kept is not operands[number]:
            parts = _parts(row_map, layers, shape, kept, result)
            found = [_sent(row_map, n, shape, kept, result, aval.dtype, target) for n in parts]
            inside, count = sum(n for n, _ in found), sum(n for _, n in found)
            gathered, aligned = (
                reshard_cost(here, there, shape, aval.dtype) for there in (operands[number], kept)
            )
            collected = kept is not result  # with a latency, as a gather has
            if aligned + (timed(inside) if collected else inside) < gathered:
                operands[number], sent, steps = kept, sent + inside, steps + count
    return Way(tuple(operands), (result,), steps, sent=sent)


def _parts(
    row_map: RowMap, layers: Sequence[Layer], shape: Sequence[int], here: Sharding, result: Sharding
) -> list[Sequence[Layer]]:
    """The layers of a source by what they need of it, if they send less apart."""
    able = not row_map.at_run_time and len(layers) > 1
    needs = row_map.needs(layers, here) if able else []

    def sent(parts: Sequence[Sequence[Layer]]) -> float:
        return sum(_sent(row_map, part, shape, here, result, np.int8)[0] for part in parts)

    return [*needs] if len(needs) > 1 and sent(needs) < sent([layers]) else [layers]


def _sent(
    row_map: RowMap,
    layers: Sequence[Layer],
    shape: Sequence[int],
    source: Sharding,
    result: Sharding,
    dtype: Any,
    target: Sharding | None = None,
) -> tuple[float, int]:
    """The bytes that a device sends for the layers of a source, and in how many collectives."""
    cut = [d for d in row_map.order(source, shape) if d in row_map.moving and source.splits[d]]
    start, after = list(source.local_shape(shape)), result.local_shape(row_map.shape)
    if 0 in start or not cut:
        return 0.0, 0
    for d in row_map.moving:
        if d not in cut:
            start[d] = sum(-(-(r.stop - r.start) // r.step) for r in row_map.read(layers, d))
    sent, steps, seen = 0.0, 0, set[Any]()
    known = not row_map.at_run_time
    moves = {d: moves_of(layers, d) if known and result.splits[d] else () for d in cut}
    wanted = target or result
    together = sorted(d for d in cut if moves[d] and result.splits[d] is wanted.splits[d])
    if len(together) > 1:  # in the order in which all row maps of the source fetch them
        cut = [*together, *(d for d in cut if d not in together)]
    for layer in layers:
        now, key = list(start), list[Any]()
        for d in cut:
            axis, split, size = layer.axes[d], source.splits[d], row_bytes(now, d, dtype)
            assert split
            now[d] = after[d] if result.splits[d] else axis.rows
            key += [moves[d] or (axis if result.splits[d] else axis[1:], layer.base[d])]
            if tuple(key) in seen:
                continue
            seen.add(tuple(key))
            steps += 1
            if moves[d]:
                starts = np.arange(split.tiles) * after[d]
                plan = plan_fetch(split.tiles, shape[d], starts, after[d], moves[d])
                sent, steps = sent + plan.sent * size, steps + plan.steps - 1
            elif result.splits[d]:
                sent += row_map.rows(layer, d, {}).sent(shape[d], split.tiles) * size
            else:
                sent += sent_bytes("all_reduce", axis.rows * size, split.tiles)
    return sent, steps


def _totals(way: Way, eqn: JaxprEqn, shardings: Shardings, targets: Targets) -> tuple[float, int]:
    """The bytes that a way sends, and in how many collectives."""
    sent, steps = way.sent, way.how
    atoms, before = (*eqn.invars, *eqn.outvars), (*shardings, *way.results)
    for atom, here, there in zip(atoms, before, (*way.operands, *targets), strict=True):
        if here is not there:
            hops = plan_reshard(here, there, atom.aval.shape, atom.aval.dtype)
            moved = [hop.bytes for hop in hops if hop.kind != "slice"]
            sent, steps = sent + sum(moved), steps + len(moved)
    return sent, steps


# ---------------------------------------------------------------- how it runs


def row_map_rule(of: RowMapOf = RowMap, **rest: Any) -> Rule:
    """The rule of operators that are row maps."""

    def run(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
        shape = tuple(eqn.outvars[0].aval.shape)
        if 0 in shape:
            empty = jnp.zeros(targets[0].local_shape(shape), eqn.outvars[0].aval.dtype)
            return [Tile(empty, targets[0], shape)]
        row_map, reason = of(eqn), Reason("operand", eqn.primitive.name)
        if isinstance(way.how, Sharding):  # gathered for all slices
            tiles = [ctx.reshard(tiles[0], way.how, reason)]
        ready = {n: ctx.reshard(t, way.operands[n], reason) for n, t in enumerate(tiles)}
        apart = [
            n
            for n, own in row_map.sources.items()
            if len(_parts(row_map, own, tiles[n].shape, way.operands[n], way.results[0])) > 1
        ]
        array = Painting(ctx, row_map, way.results[0]).run(ready, apart)
        return [Tile(array, way.results[0], shape)]

    def on_unreduced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
        """Along unsplit dims, every device paints with what it has."""
        row_map, tensors = of(eqn), [t for t in tiles if t.shape]
        alone = all(t.is_unreduced == bool(t.shape) for t in tiles)
        parts = made_alike(ctx, tensors) if alone and 0 not in row_map.shape else None
        if parts is None or any(parts[0].sharding.splits[d] for d in row_map.moving):
            return None
        if parts[0].is_blank:
            dtype = parts[0].array.dtype
            return Tile.blank(parts[0].sharding, row_map.shape, dtype, tensors[0].origin)
        ready = iter(parts)
        every = {n: next(ready) if t.shape else t for n, t in enumerate(tiles)}
        array = Painting(ctx, row_map, parts[0].sharding, shared=False).run(every)
        return Tile(array, parts[0].sharding, row_map.shape, tensors[0].origin)

    rule = Rule(
        functools.partial(row_map_factors, of=of),
        ways=functools.partial(row_map_ways, of=of),
        run=run,
        linear=Linear(_linear, on_unreduced),
        **rest,
    )
    return rule


def gathered_for_all(
    slices: Sequence[JaxprEqn],
    moving: Collection[int],
    here: Sharding,
    shardings: Mapping[Any, Sharding],
    limit: int,
) -> Sharding:
    """The sharding of the operand of slices along dims: gathered if all of them send more."""
    whole, aval = here.unsplit(moving), slices[0].invars[0].aval
    if len(slices) == 1 or byte_size(whole.local_shape(aval.shape), aval.dtype) > limit:
        return here

    known = dict[Any, float]()

    def sent(eqn: JaxprEqn) -> float:
        """What a slice sends by itself: as much wherever it begins, if its result is not split."""
        (result,), wanted = eqn.outvars, [shardings[eqn.outvars[0]]]
        whole = not any(wanted[0].splits[d] for d in moving)
        kind = (wanted[0], result.aval.shape, eqn.params["strides"]) if whole else eqn
        if kind not in known:
            row_map = RowMap(eqn)
            if row_map.moving != moving or 0 in row_map.shape:
                return 0.0
            ways = row_map_ways(eqn, [here], wanted, limit, lambda eqn: row_map)
            own = (
                w for w in ways if all(w.operands[0].splits[d] is here.splits[d] for d in moving)
            )
            known[kind] = min([price(w, eqn, [here], wanted) for w in own], default=np.inf)
        return known[kind]

    gathered = sum(step.bytes for step in plan_reshard(here, whole, aval.shape, aval.dtype))
    enough = any(0 < gathered <= total for total in itertools.accumulate(map(sent, slices)))
    return whole if enough else here


def _linear(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """Linear in all tensors jointly, if the only other numbers are zeros, or indices."""
    tensors = [n for n, a in enumerate(eqn.invars) if a.aval.shape]
    others = [a for a in eqn.invars if not a.aval.shape]
    painted = eqn.primitive is not p.dynamic_slice_p
    zeros = all(isinstance(a, Literal) and a.val == 0 for a in others) or not painted
    return (tensors,) if zeros else ()


_MOVED = Doc(
    free="dims that stay as they are",
    halo="others: the rows that change tiles",
    gather="few rows to all devices: AllReduce of them; to many tiles: ReduceScatter of them",
)
register(row_map_rule(doc=_MOVED), p.concatenate_p, row_map_p, p.slice_p, p.pad_p, p.rev_p)
