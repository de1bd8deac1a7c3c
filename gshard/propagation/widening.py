"""How much narrower the values are that others are made of, element by element.

A move of such a value costs as much as one of what it is made of (`moving.again`): that of weights
of 8 bits which become float32 a quarter, that of a row which is repeated next to nothing.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.operators.rule import RULES
from gshard.tensors.tile import byte_size

MOST = 8  # values that one is made of


def narrow_parts(jaxpr: Jaxpr) -> dict[Any, float]:
    """The part of its bytes that has to move for a value, where that is not all of them."""
    sources: dict[Any, frozenset[Any]] = {}  # what a value is made of, and fewer bytes
    found: dict[Any, float] = {}
    for eqn in jaxpr.eqns:
        if not _is_by_element(eqn):
            continue
        (var,), operands = eqn.outvars, [a for a in eqn.invars if not isinstance(a, Literal)]
        moved = frozenset().union(*[sources.get(a, frozenset([a])) for a in operands])
        least, size = sum(map(_size, moved)), _size(var)
        if least < size and len(moved) <= MOST:
            sources[var], found[var] = moved, least / size
    return found


def _size(var: Any) -> int:
    return byte_size(var.aval.shape, var.aval.dtype)


def _is_by_element(eqn: JaxprEqn) -> bool:
    """Whether elements of the results are made of single elements of the operands."""
    rule = RULES.get(eqn.primitive)
    stays = rule is not None and rule.level == 0 and not rule.partition
    return stays and len(eqn.outvars) == 1 and hasattr(eqn.outvars[0].aval, "dtype")
