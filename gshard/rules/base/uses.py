"""Use analysis: facts about later readers of a value that change the cost of an operator.

A sum need not be reduced at once if its one use is linear in it, as the rules say (`Rule.linear`),
or, in a loop, if all its uses lead to carried values that stay unreduced. A value that is computed
elementwise from narrower ones can be recomputed after a move of those (`moving.recompute`), so that
moving it costs as much as moving them: a quarter for 8-bit weights that become float32, next to
nothing for a broadcast row. Products that contract the same dims of an operand share its reshard,
and slices of one value may be cheaper from a gathered one.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import scatter_sub_p, stack_p
from gshard.graph.graph import Graph
from gshard.graph.regions import Loop
from gshard.moving.recompute import VIEWS
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import size_of

NOTHING: Mapping[Any, Any] = MappingProxyType({})

ADDED = (p.add_p, p.add_jaxvals_p, p.sub_p)
SCATTERED = (p.scatter_add_p, scatter_sub_p)  # onto their first operand
JOINED = (p.concatenate_p, row_map_p, stack_p)
_SUMMING = (p.dot_general_p, p.conv_general_dilated_p, p.reduce_sum_p, *SCATTERED)
_OF_ROWS = (p.broadcast_in_dim_p, p.reshape_p, p.convert_element_type_p, p.transpose_p)
_AROUND = (*JOINED, *SCATTERED, p.pad_p, p.dynamic_update_slice_p)
_MOST = 8  # narrower values that one is computed from


class Uses(Graph):
    """How the values of a program, or of a loop's body, are used: found once for each."""

    def __init__(self, jaxpr: Jaxpr):
        super().__init__(jaxpr.eqns, jaxpr.outvars)
        self.jaxpr = jaxpr

    @functools.cached_property
    def sums(self) -> set[Any]:
        """The variables that may be unreduced: made by summing, or from such."""
        found: set[Any] = set()
        for eqn in self.eqns:
            if eqn.primitive in _SUMMING or any(
                not isinstance(a := eqn.invars[n], Literal) and a in found
                for group in linear_groups(eqn)
                for n in group
            ):
                found.update(eqn.outvars)
        return found

    @functools.cached_property
    def narrow(self) -> dict[Any, float]:
        """The parts of values' bytes that have to move, where those are less than all."""
        sources: dict[Any, frozenset[Any]] = {}  # the origin of a value, and its bytes
        found: dict[Any, float] = {}
        for eqn in self.eqns:
            if not _is_by_element(eqn) and eqn.primitive is not p.gather_p:
                continue
            (var,), operands = eqn.outvars, [a for a in eqn.invars if not isinstance(a, Literal)]
            size = size_of(var)
            if any(a not in sources and size_of(a) >= size for a in operands):  # nearly always
                continue
            moved = frozenset().union(*[sources.get(a, frozenset([a])) for a in operands])
            least = sum(map(size_of, moved))
            if least < size and len(moved) <= _MOST:
                sources[var], found[var] = moved, least / size
        return found

    @functools.cached_property
    def products(self) -> Counter[Any]:
        """How many products contract the same dims of a variable."""
        return Counter(
            (a, eqn.params["dimension_numbers"][0][side])
            for eqn in self.eqns
            if eqn.primitive is p.dot_general_p
            for side, a in enumerate(eqn.invars)
            if not isinstance(a, Literal)
        )

    def readers(self, var: Any, after: int) -> Iterator[tuple[JaxprEqn, int]]:
        """The equations after a number that read a variable, and as which operand."""
        for eqn in self.users(var):
            if self.numbers[eqn] > after:
                yield from ((eqn, i) for i, a in enumerate(eqn.invars) if a is var)

    def view_of(self, var: Any) -> Any | None:
        """The variable that one is a transpose or a reversal of, or else such a view of it."""
        made = self.maker(var)
        if made is not None and made.primitive in VIEWS and not isinstance(made.invars[0], Literal):
            return made.invars[0]
        return next((e.outvars[0] for e in self.users(var) if e.primitive in VIEWS), None)


# ---------------------------------------------------------------- sums that are reduced later


