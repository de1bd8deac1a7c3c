"""Scatters and gathers by a permutation: JAX's run-time checks on them are constants.

The gradient of `x.at[order].set(y)` has to know which of several updates of one row came last, so
JAX numbers the updates, scatters the numbers, gathers them again and compares. If `order` is the
result of an `argsort`, every update is the last of its row: the comparison is a constant, and rows
need not be exchanged between devices for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph, filling
from gshard.rules.grouped import puts_rows, takes_rows


@in_every_body
def fold_permutation_checks(graph: Graph) -> list[JaxprEqn]:
    """The equations with such comparisons folded into constants."""
    same: dict[Any, Any] = {}  # variables that equal others
    masks: dict[Any, bool] = {}  # masks with one value for all elements
    folded = []
    for eqn in graph.eqns:
        if same:
            eqn = eqn.replace(invars=[_origin(a, same) for a in eqn.invars])
        if eqn.primitive is p.gather_p:
            found = _gathered_back(eqn, graph)
            if found is not None:
                same[eqn.outvars[0]] = _origin(found, same)
        elif eqn.primitive is p.eq_p:
            known = _known_comparison(eqn, graph)
            if known is not None:
                masks[eqn.outvars[0]] = known
                answer = Literal(np.bool_(known), ShapedArray((), np.dtype(bool)))
                eqn = filling(eqn, answer, eqn.outvars[0])
        elif eqn.primitive is p.select_n_p and len(eqn.invars) == 3:
            mask = eqn.invars[0]
            if not isinstance(mask, Literal) and mask in masks:
                same[eqn.outvars[0]] = eqn.invars[1 + masks[mask]]
        folded.append(eqn)
    return folded


def _origin(atom: Any, same: dict[Any, Any]) -> Any:
    while not isinstance(atom, Literal) and atom in same:
        atom = same[atom]
    return atom


def _gathered_back(gather: JaxprEqn, graph: Graph) -> Any:
    """The updates of a scatter, if a gather reads them all back from the same rows."""
    put = graph.maker(gather.invars[0])
    if put is None or put.primitive is not p.scatter_p or put.invars[1] is not gather.invars[1]:
        return None
    updates = put.invars[2]
    if not _sets_rows(put) or updates.aval.shape != gather.outvars[0].aval.shape:
        return None
    rows = takes_rows(gather) is not None
    return updates if rows and graph.is_permutation(put.invars[1]) else None


def _sets_rows(put: JaxprEqn) -> bool:
    """Whether a scatter sets rows of the leading dim, one for each index."""
    few = put.invars[2].aval.shape[:1] <= put.invars[0].aval.shape[:1]
    return put.params["update_jaxpr"] is None and few and puts_rows(put)


def _known_comparison(eqn: JaxprEqn, graph: Graph) -> bool | None:
    """The result of a comparison of integers, if it is the same for all elements."""
    one, other = eqn.invars
    if isinstance(one, Literal):
        return None
    if one is other and np.issubdtype(one.aval.dtype, np.integer):
        return True
    put = graph.maker(one)
    if put is None or put.primitive is not p.scatter_p or not _sets_rows(put):
        return None
    all_rows = put.invars[2].aval.shape == one.aval.shape
    if not all_rows or not graph.is_permutation(put.invars[1]) or graph.fill(other) != 0:
        return None
    return False if _counts_from_one(put.invars[2], graph) else None


def _counts_from_one(atom: Any, graph: Graph) -> bool:
    """Whether a tensor is 1 plus the numbers of rows, as JAX numbers updates."""
    eqn = graph.maker(atom)
    if eqn is None or eqn.primitive is not p.add_p:
        return False
    number = graph.maker(eqn.invars[0])
    while number is not None and number.primitive in (p.reshape_p, p.broadcast_in_dim_p):
        number = graph.maker(number.invars[0])
    counted = number is not None and number.primitive is p.iota_p
    return counted and graph.fill(eqn.invars[1]) == 1
