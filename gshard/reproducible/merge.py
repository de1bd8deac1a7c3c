"""Sums of products of which each has a tree: their leaves are added first, and one tree remains.

Products that are added (attention and the hidden layer of a parallel block, the gradients of
queries, keys and values) would be reduced over the devices one by one, and a loop that adds a tree
to what it carries (accumulated gradients, the gradient of a weight that all turns share) would be
reduced over the devices in every turn: it carries leaves instead, and one tree follows the loop.
`tree(a) + tree(b)` has other bits than `tree(a + b)`: this is decided in the logical program, for
all devices alike. Annotations do not change the decision: they move to the merged sum.
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
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph, filling, live, replacing
from gshard.graph.regions import counts_of
from gshard.reproducible.rules import tree_sum_p
from gshard.tensors.annotate import annotate_p

_ADDS = frozenset((p.add_p, p.add_jaxvals_p))

Eqns = list[JaxprEqn]
Notes = tuple[JaxprEqn, ...]  # annotations


@in_every_body
def merge_trees(graph: Graph) -> Eqns:
    """The equations with fewer trees; those of loops follow them."""
    eqns: Eqns = []
    for eqn in graph.eqns:
        eqns += _reduced_after(eqn, graph, set()) if eqn.primitive is p.scan_p else [eqn]
    body = _MergedBody(Graph(eqns, graph.results))
    return [made for eqn in eqns for made in (body.sum(eqn) if eqn.primitive in _ADDS else [eqn])]


@dataclass(frozen=True)
class _Tree:
    """A value that is a tree over `leaves`, in order of the dims `order`, and annotated."""

    leaves: Any
    axis: int
    order: tuple[int, ...]
    notes: Notes

    @property
    def leaves_first(self) -> tuple[int, ...]:
        """The dims of the leaves: their number, then the dims of the sum."""
        kept = [d for d in range(len(self.order) + 1) if d != self.axis]
        return (self.axis, *(kept[d] for d in self.order))

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims of the leaves, in that order."""
        return tuple(self.leaves.aval.shape[d] for d in self.leaves_first)

    @property
    def is_transposed(self) -> bool:
        """Whether the dims are in another order than those of the leaves."""
        return self.order != tuple(range(len(self.order)))


def _annotated(eqns: Sequence[JaxprEqn], notes: Notes, result: Any) -> Eqns:
    """Equations, and annotations of what the last of them makes, which becomes `result`."""
    found = list(eqns)
    for note in notes:
        (value,) = found[-1].outvars
        found.append(note.replace(invars=[value], outvars=[Var(value.aval)]))
    return [*found[:-1], found[-1].replace(outvars=[result])]


