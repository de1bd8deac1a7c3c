"""The cheapest way to run an operator, and how one that is described by factors runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from gshard import _jax
from gshard.graph.reason import Reason
from gshard.moving.costs import machine
from gshard.moving.partial import combine, mask_for
from gshard.rules.base.rule import MOST_REMEMBERED, RULES, Context, Rule, Shares, Way, bind_local
from gshard.rules.base.ways import Layout, least, ways_of
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

_cheapest_before: dict[Any, Way] = {}


def cheapest(
    ctx: Context, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
) -> Way:
    """The cheapest way to run `eqn` on `tiles`, found once for equal equations."""
    shardings = tuple([t.sharding for t in tiles])
    return cheapest_of(ctx, eqn, rule, shardings, targets, ctx.shares(eqn, tiles))


def cheapest_of(
    ctx: Context,
    eqn: JaxprEqn,
    rule: Rule,
    shardings: tuple[Sharding, ...],
    targets: Sequence[Sharding],
    shares: Shares | None,
) -> Way:
    """The same for operands with these shardings."""
    alike, limit = ctx.kind(eqn), ctx.memory_limit
    key = (alike, rule.ways or rule.factors, shardings, tuple(targets), shares, machine(), limit)
    found = None if alike is None else _cheapest_before.get(key)
    if found is None:
        ways = ways_of(rule, eqn, shardings, targets, limit)
        found = least(ways, eqn, shardings, targets, shares)
        if isinstance(found.how, Layout):
            found = found._replace(how=found.how.between(eqn, shardings, targets))
        if alike is not None:
            if len(_cheapest_before) > MOST_REMEMBERED:
                _cheapest_before.clear()
                _in_place.clear()
            _cheapest_before[key] = found
            # That nothing moves is independent of costs, and so of the rest of the key.
            if isinstance(found.how, Layout) and found.how.in_place:
                _in_place[alike, *shardings, *targets] = (rule, found.how)
    return found


def partition_by_factors(
    ctx: Context, eqn: JaxprEqn, rule: Rule, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """Run `eqn` under the cheapest split of its factors; results may still need resharding."""
    return run_as(ctx, eqn, rule, cheapest(ctx, eqn, rule, tiles, targets).how, tiles, targets)


_in_place: dict[Any, tuple[Rule, Layout]] = {}


def runs_in_place(kind: int, shardings: Sequence[Sharding], targets: Sequence[Sharding]) -> bool:
    """Whether an equation is equal to an earlier one that needed no communication."""
    return (kind, *shardings, *targets) in _in_place


def in_place_again(
    eqn: JaxprEqn, kind: int, tiles: Sequence[Tile], targets: Sequence[Sharding]
) -> list[Tile] | None:
    """The results of an equation equal to an earlier one that needed no communication; else None.

    It is copied onto local arrays directly, without a choice and without JAX's typing rules.
    """
    rule, layout = _in_place.get((kind, *[t.sharding for t in tiles], *targets), (None, None))
    # The user may have registered another rule meanwhile.
    if layout is None or rule is not RULES.get(eqn.primitive):
        return None
    values = [t.array for t in tiles]
    types = layout.types.get(_types(values))
    arrays = _jax.copied(eqn, values, types) if types else None
    if arrays is None:
        return None
    return [
        Tile(array, target, var.aval.shape)
        for var, array, target in zip(eqn.outvars, arrays, targets, strict=True)
    ]


def _types(values: Sequence[jax.Array]) -> tuple[Any, ...]:
    return tuple([jax.typeof(value) for value in values])


def run_as(
    ctx: Context,
    eqn: JaxprEqn,
    rule: Rule,
    layout: Layout,
    tiles: list[Tile],
    targets: list[Sharding],
) -> list[Tile]:
    """Run `eqn` as a layout says."""
    if layout.in_place and all(t.is_standard for t in tiles):  # as most operators are
        arrays = rule.local(ctx, eqn, tiles, [local for _, local in layout.results])
        if rule.local is bind_local:
            values = [t.array for t in tiles]
            layout.types[_types(values)] = _jax.types_if_plain(eqn, values, arrays)
        return [
            Tile(array, target, var.aval.shape)
            for var, array, target in zip(eqn.outvars, arrays, targets, strict=True)
        ]
    name, factors = eqn.primitive.name, layout.factors
    ready = []
    for tile, dims, (sharding, local) in zip(tiles, factors.operands, layout.operands, strict=True):
        tile = ctx.reshard(tile, sharding, Reason("operand", name))
        if tile.array.shape != local:
            for dim, size in enumerate(local):
                tile = ctx.retile(tile, dim, size, Reason("operand", name))
        ready.append(mask_for(ctx.place, tile, dims, factors) if factors.reduced else tile)
    arrays = rule.local(ctx, eqn, ready, [local for _, local in layout.results])
    kind = factors.reduction(layout.chosen)
    results = []
    for var, (here, _), array, target in zip(
        eqn.outvars, layout.results, arrays, targets, strict=True
    ):
        tile = Tile(array, here, tuple(var.aval.shape), name)
        stays = ctx.stays_unreduced(var, tile, kind)
        results.append(tile if stays else combine(ctx.place, tile, kind, target))
    return results
