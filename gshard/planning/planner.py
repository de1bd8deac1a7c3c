"""The partitioner: an interpreter that runs each equation on tiles, as decided (section 3.3).

It runs while `shard_map` traces it, so what it executes on local arrays becomes the per-device
program. Each operator's rule is ordinary `lax` code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn

from gshard._jax import current_context, without_mesh
from gshard.graph.regions import Loop
from gshard.graph.source import on_behalf_of
from gshard.planning.decide import Decider
from gshard.planning.walk import Walk
from gshard.propagation.propagate import Propagated
from gshard.rules import RULES, Rule
from gshard.rules.base.rule import Carried, Way
from gshard.rules.base.uses import NOTHING
from gshard.rules.base.ways import FactorSplit
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Targets
from gshard.tensors.tile import Tile, Tiles


class Planner(Walk):
    """Runs a program on tiles, with the shardings that propagation found, in the ways decided.

    Which variables of the per-device program hold which values is noted in `seen`.
    """

    def on(self, place: Place, shardings: Mapping[Any, Sharding]) -> Planner:
        """A planner for other devices and another program."""
        return Planner(place, Propagated(shardings), self.memory_limit, self.strict)

    def run(
        self, jaxpr: Jaxpr, tiles: Sequence[Tile], leaving: Mapping[int, float] = NOTHING
    ) -> list[Tile]:
        """The results of a program, without the user's mesh."""
        with without_mesh():
            return super().run(jaxpr, tiles, leaving)

    def begin(self, jaxpr: Jaxpr, tiles: Sequence[Tile], leaving: Mapping[int, float]) -> None:
        """Decide, if that was not done with the program around it."""
        if jaxpr not in self.decisions.shares:
            blank, limit = [t.without_elements() for t in tiles], self.memory_limit
            first = Decider(self.place, self.found, limit, self.strict, self.decisions)
            first.run(jaxpr, blank, leaving)
        self.unreduced, self.context = self.decisions.shares[jaxpr], current_context()
        self.seen.made(zip((*jaxpr.constvars, *jaxpr.invars), tiles, strict=True))

    def cheapest(
        self, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
    ) -> Way:
        """The way that was decided on, for operands with these shardings."""
        shardings, way = self.decisions.ways[eqn]
        assert shardings == [t.sharding for t in tiles], eqn
        return way

    def left(self, var: Any, tile: Tile, target: Sharding) -> Sharding:
        """As decided, whatever a region or a rule of the user has left."""
        decided = self.decisions.sums.get(var)
        return decided.sharding if decided else target

    def carried(self, scan: Loop) -> Carried:
        """The values that a loop carries unreduced."""
        return self.decisions.carried[scan.eqn]

    def results(self, eqn: JaxprEqn, rule: Rule, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
        """What `eqn` makes of `tiles` in this way."""
        if rule.run:
            return rule.run(self, eqn, way, tiles, targets)
        return way.how.run(self, eqn, rule.local, tiles, targets)

    def equation(self, number: int, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
        """The results of one equation, on behalf of the user's line."""
        rule, (_, way) = RULES.get(eqn.primitive), self.decisions.ways.get(eqn, ([], Way((), ())))
        local = rule.local if rule and not rule.run else None
        alone = local and isinstance(way.how, FactorSplit) and eqn.ctx is self.context
        if alone and (results := way.how.copied(eqn, local, tiles)):
            results = self._named(eqn, tiles, results)
        else:
            with on_behalf_of(eqn):
                results = super().equation(number, eqn, tiles, targets)
        self.seen.made(zip(eqn.outvars, results, strict=True))
        return results
