"""The rule of a ring pass (`gshard.rules.base.ring_pass`): blocks of keys pass around the devices.

A device's queries and a block of keys are treated as a tile on a larger grid of devices and blocks:
the body is partitioned for that grid, on which it needs no communication. Sums over keys stay on
the device; sums over queries are passed on with their block of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.reductions import identity
from gshard.rules.base.ring_pass import KEYS, RingPass, Sum, ring_pass_p
from gshard.rules.base.rule import Context, Doc, Rule, register
from gshard.rules.contraction import ring_of
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors
from gshard.tensors.sharding import Sharding, Split, compatible
from gshard.tensors.tile import Tile

Chosen = dict[str, Split]


def ring_pass_factors(eqn: JaxprEqn) -> Factors:
    """Every dim is named; contracted dims cannot be split, but for queries and keys."""
    ring: RingPass = eqn.params["ring"]

    def dims(atom: Any) -> list[str | None]:
        return [None if n in ring.whole else n for n in ring.names[atom]]

    operands = eqn.params["body"].invars
    return Factors.of(eqn, [dims(a) for a in operands], [dims(v) for v in _outs(ring)])


def _outs(ring: RingPass) -> list[Any]:
    return [s.eqn.outvars[0] for s in ring.sums]


@dataclass(frozen=True)
class _Block(Place):
    """One device with one block of keys, as a device of a larger grid: `count` per device."""

    outer: Place = field(default_factory=lambda: Place((), 0))
    count: int = 1
    number: Any = 0

    def lookup(self, table: np.ndarray) -> jax.Array | int:
        """Row (device, block) of a table with a row for each."""
        rows = np.asarray(table, np.int32).reshape(-1, self.count, *np.shape(table)[1:])
        if (rows == rows[:, :1]).all():
            return self.outer.lookup(rows[:, 0])
        if (rows == rows[:1]).all():
            return jnp.asarray(rows[0])[self.number]
        return jnp.asarray(self.outer.lookup(rows))[self.number]


class _Round:
    """A ring pass on a device."""

    def __init__(self, ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]):
        self.ctx, self.eqn = ctx, eqn
        self.ring: RingPass = eqn.params["ring"]
        self.body: Jaxpr = eqn.params["body"]
        self.devices = targets[0].num_devices
        self.blocks = self.ring.split.tiles
        self.chosen = self.choose(tiles, targets)
        self.tiles = [
            ctx.reshard(tile, self.sharding_of(var), Reason("operand", "attention in a ring"))
            for tile, var in zip(tiles, self.body.invars, strict=True)
        ]
        keys = self.ring.keys
        names = [self.ring.names[v] for v in self.body.invars]
        self.passed = [keys in n and self.ring.queries not in n for n in names]

    # ------------------------------------------------------------ shardings

    def choose(self, tiles: list[Tile], targets: list[Sharding]) -> Chosen:
        """Splits of the dims: of queries and keys as they have to be, of others as they are."""
        ring = self.ring
        chosen: Chosen = {ring.queries: ring.split, ring.keys: ring.split}
        tensors = [*zip(self.body.invars, tiles, strict=True)]
        shardings = [(v, t.sharding) for v, t in tensors]
        shardings += [*zip(_outs(ring), targets, strict=True)]
        for var, sharding in shardings:
            for name, split in zip(ring.names[var], sharding.splits, strict=True):
                if not split or name in ring.whole or name in chosen:
                    continue
                others = [s for n, s in chosen.items() if n not in (ring.keys,)]
                if compatible((*others, split)):
                    chosen[name] = split
        return chosen

    def sharding_of(self, var: Any) -> Sharding:
        """The sharding of a tensor on the devices; one with queries and keys has all keys."""
        names = self.ring.names[var]
        both = self.ring.queries in names and self.ring.keys in names
        splits = [None if both and n == self.ring.keys else self.chosen.get(n) for n in names]
        return Sharding(tuple(splits), self.devices)

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

    def part(self, number: int, array: jax.Array, place: _Block) -> Tile:
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

    def add_block(
        self, number: jax.Array, arrays: Sequence[jax.Array], state: list[Any]
    ) -> list[Any]:
        """The state after one more block of keys."""
        ring, block_mask = self.ring, self.ring.mask
        place = self.block(self.ctx.place, number)
        parts = [self.part(n, a, place) for n, a in enumerate(arrays)]

        def computed(state: list[Any]) -> list[Any]:
            inside = self.block(place.outer, number)
            scores = self.partitioner(inside, self.body).run(self.body, parts)
            values = dict(zip(self.body.invars, parts, strict=True))
            return self.added(list(state), scores, values, inside)

        def left_out(state: list[Any]) -> list[Any]:
            if not ring.softmax:
                return state
            return self.add_uniform_block(list(state), parts, self.block(place.outer, number))

        if block_mask is None:
            return computed(state)
        (mask,) = self.partitioner(place, block_mask.body).run(block_mask.body, parts)
        mask = replace(mask, array=mask.array if block_mask.seen else ~mask.array)
        needed = jnp.any(mask.masked(place, False).array)
        if block_mask.shift is not None:
            shift = parts[self.body.invars.index(block_mask.shift)].masked(place, jnp.inf).array
            needed |= ~jnp.all(jnp.exp(jnp.asarray(block_mask.fill, shift.dtype) - shift) == 0)
        return lax.cond(needed, computed, left_out, state)

    def block(self, outer: Place, number: jax.Array) -> _Block:
        """This device with a block of keys; what is looked up stays inside."""
        outer = outer.inner()
        devices = self.devices * self.blocks
        return _Block(outer.axes, devices, outer=outer, count=self.blocks, number=number)

    def partitioner(self, place: _Block, body: Jaxpr) -> Context:
        """What runs a body on a block."""
        variables = [v for e in body.eqns for v in e.outvars] + body.invars
        return self.ctx.on(place, {v: self.sharding_in_block(v) for v in variables})

    def added(
        self, state: list[Any], scores: list[Tile], values: dict[Any, Tile], place: _Block
    ) -> list[Any]:
        """The state with a block's scores."""
        softmax = self.ring.softmax
        online = set()
        if softmax:
            top = self.ring.sums[softmax.maximum]
            logits = scores[softmax.logits]
            highest = self.summed(top, logits, values, place)
            logits = logits.masked(place, identity("max", logits.array.dtype))
            online = self.online(state, highest, logits, values, place)
        for n, s in enumerate(self.ring.sums):
            if n not in online:
                part = self.summed(s, scores[s.scores], values, place)
                state[n] = _joined(s, state[n], part)
        return state

    def add_uniform_block(self, state: list[Any], parts: list[Tile], place: _Block) -> list[Any]:
        """The state with a block whose logits are all equal: as if it had one key, repeated.

        A query without any visible key weighs all values equally.
        """
        ring, softmax, block_mask = self.ring, self.ring.softmax, self.ring.mask
        assert softmax
        assert block_mask
        var = ring.sums[softmax.maximum].eqn.invars[0]
        names, here = ring.names[var], self.sharding_in_block(var)
        size = here.local_shape(var.aval.shape)
        begin = place.number * size[names.index(ring.keys)]
        length = var.aval.shape[names.index(ring.keys)]
        keys = jnp.clip(length - begin, 0, size[names.index(ring.keys)])
        one = [1 if n == ring.keys else m for n, m in zip(names, size, strict=True)]
        whole = Tile(jnp.zeros(size, var.aval.dtype), here, tuple(var.aval.shape))
        logits = _one_key(
            jnp.full(one, block_mask.fill, var.aval.dtype), whole, names.index(ring.keys)
        )

        def summed(tile: Tile, dims: tuple[str, ...]) -> Tile:
            if ring.keys not in dims or ring.queries in dims:
                return tile
            dim = dims.index(ring.keys)
            total = jnp.sum(tile.masked(place, 0, [dim]).array, dim, keepdims=True)
            return _one_key(total, tile, dim)

        values = {v: summed(t, ring.names[v]) for v, t in zip(self.body.invars, parts, strict=True)}
        highest = jnp.max(logits.array, names.index(ring.keys))
        self.online(state, highest, logits, values, place, keys)
        return state

    def summed(
        self, s: Sum, scores: Tile, values: dict[Any, Tile], place: _Block, wide: Any = None
    ) -> jax.Array:
        """The sum of one block's scores."""
        kind = {p.reduce_max_p: "max", p.reduce_min_p: "min"}.get(s.eqn.primitive, "sum")
        along = {self.ring.keys, self.ring.queries}
        operands = []
        for n, atom in enumerate(s.eqn.invars):
            tile = scores if n == s.number else values.get(atom)
            if tile is None or isinstance(atom, Literal):
                operands.append(atom.val)
                continue
            if s.eqn.primitive is p.dot_general_p:
                gone = s.eqn.params["dimension_numbers"][0][n]
            else:
                gone = s.eqn.params["axes"]
            dims = [int(d) for d in gone if self.ring.names[atom][d] in along]
            neutral = identity(kind, tile.array.dtype)
            operands.append(tile.masked(place, neutral, dims).array)
        changed = {"preferred_element_type": wide} if wide is not None else {}
        (part,) = bind(s.eqn, operands, **changed)
        return part

    def online(
        self,
        state: list[Any],
        highest: jax.Array,
        logits: Tile,
        values: dict[Any, Tile],
        place: _Block,
        times: jax.Array | int = 1,
    ) -> set[int]:
        """The online softmax updated by a block, and the sums that it computes.

        Each of the logits counts `times` times.
        """
        softmax, sums = self.ring.softmax, self.ring.sums
        assert softmax
        top = sums[softmax.maximum]
        names = self.ring.names[top.eqn.outvars[0]]
        before = state[softmax.maximum]
        highest = lax.max(before, highest)
        shift = jnp.where(jnp.isneginf(highest), 0, highest)
        own = self.ring.names[top.eqn.invars[0]]
        powers = jnp.exp(logits.array - _along(shift, names, own, logits.array.shape))
        less = jnp.exp(before - shift)
        part = times * jnp.sum(powers, own.index(self.ring.keys))
        state[softmax.maximum] = highest
        state[softmax.total] = state[softmax.total] * less + part
        for n, _ in softmax.weighted:
            s = sums[n]
            weights = powers.astype(s.eqn.invars[s.number].aval.dtype)
            part = self.summed(s, replace(logits, array=weights), values, place, state[n].dtype)
            outs = self.ring.names[s.eqn.outvars[0]]
            state[n] = state[n] * _along(less, names, outs, part.shape) + part
        return {softmax.maximum, softmax.total, *(n for n, _ in softmax.weighted)}

    # ------------------------------------------------------------ the round

    def start(self) -> list[jax.Array]:
        """The initial state; sums over queries have one block of the result."""
        state = []
        online = self.ring.softmax
        wide = {n for n, _ in online.weighted} if online else set()
        for n, s in enumerate(self.ring.sums):
            var = s.eqn.outvars[0]
            kind = {p.reduce_max_p: "max", p.reduce_min_p: "min"}.get(s.eqn.primitive, "sum")
            local = self.sharding_of(var).local_shape(var.aval.shape)
            dtype = jnp.promote_types(var.aval.dtype, jnp.float32) if n in wide else var.aval.dtype
            state.append(jnp.full(local, identity(kind, dtype)))
        return state

    def run(self) -> list[Tile]:
        """All blocks, each passed on while the next arrives."""
        place, split, tiles = self.ctx.place, self.ring.split, self.tiles
        first = place.coord(split)
        mine = [self.ring.names[v] for v in self.body.invars]
        pairs = [
            ring_of(t.sharding, n.index(self.ring.keys)) if v else []
            for t, n, v in zip(tiles, mine, self.passed, strict=True)
        ]
        number: dict[Any, int] = {}  # a value that is read as two operands is sent once
        ways = zip(tiles, pairs, strict=True)
        of = [number.setdefault((t.key, str(way)), len(number)) for t, way in ways]
        each = [of.index(n) for n in number.values()]
        carried = [s.over != KEYS for s in self.ring.sums]
        back = [
            ring_of(self.sharding_of(v), self.ring.names[v].index(self.ring.keys)) if c else []
            for v, c in zip(_outs(self.ring), carried, strict=True)
        ]
        why = f"keys of {self.blocks} devices exceed the memory limit"
        reason = Reason("step", "attention in a ring", why)

        def passed(arrays: Sequence[Any], ways: Sequence[Any]) -> list[Any]:
            return [
                collectives.collective_permute(place, a, way, reason) if way else a
                for a, way in zip(arrays, ways, strict=True)
            ]

        def step(i: jax.Array, carry: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            arrays, state = carry
            state = self.add_block((first + i) % self.blocks, [arrays[n] for n in of], state)
            return passed(arrays, [pairs[n] for n in each]), passed(state, back)

        carry = ([tiles[n].array for n in each], self.start())
        arrays, state = lax.fori_loop(0, self.blocks - 1, step, carry)
        last = jnp.asarray((first + self.blocks - 1) % self.blocks)
        state = self.add_block(last, [arrays[n] for n in of], state)
        state = self.finished(passed(state, back))
        return [
            Tile(a, self.sharding_of(v), tuple(v.aval.shape))
            for a, v in zip(state, _outs(self.ring), strict=True)
        ]

    def finished(self, state: list[jax.Array]) -> list[jax.Array]:
        """The results; weights are divided by their sum at the end."""
        softmax, sums = self.ring.softmax, self.ring.sums
        if softmax is None:
            return state
        names = self.ring.names[sums[softmax.total].eqn.outvars[0]]
        for n, divided in softmax.weighted:
            var = sums[n].eqn.outvars[0]
            total = _along(state[softmax.total], names, self.ring.names[var], state[n].shape)
            state[n] = (state[n] / total if divided else state[n]).astype(var.aval.dtype)
        return state


def _one_key(array: jax.Array, like: Tile, dim: int) -> Tile:
    """A tile with one key instead of a block of them."""
    shape = (*like.shape[:dim], 1, *like.shape[dim + 1 :])
    return Tile(array, like.sharding.replace(dim, None), shape)


def _joined(s: Sum, total: jax.Array, part: jax.Array) -> jax.Array:
    join = {p.reduce_max_p: lax.max, p.reduce_min_p: lax.min}.get(s.eqn.primitive, lax.add)
    return join(total, part.astype(total.dtype))


def _along(
    x: jax.Array, names: Sequence[str], wanted: Sequence[str], shape: Sequence[int]
) -> jax.Array:
    """A row of numbers for each query, repeated for the other dims that are `wanted`."""
    gone = [d for d, n in enumerate(names) if n not in wanted]
    x = lax.squeeze(x, gone)
    kept = [n for n in names if n in wanted]
    order = sorted(range(len(kept)), key=lambda i: wanted.index(kept[i]))
    x = lax.transpose(x, order)
    return lax.broadcast_in_dim(x, shape, sorted(wanted.index(n) for n in kept))


def _partition(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    return _Round(ctx, eqn, tiles, targets).run()


register(
    Rule(
        ring_pass_factors,
        partition=_partition,
        doc=Doc(free="batch dims, heads", gather="keys: a ring of CollectivePermutes"),
    ),
    ring_pass_p,
)
