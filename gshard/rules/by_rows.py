"""Recognition of row-wise equations on the leading dim: grouped products, gathers, scatters."""

from __future__ import annotations

from typing import Any

from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p
from jax.lax import GatherScatterMode

from gshard._jax import private_primitives
from gshard.rules.indexing import roles_of

(ragged_dot_general_p,) = private_primitives("lax.lax", "ragged_dot_general_p")


def is_ragged(eqn: JaxprEqn) -> bool:
    """Whether an equation is a `ragged_dot` with rows in the leading dim."""
    if eqn.primitive is not ragged_dot_general_p or any(isinstance(a, Literal) for a in eqn.invars):
        return False
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    plain = not any(numbers.dot_dimension_numbers[1]) and len(eqn.invars[2].aval.shape) == 1
    return plain and tuple(numbers.lhs_ragged_dimensions) == (0,)


def multiplies_rows(eqn: JaxprEqn) -> bool:
    """Whether it multiplies each row with its group's matrix."""
    return is_ragged(eqn) and bool(eqn.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)


def sums_rows(eqn: JaxprEqn) -> bool:
    """Whether it sums, for each group, the products of its rows."""
    if not is_ragged(eqn) or multiplies_rows(eqn):
        return False
    contracted = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    return tuple(map(tuple, contracted)) == ((0,), (0,))


def takes_rows(eqn: JaxprEqn) -> dict[str, Any] | None:
    """How a gather takes entire rows of the leading dim, one for each index; else None."""
    if eqn.primitive is not p.gather_p or not _of_rows(eqn):
        return None
    fills = eqn.params["mode"] == GatherScatterMode.FILL_OR_DROP
    return {"fill": eqn.params["fill_value"] if fills else None}


def puts_rows(eqn: JaxprEqn) -> bool:
    """Whether a scatter updates entire rows of the leading dim, one for each index."""
    return not any(isinstance(a, Literal) for a in eqn.invars) and _of_rows(eqn)


def _of_rows(eqn: JaxprEqn) -> bool:
    """Whether a gather or scatter has an entire row of the leading dim for each index."""
    if len(eqn.invars[1].aval.shape) != 2:
        return False
    roles = roles_of(eqn)
    rows = roles.index_map == (0,) and roles.operand[:1] == ("k0",)
    inside = all(n[0] == "w" for n in roles.operand[1:])
    return rows and inside and roles.windows == ("i0", *roles.operand[1:])


def sized_dims(eqn: JaxprEqn) -> list[int]:
    """The dims of the left side, before the ragged one, that each have group sizes of their own."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (contracted, _), (batch, _) = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    free = [d for d in range(len(eqn.invars[0].aval.shape)) if d not in (*contracted, *batch)]
    if ragged in batch:
        return list(batch[: batch.index(ragged)])
    others = list(contracted) if ragged in contracted else free
    return [*batch, *others[: others.index(ragged)]]
