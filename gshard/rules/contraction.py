"""Einsum (section 3.3.2): `dot_general` in all its cases.

Batch dims that agree cost nothing. Split contracting dims leave partial sums, for an AllReduce or
a ReduceScatter. Operands with conflicting splits are gathered or exchanged, whichever sends less;
if a gathered operand would exceed the memory limit, its tiles pass around a ring of
CollectivePermutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import timed
from gshard.moving.partial import combine
from gshard.moving.reductions import mask_for
from gshard.rules.base.rule import Context, Doc, Way, linear_in, rule
from gshard.rules.base.ways import FactorSplit, by_factors
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factor, Factors, shard_dims, shard_result
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles, byte_size

Pairs = list[tuple[int, int]]  # a source and a destination for each tile; none if it stays
Passed = tuple[jax.Array, Pairs]
Step = Callable[[Any, Sequence[Any], Sequence[Any]], list[jax.Array]]


def dot_work(part: Mapping[Factor, int]) -> float:
    """A multiplication and an addition for every combination of the factors."""
    return 2 * math.prod(part.values())


@dataclass(frozen=True)
class _RingProduct:
    """A product in which the tiles of one operand, `which`, pass around along a factor."""

    layout: FactorSplit
    which: int
    factor: Factor
    split: Split

    @property
    def operands(self) -> tuple[Sharding, ...]:
        """The shardings of the operands."""
        found = [here for here, _ in self.layout.operands]
        dim = self.layout.factors.operands[self.which].index((self.factor,))
        found[self.which] = found[self.which].replace(dim, self.split)
        return tuple(found)

    def run(self, ctx: Context, eqn: JaxprEqn, _: Any, tiles: Tiles, targets: Targets) -> Tiles:
        """Cannon's algorithm: one operand's tiles pass around all devices, multiplied on each.

        No device ever holds the entire operand. The loop runs once per tile and sends all but one.
        """
        place, (target,) = ctx.place, targets
        which, factor, split = self.which, self.factor, self.split
        factors, chosen = self.layout.factors, self.layout.chosen
        size = byte_size(tiles[which].shape, tiles[which].array.dtype) / 2**20
        limited = f"operand of {size:.3g} MiB exceeds the memory limit"
        reason = Reason("step", eqn.primitive.name, limited)
        why = Reason("operand", eqn.primitive.name)
        ready = [
            mask_for(ctx.place, ctx.reshard(t, wanted, why), dims, factors)
            for t, wanted, dims in zip(tiles, self.operands, factors.operands, strict=True)
        ]
        moving, still = ready[which], ready[1 - which]
        rows = moving.array.shape[factors.operands[which].index((factor,))]
        still_dims, out_dims = factors.operands[1 - which], factors.results[0]
        slice_dim = still_dims.index((factor,)) if (factor,) in still_dims else None
        write_dim = out_dims.index((factor,)) if (factor,) in out_dims else None
        out_sharding = shard_dims(out_dims, chosen, factors, target.num_devices)
        shape = tuple(eqn.outvars[0].aval.shape)
        local = list(out_sharding.local_shape(shape))
        other = still.array
        if slice_dim is not None:
            more = rows * split.tiles - other.shape[slice_dim]
            other = padding.pad(other, slice_dim, 0, more, value=0)
        if write_dim is not None:
            local[write_dim] = rows * split.tiles

        def multiply(number: Any, arrays: Sequence[Any], totals: Sequence[Any]) -> list[jax.Array]:
            (passing,), (total,), partner = arrays, totals, other
            if slice_dim is not None:
                partner = lax.dynamic_slice_in_dim(other, number * rows, rows, slice_dim)
            (part,) = bind(eqn, [passing, partner] if which == 0 else [partner, passing])
            if write_dim is None:
                return [total + part]
            return [lax.dynamic_update_slice_in_dim(total, part, number * rows, write_dim)]

        pairs = ring_of(moving.sharding, factors.operands[which].index((factor,)))
        nothing = jnp.zeros(local, eqn.outvars[0].aval.dtype)
        ring = Ring(place, split, reason)
        (total,) = ring.run(multiply, [(moving.array, pairs)], [(nothing, [])])
        if write_dim is not None:
            total = lax.slice(total, [0] * total.ndim, out_sharding.local_shape(shape))
        here = shard_result(out_dims, chosen, factors, target.num_devices)
        done = Tile(total, here, shape, eqn.primitive.name)
        kind = factors.reduction(chosen)
        stays = ctx.stays_unreduced(eqn.outvars[0], done, kind)
        return [done if stays else combine(place, done, kind, target)]


def dot_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """The splits of the factors; in a loop where one gathers more than memory allows."""
    for way in by_factors(eqn, dot_factors(eqn), shardings, targets, work=dot_work):
        loops = (_too_large(eqn, way.how, n, here, limit) for n, here in enumerate(shardings))
        loop = next(filter(None, loops), None)
        if loop is None:
            yield way
            continue
        aval, operands = eqn.invars[loop.which].aval, loop.operands
        tile = byte_size(operands[loop.which].local_shape(aval.shape), aval.dtype)
        sent = timed((loop.split.tiles - 1) * tile)  # one latency, as a gather has
        yield way._replace(operands=operands, how=loop, sent=sent)


def _too_large(
    eqn: JaxprEqn, layout: FactorSplit, which: int, here: Sharding, limit: int
) -> _RingProduct | None:
    """A loop along the factor along which an operand would be gathered beyond the memory limit."""
    wanted, local = layout.operands[which]
    if byte_size(local, eqn.invars[which].aval.dtype) <= limit:
        return None
    dims = zip(layout.factors.operands[which], here.splits, wanted.splits, strict=True)
    cut = [(dim[0], split) for dim, split, new in dims if split and not new]
    return _RingProduct(layout, which, *cut[0]) if len(cut) == 1 else None


@rule(
    p.dot_general_p,
    ways=dot_ways,
    linear=linear_in((0,), (1,)),
    doc=Doc(
        free="batch dims; any dim of one operand alone",
        gather="contracting dims: AllReduce or ReduceScatter of the result; where operands "
        "disagree: AllToAll or AllGather of the smaller",
    ),
)
def dot_factors(eqn: JaxprEqn) -> Factors:
    """Batch dims `b`, contracting dims `k`, and the dims that one operand has alone."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs: list[str] = [f"l{i}" for i in range(len(eqn.invars[0].aval.shape))]
    rhs: list[str] = [f"r{i}" for i in range(len(eqn.invars[1].aval.shape))]
    for kind, ls, rs in [("b", lhs_batch, rhs_batch), ("k", lhs_contract, rhs_contract)]:
        for i, (l, r) in enumerate(zip(ls, rs, strict=True)):
            lhs[l] = rhs[r] = f"{kind}{i}"
    batch = [f"b{i}" for i in range(len(lhs_batch))]
    out = batch + [f for f in lhs if f[0] == "l"] + [f for f in rhs if f[0] == "r"]
    contracted = [f"k{i}" for i in range(len(lhs_contract))]
    reduced = dict.fromkeys(contracted, "sum")
    return Factors.of(eqn, [lhs, rhs], [out], reduced, priority=batch, ordered=())


