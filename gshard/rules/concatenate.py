"""Concatenate, stack, unstack."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import stack_p, unstack_p
from gshard.graph.reason import Reason
from gshard.moving.halo import plan_fetch
from gshard.moving.offsets import rows_put
from gshard.moving.plan import plan_reshard, reshard_cost, whole_along
from gshard.moving.rows import Move, Runs, align, plan_rows
from gshard.operators.rule import Context, Doc, Rule, linear_in_all, register
from gshard.rules.changes import rows_of
from gshard.rules.slicing import filled
from gshard.simplify.row_maps import concatenate_slices_p
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile, itemsize_of


def stack_factors(eqn: JaxprEqn) -> Factors:
    """The new dim is unsplit, the others are free."""
    names: list[str | None] = [f"d{i}" for i in range(len(eqn.invars[0].aval.shape))]
    result = list(names)
    result.insert(eqn.params["axis"], None)
    return Factors.of(eqn, [names] * len(eqn.invars), [result])


def unstack_factors(eqn: JaxprEqn) -> Factors:
    """The removed dim is unsplit, the others are free."""
    names: list[str | None] = [f"d{i}" for i in range(len(eqn.outvars[0].aval.shape))]
    operand = list(names)
    operand.insert(eqn.params["axis"], None)
    return Factors.of(eqn, [operand], [names] * len(eqn.outvars))


def concatenate_factors(eqn: JaxprEqn) -> Factors:
    """Every dim passes its splits on; operands with fewer rows than tiles stay unsplit."""
    names = [f"d{i}" for i in range(len(eqn.outvars[0].aval.shape))]
    resized = [names[eqn.params["dimension"]]]
    return Factors.of(eqn, [names] * len(eqn.invars), [names], resized=resized)


@dataclass(frozen=True)
class OperandRows:
    """Rows `start` to `limit` of operand number `operand`, which become the rows from `at` on."""

    operand: int
    start: int
    limit: int
    at: int

    @property
    def move(self) -> Move:
        """The same for `align`."""
        return self.start, self.limit, self.at - self.start


def concatenate(
    ctx: Context, tiles: list[Tile], parts: list[OperandRows], dim: int, target: Sharding, name: str
) -> Tile:
    """The parts concatenated along `dim`.

    If the dim is split, every tile of the result fetches the rows that it needs of each operand.
    Operands that are unsplit there send nothing.
    """
    parts = [part for part in parts if part.start < part.limit]
    shape = list(tiles[0].shape)
    shape[dim] = max((part.at + part.limit - part.start for part in parts), default=0)
    if 0 in shape:
        return Tile(
            jnp.zeros(target.local_shape(shape), tiles[0].array.dtype), target, tuple(shape)
        )
    used: dict[int, list[OperandRows]] = {}
    for part in parts:
        used.setdefault(part.operand, []).append(part)
    way = _cheapest(tiles, used, dim, shape, target)
    result, sources = way.result, way.sources
    ready = {i: ctx.reshard(tiles[i], s, Reason("operand", name)) for i, s in sources.items()}
    split = result.splits[dim]
    if split is None:
        pieces = [
            lax.slice_in_dim(ready[q.operand].array, q.start, q.limit, axis=dim) for q in parts
        ]
        return Tile(lax.concatenate(pieces, dim), result, tuple(shape))
    rows = -(-shape[dim] // split.tiles)
    joined: jax.Array | None = None
    for i in sorted(used, key=lambda i: -sum(q.limit - q.start for q in used[i])):
        own = used[i]
        if joined is not None and _in_single_tiles(ready[i], own, dim, rows):
            for part in own:
                joined = _written(ctx.place, joined, ready[i].array, part, dim, split)
            continue
        reason = Reason("step", name, f"rows of operand {i} to their tiles")
        for array, covered in _fetched(ctx.place, ready[i], own, dim, split, rows, reason):
            joined = (
                array if joined is None else _over(ctx.place, joined, array, covered, dim, split)
            )
    assert joined is not None
    return Tile(joined, result, tuple(shape))


def _towards(here: Sharding, target: Sharding) -> Sharding:
    for dim in range(here.rank):
        here = filled(here, dim, target)
    return here


@dataclass(frozen=True)
class _Way:
    """A sharding of the result, and the operands' for it."""

    result: Sharding
    sources: Mapping[int, Sharding]
    cost: float  # in bytes, the latency of reshards included
    sent: int  # bytes of one device
    steps: int  # collectives


def _cheapest(
    tiles: list[Tile],
    used: Mapping[int, list[OperandRows]],
    dim: int,
    shape: list[int],
    target: Sharding,
) -> _Way:
    """Fetch rows of a split dim, or first gather it or move its split to another dim.

    The last takes an AllToAll for each operand and one for the result. It is chosen if it sends
    fewer bytes in no more steps.
    """
    options = dict.fromkeys([target, *(_towards(tiles[i].sharding, target) for i in used)])
    whole = [s.replace(dim, None) for s in options]
    moved = [m for s in options for m in whole_along(s, dim)[1:]]
    plan = functools.partial(_plan, tiles, used, dim, shape, target)
    best = min(map(plan, dict.fromkeys([*options, *whole])), key=lambda way: way.cost)
    others = [w for w in map(plan, dict.fromkeys(moved)) if w.steps <= best.steps]
    return min([best, *others], key=lambda way: way.sent)


