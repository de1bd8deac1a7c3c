"""The equations of a body with calls inlined: the input of the models of compilers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive

from gshard.graph.kinds import APART, PRODUCTS, REDUCTIONS
from gshard.graph.regions import LOOPS, with_calls_inlined
from gshard.moving.inventory import transfers
from gshard.tensors.tile import byte_size

_ALONE = {*APART, *PRODUCTS, *LOOPS}  # never fused, like collectives


@dataclass(frozen=True, eq=False)
class Op:
    """An equation of a body, calls inlined; `reads` are variables, literals left out."""

    eqn: JaxprEqn
    reads: tuple[Any, ...]
    writes: tuple[Any, ...]
    joins: bool  # whether a compiler fuses it with its neighbours
    added: Primitive | None = None  # if a compiler adds it
    by_rows: bool = False  # a reduction that is fused with its consumers too

    @property
    def primitive(self) -> Primitive:
        """The equation's, or what a compiler adds for it."""
        return self.added or self.eqn.primitive

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    @property
    def reduces(self) -> bool:
        """Whether it is fused with its producers but not with its consumers."""
        return self.primitive in REDUCTIONS and self.joins and not self.by_rows


def size_of(var: Any) -> int:
    """Bytes of a value."""
    aval = var.aval
    return byte_size(aval.shape, aval.dtype) if hasattr(aval, "shape") else 0


def elements(var: Any) -> int:
    """How many numbers a value has."""
    return math.prod(getattr(var.aval, "shape", ()))


def inlined(jaxpr: Jaxpr) -> tuple[list[Op], list[Any]]:
    """The equations with calls inlined, and the results' variables."""
    steps, outputs = with_calls_inlined(jaxpr)
    ops = []
    for eqn, operands, results in steps:
        reads = tuple(r for r in operands if not isinstance(r, Literal))
        joins = eqn.primitive not in _ALONE and not transfers(eqn)
        ops.append(Op(eqn, reads, results, joins))
    return ops, outputs