@dataclass(frozen=True)
class Ring:
    """The devices along a split, which pass their tiles around."""

    place: Place
    split: Split
    reason: Reason

    def run(self, step: Step, arrays: Sequence[Passed], state: Sequence[Passed]) -> list[jax.Array]:
        """The state after `step(number, arrays, state)` for every tile, the device's own first.

        The tiles before it follow, the nearest first: under a causal mask they are those that it
        sees. After every step arrays are passed on, and so is what of the state belongs to their
        tiles: after the last step it is back.
        """
        (values, onwards), (first, back) = zip(*arrays, strict=True), zip(*state, strict=True)
        own, tiles = self.place.coord(self.split), self.split.tiles

        def body(i: jax.Array, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            passing, state = carry
            state = step((own - i) % tiles, passing, state)
            return self._passed(passing, onwards), self._passed(state, back)

        passing, last = lax.fori_loop(0, tiles - 1, body, (list(values), list(first)))
        return self._passed(step((own + 1) % tiles, passing, last), back)

    def _passed(self, arrays: Arrays, pairs: Sequence[Pairs]) -> list[jax.Array]:
        return [
            collectives.collective_permute(self.place, array, way, self.reason) if way else array
            for array, way in zip(arrays, pairs, strict=True)
        ]


def ring_of(sharding: Sharding, dim: int) -> Pairs:
    """Pairs that send every tile to the holder of the next tile along `dim`."""
    devices = np.moveaxis(sharding.devices, dim, 0)
    return list(
        zip(devices.ravel().tolist(), np.roll(devices, -1, axis=0).ravel().tolist(), strict=True)
    )


(ragged_dot_general_p,) = private_primitives("lax.lax", "ragged_dot_general_p")


@rule(
    ragged_dot_general_p,
    doc=Doc(
        free="dims that the group sizes do not count",
        gather="contracting dims: AllReduce of the result; ragged and group dims: AllGather",
    ),
)
def ragged_factors(eqn: JaxprEqn, rows: str | None = None) -> Factors:
    """A grouped product: the dim that the group sizes count is unsplit, the others are free.

    Unless the `rows` have a name, as expert-major rows do (see `rules.grouped`).
    """
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    lhs: list[str | None] = [f"l{i}" for i in range(len(eqn.invars[0].aval.shape))]
    rhs: list[str | None] = [f"r{i}" for i in range(len(eqn.invars[1].aval.shape))]
    for kind, ls, rs in [("b", lhs_batch, rhs_batch), ("k", lhs_contract, rhs_contract)]:
        for i, (l, r) in enumerate(zip(ls, rs, strict=True)):
            lhs[l] = rhs[r] = rows if l == ragged else f"{kind}{i}"
    lhs[ragged] = rows
    for group in numbers.rhs_group_dimensions:
        rhs[group] = None
    taken = {*lhs_contract, *lhs_batch}, {*rhs_contract, *rhs_batch, *numbers.rhs_group_dimensions}
    out = [lhs[l] for l in lhs_batch]
    for names, gone in zip((lhs, rhs), taken, strict=True):
        out += [name for i, name in enumerate(names) if i not in gone]
    rank = len(eqn.outvars[0].aval.shape)
    sized = sized_dims(eqn) if len(eqn.invars[2].aval.shape) > 1 else []
    groups: list[str | None] = [*(lhs[d] for d in sized), None]
    out = [None] * (rank - len(out)) + out  # one result per group, in front
    contracted = {n: "sum" for n in lhs if n and n[0] == "k"}
    return Factors.of(eqn, [lhs, rhs, groups], [out], contracted, ordered=())


def sized_dims(eqn: JaxprEqn) -> list[int]:
    """The dims of the left side, before the ragged one, that each have group sizes of their own."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    free = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in (*contracted, *batch)]
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    others = list(contracted) if ragged in contracted else free
    return [*batch, *others[: others.index(ragged)]]
