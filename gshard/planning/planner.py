"""The partitioner: an interpreter that runs each equation on tiles (section 3.3).

It runs while `shard_map` traces it, so what it executes on local arrays becomes the per-device
program. Each operator's rule is ordinary `lax` code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import current_context, without_mesh
from gshard.graph.reason import Reason
from gshard.graph.source import on_behalf_of
from gshard.moving.available import VIEWS, Mover
from gshard.moving.reshard import retile
from gshard.moving.seen import Seen
from gshard.propagation.propagate import Propagated
from gshard.rules import RULES
from gshard.rules.base import unreduced
from gshard.rules.base.choose import (
    cheapest_of,
    in_place_again,
    partition_by_factors,
    runs_in_place,
)
from gshard.rules.base.rule import Shares, bind_local, equation_key
from gshard.rules.base.uses import NOTHING, Uses, may_stay_unreduced
from gshard.rules.grouped import reshard_ragged
from gshard.rules.manual import CROSSING_MANUAL, check_manual, own, run_manually
from gshard.rules.pointwise import same_dims
from gshard.rules.unknown import unknown_rule
from gshard.tensors.annotate import annotate_p
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Identity, Tile


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
        self.shardings = found.shardings
        self.seen = Seen() if seen is None else seen
        self.memory_limit = memory_limit
        self.strict = strict  # whether a primitive without a rule is an error
        self.mover = Mover(place, self.seen, self.rerun)
        self.uses: Uses  # of the values of the program or body that runs
        self.unreduced: Mapping[Any, float] = NOTHING
        self.over: dict[Any, float] = {}  # the cost of all slices of a variable
        self.now = 0  # the place of the equation that runs
        self.needed: dict[
            Any, list[tuple[int, Sharding]]
        ] = {}  # by the equations that read a value
        self.view_of: dict[Any, Any] = {}  # the variable that another is a view of
        self.literals: dict[Any, Tile] = {}
        self.values: dict[Any, Tile] = {}  # of all variables, once they are known

    def inner(self) -> Planner:
        """A planner for a body: it may use values available outside; what it adds stays inside."""
        place = self.place.inner()
        inner = Planner(place, self.found, self.memory_limit, self.strict, self.seen)
        inner.mover.available = self.mover.available.inner()
        return inner

    def on(self, place: Place, shardings: Mapping[Any, Sharding]) -> Planner:
        """A planner for other devices and another program."""
        return Planner(place, Propagated(shardings), self.memory_limit, self.strict)

    def sharding(self, var: Any) -> Sharding:
        """The sharding that propagation gave `var`."""
        return self.shardings[var]

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding; a repeated request moves nothing.

        What enters a manual region like this, as the first value of a loop, is replicated.
        """
        if target.manual and not tile.sharding.manual:
            replicated = Sharding.replicated(target.rank, target.num_devices)
            return own(self, self.mover.reshard(tile, replicated, reason).array)
        if tile.sharding is not target and (tile.sharding.ragged, target.ragged) != (None, None):
            return reshard_ragged(self, tile, target, reason)
        return self.mover.reshard(tile, target, reason)

    def rerun(self, eqn: JaxprEqn, tiles: list[Tile], target: Sharding) -> Tile:
        """An operator once more, with a result that has the sharding `target`."""
        with on_behalf_of(eqn):
            (made,) = partition_by_factors(self, eqn, RULES[eqn.primitive], tiles, [target])
        return made

    def retile(self, tile: Tile, dim: int, size: int, reason: Reason) -> Tile:
        """`tile` with tiles of `size` rows along `dim`, which may differ from the sharding's."""
        return retile(self.place, tile, dim, size, reason)

    def stays_unreduced(self, var: Any, tile: Tile, kind: str) -> bool:
        """Whether `tile`, a value of `var` that is to be reduced by `kind`, is reduced later."""
        return kind == "sum" and var in self.unreduced and unreduced.can_stay(tile)

    def shares(self, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Shares | None:
        """What an operator shares with others, if anything."""
        forms = [
            self.mover.available.forms_of(t).union(self.forms_later(a, t))
            for a, t in zip(eqn.invars, tiles, strict=True)
        ]
        return self.shared(eqn, forms)

    def shared(self, eqn: JaxprEqn, forms: Sequence[frozenset[Sharding]]) -> Shares | None:
        """The same, of operands that are available under these shardings."""
        of_sum = min([self.unreduced[v] for v in eqn.outvars if v in self.unreduced], default=1.0)
        variables = [None if isinstance(a, Literal) else a for a in eqn.invars]
        narrow, uses = tuple([self.uses.narrow.get(v, 1.0) for v in variables]), (1.0,) * len(forms)
        if eqn.primitive is p.dot_general_p:
            contracted = zip(variables, eqn.params["dimension_numbers"][0], strict=True)
            uses = tuple([1 / self.uses.products.get(dims, 1) for dims in contracted])
        if of_sum == 1 and not any(forms) and {*uses, *narrow} <= {1.0}:
            return None
        return Shares(of_sum, uses, narrow, tuple(forms))

    def forms_later(self, var: Any, tile: Tile) -> Iterator[Sharding]:
        """The shardings to which later operators move a value, or a view of it.

        Each is priced by itself. What it moves anyway costs an earlier one nothing.
        """
        if isinstance(var, Literal):
            return
        yield from self.moved_later(var, tile)
        view = self.mover.available.views.get(Identity(tile.array))
        if view is not None and var in self.view_of:
            for form in self.moved_later(self.view_of[var], view.source):
                if view.is_local(here := form.project(view.order)):
                    yield here

    def moved_later(self, var: Any, tile: Tile) -> Iterator[Sharding]:
        """The same without views."""
        readers = self.uses.readers.get(var, ())
        if not readers or readers[-1][0] <= self.now or tile.sharding.is_replicated:
            return
        key = (var, have := self.mover.available.forms_of(tile))
        if key not in self.needed:
            later = [reader for reader in readers if reader[0] > self.now]
            forms = [(place, self.form_needed(e, i, have)) for place, e, i in later]
            self.needed[key] = [(place, form) for place, form in forms if form]
        yield from (form for place, form in self.needed[key] if place > self.now)

    def form_needed(self, eqn: JaxprEqn, number: int, have: frozenset[Sharding]) -> Sharding | None:
        """The sharding to which an operator moves an operand; None where it moves nothing."""
        rule, kind = RULES.get(eqn.primitive), self.kind(eqn)
        shardings = [
            self.literal(a).sharding if isinstance(a, Literal) else self.shardings[a]
            for a in eqn.invars
        ]
        targets = [self.shardings[v] for v in eqn.outvars]
        if rule is None or kind is None or runs_in_place(kind, shardings, targets):
            return None
        if any(s.manual or s.ragged is not None for s in (*shardings, *targets)):
            return None
        forms = [have if i == number else frozenset() for i in range(len(shardings))]
        shares = self.shared(eqn, forms)
        form = cheapest_of(self, eqn, rule, tuple(shardings), targets, shares).operands[number]
        return None if form is shardings[number] or form in have else form

    def over_slices(self, var: Any, alike: Any, cost: Callable[[JaxprEqn], float]) -> float:
        """The cost of all slices of a variable; those that are `alike` are computed once."""
        if isinstance(var, Literal):
            return 0.0
        if (var, alike) not in self.over:
            self.over[var, alike] = sum(map(cost, self.uses.slices.get(var, ())))
        return self.over[var, alike]

    def kind(self, eqn: JaxprEqn) -> int | None:
        """Its `equation_key`, which propagation has computed."""
        found = self.found.kinds.get(eqn)
        return equation_key(eqn) if found is None else found

    def repeated(self, eqn: JaxprEqn, tiles: Sequence[Tile]) -> list[Tile] | None:
        """The results of an equation equal to an earlier one that needed no communication."""
        kind = self.found.kinds.get(eqn)
        if kind is None or eqn.primitive in VIEWS:  # of which more is to be remembered
            return None
        return in_place_again(eqn, kind, tiles, [self.shardings[v] for v in eqn.outvars])

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
        self.uses = self.found.uses.get(jaxpr) or Uses(jaxpr)
        self.unreduced = may_stay_unreduced(self.uses, leaving, self.shardings)
        self.over, self.needed, self.view_of = {}, {}, {}
        env: dict[Any, Tile] = dict(zip((*jaxpr.constvars, *jaxpr.invars), tiles, strict=True))
        self.values = env
        self.seen.made(env)

        def read(atom: Any) -> Tile:
            return self.literal(atom) if isinstance(atom, Literal) else env[atom]

        with without_mesh():
            context = current_context()
            for self.now, eqn in enumerate(jaxpr.eqns):
                operands = [read(a) for a in eqn.invars]
                results = self.repeated(eqn, operands) if eqn.ctx is context else None
                if results is None:
                    with on_behalf_of(eqn):
                        results = self.equation(eqn, operands)
                made = dict(zip(eqn.outvars, results, strict=True))
                env.update(made)
                self.seen.made(made)
                if eqn.primitive in VIEWS and not isinstance(eqn.invars[0], Literal):
                    self.view_of[eqn.outvars[0]] = eqn.invars[0]
                    self.view_of.setdefault(eqn.invars[0], eqn.outvars[0])
                if eqn.primitive is not annotate_p:
                    rule = RULES.get(eqn.primitive)
                    rule = None if rule is None or rule.partition else rule
                    stays = rule is not None and rule.level == 0
                    by_element = rule is not None and rule.factors is same_dims
                    ours = by_element and rule is not None and rule.local is not bind_local
                    local = functools.partial(self._by_element, eqn) if ours else None
                    self.mover.remember(eqn, operands, results, stays, by_element, local)
        return [read(a) for a in jaxpr.outvars]

    def _by_element(self, eqn: JaxprEqn, arrays: Sequence[jax.Array]) -> jax.Array:
        """An operator of each element alone: it is the same wherever its tiles are."""
        number = self.place.num_devices
        tiles = [Tile(a, Sharding.replicated(a.ndim, number), a.shape) for a in arrays]
        (result,) = RULES[eqn.primitive].local(self, eqn, tiles, [])
        return result

    def equation(self, eqn: JaxprEqn, tiles: list[Tile]) -> list[Tile]:
        """The results of one equation, on tiles."""
        targets, name = [self.shardings[v] for v in eqn.outvars], eqn.primitive.name
        part = None
        if any(t.is_unreduced for t in tiles):
            part = unreduced.on_unreduced(self, eqn, tiles)
            tiles = [
                self.reshard(t, self.sharding(a), Reason("operand", name))
                if part is None and t.is_unreduced
                else t
                for t, a in zip(tiles, eqn.invars, strict=True)
            ]
        results = self.on_reduced(eqn, tiles, targets) if part is None else [part]
        for number, (result, target) in enumerate(zip(results, targets, strict=True)):
            if result.sharding is target and result.is_standard:
                continue
            check_manual(eqn, result, target)
            if not result.is_unreduced or eqn.outvars[number] not in self.unreduced:
                results[number] = self.reshard(result, target, Reason("result", name))
        return results

    def on_reduced(self, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]) -> list[Tile]:
        """The results as the operator's rule gives them, which may not have their shardings yet."""
        if any(t.sharding.manual for t in tiles) and eqn.primitive not in CROSSING_MANUAL:
            return run_manually(self, eqn, tiles)
        rule = RULES.get(eqn.primitive) or unknown_rule(eqn, self.strict)
        if rule.partition:
            return rule.partition(self, eqn, tiles, targets)
        return partition_by_factors(self, eqn, rule, tiles, targets)

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
