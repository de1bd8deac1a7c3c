"""Which values of a body stay unreduced, found on shardings alone, before the body is planned.

A loop carries a sum unreduced if its body adds to it or is linear in it, and then sends less. That
follows from the ways of the body's sums, and from how linear operators pass an unreduced value on
(`rules.base.unreduced`); nothing is traced for it, so that every body is planned once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph.regions import Loop
from gshard.moving.available import Mover
from gshard.moving.partial import combine_cost
from gshard.planning.choose import Choice
from gshard.propagation.propagate import Propagated
from gshard.rules.base.rule import RULES, Carried, factors_of
from gshard.rules.base.unreduced import fitted, owners_of
from gshard.rules.base.uses import (
    Uses,
    accumulators,
    leaving,
    linear_carries,
    linear_groups,
    may_stay_unreduced,
)
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size


@dataclass
class Foreseen:
    """The shardings of values that stay unreduced, and the cost of reducing the others.

    `origins` are the operators that leave them so.
    """

    forms: dict[Any, Sharding]
    origins: dict[Any, str] = field(default_factory=dict)
    cost: float = 0.0

    def reduce(self, var: Any, here: Sharding, target: Sharding) -> None:
        """Reduce a value for an operator that needs the sum."""
        self.cost += combine_cost(here, "sum", target, var.aval)


@dataclass(frozen=True, eq=False)
class Foresight:
    """Foresees the sums of bodies, with the shardings that propagation found."""

    found: Propagated
    mover: Mover
    memory_limit: int
    known: dict[Any, Carried] = field(default_factory=dict)  # by loops, and what results pay

    def carried(self, scan: Loop, shares: Mapping[Any, float]) -> Carried:
        """The values that a loop carries unreduced, if its results pay `shares` of reductions."""
        key = (scan.eqn, *[shares.get(v) for v in scan.eqn.outvars])
        if key not in self.known:
            self.known[key] = self._carried(scan, shares)
        return self.known[key]

    def values(
        self, closed: ClosedJaxpr, leave: Mapping[int, float], carried: Mapping[Any, Sharding]
    ) -> Foreseen:
        """What becomes of the sums in a body that is entered with these unreduced values."""
        uses, known = self.found.uses.get(closed.jaxpr) or Uses(closed.jaxpr), self.found.shardings
        stay = may_stay_unreduced(uses, leave, known)
        choice = Choice(self.found, uses, stay, self.mover, self.memory_limit)
        found = Foreseen(dict(carried))
        for eqn in uses.eqns:
            parts = [a for a in eqn.invars if not isinstance(a, Literal) and a in found.forms]
            made: dict[Any, Sharding] = {}
            if eqn.primitive is p.scan_p:
                made = self._results(eqn, stay, found)
            elif len(eqn.outvars) == 1 and (parts or _may_sum(eqn, uses)):
                here = (_passed_on if parts else _summed)(choice, eqn, found.forms)
                made = {eqn.outvars[0]: here} if here else {}
            if parts and (not made or eqn.primitive is p.scan_p):
                for var in dict.fromkeys(parts):
                    found.reduce(var, found.forms[var], known[var])
            for var, here in made.items():
                if var in stay:
                    before = [name for a in parts if (name := found.origins.get(a))]
                    found.forms[var], origin = here, (*before, eqn.primitive.name)[0]
                    found.origins.setdefault(var, origin)
                else:
                    found.reduce(var, here, known[var])
        return found

    def _results(
        self, eqn: JaxprEqn, shares: Mapping[Any, float], outer: Foreseen
    ) -> dict[Any, Sharding]:
        """The results of a loop that are unreduced."""
        scan = Loop.of(eqn)
        assert scan is not None
        carried, body = self.carried(scan, shares), scan.bodies[0].jaxpr
        inside = body.invars[scan.consts : scan.consts + scan.carry]
        start = {inside[i]: here for i, here in carried.forms.items()}
        found = self.values(scan.bodies[0], carried.sums, start)
        outer.cost += found.cost * scan.runs
        made = {eqn.outvars[i]: here for i, here in carried.forms.items()}
        outer.origins.update({eqn.outvars[i]: name for i, name in carried.origins.items()})
        for out, var in zip(eqn.outvars[scan.carry :], body.outvars[scan.carry :], strict=True):
            if not isinstance(var, Literal) and (here := found.forms.get(var)):
                made[out] = replace(here, splits=(None, *here.splits))
                outer.origins[out] = found.origins[var]
        return made

    def _carried(self, scan: Loop, shares: Mapping[Any, float]) -> Carried:
        """Values to which the body only adds, and those that it is linear in."""
        (closed,), known = scan.bodies, self.found.shardings
        body, sums = closed.jaxpr, dict(leaving(scan, shares))
        for i, v in enumerate(scan.eqn.outvars):  # stacks that one ReduceScatter sums
            if i >= scan.carry and known[v].splits[0] and not isinstance(body.outvars[i], Literal):
                sums[i] = 1.0
        added, linear = accumulators(scan), linear_carries(scan)
        if not added and not linear:
            return Carried({}, {}, sums)
        inside, forms = body.invars[scan.consts : scan.consts + scan.carry], dict[int, Sharding]()
        found = self.values(closed, sums, {})
        for i, variables in added.items():
            parts = [None if isinstance(v, Literal) else found.forms.get(v) for v in variables]
            same = parts[0] is not None and all(part is parts[0] for part in parts)
            if same and parts[0] and self._may_carry(inside[i], parts[0]):
                forms[i] = parts[0]
        origins = {i: found.origins[added[i][0]] for i in forms}
        sums = {i: s for i, s in sums.items() if i not in added or i in forms}
        rest = dict.fromkeys(linear - sums.keys(), 1 / max(scan.runs, 1))
        result = Carried(forms, origins, sums)
        return self._linear(scan, result, rest) if rest else result

    def _may_carry(self, var: Any, wanted: Sharding) -> bool:
        """Whether a value can be carried unreduced, within the memory limit, or as it is."""
        here, shape = self.found.shardings[var], var.aval.shape
        if here.manual or wanted.manual or wanted.rank != len(shape):
            return False
        local, own = (byte_size(s.local_shape(shape), var.aval.dtype) for s in (wanted, here))
        fits = local <= max(self.memory_limit, own)
        return fits and any(owners_of(s, wanted) is not None for s in (here, wanted.reduced))

    def _linear(self, scan: Loop, known: Carried, linear: Mapping[int, float]) -> Carried:
        """Also the `linear` carried values that the body leaves unreduced, if it pays.

        The body sends less then, and each of them is reduced once, after the loop.
        """
        (closed,), body = scan.bodies, scan.bodies[0].jaxpr
        inside = body.invars[scan.consts : scan.consts + scan.carry]
        start = {inside[i]: here for i, here in known.forms.items()}
        sums, carried, more = {**known.sums, **linear}, dict(start), True
        while more:  # one that is unreduced may leave others so
            forms = self.values(closed, sums, carried).forms
            able = [i for i in linear if body.outvars[i] in forms]
            ends = {inside[i]: forms[body.outvars[i]] for i in able}
            ends = {v: here for v, here in ends.items() if self._may_carry(v, here)}
            more = not ends.keys() <= carried.keys()
            carried = {**ends, **carried}
        changed = {i: carried[inside[i]] for i in linear if inside[i] in carried}
        kept = {**known.sums, **{i: linear[i] for i in changed}}
        after = self.values(closed, kept, carried)
        if any(after.forms.get(body.outvars[i]) is not here for i, here in changed.items()):
            return known
        before, last = self.values(closed, known.sums, start).cost, 0.0
        for i, here in changed.items():  # in every run, a share of an AllReduce of each
            aval = inside[i].aval
            last += 2 * byte_size(here.local_shape(aval.shape), aval.dtype) * linear[i]
        if after.cost + last >= before:
            return known
        origins = {i: after.origins[body.outvars[i]] for i in changed}
        return Carried({**known.forms, **changed}, {**known.origins, **origins}, kept)


def _may_sum(eqn: JaxprEqn, uses: Uses) -> bool:
    """Whether the result may be a sum over devices: rows that each looks up in its tile are too."""
    return eqn.outvars[0] in uses.sums or eqn.primitive is p.gather_p


def _summed(choice: Choice, eqn: JaxprEqn, forms: Mapping[Any, Sharding]) -> Sharding | None:
    """The sharding that an operator leaves its result under, if it is an unreduced sum."""
    way = choice.as_propagated(eqn)
    if way is None or way.kind != "sum" or not way.results[0].unreduced:
        return None
    (here,) = way.results
    return None if here.idle or any(s.idle for s in here.unreduced) else here


def _passed_on(choice: Choice, eqn: JaxprEqn, forms: Mapping[Any, Sharding]) -> Sharding | None:
    """The sharding of the result of an operator that is linear in its unreduced operands."""
    own = [
        Sharding.replicated(len(a.aval.shape), choice.num_devices)
        if isinstance(a, Literal)
        else forms.get(a, choice.found.shardings[a])
        for a in eqn.invars
    ]
    here = {n for n, s in enumerate(own) if s.unreduced}
    group = next((g for g in linear_groups(eqn) if here.issubset(g)), None)
    if group is None or len(eqn.outvars) != 1:
        return None
    part, factors = own[min(here)], factors_of(RULES[eqn.primitive], eqn)
    if len(group) > 1:
        shape = eqn.outvars[0].aval.shape
        for n in group:
            alike = own[n] is part or (
                not own[n].unreduced
                and eqn.invars[n].aval.shape == shape
                and owners_of(own[n], part) is not None
            )
            if not alike:
                return None
            own[n] = part
    found = fitted(eqn, own, factors, [a.aval.shape for a in eqn.invars])
    return found[1] if found else None
