"""A walk over a program and its bodies, equation by equation, on tiles (section 3.3).

It is done twice: on tiles without elements, to decide how every equation runs (`decide`), and while
`shard_map` traces it, as decided (`planner`).
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard.graph.reason import Reason
from gshard.moving.available import Mover, Seen
from gshard.moving.fetch import retile
from gshard.moving.recompute import REARRANGING, Made
from gshard.propagation.propagate import Propagated
from gshard.rules import RULES, RegionRule, Rule, rule_of
from gshard.rules.base.layers import ROW_MAPS
from gshard.rules.base.rule import Carried, Context, Elementwise, Way
from gshard.rules.base.unreduced import can_stay, moved_to, partition
from gshard.rules.base.uses import NOTHING, Uses
from gshard.rules.pointwise import MARKS
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding, Targets
from gshard.tensors.tile import Tile, Tiles


@dataclass(eq=False)
class Decisions:
    """The way of every equation on operands with shardings, and what loops carry unreduced.

    `shares` are the sums that may stay unreduced in a program or body, and what they pay, `sums`
    those that do. `moves` are the values of a program or body that are needed under other
    shardings: how each is recomputed there, or None where it is moved. `known` is what loops carry
    if results pay so much, `reductions` the cost of all sums, where bodies run `runs` times.
    """

    ways: dict[JaxprEqn, tuple[list[Sharding], Way]] = field(default_factory=dict)
    carried: dict[JaxprEqn, Carried] = field(default_factory=dict)
    shares: dict[Jaxpr, Mapping[Any, float]] = field(default_factory=dict)
    sums: dict[Any, Tile] = field(default_factory=dict)
    moves: dict[Jaxpr, dict[Any, int | None]] = field(default_factory=dict)
    known: dict[Any, Carried] = field(default_factory=dict)
    reductions: float = 0.0
    runs: int = 1


@dataclass(eq=False)
class Walk(ABC):
    """What both walks have in common; rules see it as their `Context`."""

    place: Place
    found: Propagated
    memory_limit: int
    strict: bool = False  # whether a primitive without a rule is an error
    decisions: Decisions = field(default_factory=Decisions)
    seen: Seen = field(default_factory=Seen)
    unreduced: Mapping[Any, float] = field(default_factory=dict)
    control: Any = lax
    literals: dict[Any, Tile] = field(default_factory=dict)
    rows: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mover = Mover(self.place, self.seen)
        self.uses: Uses  # of the program or body that runs
        self.tiles: dict[Any, Tile]  # of its variables that are known by then
        self.weakly = weakref.proxy(self)  # it is freed together with what it remembers

    def inner(self) -> Self:
        """The walk over a body: it may use values available outside; what it adds stays inside."""
        given = (self.found, self.memory_limit, self.strict, self.decisions, self.seen)
        inner = type(self)(self.place.inner(), *given)
        inner.mover.available = self.mover.available.inner()
        return inner

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave `var`."""
        return self.found.shardings[var]

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding; a repeated request moves nothing."""
        return self.mover.reshard(tile, target, reason)

    def retile(self, tile: Tile, sizes: Sequence[int], reason: Reason) -> Tile:
        """`tile` with tiles of these sizes, which may differ from the sharding's."""
        return retile(self.place, tile, sizes, reason)

    def stays_unreduced(self, var: Any, tile: Tile, kind: str) -> bool:
        """Whether `tile`, a value of `var` that is to be reduced by `kind`, is reduced later."""
        return kind == "sum" and var in self.unreduced and can_stay(tile)

    def readers(self, var: Any) -> Sequence[JaxprEqn]:
        """The equations that read a variable."""
        return [] if isinstance(var, Literal) else self.uses.users(var)

    def run_body(
        self, closed: ClosedJaxpr, tiles: Sequence[Tile], leaving: Mapping[int, float] = NOTHING
    ) -> list[Tile]:
        """The results of a body; its constants are replicated."""
        return self.run(closed.jaxpr, [*map(self.constant, closed.consts), *tiles], leaving)

    def run(
        self, jaxpr: Jaxpr, tiles: Sequence[Tile], leaving: Mapping[int, float] = NOTHING
    ) -> list[Tile]:
        """The results of a program, given tiles for its constants and its arguments.

        The results with the numbers in `leaving` may be unreduced (`uses`).
        """
        self.uses = self.found.uses.get(jaxpr) or Uses(jaxpr)
        self.begin(jaxpr, tiles, leaving)
        self.mover.decided = self.decisions.moves.setdefault(jaxpr, {})
        entering = zip((*jaxpr.constvars, *jaxpr.invars), tiles, strict=True)
        env = self.tiles = {var: self.mover.remember(var, tile) for var, tile in entering}

        def read(atoms: Sequence[Any]) -> list[Tile]:
            return [self.literal(a) if isinstance(a, Literal) else env[a] for a in atoms]

        for number, eqn in enumerate(jaxpr.eqns):
            targets = [self.found.shardings[v] for v in eqn.outvars]
            results = self.equation(number, eqn, read(eqn.invars), targets)
            env.update(zip(eqn.outvars, results, strict=True))
        return read(jaxpr.outvars)

    def equation(self, number: int, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
        """The results of one equation, on tiles: by its rule, then under their shardings."""
        rule, context = self.rule(eqn, tiles), cast(Context, self)
        results = partition(rule, context, eqn, list(tiles), list(targets))
        results = self._named(eqn, tiles, results)
        for number, (var, target) in enumerate(zip(eqn.outvars, targets, strict=True)):
            result, wanted = results[number], self.left(var, results[number], target)
            if result.sharding is not wanted or not result.is_standard:
                reason = Reason("result", eqn.primitive.name)
                results[number] = moved_to(context, result, wanted, reason)
        return results

    @abstractmethod
    def left(self, var: Any, tile: Tile, target: Sharding) -> Sharding:
        """The sharding under which the value of `var` is left: the target, or an unreduced one."""

    def rule(self, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Rule | RegionRule:
        """The rule of an equation."""
        return rule_of(eqn, tiles, self.strict)

    def _named(self, eqn: JaxprEqn, operands: list[Tile], results: list[Tile]) -> list[Tile]:
        """The results as values that can be looked up, and recomputed if operators allow it."""
        if eqn.primitive in MARKS:  # the operand, under another sharding
            results = [results[0].of(operands[0].value)]
        rule, made, layers = RULES.get(eqn.primitive), None, ROW_MAPS.get(eqn.primitive)
        again = isinstance(rule, Elementwise) or eqn.primitive in REARRANGING
        if rule and (again or layers):
            how = rule.local if again else None, self.weakly, rule.factors, layers
            made = Made(results[0], eqn, tuple(operands), *how)
        pairs = zip(eqn.outvars, results, strict=True)
        return [self.mover.remember(var, tile, made) for var, tile in pairs]

    @abstractmethod
    def begin(self, jaxpr: Jaxpr, tiles: Sequence[Tile], leaving: Mapping[int, float]) -> None:
        """Prepare the walk over a program or a body, before its equations run."""

    def literal(self, atom: Literal) -> Tile:
        """A literal of the program; equal ones are made once."""
        key = (atom.aval, type(atom.val), np.asarray(atom.val).tobytes())
        if key not in self.literals:
            self.literals[key] = self.constant(atom.val)
        return self.literals[key]

    def constant(self, value: Any) -> Tile:
        """A replicated constant."""
        array = value if isinstance(value, jax.Array) else jnp.asarray(value)
        sharding = Sharding.replicated(jnp.ndim(array), self.place.num_devices)
        return Tile(array, sharding, jnp.shape(array))
