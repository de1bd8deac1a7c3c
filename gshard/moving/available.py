"""Values available during planning: under which shardings, and how to get them under others.

A rule that asks for a tensor under some sharding gets an existing copy if there is one: the tensor
as it was resharded for another operator, a transpose of that, or the tensor it was sliced from. The
body of a loop may use what is available outside: that is moved once, before the loop. Where moving
a value's operands sends fewer bytes, those are moved and the value is recomputed (`recompute`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.partial import combine
from gshard.moving.plan import reshard, reshard_cost
from gshard.moving.recompute import REARRANGING, Made
from gshard.moving.seen import Seen
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Identity, Tile

VIEWS = (p.transpose_p, p.rev_p)


@dataclass(frozen=True)
class View:
    """A tensor that is `source` with its dims permuted by `order`, and some `reversed`."""

    source: Tile
    order: tuple[int, ...]
    reversed: tuple[int, ...]

    def is_local(self, sharding: Sharding) -> bool:
        """Whether it is computed locally from its source: no reversed dim is split."""
        return not any(sharding.splits[d] for d in self.reversed)


@dataclass
class Available:
    """Values under the shardings under which they are available, and views of others.

    None stands for a value that is recomputed for nothing when it is needed.
    """

    forms: dict[Identity, dict[Sharding, Tile | None]] = field(default_factory=dict)
    views: dict[Identity, View] = field(default_factory=dict)

    def inner(self) -> Available:
        """What is available at the start of a body; what the body adds stays inside."""
        return Available({key: dict(found) for key, found in self.forms.items()}, dict(self.views))

    def under(self, tile: Tile, target: Sharding) -> Tile | None:
        """`tile` under another sharding, if available: itself, or what it is a view of."""
        found, view = self._forms(tile).get(target), self.views.get(tile.key)
        if found or view is None or target.manual or not view.is_local(target):
            return found
        back = [view.order.index(d) for d in range(len(view.order))]
        source = self._forms(view.source).get(target.project(back))
        if source is None:
            return None
        array: Any = lax.transpose(source.array, view.order)
        array = lax.rev(array, view.reversed) if view.reversed else array
        return self._add(tile, Tile(array, target, tile.shape))

    def add(self, tile: Tile, moved: Tile) -> None:
        """Remember that a tensor has been moved."""
        self._add(tile, moved)
        if tile.sharding.is_replicated:  # a slice of it need not be gathered again
            self._add(moved, tile)

    def add_view(self, made: Made) -> None:
        """Remember a transpose or a reversal, and its inverse."""
        (source,), result, params = made.operands, made.result, made.eqn.params
        order = tuple(params.get("permutation", range(len(source.shape))))
        back = tuple(order.index(d) for d in range(len(order)))
        turned = tuple(params.get("dimensions", ()))
        self.views[result.key] = View(source, order, turned)
        self.views.setdefault(source.key, View(result, back, turned))

    def add_index(self, made: Made) -> None:
        """Remember integers that are replicated for nothing if their operands are."""
        here = made.result.sharding
        forms = [(t.sharding, *self._forms(t)) for t in made.operands]
        if all(any(form.is_replicated for form in found) for found in forms):
            replicated = Sharding.replicated(here.rank, here.num_devices)
            self.forms.setdefault(made.result.key, {})[replicated] = None

    def forms_of(self, tile: Tile) -> frozenset[Sharding]:
        """The shardings under which `tile` is available."""
        known = frozenset(self._forms(tile))
        if view := self.views.get(tile.key):
            forms = self._forms(view.source)
            known |= {f for form in forms if view.is_local(f := form.project(view.order))}
        return known

    def _forms(self, tile: Tile) -> dict[Sharding, Tile | None]:
        return self.forms.get(tile.key, {})

    def _add(self, tile: Tile, moved: Tile) -> Tile:
        self.forms.setdefault(tile.key, {})[moved.sharding] = moved
        return moved


class Mover:
    """Brings values under the shardings that operators need; a repeated request moves nothing."""

    def __init__(self, place: Place, seen: Seen):
        self.place = place
        self.seen = seen
        self.available = Available()

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding.

        What enters a manual region like this, as the first value of a loop, is replicated.
        """
        here = tile.sharding
        if target.manual and not here.manual:
            replicated = Sharding.replicated(target.rank, target.num_devices)
            return replace(self.reshard(tile, replicated, reason), sharding=target)
        if here is not target and (here.ragged, target.ragged) != (None, None):
            return self._reshard_ragged(tile, target, reason)
        if tile.is_unreduced:
            sums, tile = tile, combine(self.place, tile, "sum", target, reason.operator)
            self.seen.moved(sums, tile, f"reduction, {reason}")
        if tile.sharding == target and tile.is_standard:
            return tile
        found = self.available.under(tile, target)
        if found is None:
            found = self._recomputed(tile, target, reason)
            found = found or reshard(self.place, tile, target, reason)
            self.available.add(tile, found)
        self.seen.moved(tile, found, str(reason))
        return found

    def _reshard_ragged(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """Another sharding of the dims of a row: all rows that devices hold are moved."""
        dim = target.ragged
        assert dim is not None, "rows are exchanged by take_rows"
        split = target.splits[dim]
        assert split is tile.sharding.splits[dim], "rows are exchanged by take_rows"
        assert split
        held = (*tile.shape[:dim], split.tiles * tile.array.shape[dim], *tile.shape[dim + 1 :])
        even = Tile(tile.array, tile.sharding.replace(dim, split.even), held)
        moved = self.reshard(even, target.replace(dim, split.even), reason)
        return Tile(moved.array, target, tile.shape)

    def remember(self, made: Made, elementwise: bool) -> None:
        """Note how a value was made: it may be recomputed elsewhere, instead of being moved."""
        primitive, operands, result = made.eqn.primitive, made.operands, made.result
        if primitive in VIEWS:
            self.available.add_view(made)
        if (elementwise or primitive in REARRANGING) and not any(
            t.is_unreduced or t.sharding.manual or t.sharding.ragged is not None
            for t in (*operands, result)
        ):
            self.place.made[result.key] = made
            if made.is_index:
                self.available.add_index(made)

    def _recomputed(self, tile: Tile, target: Sharding, reason: Reason) -> Tile | None:
        """`tile` recomputed from resharded operands; None if moving it is cheaper."""
        made = self.place.made.get(tile.key)
        if made is None or not tile.is_standard:
            return None
        direct = reshard_cost(tile.sharding, target, tile.shape, tile.array.dtype)
        cost = self._recompute_cost(made, target, direct, made.depth, {})
        # What a reshape is made of can be reshaped otherwise for another operator.
        if cost > direct or (cost == direct and made.eqn.primitive is not p.reshape_p):
            return None
        wanted = made.operands_under(target) or []
        operands = zip(made.operands, wanted, strict=True)
        moved = [self.reshard(t, s, reason).array for t, s in operands]
        return Tile(made.run(moved, target.local_shape(tile.shape)), target, tile.shape)

    def _recompute_cost(
        self, made: Made, target: Sharding, limit: float, depth: int, known: dict[Any, float]
    ) -> float:
        """The cost of recomputing a value under `target`, or any above `limit` if it is higher."""
        wanted = made.operands_under(target)
        if wanted is None or not depth:
            return math.inf
        total = made.work(target)
        for tile, sharding in zip(made.operands, wanted, strict=True):
            if total > limit:
                break
            total += self._cost(tile, sharding, depth - 1, known)
        return total

    def _cost(self, tile: Tile, target: Sharding, depth: int, known: dict[Any, float]) -> float:
        """The cost of a value under `target`, moved or recomputed, whichever is cheaper."""
        if tile.sharding == target or self.available.under(tile, target) is not None:
            return 0.0
        key = (tile.key, target)
        if key not in known:
            cost = reshard_cost(tile.sharding, target, tile.shape, tile.array.dtype)
            made = self.place.made.get(tile.key)
            if made is not None:
                cost = min(cost, self._recompute_cost(made, target, cost, depth, known))
            known[key] = cost
        return known[key]