class Delayed(Mapping[Any, float]):
    """The variables whose reduction may be delayed, and the share of its cost that is left then.

    Two that are added pay half each, and a value of which sums are taken what those pay. The
    results with the numbers in `leaving` may leave the body unreduced, and pay the share that is
    given there. A reduction is delayed only where that saves something: what a device has left of a
    scattered sum is less to scale and to transpose; and for several uses, only if they send less
    than half together. What else has to be gathered for it depends on `shardings`: before those are
    known, shares are without that. What is not asked for, most of a program, is not looked at.
    """

    def __init__(
        self,
        of: Uses,
        leaving: Mapping[int, float] = NOTHING,
        shardings: Mapping[Any, Sharding] | None = None,
    ):
        self.of, self.shardings = of, shardings
        self.found: dict[Any, float] = {}  # those, and what is paid
        self.read: Counter[Any] = Counter()  # how often by operators that can run on unreduced ones
        self.later: dict[Any, float] = defaultdict(float)  # what these reduce instead, of one byte
        self.sizes: dict[Any, float] = defaultdict(float)  # the same, if nothing is added to it
        self.known: set[JaxprEqn] = set()  # equations that were looked at
        for number, share in leaving.items():
            var = of.jaxpr.outvars[number]
            if of.uses(var) == 1:
                self.found[var], self.sizes[var] = share, 1.0
        once = {number for number, share in leaving.items() if share < 1}
        others = _leading_to(of.jaxpr, once) if once else ()
        self.others = dict.fromkeys(others, max(leaving.values(), default=1.0))

    def __getitem__(self, var: Any) -> float:
        self._look_at(self.of.users(var))
        return self.found[var] if var in self.found else self.others[var]

    def __iter__(self) -> Iterator[Any]:
        self._look_at(self.of.eqns)
        return iter(self.found | self.others)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _look_at(self, eqns: Iterable[JaxprEqn]) -> None:
        """Find the shares of what these equations read: after those of what they make of it."""
        left, new = list(eqns), set[JaxprEqn]()
        while left:
            eqn = left.pop()
            if eqn not in self.known and linear_groups(eqn):
                self.known.add(eqn)
                new.add(eqn)
                left += [user for v in eqn.outvars for user in self.of.users(v)]
        for eqn in sorted(new, key=self.of.numbers.__getitem__, reverse=True):
            self._find(eqn)

    def _find(self, eqn: JaxprEqn) -> None:
        """Find the shares of what one equation reads, if it is the last of its readers."""
        of, found, sums, shardings = self.of, self.found, self.of.sums, self.shardings
        if not _keeps_sums(eqn):
            return
        if eqn.primitive in JOINED and not sums.issuperset(filter(_is_tensor, eqn.invars)):
            return  # other values would be summed too, which are as large as they are
        groups = [[eqn.invars[n] for n in group] for group in linear_groups(eqn)]
        named = dict.fromkeys(a for a in eqn.invars if not isinstance(a, Literal))
        # A square is linear in neither of its operands.
        able = [a for a in named if any(g.count(a) == eqn.invars.count(a) for g in groups)]
        out, alone = eqn.outvars[0], [a for a in able if of.uses(a) == 1]
        for atom in able:
            both = _adds_sums(eqn, atom, sums.intersection(alone))
            saves = both or out in found or (eqn.primitive in JOINED and len(alone) > 1)
            if saves or _is_less_later(eqn, atom):
                self.read[atom] += eqn.invars.count(atom)
                growth = _growth(eqn, atom) if shardings is not None else 1.0
                gathered = _gathered(of, eqn, atom, shardings) if shardings is not None else 0.0
                self.later[atom] += found.get(out, 1.0) * growth / (2 if both else 1) + gathered
                self.sizes[atom] += (self.sizes[out] if out in found else 1.0) * growth + gathered
                saved = self.later[atom] <= 1 if atom in alone else self.sizes[atom] < 0.5
                if saved and self.read[atom] == of.uses(atom):
                    found[atom] = self.later[atom]


def _leading_to(jaxpr: Jaxpr, results: Collection[int]) -> set[Any]:
    """The variables whose uses are all linear and lead to these results, and nowhere else."""
    outside = {
        a
        for number, a in enumerate(jaxpr.outvars)
        if number not in results and not isinstance(a, Literal)
    }
    for eqn in reversed(jaxpr.eqns):
        for number, atom in enumerate(eqn.invars):
            if isinstance(atom, Literal):
                continue
            if not _passes(eqn, number) or not outside.isdisjoint(eqn.outvars):
                outside |= {atom}
    known = {*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)}
    return known - outside


def linear_carries(scan: Loop) -> set[int]:
    """The carried values of a scan whose uses are all linear and lead to such values again."""
    body = scan.bodies[0].jaxpr
    found = {i for i in range(scan.carry) if not isinstance(body.outvars[i], Literal)}
    sums = Uses(body).sums
    while True:
        leading = _leading_to(body, found)
        kept = {i for i in found if body.invars[scan.consts + i] in leading}
        if kept == found:
            return {i for i in kept if body.outvars[i] in sums}
        found = kept


def _adds_sums(eqn: JaxprEqn, atom: Any, unreduced: Collection[Any]) -> bool:
    """Whether an operator makes one sum of `atom` and another of its `unreduced` operands."""
    if eqn.primitive in SCATTERED:
        return atom is eqn.invars[0] and atom in unreduced
    return len(unreduced) == 2 and eqn.primitive in ADDED


def _growth(eqn: JaxprEqn, atom: Any) -> float:
    """The bytes of the result to reduce for one of `atom`; those around it are others' or zeros."""
    growth = size_of(eqn.outvars[0]) / max(size_of(atom), 1)
    return min(growth, 1.0) if eqn.primitive in _AROUND else growth


