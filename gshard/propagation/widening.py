"""The bytes that elementwise values have to move, given their narrower operands.

Such a value can be recomputed after a move of its operands (`moving.recompute`), so moving it costs
as much as moving those: a quarter for 8-bit weights that become float32, next to nothing for a
broadcast row.
"""

from __future__ import annotations

from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.operators.rule import RULES
from gshard.tensors.tile import byte_size

MOST = 8  # the operands of a value


def narrow_parts(jaxpr: Jaxpr) -> dict[Any, float]:
    """The part of a value's bytes that has to move, where it is less than all."""
    sources: dict[Any, frozenset[Any]] = {}  # the origin of a value, and its bytes
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
    """Whether the equation is elementwise."""
    rule = RULES.get(eqn.primitive)
    stays = rule is not None and rule.level == 0 and not rule.partition
    return stays and len(eqn.outvars) == 1 and hasattr(eqn.outvars[0].aval, "dtype")
