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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import scan_counts, scatter_sub_p, stack_p
from gshard.graph.reason import Reason
from gshard.moving.partial import reducing_key
from gshard.operators.choose import shard_dims
from gshard.operators.rule import RULES, Context
from gshard.simplify.row_maps import concatenate_slices_p
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, decompose
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import Tile

_ADDED = (p.add_p, p.add_jaxvals_p, p.sub_p)
_SLICED = (p.slice_p, p.dynamic_slice_p)
_SCATTERED = (p.scatter_add_p, scatter_sub_p)  # onto their first operand
_JOINED = (p.concatenate_p, concatenate_slices_p, stack_p)

_SUMMING = (p.dot_general_p, p.conv_general_dilated_p, p.reduce_sum_p, *_SCATTERED)


def waiting(
    jaxpr: Jaxpr, leaving: Mapping[int, float], shardings: Mapping[Any, Sharding] | None = None
) -> dict[Any, float]:
    """The variables whose sum may wait, and what share of it is to be paid for each.

    Two that are added pay half each. The results with the numbers in `leaving` may leave their sum
    to others, and pay the share that is given there. A sum waits only where that saves something:
    what a device has left of a scattered one is less to scale and to transpose. Shares are the same
    whatever the `shardings`; before those are known, the others that may wait are left out.
    """
    uses: dict[Any, int] = {}
    for atom in [*(a for eqn in jaxpr.eqns for a in eqn.invars), *jaxpr.outvars]:
        if not isinstance(atom, Literal):
            uses[atom] = uses.get(atom, 0) + 1
    sums = _sums(jaxpr)
    found: dict[Any, float] = {}
    ends: set[Any] = set()  # what is added, in the end, to a result that leaves
    saving: set[Any] = set()  # of which less, or fewer, or otherwise split ones are summed later
    for number, share in leaving.items():
        var = jaxpr.outvars[number]
        if not isinstance(var, Literal) and uses[var] == 1:
            found[var] = share
            ends.add(var)
            saving.add(var)
    for eqn in reversed(jaxpr.eqns):
        able = [
            a
            for number, a in enumerate(eqn.invars)
            if not isinstance(a, Literal) and uses[a] == 1 and _passes(eqn, number, ends)
        ]
        if eqn.primitive in _JOINED and not sums.issuperset(eqn.invars):
            able = []  # other values would be summed too, which are as large as they are
        for atom in able:
            share = found.get(eqn.outvars[0], 1.0)
            both = _adds_sums(eqn, sums.intersection(able))
            less = eqn.outvars[0].aval.size < atom.aval.size
            other = shardings and _otherwise_split(eqn, shardings[atom], shardings[eqn.outvars[0]])
            one = eqn.primitive in _JOINED and len(able) > 1
            if not (both or less or other or one or eqn.outvars[0] in saving):
                continue
            saving.add(atom)
            found[atom] = share / 2 if both else share
            if eqn.outvars[0] in ends:
                ends.add(atom)
    once = {number for number, share in leaving.items() if share < 1}
    for var in _leading_to(jaxpr, once) if once else ():
        found.setdefault(var, max(leaving.values()))
    return found


def _leading_to(jaxpr: Jaxpr, results: Collection[int]) -> set[Any]:
    """The variables whose uses are all linear and lead to these results, and nowhere else."""
    outside = {
        a
        for number, a in enumerate(jaxpr.outvars)
        if number not in results and not isinstance(a, Literal)
    }
    for eqn in reversed(jaxpr.eqns):
        for number, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            if not _passes(eqn, number, eqn.outvars) or not outside.isdisjoint(eqn.outvars):
                outside.add(atom)
    known = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    return known - outside


def linear_carries(eqn: JaxprEqn) -> set[int]:
    """The carried values of a loop whose uses are all linear and lead to such values again."""
    body = eqn.params["jaxpr"].jaxpr
    consts, carry = scan_counts(eqn.params)
    found = {i for i in range(carry) if not isinstance(body.outvars[i], Literal)}
    sums = _sums(body)
    while True:
        leading = _leading_to(body, found)
        kept = {i for i in found if body.invars[consts + i] in leading}
        if kept == found:
            return {i for i in kept if body.outvars[i] in sums}
        found = kept


def _adds_sums(eqn: JaxprEqn, waiting: Collection[Any]) -> bool:
    """Whether an operator makes one sum of two, of which those that are operands can wait."""
    return len(waiting) == 2 if eqn.primitive in _ADDED else eqn.primitive in _SCATTERED


def _otherwise_split(eqn: JaxprEqn, here: Sharding, there: Sharding) -> bool:
    """Whether a device has a larger part of one than of the other, or other rows of it."""
    joined = eqn.params.get("dimension") if eqn.primitive in _JOINED else None
    moves = joined is not None and there.splits[joined] is not None
    return moves or math.prod(here.tiles) != math.prod(there.tiles)