def _gathered(of: Uses, eqn: JaxprEqn, atom: Any, shardings: Mapping[Any, Sharding]) -> float:
    """The bytes of other operands that an unreduced `atom` needs gathered, for one of its own.

    A device of every sum needs them all, so that one with a tile on every device has to move; but
    rows that are added to `atom` are added where they are, with their indices. Where both are
    lookups in split tables, one of them at least is reduced.
    """
    (number,) = [n for n, a in enumerate(eqn.invars) if a is atom][:1]
    if eqn.primitive in SCATTERED and number == 0:
        return 0.0
    jointly = {n for group in linear_groups(eqn) if number in group for n in group}
    others = [a for n, a in enumerate(eqn.invars) if n not in jointly and _is_tensor(a)]
    moved = [a for a in others if math.prod(shardings[a].tiles) == shardings[a].num_devices > 1]
    sent = sum(size_of(a) * of.narrow.get(a, 1.0) for a in moved)
    sent += sum(2 * size_of(a) for a in others if _is_found_in_parts(of, a, shardings))
    return sent / max(size_of(atom), 1)


def _is_found_in_parts(of: Uses, var: Any, shardings: Mapping[Any, Sharding]) -> bool:
    """Whether it is made of rows that devices find in the parts of a split table."""
    made = of.maker(var)
    if made is None or not made.invars or isinstance(source := made.invars[0], Literal):
        return False
    if made.primitive is p.gather_p:
        looked_up = made.params["dimension_numbers"].start_index_map
        return any(shardings[source].splits[d] for d in looked_up)
    return made.primitive in _OF_ROWS and _is_found_in_parts(of, source, shardings)


def _is_less_later(eqn: JaxprEqn, atom: Any) -> bool:
    """Whether less of the result than of `atom` is to be reduced."""
    out = eqn.outvars[0]
    return out.aval.shape != atom.aval.shape and bool(out.aval.size < atom.aval.size)


def _is_tensor(atom: Any) -> bool:
    return not isinstance(atom, Literal) and atom.aval.shape != ()


def linear_groups(eqn: JaxprEqn) -> Sequence[Sequence[int]]:
    """The operands that an operator is linear in, those of a group jointly."""
    rule = RULES.get(eqn.primitive)
    return rule.linear.groups(eqn) if rule and rule.linear else ()


def _passes(eqn: JaxprEqn, number: int) -> bool:
    """Whether an operator can run on its operand `number` unreduced."""
    return any(number in group for group in linear_groups(eqn)) and _keeps_sums(eqn)


def _keeps_sums(eqn: JaxprEqn) -> bool:
    """Whether an operator that is linear has an unreduced result, of no narrower a type."""
    if eqn.primitive is p.convert_element_type_p:
        old, new = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
        floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
        return floats and _holds(new, old)
    if eqn.primitive is p.broadcast_in_dim_p:
        return eqn.invars[0].aval.size == eqn.outvars[0].aval.size
    return True


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether floats of one type are all floats of the other (which JAX does not say of 8 bits)."""
    one, other = jnp.finfo(wide), jnp.finfo(narrow)
    return one.nmant >= other.nmant and one.maxexp >= other.maxexp


def accumulators(scan: Loop) -> dict[int, list[Any]]:
    """The carried values of a scan to which its body only ever adds, and what it adds to each."""
    body, found = scan.bodies[0].jaxpr, {}
    graph = Graph.of(body)
    carried = zip(body.invars[scan.consts :], body.outvars[: scan.carry], strict=False)
    for i, (var, end) in enumerate(carried):
        added: list[Any] = []
        while var is not end and graph.uses(var) == 1 and graph.users(var):
            (user,) = graph.users(var)
            if user.primitive not in ADDED:
                break
            left, right = user.invars
            if right is var and user.primitive is p.sub_p:
                break
            added.append(right if left is var else left)
            (var,) = user.outvars
        if added and var is end and graph.uses(end) == 1:
            found[i] = added
    return found


def leaving(loop: Loop, shares: Mapping[Any, float]) -> Mapping[int, float]:
    """The results that may leave the body of a loop unreduced, and the share of each to pay.

    Results to which its runs add, once for all; and stacks of sums that pay a share outside.
    """
    if loop.eqn.primitive is not p.scan_p:
        return NOTHING
    outside = enumerate(loop.eqn.outvars)
    stacks = ((i, shares.get(v, 1.0)) for i, v in outside if i >= loop.carry)
    once = dict.fromkeys(accumulators(loop), 1 / max(loop.runs, 1))
    return once | {i: share for i, share in stacks if share < 1}


# ---------------------------------------------------------------- values that are narrow elsewhere


def _is_by_element(eqn: JaxprEqn) -> bool:
    """Whether the equation is elementwise."""
    rule = RULES.get(eqn.primitive)
    stays = rule is not None and rule.level == 0 and rule.by_factors
    return stays and len(eqn.outvars) == 1 and hasattr(eqn.outvars[0].aval, "dtype")
