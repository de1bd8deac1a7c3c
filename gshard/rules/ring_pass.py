"""The rule of a ring pass (`gshard.rules.base.ring_pass`): blocks of keys pass around the devices.

A device's queries and a block of keys are treated as a tile on a larger grid of devices and blocks:
the body is partitioned for that grid, on which it needs no communication. Sums over keys stay on
the device; sums over queries are passed on with their block of keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving.costs import timed
from gshard.moving.reductions import identity
from gshard.rules.base.ring_pass import KEYS, RingPass, Softmax, Sum, ring_pass_p
from gshard.rules.base.rule import Context, Doc, Way, rule
from gshard.rules.contraction import Pairs, Ring, ring_of
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets, compatible
from gshard.tensors.tile import Arrays, Tile, Tiles, byte_size

Chosen = dict[str, Split]
Values = dict[Any, Tile]  # of variables


def ring_pass_factors(eqn: JaxprEqn) -> Factors:
    """Every dim is named; contracted dims cannot be split, but for queries and keys."""
    ring: RingPass = eqn.params["ring"]

    def dims(atom: Any) -> list[str | None]:
        return [None if n in ring.whole else n for n in ring.names[atom]]

    operands = eqn.params["body"].invars
    return Factors.of(eqn, [dims(a) for a in operands], [dims(s.out) for s in ring.sums])


@dataclass(frozen=True)
class _Block(Place):
    """One device with one block of keys, as a device of a larger grid: `count` per device."""

    outer: Place = field(default_factory=lambda: Place((), 0))
    count: int = 1
    number: Any = 0

    def lookup(self, table: np.ndarray) -> Array | int:
        """Row (device, block) of a table with a row for each."""
        rows = np.asarray(table, np.int32).reshape(-1, self.count, *np.shape(table)[1:])
        if (rows == rows[:, :1]).all():
            return self.outer.lookup(rows[:, 0])
        if (rows == rows[:1]).all():
            return jnp.asarray(rows[0])[self.number]
        return jnp.asarray(self.outer.lookup(rows))[self.number]


def _chosen(eqn: JaxprEqn, shardings: Shardings, targets: Targets) -> Chosen:
    """Splits of the dims: of queries and keys as they have to be, of others as they are."""
    ring: RingPass = eqn.params["ring"]
    chosen: Chosen = {ring.queries: ring.split, ring.keys: ring.split}
    variables = [*eqn.params["body"].invars, *(s.out for s in ring.sums)]
    for var, sharding in zip(variables, (*shardings, *targets), strict=True):
        for name, split in zip(ring.names[var], sharding.splits, strict=True):
            if not split or name in ring.whole or name in chosen:
                continue
            others = [s for n, s in chosen.items() if n != ring.keys]
            if compatible((*others, split)):
                chosen[name] = split
    return chosen


def ring_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """Around the ring, where keys are sent to all devices but one, and sums over queries to all."""
    ring, chosen = eqn.params["ring"], _chosen(eqn, shardings, targets)

    def sharding(var: Any) -> Sharding:
        """On the devices; a tensor with queries and keys has all keys."""
        names = ring.names[var]
        both = ring.queries in names and ring.keys in names
        splits = [None if both and n == ring.keys else chosen.get(n) for n in names]
        return Sharding(tuple(splits), targets[0].num_devices)

    def tile(atom: Any, here: Sharding) -> int:
        return byte_size(here.local_shape(atom.aval.shape), atom.aval.dtype)

    operands = tuple(map(sharding, eqn.params["body"].invars))
    results = tuple([sharding(s.out) for s in ring.sums])
    pairs = zip(eqn.invars, operands, _passed(eqn), strict=True)
    onwards = {(atom, here): None for atom, here, passes in pairs if passes}
    back = [(s.out, here) for s, here in zip(ring.sums, results, strict=True) if s.over != KEYS]
    sent = (ring.split.tiles - 1) * sum(tile(*each) for each in onwards)
    sent += ring.split.tiles * sum(tile(*each) for each in back)
    yield Way(operands, results, chosen, sent=timed(sent, len(onwards) + len(back)))


def _passed(eqn: JaxprEqn) -> list[bool]:
    """Which operands are passed on: those with keys and without queries."""
    ring = eqn.params["ring"]
    names = [ring.names[v] for v in eqn.params["body"].invars]
    return [ring.keys in n and ring.queries not in n for n in names]


class _Round:
    """A ring pass on a device."""

    def __init__(self, ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles):
        self.ctx, self.eqn = ctx, eqn
        self.ring: RingPass = eqn.params["ring"]
        self.body: Jaxpr = eqn.params["body"]
        self.devices = way.results[0].num_devices
        self.blocks = self.ring.split.tiles
        self.chosen, self.results = way.how, way.results
        self.tiles = [
            ctx.reshard(tile, here, Reason("operand", "attention in a ring"))
            for tile, here in zip(tiles, way.operands, strict=True)
        ]
        self.passed = _passed(eqn)

    # ------------------------------------------------------------ shardings

    def sharding_in_block(self, var: Any) -> Sharding:
        """The sharding of a tensor on the grid of devices and blocks."""
        count, keys = self.blocks, self.ring.keys
        cut = Split.of(np.tile(np.arange(count), self.devices))
        splits = []
        for name in self.ring.names[var]:
            split = self.chosen.get(name)
            lifted = split and Split.of(np.repeat(split.coords, count))
            splits.append(cut if name == keys else lifted)
        return Sharding(tuple(splits), self.devices * count)

    def part(self, number: int, array: Array, place: _Block) -> Tile:
        """A block's part of an operand."""
        var = self.body.invars[number]
        here, shape = self.sharding_in_block(var), tuple(var.aval.shape)
        names = self.ring.names[var]
        if self.ring.keys in names and not self.passed[number]:
            dim = names.index(self.ring.keys)
            size = here.local_shape(shape)[dim]
            array = padding.pad_end(array, dim, size * self.blocks)
            array = lax.dynamic_slice_in_dim(array, place.number * size, size, dim)
        return Tile(array, here, shape)

    # ------------------------------------------------------------ one block

    def add_block(self, number: Array, arrays: Arrays, state: list[Any]) -> list[Any]:
        """The state after one more block of keys."""
        ring, block_mask = self.ring, self.ring.mask
        place = self.block(self.ctx.place, number)
        parts = [self.part(n, a, place) for n, a in enumerate(arrays)]

        def computed(state: list[Any]) -> list[Any]:
            inside = self.block(place.outer, number)
            made = self.partitioner(inside, self.body).run(self.body, parts)
            scores = dict(zip(self.body.outvars, made, strict=True))
            values = dict(zip(self.body.invars, parts, strict=True))
            return self.added(list(state), scores, values, inside)

        if block_mask is None:
            return computed(state)
        (mask,) = self.partitioner(place, block_mask.body).run(block_mask.body, parts)
        mask = mask.holding(mask.array if block_mask.seen else ~mask.array)
        if ring.softmax:  # what is left out is nothing beside the maximum so far
            out = ring.softmax.maximum.out
            top = state[ring.sums.index(ring.softmax.maximum)]
            seen = Tile(top, self.sharding_in_block(out), tuple(out.aval.shape))
        else:
            seen = parts[self.body.invars.index(block_mask.shift)]
        shift = seen.masked(place, jnp.inf).array
        needed = jnp.any(mask.masked(place, False).array)
        needed |= ~jnp.all(jnp.exp(jnp.asarray(block_mask.fill, shift.dtype) - shift) == 0)
        return lax.cond(needed, computed, list, state)

    def block(self, outer: Place, number: Array) -> _Block:
        """This device with a block of keys; what is looked up stays inside."""
        outer = outer.inner()
        devices = self.devices * self.blocks
        return _Block(outer.axes, devices, outer=outer, count=self.blocks, number=number)

    def partitioner(self, place: _Block, body: Jaxpr) -> Context:
        """What runs a body on a block."""
        variables = [v for e in body.eqns for v in e.outvars] + body.invars
        return self.ctx.on(place, {v: self.sharding_in_block(v) for v in variables})

    def added(self, state: list[Any], scores: Values, values: Values, place: _Block) -> list[Any]:
        """The state with a block's scores."""
        if softmax := self.ring.softmax:
            self.online(state, softmax, scores[softmax.maximum.scores], values, place)
        for n, s in enumerate(self.ring.sums):
            if not softmax or s not in softmax.sums:
                part = self.summed(s, scores[s.scores], values, place)
                state[n] = _JOIN[s.kind](state[n], part.astype(state[n].dtype))
        return state

    def summed(self, s: Sum, scores: Tile, values: Values, place: _Block) -> Array:
        """The sum of one block's scores."""
        along = {self.ring.keys, self.ring.queries}
        operands = []
        for n, atom in enumerate(s.eqn.invars):
            tile = scores if n == s.number else values.get(atom)
            if tile is None or isinstance(atom, Literal):
                operands.append(atom.val)
                continue
            dims = [d for d in s.summed(n) if self.ring.names[atom][d] in along]
            neutral = identity(s.kind, tile.array.dtype)
            operands.append(tile.masked(place, neutral, dims).array)
        (part,) = bind(s.eqn, operands)
        return part

    def online(
        self, state: list[Any], softmax: Softmax, logits: Tile, values: Values, place: _Block
    ) -> None:
        """Update the online softmax by a block."""
        number, names = self.ring.sums.index, self.ring.names
        top, total = number(softmax.maximum), number(softmax.total)
        highest = self.summed(softmax.maximum, logits, values, place)
        logits = logits.masked(place, identity("max", logits.array.dtype))
        queries, own = (names[v] for v in (softmax.maximum.out, softmax.maximum.scores))
        before = state[top]
        highest = lax.max(before, highest)
        shift = jnp.where(jnp.isneginf(highest), 0, highest)
        powers = jnp.exp(logits.array - _along(shift, queries, own, logits.array.shape))
        less = jnp.exp(before - shift)
        part = jnp.sum(powers, own.index(self.ring.keys), dtype=state[total].dtype)
        state[top], state[total] = highest, state[total] * less + part
        for s in softmax.weighted:
            n, weights = number(s), logits.holding(powers.astype(s.scores.aval.dtype))
            part = self.summed(s, weights, values, place)
            state[n] = state[n] * _along(less, queries, names[s.out], part.shape) + part

    # ------------------------------------------------------------ the round

    def start(self) -> list[Array]:
        """The initial state; sums over queries have one block of the result."""
        avals = [s.out.aval for s in self.ring.sums]
        pairs = zip(self.ring.sums, self.results, avals, strict=True)
        return [jnp.full(t.local_shape(a.shape), identity(s.kind, a.dtype)) for s, t, a in pairs]

    def pairs(self, var: Any, sharding: Sharding, passes: bool) -> Pairs:
        """The devices between which a tensor with a dim of keys is passed on, if it is."""
        return ring_of(sharding, self.ring.names[var].index(self.ring.keys)) if passes else []

    def run(self) -> Tiles:
        """All blocks, each passed on while the next arrives."""
        sums, shardings = self.ring.sums, self.results
        operands = zip(self.body.invars, self.tiles, self.passed, strict=True)
        pairs = [self.pairs(v, t.sharding, passes) for v, t, passes in operands]
        number: dict[Any, int] = {}  # a value that is read as two operands is sent once
        ways = enumerate(zip(self.tiles, pairs, strict=True))
        keys = [(t.value or n, t.sharding, str(way)) for n, (t, way) in ways]
        of = [number.setdefault(key, len(number)) for key in keys]
        passing = [(self.tiles[n].array, pairs[n]) for n in map(of.index, number.values())]
        back = [
            self.pairs(s.out, sharding, s.over != KEYS)
            for s, sharding in zip(sums, shardings, strict=True)
        ]
        why = f"keys of {self.blocks} devices exceed the memory limit"
        ring = Ring(self.ctx.place, self.ring.split, Reason("step", "attention in a ring", why))

        def step(block: Any, arrays: Sequence[Any], state: Sequence[Any]) -> list[Any]:
            return self.add_block(jnp.asarray(block), [arrays[n] for n in of], list(state))

        state = ring.run(step, passing, [*zip(self.start(), back, strict=True)])
        done = zip(state, shardings, sums, strict=True)
        return [Tile(a, sharding, tuple(s.out.aval.shape)) for a, sharding, s in done]


_JOIN = {"sum": lax.add, "max": lax.max, "min": lax.min}


def _along(x: Array, names: Sequence[str], wanted: Sequence[str], shape: Sequence[int]) -> Array:
    """A row of numbers for each query, repeated for the other dims that are `wanted`."""
    gone = [d for d, n in enumerate(names) if n not in wanted]
    x = lax.squeeze(x, gone)
    kept = [n for n in names if n in wanted]
    order = sorted(range(len(kept)), key=lambda i: wanted.index(kept[i]))
    x = lax.transpose(x, order)
    return lax.broadcast_in_dim(x, shape, sorted(wanted.index(n) for n in kept))


@rule(
    ring_pass_p,
    factors=ring_pass_factors,
    ways=ring_ways,
    doc=Doc(free="batch dims, heads", gather="keys: a ring of CollectivePermutes"),
)
def _ring_pass(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    return _Round(ctx, eqn, way, tiles).run()
