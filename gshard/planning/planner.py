"""The partitioner: an interpreter that runs each equation on tiles (section 3.3).

It runs while `shard_map` traces it, so what it executes on local arrays becomes the per-device
program. Each operator's rule is ordinary `lax` code.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard._jax import without_mesh
from gshard.graph.reason import Reason
from gshard.graph.regions import Loop
from gshard.graph.source import on_behalf_of
from gshard.moving.available import Mover
from gshard.moving.recompute import REARRANGING, Made
from gshard.moving.retile import retile
from gshard.moving.seen import Seen
from gshard.planning.choose import Choice
from gshard.planning.foresee import Foresight
from gshard.propagation.propagate import Propagated
from gshard.rules import RULES, Rule, rule_of
from gshard.rules.base import unreduced
from gshard.rules.base.rule import Carried, Elementwise, Way
from gshard.rules.base.uses import NOTHING, Uses, may_stay_unreduced
from gshard.rules.pointwise import MARKS
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


def partition(
    jaxpr: Jaxpr, found: Propagated, memory_limit: int, strict: bool, seen: Seen
) -> Callable[[Place, Sequence[Tile]], list[Tile]]:
    """The per-device program: from tiles of its constants and arguments to tiles of its results.

    Which variables of it hold which values of `jaxpr` is noted in `seen`.
    """

    def local(place: Place, tiles: Sequence[Tile]) -> list[Tile]:
        planner = Planner(place, found, memory_limit, strict, seen)
        return planner.run(jaxpr, tiles)

    return local


class Planner:
    """Runs a program on tiles, with the shardings that propagation found."""

    def __init__(
        self,
        place: Place,
        found: Propagated,
        memory_limit: int,
        strict: bool = False,
        seen: Seen | None = None,
    ):
        self.place = place
        self.found = found
        self.seen = Seen() if seen is None else seen
        self.memory_limit = memory_limit
        self.strict = strict  # whether a primitive without a rule is an error
        self.mover = Mover(place, self.seen)
        self.choice: Choice  # for the program or body that runs
        self.foresight = Foresight(found, self.mover, memory_limit)
        self.unreduced: Mapping[Any, float] = NOTHING
        self.literals: dict[Any, Tile] = {}
        self.weakly = weakref.proxy(self)  # it is freed together with what it remembers

    def inner(self) -> Planner:
        """A planner for a body: it may use values available outside; what it adds stays inside."""
        place = self.place.inner()
        inner = Planner(place, self.found, self.memory_limit, self.strict, self.seen)
        inner.mover.available = self.mover.available.inner()
        inner.foresight = self.foresight
        return inner

    def on(self, place: Place, shardings: Mapping[Any, Sharding]) -> Planner:
        """A planner for other devices and another program."""
        return Planner(place, Propagated(shardings), self.memory_limit, self.strict)

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave `var`."""
        return self.found.shardings[var]

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding; a repeated request moves nothing."""
        return self.mover.reshard(tile, target, reason)

    def retile(self, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
        """`tile` with tiles of `size` rows along `dim`, which may differ from the sharding's."""
        return retile(self.place, tile, dim, size, reason)

    def stays_unreduced(self, var: Any, tile: Tile, kind: str) -> bool:
        """Whether `tile`, a value of `var` that is to be reduced by `kind`, is reduced later."""
        return kind == "sum" and var in self.unreduced and unreduced.can_stay(tile)

    def cheapest(
        self, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
    ) -> Way:
        """The cheapest way to run `eqn` on `tiles`."""
        return self.choice.cheapest(eqn, rule, tiles, targets)

    def readers(self, var: Any) -> Sequence[JaxprEqn]:
        """The equations that read a variable."""
        return [] if isinstance(var, Literal) else self.choice.uses.users(var)

    def over_slices(self, var: Any, alike: Any, cost: Callable[[JaxprEqn], float]) -> float:
        """The cost of all slices of a variable; those that are `alike` are computed once."""
        return self.choice.over_slices(var, alike, cost)

    def carried(self, scan: Loop) -> Carried:
        """The values that a loop carries unreduced."""
        return self.foresight.carried(scan, self.unreduced)

    def run_body(
        self,
        closed: ClosedJaxpr,
        tiles: Sequence[Tile],
        leaving: Mapping[int, float] = NOTHING,
    ) -> list[Tile]:
        """The results of a body; its constants are replicated."""
        return self.run(closed.jaxpr, [*map(self.constant, closed.consts), *tiles], leaving)

    def run(
        self,
        jaxpr: Jaxpr,
        tiles: Sequence[Tile],
        leaving: Mapping[int, float] = NOTHING,
    ) -> list[Tile]:
        """The results of a program, given tiles for its constants and its arguments.

        The results with the numbers in `leaving` may be unreduced (`uses`).
        """
        uses = self.found.uses.get(jaxpr) or Uses(jaxpr)
        self.unreduced = may_stay_unreduced(uses, leaving, self.found.shardings)
        self.choice = Choice(self.found, uses, self.unreduced, self.mover, self.memory_limit)
        entering = zip((*jaxpr.constvars, *jaxpr.invars), tiles, strict=True)
        env = {var: self.mover.remember(var, tile) for var, tile in entering}
        self.seen.made(env)
        self.choice.tiles = env

        def read(atom: Any) -> Tile:
            return self.literal(atom) if isinstance(atom, Literal) else env[atom]

        with without_mesh():
            for self.choice.now, eqn in enumerate(jaxpr.eqns):
                operands = [read(a) for a in eqn.invars]
                targets = [self.found.shardings[v] for v in eqn.outvars]
                results = self.equation(eqn, operands, targets)
                made = dict(zip(eqn.outvars, results, strict=True))
                env.update(made)
                self.seen.made(made)
        return [read(a) for a in jaxpr.outvars]

    def named(self, eqn: JaxprEqn, operands: list[Tile], results: list[Tile]) -> list[Tile]:
        """The results as values that can be looked up, and recomputed if operators allow it."""
        if eqn.primitive in MARKS:  # the operand, under another sharding
            results = [results[0].of(operands[0].value)]
        rule, made = RULES.get(eqn.primitive), None
        if rule and (isinstance(rule, Elementwise) or eqn.primitive in REARRANGING):
            made = Made(results[0], eqn, tuple(operands), rule.local, self.weakly)
        pairs = zip(eqn.outvars, results, strict=True)
        return [self.mover.remember(var, tile, made) for var, tile in pairs]

    def equation(self, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
        """The results of one equation, on tiles: by its rule, then under their shardings."""
        with on_behalf_of(eqn):
            results = rule_of(eqn, tiles, self.strict).partition(self, eqn, tiles, targets)
            results = self.named(eqn, tiles, results)
            for number, (result, target) in enumerate(zip(results, targets, strict=True)):
                if result.sharding is target and result.is_standard:
                    continue
                if not result.is_unreduced or eqn.outvars[number] not in self.unreduced:
                    reason = Reason("result", eqn.primitive.name)
                    results[number] = self.mover.reshard(result, target, reason)
        return results

    def literal(self, atom: Literal) -> Tile:
        """A literal of the program; equal ones are made once."""
        key = (atom.aval, type(atom.val), np.asarray(atom.val).tobytes())
        if key not in self.literals:
            self.literals[key] = self.constant(atom.val)
        return self.literals[key]

    def constant(self, value: Any) -> Tile:
        """A replicated constant."""
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        return Tile(
            array, Sharding.replicated(jnp.ndim(array), self.place.num_devices), jnp.shape(array)
        )
