"""What the moves of a tensor cost at least, for a bound: as much as the dearest of them.

Operators that need a tensor in the same form share one move, and a form may be made from another
one on the way. Whatever a lowered program shares, it pays for the form that is dearest to reach.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from typing import Any

import numpy as np

from gshard.autosharding.memory import Floats, Ints
from gshard.autosharding.problem import FORBIDDEN

# Specs of a tensor up to which its moves have a node; of more, each reader pays an equal share.
_MOST_SPECS = 16


@dataclasses.dataclass
class Dearest:
    """The moves of tensors, by who reads them: tables of a reader's strategies and the tensor's
    specs."""

    readers: dict[Any, list[tuple[int, Floats]]] = dataclasses.field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, var: Any, reader: int, table: Floats) -> None:
        """A node that reads a tensor, and what moving the tensor for it alone would cost."""
        self.readers[var].append((reader, table))

    def write(
        self, nodes: dict[Any, int], costs: list[Floats], edges: list[tuple[int, int, Floats]]
    ) -> None:
        """Add the moves of all tensors to a problem: those of a tensor with several readers as a
        node, whose strategies are a spec of the tensor and the most that a move from it costs."""
        for var, readers in self.readers.items():
            if len(readers) == 1 or all(_is_free(table) for _, table in readers):
                edges += [(reader, nodes[var], table) for reader, table in readers]
                continue
            if len(costs[nodes[var]]) > _MOST_SPECS:
                edges += [(r, nodes[var], _shared(t, len(readers))) for r, t in readers]
                continue
            own, level = _levels([table for _, table in readers])
            node = len(costs)
            costs.append(level)
            taken = np.arange(len(costs[nodes[var]]))[:, None] == own
            edges.append((nodes[var], node, np.where(taken, 0.0, FORBIDDEN)))
            for reader, table in readers:
                allowed = table[:, own] <= level
                edges.append((reader, node, np.where(allowed, 0.0, FORBIDDEN)))


def _is_free(table: Floats) -> bool:
    """Whether a reader moves nothing."""
    return bool(((table == 0.0) | (table >= FORBIDDEN)).all())


def _shared(table: Floats, readers: int) -> Floats:
    """What one of so many readers pays at least: all may need the same form."""
    return np.where(table >= FORBIDDEN, table, np.floor(table / readers))


def _levels(tables: list[Floats]) -> tuple[Ints, Floats]:
    """Pairs of a spec and of what a move from it may cost; less than every reader's cheapest move
    is not among them."""
    own, level = [], []
    for spec in range(tables[0].shape[1]):
        columns = [table[:, spec] for table in tables]
        least = max(float(c.min()) for c in columns)
        found = np.unique(np.concatenate(columns))
        found = found[(found >= least) & (found < FORBIDDEN)]
        own += [spec] * len(found)
        level += found.tolist()
    return np.array(own, dtype=np.int64), np.array(level)
