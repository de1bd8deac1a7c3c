"""Unreduced values: the sum over devices of what each holds, reduced where that is needed.

A contraction over a split dim leaves an unreduced result. Operators that are linear in it
(`Rule.linear`) can run on it as it is, and a loop can carry it: one reduction after the loop takes
the place of one in every run (gradient accumulation; the gradient of a linear recursion). A
reduction is delayed only through operators that are all of the value's uses, and leave less of it
to reduce, or to reduce with others, so it is never done twice; or, in a loop, where all uses
lead to carried values that stay unreduced. It is never done in a narrower type than the program's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.partial import combine_cost, reducing_key
from gshard.moving.plan import reshard_cost
from gshard.moving.reductions import mask_for
from gshard.rules.base.rule import RULES, Context, RegionRule, Rule
from gshard.rules.base.uses import NOTHING, linear_groups
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, Factors, decompose, shard_dims, shard_result
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import HeldRows, Tile


def can_stay(tile: Tile) -> bool:
    """Whether a sum can stay unreduced: all devices have to take part."""
    idle = tile.sharding.idle or any(s.idle for s in tile.sharding.unreduced)
    return not idle and jnp.issubdtype(tile.array.dtype, jnp.inexact) and 0 not in tile.shape


def partition(
    rule: Rule | RegionRule, ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    """The results of an operator, some of whose operands may be unreduced.

    It runs on them as they are if it can, with an unreduced result, and on their sums otherwise.
    """
    here = {number for number, tile in enumerate(tiles) if tile.is_unreduced}
    linear = rule.linear if here and isinstance(rule, Rule) else None
    if linear and any(here.issubset(group) for group in linear.groups(eqn)):
        part = (linear.run or in_place)(ctx, eqn, tiles)
        if part is not None:
            return [part]
    reason = Reason("operand", eqn.primitive.name)
    for number in here:
        tiles[number] = ctx.reshard(tiles[number], ctx.sharding(eqn.invars[number]), reason)
    return rule.partition(ctx, eqn, tiles, targets)


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
    """An operator on unreduced tiles as they are, with the other operands moved to fit them.

    None where they do not, or where that sends more than a later reduction saves.
    """
    rule, shape = RULES[eqn.primitive], tuple(eqn.outvars[0].aval.shape)
    found = fitted(eqn, [t.sharding for t in tiles], factors, [t.shape for t in tiles])
    if found is None or not all(t.is_standard for t in tiles):
        return None
    wanted, here = found
    moved = [n for n, t in enumerate(tiles) if t.sharding.reduced is not wanted[n]]
    rows = _MaskedRows.of(eqn, tiles, factors)
    mixed = rows.is_product and rows.after is None and not rows.dims  # no other operand tells apart
    if mixed or (moved and _moved(tiles, wanted) > _saved(ctx, eqn, tiles)):
        return None
    reason = Reason("operand", eqn.primitive.name)
    origin = next(t.origin for t in tiles if t.is_unreduced)
    tiles = [ctx.reshard(t, wanted[n], reason) if n in moved else t for n, t in enumerate(tiles)]
    if tiles[0].is_blank:
        return Tile.blank(here, shape, eqn.outvars[0].aval.dtype, origin, rows.after)
    pairs = zip(tiles, factors.operands, strict=True)
    ready = rows.for_product([mask_for(ctx.place, t, dims, factors) for t, dims in pairs])
    (array,) = rule.local(ctx, eqn, ready, [here.local_shape(shape)])
    return Tile(rows.of_product(array), here, shape, origin, rows.after)


class _MaskedRows(NamedTuple):
    """The rows of a lookup in an operator, if its one unreduced operand is such.

    Rows of other devices are zeros here, whatever they are multiplied by: without a mask, zeros
    times infinity would be NaN. `dims` are those of the mask in every operand that has them all.
    """

    held: HeldRows | None = None
    is_product: bool = False
    dims: Mapping[int, list[int]] = NOTHING
    after: HeldRows | None = None

    @staticmethod
    def of(eqn: JaxprEqn, tiles: Sequence[Tile], factors: Factors) -> _MaskedRows:
        """The rows in the operands of an equation, and in its result if that has all their dims."""
        number, *others = [n for n, t in enumerate(tiles) if t.is_unreduced]
        if (held := tiles[number].held) is None or others:
            return _MaskedRows()
        names = [factors.operands[number][d] for d in held.dims]
        tensors = (*factors.operands, factors.results[0])
        dims = {
            n: [named.index(name) for name in names]
            for n, named in enumerate(tensors)
            if n != number and set(names) <= set(named)
        }
        after = dims.pop(len(tiles), None)
        product = eqn.primitive in (p.mul_p, p.div_p, p.dot_general_p)
        return _MaskedRows(
            held, product, dims, None if after is None else HeldRows(held.mask, tuple(after))
        )

    def for_product(self, tiles: list[Tile]) -> list[Tile]:
        """Operands with 1 in the place of what others' rows are multiplied by, before a sum."""
        if self.held and self.is_product and not self.after:
            for n, dims in self.dims.items():
                tiles[n] = tiles[n].holding(self.held.select(tiles[n].array, dims, 1))
        return tiles

    def of_product(self, array: jax.Array) -> jax.Array:
        """The result with zeros in others' rows."""
        masked = self.is_product and self.after
        return masked.select(array, masked.dims, 0) if masked else array


