"""Sorting along a split dim with static shapes: Leighton's columnsort (1985).

The tiles are the columns of a matrix, each on its own devices. Sort the columns; deal every column
out to all (an AllToAll); sort; take back (an AllToAll); sort; and merge each column's upper half
with its neighbour's lower half (two permutes of half a tile). That sorts the dim if a column is
long enough: rows >= 2 (columns - 1)^2. A device sends about 3 times its tile, where a gather would
send it columns - 1 times, and it never holds more than its tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving.collectives import all_to_all, collective_permute
from gshard.moving.halo import shifted_pairs
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding

Columns = list[jax.Array]  # the operands of a sort, the dim to be sorted in front


def rows_needed(rows: int, columns: int) -> int | None:
    """The length to which columns are padded; None if they are too short for this algorithm."""
    step = math.lcm(2, columns)
    padded = -(-rows // step) * step
    return padded if padded >= 2 * (columns - 1) ** 2 else None


def columnsort(
    place: Place,
    columns: Columns,
    sort: Callable[[Columns], Columns],
    sharding: Sharding,
    dim: int,
    groups: Sequence[Sequence[int]],
    reason: Reason,
) -> Columns:
    """`columns` in order: within a tile, and from each tile of `dim` to the next.

    `sort` sorts a column by a total order. `groups` are the holders of the tiles along `dim`.
    """
    split = sharding.splits[dim]
    assert split
    count, rows = split.tiles, columns[0].shape[0]
    part, half = rows // count, rows // 2

    def deal(x: jax.Array) -> jax.Array:
        dealt = x.reshape(part, count, *x.shape[1:]).swapaxes(0, 1)
        return all_to_all(place, dealt, groups, reason).reshape(x.shape)

    def take_back(x: jax.Array) -> jax.Array:
        back = all_to_all(place, x.reshape(count, part, *x.shape[1:]), groups, reason)
        return back.swapaxes(0, 1).reshape(x.shape)

    columns = sort([take_back(x) for x in sort([deal(x) for x in sort(columns)])])

    right, left = shifted_pairs(sharding, dim, -1), shifted_pairs(sharding, dim, 1)
    upper, lower = [x[:half] for x in columns], [x[half:] for x in columns]
    before = [collective_permute(place, x, right, reason) for x in lower]
    merged = sort([lax.concatenate([b, u], 0) for b, u in zip(before, upper, strict=True)])
    after = [collective_permute(place, x[:half], left, reason) for x in merged]
    number = place.coord(split)
    return [
        lax.concatenate(
            [
                jnp.where(number == 0, u, m[half:]),
                jnp.where(number == count - 1, l, a),
            ],
            0,
        )
        for u, l, m, a in zip(upper, lower, merged, after, strict=True)
    ]
