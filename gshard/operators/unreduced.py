"""Partial sums that wait: a value that is the sum of what the devices hold, summed where needed.

A contraction over a split dim leaves a partial sum on every device. Additions, scalings,
transposes and the like can work on the partial sums themselves, and a loop can accumulate them: the
devices are asked for their sum once, after it (gradient accumulation; the gradient of what queries,
keys and values have in common). A sum waits only for an operator that is its one use, so it is
never asked for twice, and only through operators that leave it no larger than it was. It is never
taken in a narrower type than the program's own.
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
from gshard.tensors.factors import decompose
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import Tile

_ADDED = (p.add_p, p.add_jaxvals_p, p.sub_p)
_SCALED = (p.mul_p, p.div_p)
_REARRANGED = (
    p.neg_p, p.transpose_p, p.reshape_p, p.squeeze_p, p.reduce_sum_p, p.convert_element_type_p,
    p.copy_p, p.broadcast_in_dim_p,
)  # fmt: skip
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
    return found


def _adds_sums(eqn: JaxprEqn, waiting: Collection[Any]) -> bool:
    """Whether an operator makes one sum of two, of which those that are operands can wait."""
    return len(waiting) == 2 if eqn.primitive in _ADDED else eqn.primitive in _SCATTERED


def _otherwise_split(eqn: JaxprEqn, here: Sharding, there: Sharding) -> bool:
    """Whether a device has a larger part of one than of the other, or other rows of it."""
    joined = eqn.params.get("dimension") if eqn.primitive in _JOINED else None
    moves = joined is not None and there.splits[joined] is not None
    return moves or math.prod(here.tiles) != math.prod(there.tiles)


def _sums(jaxpr: Jaxpr) -> set[Any]:
    """The variables that may be partial sums: made by summing, or from such."""
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        linear = eqn.primitive in (*_ADDED, *_SCALED, *_REARRANGED, *_SLICED, *_JOINED)
        if eqn.primitive in _SUMMING or (
            linear and any(not isinstance(a, Literal) and a in found for a in eqn.invars)
        ):
            found.update(eqn.outvars)
    return found


def _passes(eqn: JaxprEqn, number: int, ends: Collection[Any]) -> bool:
    """Whether an operator can work on partial sums of its operand `number`."""
    if eqn.primitive is p.convert_element_type_p:
        # To sum wider numbers sends more: only a loop makes up for it, by summing once.
        old, new = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
        floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
        return (old == new or eqn.outvars[0] in ends) and floats and _holds(new, old)
    if eqn.primitive is p.broadcast_in_dim_p:
        return number == 0 and eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    if eqn.primitive in _SCALED:
        return number == 0 or eqn.primitive is p.mul_p
    if eqn.primitive in (*_SLICED, *_SCATTERED):
        return number == 0
    return eqn.primitive in (*_ADDED, *_REARRANGED, *_JOINED)


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
    """The result of an operator on partial sums, mostly itself one; None if it needs the sums."""
    if eqn.primitive in _ADDED:
        return _added(ctx, eqn, tiles)
    if eqn.primitive in _SCALED:
        return _scaled(ctx, eqn, tiles)
    if eqn.primitive in _REARRANGED:
        return _rearranged(ctx, eqn, tiles[0])
    if eqn.primitive in _SLICED:
        return _sliced(ctx, eqn, tiles)
    if eqn.primitive in _JOINED:
        return _joined(ctx, eqn, tiles)
    if eqn.primitive in _SCATTERED:
        return _scattered(ctx, eqn, tiles)
    return None


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


def _added(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    """A sum of partial sums, or of one and another value: the devices are asked for it once."""
    (part, *_) = [t for t in tiles if t.partial]
    if part.shape != tuple(eqn.outvars[0].aval.shape):
        return None
    parts = _alike(ctx, [_grown(t, part) for t in tiles])
    if parts is None:
        return None
    (array,) = RULES[eqn.primitive].local(ctx, eqn, parts, [part.array.shape])
    return replace(part, array=array)


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


def _scaled(ctx: Context, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Tile | None:
    (which,) = [i for i, t in enumerate(tiles) if t.partial][:1]
    part, by = tiles[which], tiles[1 - which]
    if by.partial or (which == 1 and eqn.primitive is not p.mul_p) or not part.is_standard:
        return None
    same = by.sharding == part.sharding and by.is_standard and by.shape == part.shape
    if not same and not (by.shape == () and by.sharding.is_replicated):
        return None
    if part.shape != tuple(eqn.outvars[0].aval.shape):
        return None
    (array,) = RULES[eqn.primitive].local(ctx, eqn, list(tiles), [part.array.shape])
    return replace(part, array=array)


def _rearranged(ctx: Context, eqn: JaxprEqn, tile: Tile) -> Tile | None:
    """An operator of one operand, where no split dim is summed over or torn apart."""
    rule = RULES[eqn.primitive]
    factors, shape = rule.factors(eqn), tuple(eqn.outvars[0].aval.shape)
    chosen: dict[str, Split] = {}
    for dim, split in zip(factors.operands[0], tile.sharding.splits, strict=True):
        chosen |= decompose(split, dim, factors.sizes)
    if any(f in factors.reduced or f in factors.whole or f in factors.resized for f in chosen):
        return None
    devices = tile.sharding.num_devices
    here = shard_dims(factors.results[0], chosen, factors, devices)
    back = shard_dims(factors.operands[0], chosen, factors, devices)
    if back != tile.sharding or math.prod(here.tiles) != math.prod(back.tiles):
        return None
    if not tile.sharding.is_even(tile.shape) or not here.is_even(shape) or not tile.is_standard:
        return None
    (array,) = rule.local(ctx, eqn, [tile], [here.local_shape(shape)])
    return Tile(array, here, shape, tile.partial, tile.origin)


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
    """A value as a partial sum whose tiles lie like `sharding`; nothing is sent for it.

    Every part of it comes from one of the devices that are to sum, and the others hold zeros. None
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