def _sums(jaxpr: Jaxpr) -> set[Any]:
    """The variables that may be unreduced: made by summing, or from such."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        linear = [eqn.invars[n] for group in _groups(eqn) for n in group]
        from_sum = any(not isinstance(a, Literal) and a in found for a in linear)
        if eqn.primitive in _SUMMING or from_sum:
            found.update(eqn.outvars)
    return found


def _groups(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """The operands that an operator is linear in, those of a group jointly."""
    rule = RULES.get(eqn.primitive)
    return rule.linear(eqn) if rule and rule.linear else ()


def _passes(eqn: JaxprEqn, number: int, ends: Collection[Any]) -> bool:
    """Whether an operator can run on its operand `number` unreduced."""
    if not any(number in group for group in _groups(eqn)):
        return False
    if eqn.primitive is p.convert_element_type_p:
        # To sum wider numbers sends more: only a loop makes up for it, by summing once.
        old, new = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
        floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
        return (old == new or eqn.outvars[0] in ends) and floats and _holds(new, old)
    if eqn.primitive is p.broadcast_in_dim_p:
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return True


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether floats of one type are all floats of the other (which JAX does not say of 8 bits)."""
    one, other = jnp.finfo(wide), jnp.finfo(narrow)
    return one.nmant >= other.nmant and one.maxexp >= other.maxexp


def accumulators(eqn: JaxprEqn) -> dict[int, list[Any]]:
    """The carried values of a loop to which its body only ever adds, and what it adds to each."""
    body = eqn.params["jaxpr"].jaxpr
    consts, carry = scan_counts(eqn.params)
    users: dict[Any, list[JaxprEqn | None]] = {}
    for e in [*body.eqns, None]:
        for a in e.invars if e else body.outvars:
            if not isinstance(a, Literal):
                users.setdefault(a, []).append(e)
    found = {}
    for i, (var, end) in enumerate(zip(body.invars[consts:], body.outvars[:carry], strict=False)):
        added: list[Any] = []
        while var is not end:
            (user, *more) = users.get(var, [None])
            if more or user is None or user.primitive not in _ADDED:
                break
            left, right = user.invars
            if right is var and user.primitive is p.sub_p:
                break
            added.append(right if left is var else left)
            (var,) = user.outvars
        if added and var is end and len(users[end]) == 1:
            found[i] = added
    return found


def leaving(eqn: JaxprEqn, shares: Mapping[Any, float]) -> dict[int, float]:
    """The results that may leave the body of a loop as partial sums, and the share of each to pay.

    Those to which its runs add, once for all of them; and stacks of sums that pay a share outside.
    """
    _, carry = scan_counts(eqn.params)
    stacks = ((i, shares.get(v, 1.0)) for i, v in enumerate(eqn.outvars) if i >= carry)
    once = dict.fromkeys(accumulators(eqn), 1 / max(eqn.params["length"], 1))
    return once | {i: share for i, share in stacks if share < 1}


def left_unreduced(tile: Tile, splits: Sequence[Split]) -> Tile | None:
    """`tile` as a partial sum over `splits`, if it can wait: all devices have to take part."""
    fits = not any(s.idle for s in splits) and not tile.sharding.idle
    if not fits or not jnp.issubdtype(tile.array.dtype, jnp.inexact) or 0 in tile.shape:
        return None
    return replace(tile, partial=tuple(splits))


def on_unreduced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """The result of an operator on unreduced operands, itself unreduced; None if it needs sums."""
    here = {number for number, tile in enumerate(tiles) if tile.partial}
    group = next((g for g in _groups(eqn) if here.issubset(g)), None)
    if group is None:
        return None
    if eqn.primitive in _SLICED:
        return _sliced(ctx, eqn, tiles)
    if eqn.primitive in _JOINED:
        return _joined(ctx, eqn, tiles)
    if eqn.primitive in _SCATTERED:
        return _scattered(ctx, eqn, tiles)
    if len(group) > 1:
        (part, *_) = [t for t in tiles if t.partial]
        if part.shape != tuple(eqn.outvars[0].aval.shape):
            return None
        if eqn.primitive in _ADDED:
            tiles = [_grown(tile, part) for tile in tiles]
        alike = _alike(ctx, [tiles[n] for n in group])
        if alike is None:
            return None
        joint = dict(zip(group, alike, strict=True))
        tiles = [joint.get(n, tile) for n, tile in enumerate(tiles)]
    return _in_place(ctx, eqn, tiles)


