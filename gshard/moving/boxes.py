"""Point-to-point redistribution: rounds of CollectivePermutes that send just what is missing.

Works between any two tilings of a tensor: uneven, of different tile counts on one dim, on other
devices, or on fewer of them. It takes as many rounds as a device has partners, so it is used where
that number is small; regular patterns have better plans in `reshard`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.devices import Place
from gshard.moving.collectives import collective_permute
from gshard.sharding import Sharding
from gshard.tile import Tile

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One permute of boxes of one size: per device, what it sends from and where it receives to."""

    pairs: tuple[tuple[int, int], ...]
    box: Shape
    send_start: np.ndarray  # [devices, dims] local row of the source tile
    receive_start: np.ndarray  # [devices, dims] local row of the target tile; dump where < -box


@functools.lru_cache(maxsize=4096)
def plan_route(
    source: Sharding, source_local: Shape, target: Sharding, target_local: Shape, shape: Shape
) -> tuple[Round, ...]:
    """The rounds that bring every device the part of the tensor that `target` gives it.

    The first round is local: what a device already has.
    """
    edges = _edges(source, source_local, target, target_local, shape)
    rounds: list[dict[int, tuple]] = []  # destination -> (source, start, stop)
    sending: list[set[int]] = []
    local = {d: (s, lo, hi) for s, d, lo, hi in edges if s == d}
    remote = sorted(
        (e for e in edges if e[0] != e[1]),
        key=lambda e: (_distance(source, target, e[0], e[1]), e[1]),
    )
    for s, d, lo, hi in remote:
        for taken, senders in zip(rounds, sending, strict=True):
            if d not in taken and s not in senders:
                break
        else:
            taken, senders = {}, set()
            rounds.append(taken)
            sending.append(senders)
        taken[d] = (s, lo, hi)
        senders.add(s)
    parts = [local, *rounds] if local else rounds
    return tuple(_round(part, source, source_local, target, target_local) for part in parts)


def route_bytes(rounds: tuple[Round, ...], itemsize: int) -> int:
    """What a device sends over all rounds."""
    return sum(math.prod(r.box) * itemsize for r in rounds if _is_remote(r))


def route(place: Place, tile: Tile, target: Sharding, target_local: Shape, reason: str) -> Tile:
    """`tile` under `target`, with tiles of size `target_local`."""
    rounds = plan_route(tile.sharding, tile.array.shape, target, target_local, tile.shape)
    moved = [
        d
        for d, (a, b) in enumerate(zip(tile.sharding.splits, target.splits, strict=True))
        if a or b
    ]
    margin = [
        max((r.box[d] for r in rounds), default=0) if d in moved else 0 for d in range(target.rank)
    ]
    buffer = jnp.zeros(
        [l + 2 * m for l, m in zip(target_local, margin, strict=True)], tile.array.dtype
    )
    for step in rounds:
        piece = lax.dynamic_slice(tile.array, _starts(place, step.send_start), step.box)
        if _is_remote(step):
            piece = collective_permute(place, piece, step.pairs, reason)
        # A device that receives nothing drops the zeros it gets into the margin.
        start = np.where(
            step.receive_start < -np.array(step.box), -np.array(margin), step.receive_start
        )
        buffer = lax.dynamic_update_slice(buffer, piece, _starts(place, start + np.array(margin)))
    inside = lax.slice(buffer, margin, [m + l for m, l in zip(margin, target_local, strict=True)])
    return Tile(inside, target, tile.shape)


def _is_remote(step: Round) -> bool:
    return any(s != d for s, d in step.pairs)


def _starts(place: Place, table: np.ndarray) -> list:
    return [place.lookup(table[:, d]) for d in range(table.shape[1])]


def _edges(source, source_local, target, target_local, shape) -> list[tuple]:
    """(source device, target device, first row, end row) for every piece that has to be there."""
    holders = defaultdict(list)
    for device, index in enumerate(source.tile_index.tolist()):
        if index >= 0:
            holders[index].append(device)
    coords = [s.coords if s else np.zeros(target.num_devices, int) for s in target.splits]
    edges: list[tuple] = []
    served: dict[int, int] = defaultdict(int)
    for device in np.flatnonzero(target.tile_index >= 0).tolist():
        low = [int(c[device]) * l for c, l in zip(coords, target_local, strict=True)]
        high = [min(a + l, n) for a, l, n in zip(low, target_local, shape, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        spans = [
            range(a // l, min((b - 1) // l, t - 1) + 1)
            for a, b, l, t in zip(low, high, source_local, source.tiles, strict=True)
        ]
        for where in itertools.product(*spans):
            index = int(np.ravel_multi_index(where, source.tiles)) if where else 0
            candidates = holders[index]
            if device in candidates:
                sender = device
            else:
                sender = candidates[served[index] % len(candidates)]
                served[index] += 1
            lo = tuple(max(a, w * l) for a, w, l in zip(low, where, source_local, strict=True))
            hi = tuple(
                min(b, (w + 1) * l) for b, w, l in zip(high, where, source_local, strict=True)
            )
            edges.append((sender, device, lo, hi))
    return edges


def _distance(source: Sharding, target: Sharding, sender: int, receiver: int) -> int:
    return int(target.tile_index[receiver] - source.tile_index[sender])


def _round(part: dict[int, tuple], source, source_local, target, target_local) -> Round:
    rank, devices = source.rank, source.num_devices
    box = tuple(
        max(hi[d] - lo[d] for _, lo, hi in part.values()) if part else 0 for d in range(rank)
    )
    send = np.zeros((devices, rank), np.int32)
    receive = np.full((devices, rank), np.iinfo(np.int32).min // 2, np.int32)
    for receiver, (sender, lo, _) in part.items():
        for d in range(rank):
            origin = (
                int(source.splits[d].coords[sender]) * source_local[d] if source.splits[d] else 0
            )
            landing = (
                int(target.splits[d].coords[receiver]) * target_local[d] if target.splits[d] else 0
            )
            send[sender, d] = min(lo[d] - origin, source_local[d] - box[d])
            receive[receiver, d] = origin + send[sender, d] - landing
    pairs = tuple((sender, receiver) for receiver, (sender, _, _) in sorted(part.items()))
    return Round(pairs, box, send, receive)