class _MergedBody:
    """One body of a program, and the equations that take the place of others in it."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.made: dict[Any, JaxprEqn] = {}  # here; each new value is used once

    def alone(self, atom: Any) -> JaxprEqn | None:
        """The equation that makes a value which is used once."""
        if isinstance(atom, Literal) or self.graph.uses(atom) > 1:
            return None
        return self.made.get(atom) or self.graph.maker(atom)

    def noted(self, atom: Any) -> tuple[Any, Notes]:
        """A value before its annotations, and those."""
        notes: Notes = ()
        while (eqn := self.alone(atom)) and eqn.primitive is annotate_p:
            notes, atom = (*notes, eqn), eqn.invars[0]
        return atom, notes

    def tree_of(self, atom: Any) -> _Tree | None:
        """The tree that a value is, if it is used once."""
        rank, (atom, notes) = len(atom.aval.shape), self.noted(atom)
        order, eqn = tuple(range(rank)), self.alone(atom)
        if eqn and eqn.primitive is p.transpose_p:
            order = tuple(eqn.params["permutation"])
            atom, _ = self.noted(eqn.invars[0])  # annotations of other dims are left out
            eqn = self.alone(atom)
        if not eqn or eqn.primitive is not tree_sum_p:
            return None
        return _Tree(eqn.invars[0], eqn.params["axis"], order, notes)

    def sum(self, eqn: JaxprEqn) -> Eqns:
        """The equations in the place of an addition."""
        for x, y in (eqn.invars, eqn.invars[::-1]):
            first, second = self.tree_of(x), self.tree_of(y)
            if second is None:
                continue
            if first is not None:
                return self._both(eqn, first, second, eqn.outvars[0], ())
            inner, notes = self.noted(x)
            before = self.alone(inner)
            if not before or before.primitive not in _ADDS:
                continue
            for rest, term in (before.invars, before.invars[::-1]):
                first = self.tree_of(term)
                if first is not None and first.shape == second.shape:
                    total = Var(ShapedArray(first.shape[1:], eqn.outvars[0].aval.dtype))
                    both = self._both(eqn, first, second, total, notes)
                    return [*both, self._keep(eqn.replace(invars=[rest, total]))]
        return [eqn]

    def _keep(self, eqn: JaxprEqn) -> JaxprEqn:
        """An equation that later ones may look at."""
        self.made |= dict.fromkeys(eqn.outvars, eqn)
        return eqn

    def _both(self, eqn: JaxprEqn, first: _Tree, second: _Tree, result: Any, notes: Notes) -> Eqns:
        """One tree over the sums of the leaves of two, annotated as they were."""
        if first.shape != second.shape:
            return [eqn]
        dtype, eqns = eqn.outvars[0].aval.dtype, []
        operands, axis = [first.leaves, second.leaves], first.axis
        if first.axis != second.axis or first.is_transposed or second.is_transposed:
            operands, axis = [Var(ShapedArray(first.shape, dtype)) for _ in operands], 0
            for tree, moved in zip((first, second), operands, strict=True):
                order = {"permutation": tree.leaves_first}
                eqns.append(
                    self._keep(replacing(eqn, p.transpose_p, [tree.leaves], moved, **order))
                )
        leaves = Var(ShapedArray(operands[0].aval.shape, dtype))
        eqns += self.sum(self._keep(eqn.replace(invars=operands, outvars=[leaves])))
        total = replacing(eqn, tree_sum_p, [leaves], Var(result.aval), axis=axis)
        summed = _annotated([total], (*first.notes, *second.notes, *notes), result)
        return [*eqns, *map(self._keep, summed)]


# ---------------------------------------------------------------- sums over the turns of a loop


@dataclass(frozen=True)
class _CarrySum:
    """A carry to which each turn adds a tree, and the annotations of the carry."""

    number: int
    tree: _Tree
    notes: Notes


def _reduced_after(eqn: JaxprEqn, graph: Graph, zeros: set[Any]) -> Eqns:
    """The equations in the place of a scan; `zeros` are variables that were made here."""
    sums = _sums(eqn)
    if not sums:
        return [eqn]
    loop = _carrying_leaves(eqn, sums)
    first, _ = counts_of(eqn)
    before: Eqns = []
    after: Eqns = []
    for found in sums:
        start, total = loop.invars[first + found.number], loop.outvars[found.number]
        zero = Literal(np.zeros((), start.aval.dtype), ShapedArray((), start.aval.dtype))
        before.append(filling(eqn, zero, start))
        began = eqn.invars[first + found.number]
        known = not isinstance(began, Literal) and began in zeros
        added = [] if known or graph.fill(began) == 0 else [began]
        after += _total(eqn, found, total, added, eqn.outvars[found.number])
    zeros |= {made.outvars[0] for made in before}
    return [*before, *_reduced_after(loop, graph, zeros), *after]


def _sums(eqn: JaxprEqn) -> list[_CarrySum]:
    """The carries of a scan that each turn adds a tree to, and does nothing else with."""
    jaxpr, (first, carries) = eqn.params["jaxpr"].jaxpr, counts_of(eqn)
    body = _MergedBody(Graph.of(jaxpr))
    found = []
    for number in range(carries):
        carry = jaxpr.invars[first + number]
        result, notes = body.noted(jaxpr.outvars[number])
        adding = body.alone(result)
        if not adding or adding.primitive not in _ADDS or body.graph.uses(carry) != 1:
            continue
        for x, y in (adding.invars, adding.invars[::-1]):
            same, more = body.noted(x)
            tree = body.tree_of(y) if same is carry else None
            if tree:
                found.append(_CarrySum(number, tree, (*tree.notes, *notes, *more)))
    return found


def _carrying_leaves(eqn: JaxprEqn, sums: Sequence[_CarrySum]) -> JaxprEqn:
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
        eqns.append(replacing(eqn, p.add_p, [carry, leaves], total))
    body = jaxpr.replace(invars=inside, outvars=results, eqns=live(eqns, results))
    params = eqn.params | {"jaxpr": closed.replace(jaxpr=body)}
    return eqn.replace(invars=operands, outvars=outside, params=params)


def _total(eqn: JaxprEqn, found: _CarrySum, leaves: Any, added: Sequence[Any], result: Any) -> Eqns:
    """The tree over the carried leaves, added to what the loop began with, and annotated."""
    tree, aval = found.tree, result.aval
    summed = Var(ShapedArray(tuple(aval.shape[d] for d in np.argsort(tree.order)), aval.dtype))
    eqns = [replacing(eqn, tree_sum_p, [leaves], summed, axis=tree.axis)]
    if tree.is_transposed:
        order = {"permutation": tree.order}
        eqns.append(replacing(eqn, p.transpose_p, eqns[-1].outvars, Var(aval), **order))
    for start in added:
        eqns.append(replacing(eqn, p.add_p, [start, *eqns[-1].outvars], Var(aval)))
    return _annotated(eqns, found.notes, result)
