"""Schedules of CollectivePermutes: in each round, a device sends and receives at most once.

Point-to-point communication (boxes of a tensor, rows of a dim) is a list of pieces; each piece is
assigned to the first round in which its sender and receiver are free. Pieces that a device has
itself are in local rounds, which send nothing.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar


class Shipment(Protocol):
    """Data that one device, or the holders of one tile, have and others need."""

    @property
    def sender(self) -> int:
        """The device or tile that has it."""
        ...

    @property
    def receiver(self) -> int:
        """The device or tile that needs it."""
        ...


P = TypeVar("P", bound=Shipment)


def is_remote(piece: Shipment) -> bool:
    """Whether it has to be sent."""
    return piece.sender != piece.receiver


def in_rounds(pieces: Iterable[P], limit: int | None = None) -> list[list[P]] | None:
    """`pieces` in rounds, local ones separately; None if more than `limit` rounds would send."""
    rounds: dict[bool, list[list[P]]] = {False: [], True: []}
    taken: dict[Any, set[int]] = defaultdict(set)  # rounds, by who sends and who receives in them
    for piece in pieces:
        remote = is_remote(piece)
        both = taken[remote, "from", piece.sender], taken[remote, "to", piece.receiver]
        number = next(n for n in itertools.count() if not any(n in each for each in both))
        if number == len(rounds[remote]):
            if remote and number == limit:
                return None
            rounds[remote].append([])
        rounds[remote][number].append(piece)
        for each in both:
            each.add(number)
    return rounds[False] + rounds[True]
