"""Unreduced values: the sum over devices of what each holds, reduced where that is needed.

A contraction over a split dim leaves an unreduced result. Operators that are linear in it
(`Rule.linear`) can run on it as it is, and a loop can carry it: one reduction after the loop takes
the place of one in every run (gradient accumulation; the gradient of a linear recursion). A
reduction is delayed only to an operator that is the value's one use, so it is never done twice, and
only through operators that leave the value no larger than it was; or, in a loop, where all uses
lead to carried values that stay unreduced. It is never done in a narrower type than the program's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.reason import Reason
from gshard.moving.partial import reducing_key
from gshard.rules.base.rule import RULES, Context, Rule
from gshard.rules.base.uses import linear_groups
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, Factors, decompose, shard_dims
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import Tile


def can_stay(tile: Tile) -> bool:
    """Whether a sum can stay unreduced: all devices have to take part."""
    idle = tile.sharding.idle or any(s.idle for s in tile.sharding.unreduced)
    return not idle and jnp.issubdtype(tile.array.dtype, jnp.inexact) and 0 not in tile.shape


def with_unreduced(rule: Rule) -> Rule:
    """The rule of an operator some of whose operands are unreduced.

    It runs on them as they are if it can, with an unreduced result, and on their sums otherwise.
    """

    def partition(
        ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
    ) -> list[Tile]:
        here = {number for number, tile in enumerate(tiles) if tile.is_unreduced}
        groups = rule.linear(eqn) if rule.linear else ()
        if any(here.issubset(group) for group in groups):
            part = (rule.on_unreduced or in_place)(ctx, eqn, tiles)
            if part is not None:
                return [part]
        reason = Reason("operand", eqn.primitive.name)
        reduced = [
            ctx.reshard(tile, ctx.sharding(atom), reason) if tile.is_unreduced else tile
            for tile, atom in zip(tiles, eqn.invars, strict=True)
        ]
        return rule.partition(ctx, eqn, reduced, targets)

    return replace(rule, partition=partition)


def in_place(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """An operator on unreduced tiles as they are, those that it is jointly linear in made alike."""
    here = {number for number, tile in enumerate(tiles) if tile.is_unreduced}
    group = next(g for g in linear_groups(eqn) if here.issubset(g))
    if len(group) > 1:
        (part, *_) = [t for t in tiles if t.is_unreduced]
        if part.shape != tuple(eqn.outvars[0].aval.shape):
            return None
        alike = made_alike(ctx, [tiles[n] for n in group])
        if alike is None:
            return None
        joint = dict(zip(group, alike, strict=True))
        tiles = [joint.get(n, tile) for n, tile in enumerate(tiles)]
    return _locally(ctx, eqn, tiles, RULES[eqn.primitive].factors(eqn))


def added(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """A sum of which one operand may have one row for all rows of the other."""
    (part, *_) = [t for t in tiles if t.is_unreduced]
    if part.shape != tuple(eqn.outvars[0].aval.shape):
        return None
    alike = made_alike(ctx, [_grown(tile, part) for tile in tiles])
    factors = RULES[eqn.primitive].factors(eqn)
    both = replace(factors, operands=factors.results * 2)
    return _locally(ctx, eqn, alike, both) if alike else None


def _locally(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile], factors: Factors) -> Tile | None:
    """An operator on tiles as they are; None if some have to move or split dims are summed over."""
    rule, (part, *_) = RULES[eqn.primitive], [t for t in tiles if t.is_unreduced]
    (result,), operands = factors.results, factors.operands
    shape = tuple(eqn.outvars[0].aval.shape)
    chosen: dict[Factor, Split] = {}
    for dims, tile in zip(operands, tiles, strict=True):
        for dim, split in zip(dims, tile.sharding.splits, strict=True):
            for factor, found in decompose(split, dim, factors.sizes).items():
                if chosen.setdefault(factor, found) is not found:
                    return None
    if any(f in factors.reduced or f in factors.replicated or f in factors.resized for f in chosen):
        return None
    devices = part.sharding.num_devices
    for dims, tile in zip(operands, tiles, strict=True):
        wanted = shard_dims(dims, chosen, factors, devices)
        if wanted is not tile.sharding.reduced or not tile.is_standard:
            return None
    here = shard_dims(result, chosen, factors, devices)
    by_element = all(not dims or dims == result for dims in operands)
    even = here.is_even(shape) and all(t.sharding.is_even(t.shape) for t in tiles)
    if not (by_element or even):  # padding would get between the elements
        return None
    unreduced = part.sharding.unreduced
    if not compatible((*here.splits, *unreduced)):  # one axis for two dims of the result
        return None
    (array,) = rule.local(ctx, eqn, list(tiles), [here.local_shape(shape)])
    return Tile(array, here.unreduced_over(unreduced), shape, part.origin)


def made_alike(ctx: Context, tiles: Sequence[Tile]) -> list[Tile] | None:
    """All operands unreduced over the same devices; None where that is not free.

    A reduced value counts once: one device of those that sum has it, the others zeros.
    """
    (part, *_) = [t for t in tiles if t.is_unreduced]
    found = []
    for tile in tiles:
        if not tile.is_unreduced and len(tile.shape) == len(part.shape):
            tile = as_unreduced(ctx.place, tile, part.sharding) or tile
        if tile.sharding is not part.sharding or not tile.is_standard:
            return None
        found.append(tile)
    return found if len({t.array.dtype for t in found}) == 1 else None


def _grown(tile: Tile, like: Tile) -> Tile:
    """`tile` with the rows of `like` in the dims in which it has one for all of them."""
    shape = tile.shape or (1,) * len(like.shape)
    grown = [n == 1 and m != 1 for n, m in zip(shape, like.shape, strict=True)]
    if tile.is_unreduced or not any(grown):
        return tile
    own = tile.sharding.splits or (None,) * len(shape)
    given = zip(own, like.sharding.splits, grown, strict=True)
    splits = tuple(theirs if grows else mine for mine, theirs, grows in given)
    if not compatible(splits):
        return tile
    local = zip(tile.array.shape or shape, like.array.shape, grown, strict=True)
    array = jnp.broadcast_to(tile.array, [m if grows else n for n, m, grows in local])
    full = tuple(m if grows else n for n, m, grows in zip(shape, like.shape, grown, strict=True))
    return Tile(array, Sharding(splits, tile.sharding.num_devices), full)


def stacked(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """A stack."""
    if not all(t.is_unreduced for t in tiles):
        return None
    parts, dim = made_alike(ctx, tiles), eqn.params["axis"]
    if parts is None:
        return None
    arrays = [lax.expand_dims(t.array, [dim]) for t in parts]
    splits = list(parts[0].sharding.splits)
    splits.insert(dim, None)
    sharding = replace(parts[0].sharding, splits=tuple(splits))
    shape = tuple(eqn.outvars[0].aval.shape)
    return Tile(lax.concatenate(arrays, dim), sharding, shape, tiles[0].origin)


def scattered(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """Updates added to an unreduced value, by the operator's own rule."""
    if any(t.is_unreduced for t in tiles[1:]):
        return None
    targets = [ctx.sharding(eqn.outvars[0])]
    (done,) = RULES[eqn.primitive].partition(ctx, eqn, list(tiles), targets)
    return done


