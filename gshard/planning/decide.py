"""Decisions: how every equation of a program runs, before anything is traced.

One walk over the program and its bodies, on tiles without elements: it knows the shardings of all
values, those that are unreduced, and what is available under which others. A loop carries a sum
unreduced if its body adds to it or is linear in it, and then sends less: its body is walked for
each of the two, and the reductions of both are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.graph.regions import LOOPS, Loop
from gshard.moving.partial import combine, combine_cost
from gshard.planning.choose import Choice
from gshard.planning.walk import Decisions, Walk
from gshard.rules import RegionRule, Rule
from gshard.rules.base.rule import Carried, Way
from gshard.rules.base.unreduced import owners_of
from gshard.rules.base.uses import SCATTERED, Delayed, accumulators, leaving, linear_carries
from gshard.rules.base.ways import FactorSplit
from gshard.rules.indexing import held_dims, roles_of
from gshard.rules.scatter import unreduced_start
from gshard.tensors.manual import to_manual_p
from gshard.tensors.sharding import Sharding, Targets
from gshard.tensors.tile import HeldRows, Tile, Tiles, byte_size


class Decider(Walk):
    """Walks over a program without elements, and decides."""

    choice: Choice

    def begin(self, jaxpr: Jaxpr, tiles: Sequence[Tile], leaving: Mapping[int, float]) -> None:
        """Find the sums that may stay unreduced."""
        shares = Delayed(self.uses, leaving, self.found.shardings)
        self.unreduced = self.decisions.shares[jaxpr] = shares
        self.choice = Choice(self.found, self.uses, shares, self.mover, self.memory_limit)
        self.control = self.weakly

    def rule(self, eqn: JaxprEqn, tiles: Sequence[Tile]) -> Rule | RegionRule:
        """The rule of an equation; a region that only a trace knows has results as propagated."""
        rule = super().rule(eqn, tiles)
        return rule if isinstance(rule, Rule) or eqn.primitive in LOOPS else _REGION

    def equation(self, number: int, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
        """The results of one equation, which may be unreduced."""
        self.choice.now, self.choice.tiles = number, self.tiles
        shardings = [t.sharding for t in tiles]
        if way := self.choice.in_place(eqn, shardings, targets):
            self.decisions.ways[eqn] = shardings, way  # as most are
            return self._named(eqn, tiles, way.how.blanks(eqn))
        return super().equation(number, eqn, tiles, targets)

    def left(self, var: Any, tile: Tile, target: Sharding) -> Sharding:
        """Unreduced, if it may be."""
        if not tile.is_unreduced or var not in self.unreduced:
            return target
        self.decisions.sums[var] = tile
        return tile.sharding

    def cheapest(
        self, eqn: JaxprEqn, rule: Rule, tiles: Sequence[Tile], targets: Sequence[Sharding]
    ) -> Way:
        """The cheapest way to run `eqn` on `tiles`; a slice may gather its operand for others."""
        here, gathered = [t.sharding for t in tiles], None
        if eqn.primitive is p.slice_p and 0 not in eqn.outvars[0].aval.shape:
            gathered = self.choice.for_all_slices(eqn, here[0])
        if gathered is None or gathered is here[0]:
            way = self.choice.cheapest(eqn, rule, tiles, targets)
        else:
            operand = self.reshard(tiles[0], gathered, Reason("operand", "slice"))
            way = self.choice.cheapest(eqn, rule, [operand], targets)._replace(how=gathered)
        self.decisions.ways[eqn] = here, way
        return way

    def results(self, eqn: JaxprEqn, rule: Rule, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
        """What `eqn` makes of `tiles` in this way."""
        avals, name = [v.aval for v in eqn.outvars], eqn.primitive.name
        if isinstance(way.how, FactorSplit) and way.how.in_place:
            return way.how.blanks(eqn)
        held, start = None, None
        if eqn.primitive is p.gather_p and way.kind:
            held = HeldRows(None, held_dims(roles_of(eqn), way.how.chosen))
        if eqn.primitive in SCATTERED and way.kind == "sum":
            if 0 in tiles[2].shape:
                return tiles[:1]
            nothing = Tile.blank(way.results[0], tiles[0].shape, tiles[0].array.dtype)
            stays = self.stays_unreduced(eqn.outvars[0], nothing, way.kind)
            start = unreduced_start(self.place, tiles[0], way.results[0], stays)
        reason = Reason("operand", name)
        for number, (tile, wanted) in enumerate(zip(tiles, way.operands, strict=True)):
            if number or start is None:
                self.reshard(tile, wanted, reason)
        found = []
        for var, aval, here, target in zip(eqn.outvars, avals, way.results, targets, strict=True):
            tile = Tile.blank(here, tuple(aval.shape), aval.dtype, name, held)
            stays = self.stays_unreduced(var, tile, way.kind)
            if here.unreduced and not (start or (stays and eqn.primitive not in SCATTERED)):
                if way.kind == "sum":
                    self._reduce(here, target, aval)
                tile = combine(self.place, tile, way.kind, target)
            found.append(tile)
        return found

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding."""
        if tile.is_unreduced:
            self._reduce(tile.sharding, target, ShapedArray(tile.shape, tile.array.dtype))
        return self.mover.reshard(tile, target, reason)

    def _reduce(self, here: Sharding, target: Sharding, aval: Any) -> None:
        """Count a reduction."""
        self.decisions.reductions += combine_cost(here, "sum", target, aval) * self.decisions.runs

    def constant(self, value: Any) -> Tile:
        """A replicated constant."""
        aval = jax.typeof(value)
        sharding = Sharding.replicated(len(aval.shape), self.place.num_devices)
        return Tile.blank(sharding, tuple(aval.shape), aval.dtype)

    # ------------------------------------------------------------ loops: every body once

    def scan(
        self, step: Callable[..., Any], init: Any, xs: Sequence[Any], length: int, **_: Any
    ) -> Any:
        """As `lax.scan`."""
        before = self.decisions.runs
        self.decisions.runs *= length
        _, made = step(init, [ShapedArray(x.shape[1:], x.dtype) for x in xs])
        self.decisions.runs = before
        return init, [ShapedArray((length, *y.shape), y.dtype) for y in made]

    def while_loop(self, again: Callable[..., Any], step: Callable[..., Any], init: Any) -> Any:
        """As `lax.while_loop`."""
        again(init)
        step(init)
        return init

    def switch(self, index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
        """As `lax.switch`."""
        first, *_ = [branch(*operands) for branch in branches]
        return first

    def platform_dependent(self, *operands: Any, **branches: Callable[..., Any]) -> Any:
        """As `lax.platform_dependent`."""
        return self.switch(None, list(branches.values()), *operands)

    def carried(self, scan: Loop) -> Carried:
        """The values that a loop carries unreduced, found once for what its results pay."""
        known = self.decisions.known
        key = (scan.eqn, *[self.unreduced.get(v) for v in scan.eqn.outvars])
        if key not in known:
            known[key] = self._carried(scan)
        self.decisions.carried[scan.eqn] = known[key]
        return known[key]

    def _tried(
        self, closed: ClosedJaxpr, leave: Mapping[int, float], carried: Mapping[Any, Sharding]
    ) -> Decisions:
        """The decisions for a body that is entered with these unreduced values."""
        trial, known = Decisions(known=self.decisions.known), self.found.shardings
        inner = Decider(self.place, self.found, self.memory_limit, self.strict, trial)
        tiles = [
            Tile.blank(carried.get(v, known[v]), tuple(v.aval.shape), v.aval.dtype)
            for v in closed.jaxpr.invars
        ]
        inner.run_body(closed, tiles, leave)
        return trial

    def _carried(self, scan: Loop) -> Carried:
        """Values to which the body only adds, and those that it is linear in."""
        (closed,), known = scan.bodies, self.found.shardings
        body, sums = closed.jaxpr, dict(leaving(scan, self.unreduced))
        for i, v in enumerate(scan.eqn.outvars):  # stacks that one ReduceScatter sums
            if i >= scan.carry and known[v].splits[0] and not isinstance(body.outvars[i], Literal):
                sums[i] = 1.0
        added, linear = accumulators(scan), linear_carries(scan)
        if not added and not linear:
            return Carried({}, {}, sums)
        inside, forms = body.invars[scan.consts : scan.consts + scan.carry], dict[int, Sharding]()
        found = self._tried(closed, sums, {}).sums
        for i, variables in added.items():
            parts = [None if isinstance(v, Literal) else found.get(v) for v in variables]
            first = parts[0]
            same = first and all(part and part.sharding is first.sharding for part in parts)
            if first and same and self._may_carry(inside[i], first.sharding):
                forms[i] = first.sharding
        origins = {i: found[added[i][0]].origin for i in forms}
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
        (closed,), ends = scan.bodies, scan.bodies[0].jaxpr.outvars
        inside = closed.jaxpr.invars[scan.consts : scan.consts + scan.carry]
        start = {inside[i]: here for i, here in known.forms.items()}
        sums, carried, more = {**known.sums, **linear}, dict(start), True
        while more:  # one that is unreduced may leave others so
            found = self._tried(closed, sums, carried).sums
            able = {inside[i]: found[ends[i]].sharding for i in linear if ends[i] in found}
            able = {v: here for v, here in able.items() if self._may_carry(v, here)}
            more = not able.keys() <= carried.keys()
            carried = {**able, **carried}
        changed = {i: carried[inside[i]] for i in linear if inside[i] in carried}
        kept = {**known.sums, **{i: linear[i] for i in changed}}
        after = self._tried(closed, kept, carried)
        found = after.sums
        if any(ends[i] not in found or found[ends[i]].sharding is not changed[i] for i in changed):
            return known
        before, last = self._tried(closed, known.sums, start), 0.0
        for i, here in changed.items():  # in every run, a share of an AllReduce of each
            aval = inside[i].aval
            last += 2 * byte_size(here.local_shape(aval.shape), aval.dtype) * linear[i]
        if after.reductions + last >= before.reductions:
            return known
        origins = {i: found[ends[i]].origin for i in changed}
        return Carried({**known.forms, **changed}, {**known.origins, **origins}, kept)


def _blanks(ctx: Any, eqn: JaxprEqn, tiles: Tiles, targets: Targets) -> Tiles:
    """Results under the shardings that propagation gave them, of operands that it moves."""
    reason = Reason("operand", eqn.primitive.name)
    if eqn.primitive is to_manual_p:
        ctx.reshard(tiles[0], eqn.params["annotation"].sharding, reason)
    elif any(t.sharding.manual for t in tiles):
        for tile in tiles:
            if not tile.sharding.manual:
                devices = tile.sharding.num_devices
                ctx.reshard(tile, Sharding.replicated(tile.sharding.rank, devices), reason)
    pairs = zip(targets, eqn.outvars, strict=True)
    return [Tile.blank(here, tuple(v.aval.shape), v.aval.dtype) for here, v in pairs]


_REGION = RegionRule(_blanks)