def fitted(
    eqn: JaxprEqn, shardings: Sequence[Sharding], factors: Factors, shapes: Sequence[Sequence[int]]
) -> tuple[list[Sharding], Sharding] | None:
    """Shardings that fit the unreduced operands of an operator, and that of its unreduced result.

    None if the operator cannot run on them as they are.
    """
    operands, shape = factors.operands, eqn.outvars[0].aval.shape
    number, part = next((n, s) for n, s in enumerate(shardings) if s.unreduced)
    chosen = _splits(shardings, number, factors)
    if any(f in factors.replicated or f in factors.resized for f in chosen):
        return None
    wanted = [shard_dims(dims, chosen, factors, part.num_devices) for dims in operands]
    if any(s.unreduced and s.reduced is not w for s, w in zip(shardings, wanted, strict=True)):
        return None
    here = shard_result(factors.results[0], chosen, factors, part.num_devices)
    alone = all(len(dim) < 2 for dims in (*operands, *factors.results) for dim in dims)
    even = here.is_even(shape) and all(w.is_even(s) for w, s in zip(wanted, shapes, strict=True))
    if not (alone or even):  # padding would get between the elements
        return None
    kept = zip(factors.results[0], here.splits, strict=True)
    if any(_tiles(chosen, dim) != (split.tiles if split else 1) for dim, split in kept):
        return None  # a minor factor of a dim is split, which no split of the dim says
    unreduced = (*part.unreduced, *here.unreduced)
    if any(s.idle for s in here.unreduced) or not compatible((*here.splits, *unreduced)):
        return None  # some devices would not take part, or one axis is for two dims of the result
    return wanted, here.unreduced_over(unreduced)


def _tiles(chosen: Mapping[Factor, Split], dim: Sequence[Factor]) -> int:
    return math.prod(chosen[f].tiles for f in dim if f in chosen)


def _moved(tiles: Sequence[Tile], wanted: Sequence[Sharding]) -> float:
    """The cost of operands under other shardings."""
    pairs = zip(tiles, wanted, strict=True)
    return sum(reshard_cost(t.sharding.reduced, w, t.shape, t.array.dtype) for t, w in pairs)


