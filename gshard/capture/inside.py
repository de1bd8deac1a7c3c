"""Annotations of tensors inside a program, from outside: by the line that makes them.

A program is traced anew in every process, and its variables have no names. A tensor is named by
what is the same in each trace: the line of the user's code, the operator, the pass (a line has
operators in the backward pass too), the shape, and the number among those that have all of this in
common, such as the layers of a Python loop.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr

from gshard.graph.regions import LOOPS, walk
from gshard.graph.source import source_of
from gshard.tensors.sharding import Sharding


@dataclass(frozen=True)
class TensorSite:
    """Where tensors are made: all first results of such operators."""

    source: str  # the name of the file, and the line
    operator: str
    backward: bool
    shape: tuple[int, ...]

    def __str__(self) -> str:
        when = ", backward" if self.backward else ""
        return f"{self.source} {self.operator} {'x'.join(map(str, self.shape))}{when}"


@dataclass(frozen=True)
class Inside:
    """A sharding for the tensors of a place: all, or those with these numbers."""

    place: TensorSite
    numbers: tuple[int, ...] | None
    sharding: Sharding


Places = dict[
    Any, tuple[TensorSite, int]
]  # of every tensor that an operator makes; its number there


def places(closed: ClosedJaxpr) -> Places:
    """The places of a program's tensors."""
    found: Places = {}
    counts: dict[TensorSite, int] = {}
    for eqn in walk(closed.jaxpr):
        var = eqn.outvars[0] if eqn.outvars and eqn.primitive not in LOOPS else None
        shape = getattr(getattr(var, "aval", None), "shape", ())
        if shape:
            backward = "transpose(" in str(eqn.source_info.name_stack)
            source = os.path.basename(source_of(eqn))
            place = TensorSite(source, eqn.primitive.name, backward, tuple(shape))
            counts[place] = counts.get(place, -1) + 1
            found[var] = (place, counts[place])
    return found


def resolved(places: Places, wanted: Sequence[Inside]) -> dict[Any, Sharding]:
    """The tensors of a program that are annotated so; a place that it does not have is an error."""
    by_place: dict[TensorSite, list[Any]] = {}
    for var, (place, _) in places.items():
        by_place.setdefault(place, []).append(var)
    found = {}
    for inside in wanted:
        made = by_place.get(inside.place, [])
        numbers = range(len(made)) if inside.numbers is None else inside.numbers
        if not made or max(numbers, default=0) >= len(made):
            raise ValueError(
                f"the layout annotates a tensor made at {inside.place}, which this program does "
                "not have: it is the layout of another program, or its lines have changed"
            )
        found.update({made[number]: inside.sharding for number in numbers})
    return found
