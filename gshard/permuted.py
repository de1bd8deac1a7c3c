"""Indices that are a permutation: what JAX asks about them at run time is known beforehand.

The gradient of `x.at[order].set(y)` has to know which of several updates of one row came last, so
JAX numbers the updates, scatters the numbers, gathers them again and compares. If `order` is the
result of an `argsort`, every update comes last, and what would move rows between devices twice is
a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

Made = Mapping[Any, JaxprEqn]  # the equation that makes a variable


def without_questions(eqns: Sequence[JaxprEqn]) -> list[JaxprEqn]:
    """The equations, where comparisons of scattered numbers have their known answers."""
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    same: dict[Any, Any] = {}  # variables that are others
    truth: dict[Any, bool] = {}  # masks that are the same everywhere

    def stands_for(atom: Any) -> Any:
        while not isinstance(atom, Literal) and atom in same:
            atom = same[atom]
        return atom

    answered = []
    for eqn in eqns:
        if same:
            eqn = eqn.replace(invars=[stands_for(a) for a in eqn.invars])
        if eqn.primitive is p.gather_p:
            found = _taken_back(eqn, made)
            if found is not None:
                same[eqn.outvars[0]] = stands_for(found)
        elif eqn.primitive is p.eq_p:
            known = _answer(eqn, made)
            if known is not None:
                truth[eqn.outvars[0]] = known
                eqn = _everywhere(eqn, known)
        elif eqn.primitive is p.select_n_p and len(eqn.invars) == 3:
            mask = eqn.invars[0]
            if not isinstance(mask, Literal) and mask in truth:
                same[eqn.outvars[0]] = eqn.invars[1 + truth[mask]]
        answered.append(eqn)
    return answered


def is_permutation(atom: Any, made: Made) -> bool:
    """Whether indices of rows are those of all rows, in some order: the result of an `argsort`."""
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    if eqn is None:
        return False
    if eqn.primitive in (p.broadcast_in_dim_p, p.reshape_p, p.convert_element_type_p):
        source = eqn.invars[0]
        alike = atom.aval.size == source.aval.size
        return (
            alike and np.issubdtype(source.aval.dtype, np.integer) and is_permutation(source, made)
        )
    if eqn.primitive is p.select_n_p:  # negative indices count from the end, and there are none
        return len(eqn.invars) == 3 and _wraps(eqn, made) and is_permutation(eqn.invars[1], made)
    if eqn.primitive is p.sort_p and len(eqn.invars[0].aval.shape) == 1:
        number = next(i for i, v in enumerate(eqn.outvars) if v is atom)
        source = None if isinstance(eqn.invars[number], Literal) else made.get(eqn.invars[number])
        return source is not None and source.primitive is p.iota_p
    return False


def _wraps(eqn: JaxprEqn, made: Made) -> bool:
    """Whether a `select_n` is `where(i < 0, i + rows, i)`."""
    mask, index, _ = eqn.invars
    asked = None if isinstance(mask, Literal) else made.get(mask)
    if asked is None or asked.primitive is not p.lt_p or asked.invars[0] is not index:
        return False
    return isinstance(asked.invars[1], Literal) and asked.invars[1].val == 0


def _taken_back(gather: JaxprEqn, made: Made) -> Any:
    """What was scattered, if a gather takes all of it from the places where it was put."""
    put = None if isinstance(gather.invars[0], Literal) else made.get(gather.invars[0])
    if put is None or put.primitive is not p.scatter_p or put.invars[1] is not gather.invars[1]:
        return None
    updates = put.invars[2]
    if not _whole_rows(put) or updates.aval.shape != gather.outvars[0].aval.shape:
        return None
    numbers = gather.params["dimension_numbers"]
    rows = numbers.start_index_map == numbers.collapsed_slice_dims == (0,)
    return updates if rows and is_permutation(put.invars[1], made) else None


def _whole_rows(put: JaxprEqn) -> bool:
    """Whether a scatter puts rows of the leading dim, one for each index."""
    numbers, (operand, _, updates) = put.params["dimension_numbers"], put.invars
    return (
        numbers.scatter_dims_to_operand_dims == numbers.inserted_window_dims == (0,)
        and updates.aval.shape[1:] == operand.aval.shape[1:]
        and updates.aval.shape[0] <= operand.aval.shape[0]
    )


def _answer(eqn: JaxprEqn, made: Made) -> bool | None:
    """Whether numbers are equal, if that is known: always, or never."""
    one, other = eqn.invars
    if isinstance(one, Literal):
        return None
    if one is other and np.issubdtype(one.aval.dtype, np.integer):
        return True
    put = made.get(one)
    if put is None or put.primitive is not p.scatter_p or not _whole_rows(put):
        return None
    everywhere = put.invars[2].aval.shape == one.aval.shape
    if not everywhere or not is_permutation(put.invars[1], made) or not is_zero(other, made):
        return None
    return False if _counts_from_one(put.invars[2], made) else None


def is_zero(atom: Any, made: Made) -> bool:
    """Whether a tensor is zero everywhere."""
    if isinstance(atom, Literal):
        return bool(np.all(np.asarray(atom.val) == 0))
    eqn = made.get(atom)
    return (
        eqn is not None and eqn.primitive is p.broadcast_in_dim_p and is_zero(eqn.invars[0], made)
    )


def _counts_from_one(atom: Any, made: Made) -> bool:
    """Whether a tensor is 1 plus the numbers of rows, as JAX numbers updates."""
    eqn = None if isinstance(atom, Literal) else made.get(atom)
    if eqn is None or eqn.primitive is not p.add_p:
        return False
    number, one = (None if isinstance(a, Literal) else made.get(a) for a in eqn.invars)
    while number is not None and number.primitive in (p.reshape_p, p.broadcast_in_dim_p):
        number = None if isinstance(number.invars[0], Literal) else made.get(number.invars[0])
    counted = number is not None and number.primitive is p.iota_p
    if not counted or one is None or one.primitive is not p.broadcast_in_dim_p:
        return False
    return isinstance(one.invars[0], Literal) and one.invars[0].val == 1


def _everywhere(eqn: JaxprEqn, known: bool) -> JaxprEqn:
    """A mask with one answer for all elements."""
    shape = eqn.outvars[0].aval.shape
    params = {"shape": shape, "broadcast_dimensions": (), "sharding": None}
    answer = Literal(np.bool_(known), ShapedArray((), np.dtype(bool)))
    return eqn.replace(primitive=p.broadcast_in_dim_p, invars=[answer], params=params)
