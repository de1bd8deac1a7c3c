"""Copies of tensors that several operators share: a tensor is resharded once for all of them.

A weight is gathered once for both passes, for example. Where copies break the memory limit
(`MeshProblem.uncounted`), they are counted as long as they are read: then a strategy is a pair, of
the tensor's spec and the copy's, since a copy that is the tensor itself takes nothing. That makes
problems larger, so that it is done for the copies that matter.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
from jax.extend.core import Literal
from jax.extend.core import primitives as p

from gshard.autosharding.cost import NONE, MeshShape, specs_of
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints
from gshard.propagation.flow import Edge, Flow
from gshard.tensors.tile import byte_size

# A tensor is large if all of it takes this share of the memory limit.
_LARGE = 1 / 200

# Specs of a tensor up to which all pairs of them are strategies.
MOST_SPECS = 16


@dataclasses.dataclass
class SharedCopy:
    """A copy of a tensor for its readers: the specs of the two by strategy, and when it is read."""

    own: Ints
    read: Ints
    paired: bool  # whether strategies are pairs, so that the copy is counted
    first: int
    last: int = 0
    node: int = -1

    def table(self, by_spec: Floats) -> Floats:
        """The table of an operator with a column for each strategy; `by_spec` has one for each
        spec. Where the copy counts, it is what the operator reads: nothing is sent after it."""
        table = by_spec[:, self.read]
        closed = self.paired and by_spec.shape[1] <= MOST_SPECS
        return np.where(table > 0, FORBIDDEN, table) if closed else table

    def held(self, sizes: Floats) -> Floats:
        """The bytes of the copy by strategy, where the sizes of the tensor are by spec."""
        return np.where(self.own == self.read, 0.0, sizes[self.read])


class SharedCopies:
    """Which tensors of a program have a copy for the operators that read them."""

    def __init__(self, flow: Flow, mesh: MeshShape, limit: float, paired: Collection[Any]) -> None:
        self.mesh, self.limit, self.paired = mesh, limit, paired
        self.readers: Counter[Any] = Counter()
        for edge in flow.edges:
            if reads_copy(edge):
                self.readers.update({a for a in edge.atoms[0] if not isinstance(a, Literal)})
        self.found: dict[Any, SharedCopy] = {}

    def is_large(self, size: float) -> bool:
        """Whether so many bytes count in the memory limit."""
        return size > _LARGE * self.limit

    def of(self, var: Any, place: int) -> SharedCopy | None:
        """The copy of a tensor, read at this place; None where operators read the tensor itself."""
        shape, paired = var.aval.shape, var in self.paired
        if self.readers[var] < 2 and not self.is_large(byte_size(shape, var.aval.dtype)):
            return None
        if var not in self.found:
            every = np.arange(len(specs_of(shape, self.mesh)))
            own, read = _pairs(shape, self.mesh) if paired else (every, every)
            self.found[var] = SharedCopy(own, read, paired, place)
        self.found[var].last = place
        return self.found[var]


def reads_copy(edge: Edge) -> bool:
    """Whether an operator reads a copy of its operands: pointwise ones take them as they are."""
    return edge.level > 0 or (edge.eqn is not None and edge.eqn.primitive is p.transpose_p)


def _pairs(shape: tuple[int, ...], mesh: MeshShape) -> tuple[Ints, Ints]:
    """Specs and copies: all of them, or where these are many the tensor itself and what is gathered
    from it along some axes."""
    specs = np.array(specs_of(shape, mesh)).reshape(-1, len(mesh))
    gathered = ((specs[:, None] == specs) | (specs == NONE)).all(axis=2)
    own, read = np.nonzero(gathered | (len(specs) <= MOST_SPECS))
    return own, read
