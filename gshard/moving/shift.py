"""A node that sends a tile once around: to the next member of a ring of devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from gshard.moving import collectives
from gshard.moving.nodes import Node
from gshard.tensors.devices import Groups, Place
from gshard.tensors.tile import itemsize_of


@dataclass(frozen=True)
class Shift(Node):
    """What a device has, sent to the member of its group that is `by` places further."""

    name: ClassVar[str] = "shift"
    groups: Groups
    by: int

    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """What another member had."""
        return local

    def sent(self, local: tuple[int, ...], dtype: Any) -> int:
        """All of it."""
        return math.prod(local) * itemsize_of(dtype)

    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """A CollectivePermute."""
        pairs = [
            (device, group[(number + self.by) % len(group)])
            for group in self.groups
            for number, device in enumerate(group)
        ]
        return collectives.collective_permute(place, array, sorted(pairs), self.reason)

    def __str__(self) -> str:
        return f"to the device {self.by:+d} in rings of {len(self.groups[0])}"
