"""Stacks: tensors as the rows of one, and back.

A stack whose rows are split between all devices is dealt out: each device sends its tiles of the
rows to the devices of the rows, in one AllToAll. Every row may have another sharding. The way back
is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from gshard._jax import split_p, stack_p, unstack_p
from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.moving.costs import sent_bytes, timed
from gshard.moving.steps import copies_as_split
from gshard.rules.base.rule import (
    Context,
    Doc,
    Rule,
    Way,
    bind_local,
    linear_in_all,
    register,
    rule,
)
from gshard.rules.base.unreduced import stacked
from gshard.rules.base.ways import by_factors
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding, Shardings, Targets
from gshard.tensors.tile import Tile, Tiles, itemsize_of
from gshard.tensors.uneven import stack, unstack


def stack_factors(eqn: JaxprEqn) -> Factors:
    """The dim along which tensors are stacked, or unstacked, is unsplit; the others are free."""
    rank = max(len(a.aval.shape) for a in (*eqn.invars, *eqn.outvars))
    whole = [None if d == eqn.params["axis"] else f"d{d}" for d in range(rank)]
    parts = [name for name in whole if name]
    operands, results = (
        [whole if len(a.aval.shape) == rank else parts for a in atoms]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Factors.of(eqn, operands, results)


@dataclass(frozen=True)
class Deal:
    """Rows of one shape, each under one of `forms`, and where they are in a stack.

    `rows` has for every device the numbers of its rows; those beyond the last are padding.
    """

    shape: tuple[int, ...]
    forms: tuple[Sharding, ...]
    rows: np.ndarray

    @property
    def size(self) -> int:
        """The elements of the largest tile of a row."""
        return max(math.prod(form.local_shape(self.shape)) for form in self.forms)

    def stacked(self, place: Place, tiles: Sequence[Tile], reason: Reason) -> jax.Array:
        """This device's rows, of which it gets the tiles from all."""
        flat = [_padded(t.array.reshape(1, -1), self.size) for t in tiles]
        flat.append(jnp.zeros_like(flat[0]))
        numbers = np.minimum(self.rows, len(tiles)).ravel().tolist()
        sent = jnp.concatenate([flat[n] for n in numbers]).reshape(*self.rows.shape, -1)
        got = self._exchanged(place, sent, reason)

        def row(form: Sharding, slot: int) -> jax.Array:
            local = form.local_shape(self.shape)
            parts = got[:, slot, : math.prod(local)].reshape(-1, *local[1:])
            return unstack(parts, form, self.shape)

        return self._of_its_form(place, row, 0)

    def unstacked(self, place: Place, stacked: jax.Array, reason: Reason) -> list[jax.Array]:
        """This device's tiles of all rows, of each of which one device has all."""

        def parts(form: Sharding, slot: int) -> jax.Array:
            tiles = stack(stacked[slot], form).reshape(len(self.rows), -1)
            return _padded(tiles, self.size)

        got = self._exchanged(place, self._of_its_form(place, parts, 1), reason)
        found = []
        for number, form in enumerate(self.forms):
            ((device,), (slot,)) = np.nonzero(self.rows == number)
            local = form.local_shape(self.shape)
            found.append(got[device, slot, : math.prod(local)].reshape(local))
        return found

    def _exchanged(self, place: Place, pieces: jax.Array, reason: Reason) -> jax.Array:
        everyone = (tuple(range(place.num_devices)),)
        return collectives.all_to_all(place, pieces, everyone, reason)

    def _of_its_form(self, place: Place, make: Any, dim: int) -> jax.Array:
        """What is made for each of a device's rows by the form of that row, stacked."""
        kinds = list(dict.fromkeys(self.forms))
        numbers = np.array([*map(kinds.index, self.forms), 0])
        table = numbers[np.minimum(self.rows, len(self.forms))]
        slots = range(self.rows.shape[1])
        found = [jnp.stack([make(form, slot) for slot in slots], dim) for form in kinds]
        mine, result = place.lookup(table) if len(kinds) > 1 else None, found[0]
        for kind, other in enumerate(found[1:], 1):
            mask = jnp.expand_dims(mine == kind, [d for d in range(other.ndim) if d != dim])
            result = jnp.where(mask, other, result)
        return result


