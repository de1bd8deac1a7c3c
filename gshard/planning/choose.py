"""The choice of the cheapest way to run each operator of a program.

The price looks one step ahead: an operand that is already available under the sharding that a way
takes costs nothing, and neither does one that a later operator moves there anyway, or a view of it.
Each later reader is priced by the same function, with what is available now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.moving.available import Mover
from gshard.moving.costs import cost_model
from gshard.propagation.propagate import Propagated
from gshard.rules import RULES
from gshard.rules.base.rule import REMEMBERED, Rule, Shares, Way, equation_key
from gshard.rules.base.uses import Uses
from gshard.rules.base.ways import FactorSplit, least, ways_of
from gshard.rules.painting import RowMap
from gshard.rules.row_map import gathered_for_all
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


@dataclass(eq=False)
class Choice:
    """Chooses how the equations of one program or body run, each when its operands are known."""

    found: Propagated
    uses: Uses
    unreduced: Mapping[Any, float]  # variables that may stay so; share of the reduction to pay
    mover: Mover
    memory_limit: int
    now: int = 0  # the place of the equation that runs
    tiles: Mapping[Any, Tile] = field(default_factory=dict)  # of variables known by then
    # By later readers of a value; for all slices of a variable
    needed: dict[Any, list[tuple[int, Sharding]]] = field(default_factory=dict)
    sliced: dict[Any, Sharding] = field(default_factory=dict)

    def cheapest(
        self, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
    ) -> Way:
        """The cheapest way to run `eqn` on `tiles`, found once for equal equations."""
        shardings = tuple([t.sharding for t in tiles])
        forms = [
            self.mover.forms(t).union(self._forms_later(a, t))
            for a, t in zip(eqn.invars, tiles, strict=True)
        ]
        return self._cheapest(eqn, rule, shardings, targets, self._shares(eqn, forms))

    def in_place(
        self, eqn: JaxprEqn, shardings: Sequence[Sharding], targets: Sequence[Sharding]
    ) -> Way | None:
        """The way to run `eqn` if it is known to need no communication."""
        key = (self._kind(eqn), *shardings, *targets)
        known, way = REMEMBERED.in_place.get(key, (None, None))
        # The user may have registered another one meanwhile.
        return way if known is RULES.get(eqn.primitive) else None

    def for_all_slices(self, eqn: JaxprEqn, here: Sharding) -> Sharding:
        """The sharding of the operand of a slice, gathered if all slices of it send more."""
        var, moving = eqn.invars[0], RowMap(eqn).moving
        if isinstance(var, Literal) or here.unsplit(moving) is here:
            return here
        key = (var, here, *moving)
        if key not in self.sliced:
            slices = [e for e in self.uses.users(var) if e.primitive is p.slice_p]
            known, limit = self.found.shardings, self.memory_limit
            self.sliced[key] = gathered_for_all(slices, moving, here, known, limit)
        return self.sliced[key]

    def _kind(self, eqn: JaxprEqn) -> int | None:
        """Its `equation_key`, which propagation has computed."""
        found = self.found.kinds.get(eqn)
        return equation_key(eqn) if found is None else found

    def _cheapest(
        self,
        eqn: JaxprEqn,
        rule: Rule,
        shardings: tuple[Sharding, ...],
        targets: Sequence[Sharding],
        shares: Shares | None,
    ) -> Way:
        """The same for operands with these shardings, and what it shares with other operators."""
        kind, limit, costs = self._kind(eqn), self.memory_limit, cost_model()
        key = (kind, rule.ways or rule.factors, shardings, tuple(targets), shares, costs, limit)
        found = None if kind is None else REMEMBERED.cheapest.get(key)
        if found is None:
            ways = ways_of(rule, eqn, shardings, targets, limit)
            found = least(ways, eqn, shardings, targets, shares)
            if isinstance(found.how, FactorSplit):
                found = found._replace(how=found.how.between(eqn, shardings, targets))
            if kind is not None:
                REMEMBERED.add(REMEMBERED.cheapest, key, found)
                if isinstance(found.how, FactorSplit) and found.how.in_place:
                    REMEMBERED.in_place[kind, *shardings, *targets] = rule, found
        return found

    def _shares(self, eqn: JaxprEqn, forms: Sequence[frozenset[Sharding]]) -> Shares | None:
        """What an operator shares, if its operands are available under these shardings."""
        of_sum = min([self.unreduced[v] for v in eqn.outvars if v in self.unreduced], default=1.0)
        variables = [None if isinstance(a, Literal) else a for a in eqn.invars]
        narrow, uses = tuple([self.uses.narrow.get(v, 1.0) for v in variables]), (1.0,) * len(forms)
        if eqn.primitive is p.dot_general_p:
            contracted = zip(variables, eqn.params["dimension_numbers"][0], strict=True)
            uses = tuple([1 / self.uses.products.get(dims, 1) for dims in contracted])
        if of_sum == 1 and not any(forms) and {*uses, *narrow} <= {1.0}:
            return None
        return Shares(of_sum, uses, narrow, tuple(forms))

    def _forms_later(self, var: Any, tile: Tile) -> Iterator[Sharding]:
        """The shardings to which later operators move a value, or a view of it."""
        if isinstance(var, Literal):
            return
        yield from self._moved_later(var, tile)
        other = self.uses.view_of(var)
        for view in self.mover.views(tile)[:1] if other is not None else ():
            yield from view.local_forms(self._moved_later(other, view.operands[0]))

    def _moved_later(self, var: Any, tile: Tile) -> Iterator[Sharding]:
        """The same without views."""
        users = self.uses.users(var)
        numbers, now = self.uses.numbers, self.now
        if not users or numbers[users[-1]] <= now or tile.sharding.is_replicated:
            return
        key = (var, have := self.mover.forms(tile))
        if key not in self.needed:
            later = [(e, self._form_needed(e, i, have)) for e, i in self.uses.readers(var, now)]
            self.needed[key] = [(numbers[e], form) for e, form in later if form]
        yield from (form for number, form in self.needed[key] if number > now)

    def _form_needed(
        self, eqn: JaxprEqn, number: int, have: frozenset[Sharding]
    ) -> Sharding | None:
        """The sharding to which an operator moves an operand; None where it moves nothing."""
        rule, kind, known = RULES.get(eqn.primitive), self._kind(eqn), self.found.shardings
        targets = [known[v] for v in eqn.outvars]
        devices = known[eqn.invars[number]].num_devices
        shardings = tuple(
            Sharding.replicated(len(a.aval.shape), devices) if isinstance(a, Literal) else known[a]
            for a in eqn.invars
        )
        if rule is None or kind is None or (kind, *shardings, *targets) in REMEMBERED.in_place:
            return None
        if any(s.manual or s.ragged is not None for s in (*shardings, *targets)):
            return None
        forms = [have if i == number else self._forms(a) for i, a in enumerate(eqn.invars)]
        way = self._cheapest(eqn, rule, shardings, targets, self._shares(eqn, forms))
        form = way.operands[number]
        return None if form is shardings[number] or form in have else form

    def _forms(self, atom: Any) -> frozenset[Sharding]:
        """The shardings under which a value is available; none for one that is made later."""
        tile = None if isinstance(atom, Literal) else self.tiles.get(atom)
        return self.mover.forms(tile) if tile else frozenset()
