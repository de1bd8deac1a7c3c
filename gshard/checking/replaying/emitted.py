"""An emitted program with its border and what it has of the user's values: what is replayed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from gshard.checking.exact.number import Value, plain
from gshard.checking.tiles import Tiling
from gshard.moving.seen import Held
from gshard.tensors.sharding import Sharding

Crossing = tuple[Sharding, tuple[int, ...]]  # the sharding and the logical shape of an array


@dataclass(frozen=True, eq=False)
class Emitted:
    """What each device of a mesh with axes of these `sizes` runs.

    `flat` is the user's program, before anything was rewritten; `consts` are the values that the
    user's function closes over, which cross the border before its arguments do.
    """

    name: str
    body: ClosedJaxpr
    sizes: Mapping[str, int]
    into: Sequence[Crossing]
    out_of: Sequence[Crossing]
    consts: Sequence[Any]
    held: Mapping[Any, Sequence[Held]]  # what the variables of the program hold of the user's
    flat: ClosedJaxpr

    @property
    def count(self) -> int:
        """How many devices there are."""
        return math.prod(self.sizes.values())

    @property
    def unpartitioned(self) -> ClosedJaxpr:
        """The user's program, of everything that enters: constants are its first arguments."""
        jaxpr = self.flat.jaxpr
        variables = [*jaxpr.constvars, *jaxpr.invars]
        return ClosedJaxpr(jaxpr.replace(constvars=[], invars=variables), [])

    def entering(self, values: Sequence[Value]) -> list[Value]:
        """The tiles of all devices of everything that enters."""
        pairs = zip(values, self.into, strict=True)
        return [Tiling(*crossing).cut(value) for value, crossing in pairs]

    def leaving(self, results: Sequence[Value]) -> list[Any]:
        """The logical results."""
        pairs = zip(results, self.out_of, strict=True)
        return [plain(Tiling(*crossing).assembled(tiles))[0] for tiles, crossing in pairs]
