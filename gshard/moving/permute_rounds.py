"""Schedules of CollectivePermutes: in each round, a device sends and receives at most once.

Point-to-point communication (boxes of a tensor, rows of a dim) is a list of pieces; each piece is
assigned to the first round in which its sender and receiver are free. Pieces that a device has
itself are in local rounds, which send nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Piece(Protocol):
    """Data that one device, or the holders of one tile, have and others need."""

    @property
    def sender(self) -> int:
        """The device or tile that has it."""
        ...

    @property
    def receiver(self) -> int:
        """The device or tile that needs it."""
        ...


P = TypeVar("P", bound=Piece)


@dataclass
class _Open(Generic[P]):
    pieces: list[P] = field(default_factory=list)
    senders: set[int] = field(default_factory=set)
    receivers: set[int] = field(default_factory=set)


def is_remote(piece: Piece) -> bool:
    """Whether it has to be sent."""
    return piece.sender != piece.receiver


def in_rounds(pieces: Iterable[P], limit: int | None = None) -> list[list[P]] | None:
    """`pieces` in rounds, local ones separately; None if more than `limit` rounds would send."""
    rounds: dict[bool, list[_Open[P]]] = {False: [], True: []}
    for piece in pieces:
        kind = rounds[is_remote(piece)]
        for here in kind:
            if piece.sender not in here.senders and piece.receiver not in here.receivers:
                break
        else:
            if limit is not None and kind is rounds[True] and len(kind) == limit:
                return None
            here = _Open()
            kind.append(here)
        here.pieces.append(piece)
        here.senders.add(piece.sender)
        here.receivers.add(piece.receiver)
    return [r.pieces for kind in (False, True) for r in rounds[kind]]