def _padded(rows: jax.Array, size: int) -> jax.Array:
    return jnp.pad(rows, [(0, 0), (0, size - rows.shape[1])])


def _deal(eqn: JaxprEqn, stacks: Sharding, rows: Sequence[Sharding]) -> Deal | None:
    """How rows under these shardings are dealt out, or collected; None if they cannot be."""
    shape = (eqn.invars if eqn.primitive is stack_p else eqn.outvars)[0].aval.shape
    axis, split = eqn.params["axis"], stacks.splits[eqn.params["axis"]]
    alone = split is not None and stacks.replace(axis, None).is_replicated
    if not alone or split.tiles != stacks.num_devices or all(s.is_replicated for s in rows):
        return None
    forms = [_on_all(s, shape) for s in rows if s.is_tiling and not s.idle]
    if len(forms) < len(rows) or is_key_type(eqn.invars[0].aval.dtype):
        return None
    slots = split.rows(len(rows))
    return Deal(shape, tuple(forms), split.coords[:, None] * slots + np.arange(slots))


def _on_all(here: Sharding, shape: Sequence[int]) -> Sharding:
    """`here` with its copies as tiles, along the dim of which a device has most."""
    if (spare := copies_as_split(here)) is None:
        return here
    dim = int(np.argmax(here.local_shape(shape)))
    split = here.splits[dim]
    return here.replace(dim, split.times(spare) if split else spare)


def stack_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterator[Way]:
    """By factors, with all rows on every device; or dealt out."""
    yield from by_factors(eqn, stack_factors(eqn), shardings, targets)
    stacking = eqn.primitive is stack_p
    (stacks, *_), rows = (targets, shardings) if stacking else (shardings, targets)
    if deal := _deal(eqn, stacks, rows):
        pieces = deal.rows.size * deal.size * itemsize_of(eqn.invars[0].aval.dtype)
        sent = timed(sent_bytes("all_to_all", pieces, stacks.num_devices))
        operands, results = (deal.forms, (stacks,)) if stacking else ((stacks,), deal.forms)
        yield Way(operands, results, deal, sent=sent)


def _run(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    deal, name, axis = way.how, eqn.primitive.name, eqn.params["axis"]
    if not isinstance(deal, Deal):
        return way.how.run(ctx, eqn, bind_local, tiles, targets)
    operand, reason = Reason("operand", name), Reason("step", name, "tiles of rows between devices")
    ready = [ctx.reshard(t, here, operand) for t, here in zip(tiles, way.operands, strict=True)]
    shapes = [tuple(v.aval.shape) for v in eqn.outvars]
    if eqn.primitive is stack_p:
        array = jnp.moveaxis(deal.stacked(ctx.place, ready, reason), 0, axis)
        return [Tile(array, way.results[0], shapes[0])]
    arrays = deal.unstacked(ctx.place, jnp.moveaxis(ready[0].array, axis, 0), reason)
    return [Tile(*made) for made in zip(arrays, way.results, shapes, strict=True)]


rule(
    stack_p,
    factors=stack_factors,
    ways=stack_ways,
    linear=replace(linear_in_all, run=stacked),
    doc=Doc(free="the operands' dims", gather="the stack's dim: AllToAll of the operands' tiles"),
)(_run)
rule(
    unstack_p,
    factors=stack_factors,
    ways=stack_ways,
    doc=Doc(free="the results' dims", gather="the other: AllToAll of the results' tiles"),
)(_run)
register(Rule(stack_factors, doc=Doc(free="other dims", halo="as its slices")), split_p)