def _saved(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> float:
    """The cost of reducing the unreduced operands now, less what is left of it later."""
    return sum(
        combine_cost(tile.sharding, "sum", ctx.sharding(a), a.aval) * (1 - ctx.unreduced[a])
        for a, tile in zip(eqn.invars, tiles, strict=True)
        if tile.is_unreduced and not isinstance(a, Literal) and a in ctx.unreduced
    )


def _splits(shardings: Sequence[Sharding], first: int, factors: Factors) -> dict[Factor, Split]:
    """The splits of an unreduced operand, and those of the other operands that agree with them."""
    part, own = shardings[first], {f for dim in factors.operands[first] for f in dim}
    chosen: dict[Factor, Split] = {}
    for n in sorted(range(len(shardings)), key=lambda n: n != first):
        for dim, split in zip(factors.operands[n], shardings[n].splits, strict=True):
            for factor, found in decompose(split, dim, factors.sizes).items():
                free = n == first or factor not in own
                if free and compatible((*chosen.values(), found, *part.unreduced)):
                    chosen.setdefault(factor, found)
    return chosen


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
    full = tuple(m if grows else n for n, m, grows in zip(shape, like.shape, grown, strict=True))
    sharding = Sharding(splits, tile.sharding.num_devices)
    if tile.is_blank:
        return Tile.blank(sharding, full, tile.array.dtype)
    local = zip(tile.array.shape or shape, like.array.shape, grown, strict=True)
    array = jnp.broadcast_to(tile.array, [m if grows else n for n, m, grows in local])
    return Tile(array, sharding, full)


def stacked(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """A stack."""
    if not all(t.is_unreduced for t in tiles):
        return None
    parts, dim = made_alike(ctx, tiles), eqn.params["axis"]
    if parts is None:
        return None
    splits = list(parts[0].sharding.splits)
    splits.insert(dim, None)
    sharding = replace(parts[0].sharding, splits=tuple(splits))
    shape = tuple(eqn.outvars[0].aval.shape)
    if parts[0].is_blank:
        return Tile.blank(sharding, shape, parts[0].array.dtype, tiles[0].origin)
    arrays = [lax.expand_dims(t.array, [dim]) for t in parts]
    return Tile(lax.concatenate(arrays, dim), sharding, shape, tiles[0].origin)


def scattered(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """Updates added to an unreduced value, by the operator's own rule; or unreduced updates."""
    if (updates := tiles[2]).is_unreduced:
        factors = RULES[eqn.primitive].factors(eqn)
        devices = updates.sharding.num_devices
        chosen = _splits([t.sharding for t in tiles], 2, factors)
        kept = {f: s for f, s in chosen.items() if any(f in d for d in factors.operands[2])}
        like = shard_dims(factors.operands[0], kept, factors, devices)
        like = like.unreduced_over(updates.sharding.unreduced)
        operand = tiles[0] if tiles[0].sharding is like else as_unreduced(ctx.place, tiles[0], like)
        padded = any(t.padded_dims() for t in tiles[1:])  # indices that are not in order
        return (
            None
            if operand is None or padded
            else _locally(ctx, eqn, [operand, *tiles[1:]], factors)
        )
    targets = [ctx.sharding(eqn.outvars[0])]
    rule, plain = RULES[eqn.primitive], [replace(t, sharding=t.sharding.reduced) for t in tiles]
    way = ctx.cheapest(eqn, rule, plain, targets)
    (done,) = ctx.results(eqn, rule, way, list(tiles), targets)
    return done


def owners_of(here: Sharding, unreduced: Sharding) -> np.ndarray | None:
    """The devices whose parts of a value under `here` are summed for it to be `unreduced`."""
    pairs = list(enumerate(zip(here.splits, unreduced.splits, strict=True)))
    placed = [d for d, (a, b) in pairs if a is not b]  # dims of which a device has a part only
    if here.idle or any(unreduced.splits[d] for d in placed):
        return None
    group = reducing_key(unreduced)
    parts, owners = np.unique(group * math.prod(here.tiles) + here.tile_index, return_index=True)
    needed = len(np.unique(group)) * math.prod(here.tiles[d] for d in placed)
    return None if (group < 0).any() or len(parts) != needed else owners


def moved_to(ctx: Context, tile: Tile, wanted: Sharding, reason: Reason) -> Tile:
    """`tile` under a sharding that may be unreduced."""
    if tile.sharding is wanted and (tile.is_unreduced or tile.is_standard):
        return tile
    if not wanted.unreduced:
        return ctx.reshard(tile, wanted, reason)
    kept = None if tile.is_unreduced else as_unreduced(ctx.place, tile, wanted)
    kept = kept or as_unreduced(ctx.place, ctx.reshard(tile, wanted.reduced, reason), wanted)
    assert kept is not None
    return kept


def as_unreduced(place: Place, tile: Tile, sharding: Sharding) -> Tile | None:
    """A value under a sharding that is unreduced, without communication.

    Every part of it comes from one of the devices of the reduction, and the others have zeros. None
    if they do not have all parts between them.
    """
    here = tile.sharding
    owners = owners_of(here, sharding) if tile.is_standard else None
    if owners is None:
        return None
    if tile.is_blank:
        return Tile.blank(sharding, tile.shape, tile.array.dtype, tile.origin)
    placed = [d for d, s in enumerate(here.splits) if s is not sharding.splits[d]]
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
