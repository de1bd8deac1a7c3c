"""`ragged_dot` of ragged rows: the product is local.

Only if a device would have more rows than its capacity, rows are in equal shares, and the groups'
matrices (or the sums that become their gradients) pass around a ring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.reason import Reason
from gshard.graph.source import unlikely
from gshard.moving import collectives
from gshard.moving.partial import combine
from gshard.moving.reductions import mask_for
from gshard.rules.base.ragged_rows import Bounds, ExpertGroups, grouped_dot_p
from gshard.rules.base.rule import Context, Doc, Way, rule
from gshard.rules.base.ways import by_factors
from gshard.rules.contraction import dot_work, ragged_factors, ring_of
from gshard.rules.grouped import limits_of
from gshard.tensors.factors import Factors, shard_dims
from gshard.tensors.sharding import Shardings, Targets
from gshard.tensors.tile import Tile, Tiles


def grouped_factors(eqn: JaxprEqn) -> Factors:
    """The factors of a `ragged_dot` whose rows `t` may be split; its groups are, like the rows."""
    return ragged_factors(eqn, rows="t")


def grouped_ways(
    eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int
) -> Iterator[Way]:
    """Every split of the factors with ragged rows, and of the groups as these are."""
    groups, factors, count = eqn.params["groups"], grouped_factors(eqn), targets[0].num_devices
    of_groups = _of_groups(eqn)
    for way in by_factors(eqn, factors, shardings, targets, kept=("t",), work=dot_work):
        chosen = way.how.chosen
        if chosen["t"] is not groups.ragged:
            chosen = {f: groups.ragged if f == "t" else None for f in chosen}
        lhs, rhs, sizes = (shard_dims(dims, chosen, factors, count) for dims in factors.operands)
        here = shard_dims(factors.results[0], chosen, factors, count)
        reduced = [s for f in factors.reduced if (s := chosen[f])]
        if of_groups:
            rhs = rhs.replace(of_groups[0], groups.split)
        else:
            here = here.replace(0, groups.split)
            copies = groups.parts.minor(groups.parts.tiles // groups.split.tiles)
            reduced += [copies] if copies and groups.parts is not groups.split else []
        kind, result = "sum" if reduced else "", here.unreduced_over(reduced) if reduced else here
        yield way._replace(operands=(lhs, rhs, sizes), results=(result,), kind=kind)


def _of_groups(eqn: JaxprEqn) -> Sequence[int]:
    """The dim of the matrices' groups; none where rows of groups are summed."""
    return eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions


@rule(
    grouped_dot_p,
    factors=grouped_factors,
    ways=grouped_ways,
    doc=Doc(free="rows by group, and all dims of a row that are not contracted"),
)
def _grouped_dot(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """Each device multiplies its rows with its own groups' matrices, or sums its groups' rows."""
    groups: ExpertGroups = eqn.params["groups"]
    factors, (result,) = grouped_factors(eqn), way.results
    limits, of_groups, here = limits_of(ctx, groups, tiles[2]), _of_groups(eqn), result.reduced
    ready = []
    for number, dims in enumerate(factors.operands[:2]):
        tile = ctx.reshard(tiles[number], way.operands[number], Reason("operand", "ragged_dot"))
        tile = tile.masked(ctx.place, 0, list(of_groups)) if number and of_groups else tile
        ready.append(mask_for(ctx.place, tile, dims, factors))
    shape = tuple(eqn.outvars[0].aval.shape)
    lhs, rhs = (tile.array for tile in ready)
    dot = _Local(eqn, groups, limits, ctx.place.coord(groups.parts), ctx.place.coord(groups.split))
    pairs = ring_of(ready[1].sharding, of_groups[0]) if of_groups else ring_of(here, 0)
    what = f"{'matrices of' if of_groups else 'sums over'} {groups.count} groups in a ring"
    reason = Reason("step", "ragged_dot", f"{what}, if a device has more rows than its capacity")

    def on_own_rows() -> jax.Array:
        return dot.product(lhs, rhs, dot.sizes(dot.first)[0])

    def pass_on(x: jax.Array) -> jax.Array:
        return collectives.collective_permute(ctx.place, x, pairs, reason)

    def in_a_ring() -> jax.Array:
        nothing = jnp.zeros_like(jax.eval_shape(on_own_rows))
        with unlikely():
            run = _rows_times_groups if of_groups else _sums_of_groups
            return run(dot, lhs, rhs, nothing, pass_on)

    array = lax.cond(~limits.overflow, on_own_rows, in_a_ring)
    done = Tile(array, result, shape, "ragged_dot")
    stays = bool(way.kind) and ctx.stays_unreduced(eqn.outvars[0], done, "sum")
    return [done if stays else combine(ctx.place, done, "sum", targets[0])]


@dataclass(frozen=True)
class _Local:
    """A `ragged_dot` on this device: its rows are a window of the sorted ones.

    `own` is the number of the device's part of the rows, `first` that of its tile of groups.
    """

    eqn: JaxprEqn
    groups: ExpertGroups
    limits: Bounds
    own: jax.Array | int
    first: jax.Array | int

    def sizes(self, number: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """How many of the rows each group of a tile has, and where the first of them is."""
        groups, limits = self.groups, self.limits
        low, high = limits.starts[self.own], limits.starts[self.own + 1]
        members = number * groups.per_tile + jnp.arange(groups.per_tile + 1)
        edges = jnp.clip(limits.first[jnp.minimum(members, groups.count)], low, high) - low
        return jnp.diff(edges), edges[0]

    def product(self, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        """The product as the user asked for it."""
        params = {k: v for k, v in self.eqn.params.items() if k != "groups"}
        return lax.ragged_dot_general(lhs, rhs, sizes, **params)


PassOn = Callable[[jax.Array], jax.Array]  # to the device with the next groups


def _rows_times_groups(
    dot: _Local, lhs: jax.Array, rhs: jax.Array, total: jax.Array, pass_on: PassOn
) -> jax.Array:
    """Every row times its group's matrix; the matrices are passed on."""
    tiles = dot.groups.split.tiles

    def multiply(i: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        passing, total = carry
        sizes, begin = dot.sizes((dot.first - i) % tiles)
        part = jnp.roll(dot.product(jnp.roll(lhs, -begin, 0), passing, sizes), begin, 0)
        row = lax.broadcasted_iota(jnp.int32, part.shape, 0)
        total = jnp.where((row >= begin) & (row < begin + jnp.sum(sizes)), part, total)
        return pass_on(passing), total

    return lax.fori_loop(0, tiles, multiply, (rhs, total))[1]


def _sums_of_groups(
    dot: _Local, lhs: jax.Array, rhs: jax.Array, total: jax.Array, pass_on: PassOn
) -> jax.Array:
    """For every group the product of its rows on both sides, summed over them; sums are passed."""
    tiles = dot.groups.split.tiles

    def part(number: jax.Array | int) -> jax.Array:
        sizes, begin = dot.sizes(number)
        return dot.product(jnp.roll(lhs, -begin, 0), jnp.roll(rhs, -begin, 0), sizes)

    def multiply(i: jax.Array, total: jax.Array) -> jax.Array:
        return pass_on(total + part((dot.first - 1 - i) % tiles))

    return lax.fori_loop(0, tiles - 1, multiply, total) + part(dot.first)
