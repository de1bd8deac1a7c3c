"""Sums over the turns of a loop: leaves are carried, and one tree follows the loop.

A loop that adds a tree to what it carries (accumulated gradients, the gradient of a weight that all
turns share) would be reduced over the devices in every turn. `c + tree(a) + tree(b)` has other bits
than `c + tree(a + b)`: as in `merged_trees`, this is decided in the logical program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.merged_trees import ADDS, Merging, Tree
from gshard.graph import live
from gshard.graph.regions import counts_of
from gshard.rules.base.primitives import tree_sum_p


@dataclass(frozen=True)
class _Sum:
    """A carry to which each turn adds a tree, and the annotations of the carry."""

    number: int
    tree: Tree
    notes: tuple[JaxprEqn, ...]


def reduced_after(eqn: JaxprEqn, zeros: set[Any]) -> list[JaxprEqn]:
    """The equations in the place of a scan; `zeros` are variables that are zero everywhere."""
    sums = _sums(eqn)
    if not sums:
        return [eqn]
    loop = _carrying_leaves(eqn, sums)
    first, _ = counts_of(eqn)
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    for found in sums:
        place = first + found.number
        start, total = loop.invars[place], loop.outvars[found.number]
        before.append(_zeros(eqn, start))
        zeros.add(start)
        result = eqn.outvars[found.number]
        after += _total(eqn, found, total, eqn.invars[place], result, zeros)
    return [*before, *reduced_after(loop, zeros), *after]


def _sums(eqn: JaxprEqn) -> list[_Sum]:
    """The carries of a scan that each turn adds a tree to, and does nothing else with."""
    jaxpr, (first, carries) = eqn.params["jaxpr"].jaxpr, counts_of(eqn)
    body = Merging(jaxpr.eqns, jaxpr.outvars)
    found = []
    for number in range(carries):
        carry = jaxpr.invars[first + number]
        result, notes = body.noted(jaxpr.outvars[number])
        adding = body.alone(result)
        if not adding or adding.primitive not in ADDS or body.uses[carry] != 1:
            continue
        for x, y in (adding.invars, adding.invars[::-1]):
            same, more = body.noted(x)
            tree = body.tree_of(y) if same is carry else None
            if tree:
                found.append(_Sum(number, tree, (*tree.notes, *notes, *more)))
    return found


def _carrying_leaves(eqn: JaxprEqn, sums: Sequence[_Sum]) -> JaxprEqn:
    """The scan whose carries are sums of leaves, from zeros on."""
    closed, (first, _) = eqn.params["jaxpr"], counts_of(eqn)
    jaxpr = closed.jaxpr
    inside, results = list(jaxpr.invars), list(jaxpr.outvars)
    operands, outside = list(eqn.invars), list(eqn.outvars)
    eqns = list(jaxpr.eqns)
    for found in sums:
        leaves = found.tree.leaves
        carry, total, start, end = (Var(leaves.aval) for _ in range(4))
        inside[first + found.number], results[found.number] = carry, total
        operands[first + found.number], outside[found.number] = start, end
        eqns.append(_made(eqn, p.add_p, {}, [carry, leaves], total))
    body = jaxpr.replace(invars=inside, outvars=results, eqns=live(eqns, results))
    params = eqn.params | {"jaxpr": closed.replace(jaxpr=body)}
    return eqn.replace(invars=operands, outvars=outside, params=params)


def _total(
    eqn: JaxprEqn, found: _Sum, leaves: Any, start: Any, result: Any, zeros: set[Any]
) -> list[JaxprEqn]:
    """The tree over the carried leaves, added to what the loop began with, and annotated."""
    tree, aval = found.tree, result.aval
    inverse = np.argsort(tree.order)
    summed = Var(ShapedArray(tuple(aval.shape[d] for d in inverse), aval.dtype))
    eqns = [_made(eqn, tree_sum_p, {"axis": tree.axis}, [leaves], summed)]
    if list(tree.order) != list(range(len(tree.order))):
        value = Var(aval)
        eqns.append(_made(eqn, p.transpose_p, {"permutation": tree.order}, [summed], value))
        summed = value
    if not (_is_zero(start) if isinstance(start, Literal) else start in zeros):
        value = Var(aval)
        eqns.append(_made(eqn, p.add_p, {}, [start, summed], value))
        summed = value
    for note in found.notes:
        value = Var(aval)
        eqns.append(note.replace(invars=[summed], outvars=[value]))
        summed = value
    return [*eqns[:-1], eqns[-1].replace(outvars=[result])]


def _made(eqn: JaxprEqn, primitive: Any, params: dict[str, Any], operands: Any, result: Any) -> Any:
    """An equation on behalf of another."""
    return eqn.replace(
        primitive=primitive, params=params, invars=operands, outvars=[result], effects=set()
    )


def _zeros(eqn: JaxprEqn, var: Any) -> JaxprEqn:
    """Zeros of the shape of a variable."""
    zero = Literal(np.zeros((), var.aval.dtype), ShapedArray((), var.aval.dtype))
    params = {"shape": var.aval.shape, "broadcast_dimensions": (), "sharding": None}
    made: JaxprEqn = _made(eqn, p.broadcast_in_dim_p, params, [zero], var)
    return made


def _is_zero(literal: Literal) -> bool:
    return bool(np.all(np.asarray(literal.val) == 0))


def is_zero(eqn: JaxprEqn) -> bool:
    """Whether an equation makes zeros."""
    operand = eqn.invars[0] if eqn.primitive is p.broadcast_in_dim_p else None
    return isinstance(operand, Literal) and _is_zero(operand)