def _plan(
    tiles: list[Tile],
    used: Mapping[int, list[OperandRows]],
    dim: int,
    shape: list[int],
    target: Sharding,
    result: Sharding,
) -> _Way:
    """What there is to send if the result is split like that."""
    dtype, split = tiles[0].array.dtype, result.splits[dim]
    local = result.local_shape(shape)
    row = math.prod(n for d, n in enumerate(local) if d != dim) * itemsize_of(dtype)
    sources = {}
    cost, total, steps = _moved(result, target, shape, dtype)
    for i, own in used.items():
        tile, sources[i] = tiles[i], result.replace(dim, None)
        best = _moved(tile.sharding, sources[i], tile.shape, dtype)
        if split:
            rows, rounds = _rows_sent(tile.shape[dim], own, split.tiles, local[dim])
            there = _moved(tile.sharding, result, tile.shape, dtype)
            if there[0] + rows * row < best[0]:
                best = there[0] + rows * row, there[1] + rows * row, there[2] + rounds
                sources[i] = result
        cost, total, steps = cost + best[0], total + best[1], steps + best[2]
    return _Way(result, sources, cost, total, steps)


def _moved(
    source: Sharding, target: Sharding, shape: Sequence[int], dtype: Any
) -> tuple[float, int, int]:
    """The cost of a reshard, its bytes and its steps."""
    if source == target:
        return 0.0, 0, 0
    steps = [s for s in plan_reshard(source, target, shape, dtype) if s.kind != "slice"]
    sent = sum(s.bytes for s in steps)
    return reshard_cost(source, target, shape, dtype), sent, len(steps)


def _rows_sent(size: int, parts: list[OperandRows], tiles: int, rows: int) -> tuple[int, int]:
    """The rows that a device sends of one operand, and in how many steps."""
    starts = np.arange(tiles) * rows
    if len(parts) == 1:
        (part,) = parts
        first, end, by = part.move
        fetched = plan_fetch(tiles, size, starts - by, rows, (first, end))
        return fetched.sent, fetched.steps
    held = Runs.even(tiles, -(-size // tiles), size)
    moved = plan_rows(held, starts, rows, [q.move for q in parts])
    assert moved
    return moved.sent, moved.steps


def _fetched(
    place: Place,
    tile: Tile,
    parts: list[OperandRows],
    dim: int,
    split: Split,
    rows: int,
    reason: Reason,
) -> Iterator[tuple[jax.Array, list[OperandRows]]]:
    """The rows of the result's tile that come from one operand, and the parts that they are."""
    starts = np.arange(split.tiles) * rows
    if tile.sharding.splits[dim] is split and len(parts) > 1:
        held, moves = Runs.of(tile, dim), [q.move for q in parts]
        yield align(place, tile.array, tile.sharding, dim, held, starts, rows, reason, moves), parts
        return
    for part in parts:
        first, end, by = part.move
        yield rows_of(place, tile, dim, split, starts - by, rows, reason, (first, end)), [part]


def _in_single_tiles(tile: Tile, parts: list[OperandRows], dim: int, rows: int) -> bool:
    """Whether all devices have an operand, and each of its parts goes into one tile."""
    ends = [(q.at, q.at + q.limit - q.start - 1) for q in parts]
    return tile.sharding.splits[dim] is None and all(a // rows == b // rows for a, b in ends)


def _written(
    place: Place, below: jax.Array, source: jax.Array, part: OperandRows, dim: int, split: Split
) -> jax.Array:
    """`below` with a part of `source` in the rows of the one tile that it goes into."""
    rows, count = below.shape[dim], part.limit - part.start
    number, first = divmod(part.at, rows)
    new = lax.slice_in_dim(source, part.start, part.limit, axis=dim)
    there = lax.slice_in_dim(below, first, first + count, axis=dim)
    new = place.where(np.maximum(split.coords, 0) == number, new, there)
    return rows_put(below, new, first, dim)


def _over(
    place: Place,
    below: jax.Array,
    above: jax.Array,
    parts: list[OperandRows],
    dim: int,
    split: Split,
) -> jax.Array:
    """`above` in the rows that the parts become, `below` in all others."""
    rows = below.shape[dim]
    offset = place.lookup(np.maximum(split.coords, 0) * rows)
    index = lax.broadcasted_iota(jnp.int32, below.shape, dim) + offset
    inside = functools.reduce(
        jnp.logical_or,
        [(index >= q.at) & (index < q.at + q.limit - q.start) for q in parts],
    )
    return lax.select(inside, above, below)


def _concatenate(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    dim, parts, at = eqn.params["dimension"], [], 0
    windows = eqn.params.get("windows") or [(i, 0, t.shape[dim]) for i, t in enumerate(tiles)]
    for operand, start, limit in windows:
        parts.append(OperandRows(operand, start, limit, at))
        at += limit - start
    return [concatenate(ctx, tiles, parts, dim, targets[0], "concatenate")]


_JOINED = Doc(free="other dims", halo="the dim itself: the rows that change tiles")
register(
    Rule(concatenate_factors, partition=_concatenate, linear=linear_in_all, doc=_JOINED),
    p.concatenate_p,
    concatenate_slices_p,
)
register(Rule(stack_factors, linear=linear_in_all, doc=Doc(free="the operands' dims")), stack_p)
register(
    Rule(
        unstack_factors,
        doc=Doc(
            free="the results' dims", gather="the other: AllGather, every device needs all rows"
        ),
    ),
    unstack_p,
)
