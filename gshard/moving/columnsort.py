"""Sorting along a split dim with static shapes: Leighton's columnsort (1985).

The tiles are the columns of a matrix, each on its own devices. Sort the columns; deal every column
out to all (an AllToAll); sort; take back (an AllToAll); sort; and merge each column's upper half
with its neighbour's lower half (two halos of half a tile). That sorts the dim if a column is
long enough: rows >= 2 (columns - 1)^2. A device sends about 3 times its tile, where a gather would
send it columns - 1 times, and it never holds more than its tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.moving.collectives import all_to_all
from gshard.moving.costs import sent_bytes
from gshard.moving.fetch import Along, fetch
from gshard.moving.halo import groups_along
from gshard.moving.row_windows import plan_fetch
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

Columns = list[jax.Array]  # the operands of a sort, the dim to be sorted in front


def rows_needed(rows: int, columns: int) -> int | None:
    """The length to which columns are padded; None if they are too short for this algorithm."""
    step = math.lcm(2, columns)
    padded = -(-rows // step) * step
    return padded if padded >= 2 * (columns - 1) ** 2 else None


def rows_sent(rows: int, columns: int) -> int:
    """How many rows a device sends to sort columns of `rows` rows."""
    starts = np.arange(columns) * rows - rows // 2
    halves = plan_fetch(columns, rows * columns, starts, rows).sent
    return 2 * sent_bytes("all_to_all", rows, columns) + 2 * halves


def columnsort(
    place: Place,
    columns: Columns,
    sort: Callable[[Columns], Columns],
    sharding: Sharding,
    reason: Reason,
) -> Columns:
    """`columns` in order: within a tile, and from each tile of dim 0 to the next.

    `sort` sorts a column by a total order.
    """
    split, groups = sharding.splits[0], groups_along(sharding, 0)
    assert split
    count, rows = split.tiles, columns[0].shape[0]
    part, half = rows // count, rows // 2

    def deal(x: jax.Array) -> jax.Array:
        dealt = x.reshape(part, count, *x.shape[1:]).swapaxes(0, 1)
        return all_to_all(place, dealt, groups, reason).reshape(x.shape)

    def take_back(x: jax.Array) -> jax.Array:
        back = all_to_all(place, x.reshape(count, part, *x.shape[1:]), groups, reason)
        return back.swapaxes(0, 1).reshape(x.shape)

    def moved(x: jax.Array, by: int) -> jax.Array:
        tile = Tile(x, sharding, (rows * count, *x.shape[1:]))
        return fetch(place, tile, reason, Along(0, np.arange(count) * rows + by, rows))

    columns = sort([take_back(x) for x in sort([deal(x) for x in sort(columns)])])
    merged = [moved(x, half) for x in sort([moved(x, -half) for x in columns])]
    # The first half of all rows and the last one have no neighbour to merge with.
    row = lax.broadcasted_iota(jnp.int32, columns[0].shape, 0) + place.lookup(split.own * rows)
    ends = (row < half) | (row >= count * rows - half)
    return [lax.select(ends, x, m) for x, m in zip(columns, merged, strict=True)]