def _in_place(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """An operator on tiles as they are; None if some have to move or split dims are summed over."""
    rule, (part, *_) = RULES[eqn.primitive], [t for t in tiles if t.partial]
    factors, shape = rule.factors(eqn), tuple(eqn.outvars[0].aval.shape)
    (result,) = factors.results
    operands = (result, result) if eqn.primitive in _ADDED else factors.operands
    chosen: dict[Factor, Split] = {}
    for dims, tile in zip(operands, tiles, strict=True):
        for dim, split in zip(dims, tile.sharding.splits, strict=True):
            for factor, found in decompose(split, dim, factors.sizes).items():
                if chosen.setdefault(factor, found) is not found:
                    return None
    if any(f in factors.reduced or f in factors.whole or f in factors.resized for f in chosen):
        return None
    devices = part.sharding.num_devices
    for dims, tile in zip(operands, tiles, strict=True):
        if shard_dims(dims, chosen, factors, devices) != tile.sharding or not tile.is_standard:
            return None
    here = shard_dims(result, chosen, factors, devices)
    by_element = all(not dims or dims == result for dims in operands)
    even = here.is_even(shape) and all(t.sharding.is_even(t.shape) for t in tiles)
    if not (by_element or even):  # padding would get between the elements
        return None
    if not compatible((*here.splits, *part.partial)):  # one axis for two dims of the result
        return None
    (array,) = rule.local(ctx, eqn, list(tiles), [here.local_shape(shape)])
    return Tile(array, here, shape, part.partial, part.origin)


def _alike(ctx: Context, tiles: Sequence[Tile]) -> list[Tile] | None:
    """All operands as partial sums over the same devices; None where that is not free.

    What is not a partial sum counts once: one device of those that sum has it, the others zeros.
    """
    (part, *_) = [t for t in tiles if t.partial]
    found = []
    for tile in tiles:
        if not tile.partial and len(tile.shape) == len(part.shape):
            tile = as_unreduced(ctx.place, tile, part.sharding, part.partial) or tile
        if (tile.sharding, tile.partial) != (part.sharding, part.partial) or not tile.is_standard:
            return None
        found.append(tile)
    return found if len({t.array.dtype for t in found}) == 1 else None


def _grown(tile: Tile, like: Tile) -> Tile:
    """`tile` with the rows of `like` in the dims in which it has one for all of them."""
    shape = tile.shape or (1,) * len(like.shape)
    grown = [n == 1 and m != 1 for n, m in zip(shape, like.shape, strict=True)]
    if tile.partial or not any(grown):
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


def _joined(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """A concatenation along a dim that is not split, or a stack."""
    if not all(t.partial for t in tiles):
        return None
    parts, stacked = _alike(ctx, tiles), eqn.primitive is stack_p
    dim = eqn.params["axis" if stacked else "dimension"]
    if parts is None or (not stacked and parts[0].sharding.splits[dim]):
        return None
    arrays = [lax.expand_dims(t.array, [dim]) if stacked else t.array for t in parts]
    if windows := eqn.params.get("windows"):
        arrays = [lax.slice_in_dim(arrays[i], low, high, axis=dim) for i, low, high in windows]
    splits = list(parts[0].sharding.splits)
    if stacked:
        splits.insert(dim, None)
    sharding = replace(parts[0].sharding, splits=tuple(splits))
    shape, (origin, *_) = eqn.outvars[0].aval.shape, [t.origin for t in tiles if t.partial]
    return Tile(lax.concatenate(arrays, dim), sharding, tuple(shape), parts[0].partial, origin)


def _scattered(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """Updates added to a partial sum, by the operator's own rule."""
    partition = RULES[eqn.primitive].partition
    if partition is None or any(t.partial for t in tiles[1:]):
        return None
    (done,) = partition(ctx, eqn, list(tiles), [ctx.sharding(eqn.outvars[0])])
    return done


def _sliced(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """A slice along dims that are whole: less is left to sum."""
    tile, *starts = tiles
    shape = tuple(eqn.outvars[0].aval.shape)
    cut = [d for d, (n, m) in enumerate(zip(tile.shape, shape, strict=True)) if n != m]
    if any(t.partial for t in starts) or not tile.is_standard or 0 in shape:
        return None
    if any(tile.sharding.splits[d] for d in cut):
        return None
    array = tile.array
    for d in cut:
        if eqn.primitive is p.slice_p:
            start, limit = (eqn.params[k][d] for k in ("start_indices", "limit_indices"))
            stride = (eqn.params["strides"] or (1,) * len(shape))[d]
            array = lax.slice_in_dim(array, start, limit, stride, d)
        else:
            whole = Sharding.replicated(0, tile.sharding.num_devices)
            start = ctx.reshard(starts[d], whole, Reason("operand", "dynamic_slice")).array
            array = lax.dynamic_slice_in_dim(array, start, shape[d], d)
    return replace(tile, array=array, shape=shape)


def as_unreduced(
    place: Place, tile: Tile, sharding: Sharding, partial: tuple[Split, ...]
) -> Tile | None:
    """A value as an unreduced one with this sharding, without communication.

    Every part of it comes from one of the devices of the reduction, and the others have zeros. None
    if they do not have all parts between them.
    """
    here = tile.sharding
    pairs = list(enumerate(zip(here.splits, sharding.splits, strict=True)))
    placed = [d for d, (a, b) in pairs if a is not b]  # dims of which a device has a part only
    if here.idle or not tile.is_standard or any(sharding.splits[d] for d in placed):
        return None
    group = reducing_key(sharding, partial)
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
    return Tile(array, sharding, tile.shape, partial, tile.origin)