def as_unreduced(place: Place, tile: Tile, sharding: Sharding) -> Tile | None:
    """A value under a sharding that is unreduced, without communication.

    Every part of it comes from one of the devices of the reduction, and the others have zeros. None
    if they do not have all parts between them.
    """
    here = tile.sharding
    pairs = list(enumerate(zip(here.splits, sharding.splits, strict=True)))
    placed = [d for d, (a, b) in pairs if a is not b]  # dims of which a device has a part only
    if here.idle or not tile.is_standard or any(sharding.splits[d] for d in placed):
        return None
    group = reducing_key(sharding)
    parts, owners = np.unique(group * math.prod(here.tiles) + here.tile_index, return_index=True)
    needed = len(np.unique(group)) * math.prod(here.tiles[d] for d in placed)
    if (group < 0).any() or len(parts) != needed:
        return None
    mine = np.zeros(place.num_devices, np.int32)
    mine[owners] = 1
    clean = tile.masked(place, 0, placed).array
    array = jnp.where(place.lookup(mine) == 1, clean, jnp.zeros_like(clean))
    for dim in placed:
        rows, split = array.shape[dim], here.splits[dim]
        assert split
        wide = jnp.zeros(
            (*array.shape[:dim], rows * split.tiles, *array.shape[dim + 1 :]), array.dtype
        )
        start = place.lookup(split.coords * rows)
        array = lax.dynamic_update_slice_in_dim(wide, array, start, dim)
        array = lax.slice_in_dim(array, 0, tile.shape[dim], axis=dim)
    return Tile(array, sharding, tile.shape, tile.origin)
