"""Sums of products of which each has a tree: their leaves are added first, and one tree remains.

Products that are added (attention and the hidden layer of a parallel block, the gradients of
queries, keys and values) would be reduced over the devices one by one. `tree(a) + tree(b)` has
other bits than `tree(a + b)`: this is decided in the logical program, for all devices alike.
Annotations do not change the decision: they move to the merged sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph import live
from gshard.rules.base.primitives import tree_sum_p

ADDS = frozenset((p.add_p, p.add_jaxvals_p))


@dataclass(frozen=True)
class Tree:
    """A value that is a tree over `leaves`, in order of the dims `order`, and annotated."""

    leaves: Any
    axis: int
    order: tuple[int, ...]
    notes: tuple[JaxprEqn, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the leaves: their number, and the dims of the sum."""
        kept = [n for d, n in enumerate(self.leaves.aval.shape) if d != self.axis]
        return (self.leaves.aval.shape[self.axis], *(kept[d] for d in self.order))


class Merging:
    """One body of a program, whose equations are merged."""

    def __init__(self, eqns: Sequence[JaxprEqn], results: Sequence[Any]):
        self._makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        used = [a for eqn in eqns for a in eqn.invars if not isinstance(a, Literal)]
        self.uses = Counter([*used, *(a for a in results if not isinstance(a, Literal))])
        self._eqns, self._results = eqns, results

    def merged(self) -> list[JaxprEqn]:
        """The equations, without those that have become unused."""
        found: list[JaxprEqn] = []
        for eqn in self._eqns:
            found += self._sum(eqn) if eqn.primitive in ADDS else [eqn]
        return found if len(found) == len(self._eqns) else live(found, self._results)

    def alone(self, atom: Any) -> JaxprEqn | None:
        """The equation that makes a value which is used once."""
        if isinstance(atom, Literal) or self.uses[atom] != 1:
            return None
        return self._makers.get(atom)

    def noted(self, atom: Any) -> tuple[Any, tuple[JaxprEqn, ...]]:
        """A value before its annotations, and those."""
        notes: tuple[JaxprEqn, ...] = ()
        while (eqn := self.alone(atom)) and eqn.primitive.name == "annotate":
            notes, atom = (*notes, eqn), eqn.invars[0]
        return atom, notes

    def tree_of(self, atom: Any) -> Tree | None:
        """The tree that a value is, if it is used once."""
        rank, (atom, notes) = len(atom.aval.shape), self.noted(atom)
        order, eqn = tuple(range(rank)), self.alone(atom)
        if eqn and eqn.primitive is p.transpose_p:
            order = eqn.params["permutation"]
            atom, _ = self.noted(eqn.invars[0])  # annotations of other dims are left out
            eqn = self.alone(atom)
        if not eqn or eqn.primitive is not tree_sum_p:
            return None
        return Tree(eqn.invars[0], eqn.params["axis"], order, notes)

    def _sum(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """The equations in the place of an addition."""
        for x, y in (eqn.invars, eqn.invars[::-1]):
            first, second = self.tree_of(x), self.tree_of(y)
            if second is None:
                continue
            if first is not None:
                return self._both(eqn, first, second, eqn.outvars[0])
            inner, notes = self.noted(x)
            before = self.alone(inner)
            if not before or before.primitive not in ADDS:
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
        self._makers |= dict.fromkeys(eqn.outvars, eqn)
        for atom in (a for a in eqn.invars if not isinstance(a, Literal)):
            self.uses[atom] = max(self.uses[atom], 1)
        return eqn

    def _both(
        self,
        eqn: JaxprEqn,
        first: Tree,
        second: Tree,
        result: Any,
        notes: Sequence[JaxprEqn] = (),
    ) -> list[JaxprEqn]:
        """One tree over the sums of the leaves of two, annotated as they were."""
        if first.shape != second.shape:
            return [eqn]
        eqns: list[JaxprEqn] = []
        dtype, operands, axis = eqn.outvars[0].aval.dtype, [], 0
        if (
            (first.axis, first.order)
            == (second.axis, second.order)
            == (
                first.axis,
                tuple(range(len(first.order))),
            )
        ):
            operands, axis = [first.leaves, second.leaves], first.axis
        else:
            for tree in (first, second):
                kept = [d for d in range(len(tree.order) + 1) if d != tree.axis]
                order = (tree.axis, *(kept[d] for d in tree.order))
                operands.append(Var(ShapedArray(tree.shape, dtype)))
                change = {"primitive": p.transpose_p, "params": {"permutation": order}}
                made = {"invars": [tree.leaves], "outvars": [operands[-1]], "effects": set()}
                eqns.append(self._keep(eqn.replace(**change, **made)))
        leaves = Var(ShapedArray(operands[0].aval.shape, dtype))
        eqns += self._sum(self._keep(eqn.replace(invars=operands, outvars=[leaves])))
        notes = (*first.notes, *second.notes, *notes)
        values = [Var(result.aval) for _ in notes] + [result]
        total = {"primitive": tree_sum_p, "params": {"axis": axis}, "effects": set()}
        eqns.append(self._keep(eqn.replace(invars=[leaves], outvars=[values[0]], **total)))
        for note, before, after in zip(notes, values[:-1], values[1:], strict=True):
            eqns.append(self._keep(note.replace(invars=[before], outvars=[after])))
        return eqns
