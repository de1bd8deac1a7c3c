"""Rows exchanged by index: each from the device that has it to the one that needs it.

The number of rows between two devices is only known at run time. The first AllToAll has the
capacity for balanced numbers; while some pair has more rows left, further ones with a quarter of
that capacity follow. With balanced numbers a device sends each of its rows once. The indices are
replicated, so no requests are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from gshard.graph.reason import Reason
from gshard.graph.source import unlikely
from gshard.moving.collectives import Members, all_to_all
from gshard.tensors.devices import Place

_DROPPED = 2**30  # the row of an update that is dropped


@dataclass(frozen=True)
class RowTransfers:
    """For each row: whether it is sent, and the tile and row of its source and target."""

    valid: jax.Array
    source: jax.Array
    from_row: jax.Array
    target: jax.Array
    to_row: jax.Array


def found_in(starts: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tile that holds each of the rows, if tile c starts at `starts[c]`, and the row there."""
    tile = jnp.searchsorted(starts[:-1], rows, side="right").astype(jnp.int32) - 1
    tile = jnp.maximum(tile, 0)
    return tile, rows - starts[tile]


def send_rows(
    place: Place,
    x: jax.Array,
    transfers: RowTransfers,
    number: jax.Array | int,
    tiles: int,
    groups: Members,
    into: jax.Array,
    put: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    reason: Reason,
) -> jax.Array:
    """`into`, after `put(into, rows, indices)` of the rows of all tiles that are sent to this one.

    `number` is this device's tile; indices beyond the rows of `into` are to be dropped.
    """
    turn, most = _turns(transfers, tiles)
    step = -(-transfers.source.size // tiles**2)

    def exchanged(into: jax.Array, begin: jax.Array | int, size: int) -> jax.Array:
        now = (turn >= begin) & (turn < begin + size)
        slot = turn - begin

        def listed(mine: jax.Array, other: jax.Array, rows: jax.Array, nothing: int) -> jax.Array:
            at = jnp.where(now & (mine == number), other * size + slot, _DROPPED)
            return jnp.full(tiles * size, nothing, jnp.int32).at[at].set(rows, mode="drop")

        sent = listed(transfers.source, transfers.target, transfers.from_row, 0)
        kept = listed(transfers.target, transfers.source, transfers.to_row, _DROPPED)
        rows = x[sent].reshape(tiles, size, *x.shape[1:])
        return put(into, all_to_all(place, rows, groups, reason).reshape(-1, *x.shape[1:]), kept)

    into = exchanged(into, 0, step)
    more = -(-step // 4)

    def again(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        begin, into = carry
        return begin + more, exchanged(into, begin, more)

    if transfers.source.size <= step:
        return into
    with unlikely():
        begin = jnp.asarray(step, jnp.int32)
        return lax.while_loop(lambda carry: carry[0] < most, again, (begin, into))[1]


def _turns(transfers: RowTransfers, tiles: int) -> tuple[jax.Array, jax.Array]:
    """The rank of each row among those between its two tiles, and the largest number of them."""
    pair = jnp.where(transfers.valid, transfers.source * tiles + transfers.target, tiles**2)
    number = lax.iota(jnp.int32, pair.size)
    ordered, order = lax.sort((pair, number), num_keys=2)
    begins = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    turn = number - lax.cummax(jnp.where(begins, number, 0))
    most = jnp.max(jnp.where(ordered < tiles**2, turn + 1, 0))
    turn = jnp.zeros_like(turn).at[order].set(turn, unique_indices=True)
    return jnp.where(transfers.valid, turn, _DROPPED), most
