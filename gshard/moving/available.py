"""Values available during planning: under which shardings, and how to get them under others.

A rule that asks for a tensor under some sharding gets an existing copy if there is one: the tensor
as it was resharded for another operator, a transpose of that, or the tensor it was sliced from. The
body of a loop may use what is available outside: that is moved once, before the loop. Where moving
a value's operands sends fewer bytes, those are moved and the value is recomputed (`recompute`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.graph.reason import Reason
from gshard.moving.costs import worked
from gshard.moving.partial import combine
from gshard.moving.plan import reshard_cost
from gshard.moving.recompute import DEPTH, REARRANGING, LocalArrays, Made
from gshard.moving.reshard import reshard
from gshard.moving.seen import Seen
from gshard.tensors.devices import Place
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Identity, Tile, byte_size

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
    """Values under their available shardings, views of others, and equations that made them."""

    moved: dict[tuple[Identity, Sharding], Tile] = field(default_factory=dict)
    forms: dict[Identity, list[Sharding]] = field(default_factory=dict)
    views: dict[Identity, View] = field(default_factory=dict)
    makers: dict[Identity, tuple[JaxprEqn, list[Tile]]] = field(default_factory=dict)

    def inner(self) -> Available:
        """What is available at the start of a body; what the body adds stays inside."""
        forms = {array: list(found) for array, found in self.forms.items()}
        return Available(dict(self.moved), forms, dict(self.views))

    def under(self, tile: Tile, target: Sharding) -> Tile | None:
        """`tile` under another sharding, if available."""
        key = (Identity(tile.array), target)
        if key not in self.moved and (made := self._view_of_moved(tile, target)):
            self.moved[key] = made
        return self.moved.get(key)

    def moved_to(self, tile: Tile, target: Sharding) -> Tile | None:
        """`tile` under another sharding, if it was resharded itself, not through a view."""
        return self.moved.get((Identity(tile.array), target))

    def add(self, tile: Tile, moved: Tile) -> None:
        """Remember that a tensor has been moved."""
        key = Identity(tile.array)
        self.forms.setdefault(key, []).append(moved.sharding)
        self.moved[key, moved.sharding] = moved
        if tile.sharding.is_replicated:  # a slice of it need not be gathered again
            self.moved.setdefault((Identity(moved.array), tile.sharding), tile)

    def add_made(self, tile: Tile, made: Tile) -> None:
        """Remember a tensor that was recomputed under another sharding."""
        self.moved[Identity(tile.array), made.sharding] = made

    def add_view(self, eqn: JaxprEqn, result: Tile, source: Tile) -> None:
        """Remember a transpose or a reversal, and its inverse."""
        order = tuple(eqn.params.get("permutation", range(len(source.shape))))
        back = tuple(order.index(d) for d in range(len(order)))
        turned = tuple(eqn.params.get("dimensions", ()))
        self.views[Identity(result.array)] = View(source, order, turned)
        self.views.setdefault(Identity(source.array), View(result, back, turned))

    def add_maker(self, result: Tile, eqn: JaxprEqn, operands: list[Tile]) -> None:
        """Remember how integers were computed."""
        self.makers[Identity(result.array)] = (eqn, operands)
        if all(t.sharding.is_replicated or self._has_replicated(t) for t in operands):
            replicated = Sharding.replicated(result.sharding.rank, result.sharding.num_devices)
            self.forms.setdefault(Identity(result.array), []).append(replicated)

    def _has_replicated(self, tile: Tile) -> bool:
        return any(form.is_replicated for form in self.forms.get(Identity(tile.array), ()))

    def maker(self, tile: Tile) -> tuple[JaxprEqn, list[Tile]] | None:
        """The equation that computed integers, and its operands."""
        return self.makers.get(Identity(tile.array))

    def forms_of(self, tile: Tile) -> frozenset[Sharding]:
        """The shardings under which `tile` is available."""
        known = frozenset(self.forms.get(Identity(tile.array), ()))
        if view := self.views.get(Identity(tile.array)):
            forms = self.forms.get(Identity(view.source.array), ())
            known |= {f for form in forms if view.is_local(f := form.project(view.order))}
        return known

    def _view_of_moved(self, tile: Tile, target: Sharding) -> Tile | None:
        view = self.views.get(Identity(tile.array))
        if view is None or target.manual or not view.is_local(target):
            return None
        back = [view.order.index(d) for d in range(len(view.order))]
        moved = self.moved.get((Identity(view.source.array), target.project(back)))
        if moved is None:
            return None
        array: Any = lax.transpose(moved.array, view.order)
        array = lax.rev(array, view.reversed) if view.reversed else array
        return Tile(array, target, tile.shape)


Rerun = Callable[[JaxprEqn, list[Tile], Sharding], Tile]  # an operator, with a result so sharded


class Mover:
    """Brings values under the shardings that operators need; a repeated request moves nothing."""

    def __init__(self, place: Place, seen: Seen, rerun: Rerun, available: Available | None = None):
        self.place = place
        self.seen = seen
        self.rerun = rerun
        self.available = available or Available()

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
        if found is None and (found := self._recomputed(tile, target, reason)):
            self.available.add(tile, found)
        if found is None and target.is_replicated:
            found = self._recomputed_replicated(tile)
        if found is None:
            found = reshard(self.place, tile, target, reason)
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

    def remember(
        self,
        eqn: JaxprEqn,
        operands: list[Tile],
        results: Sequence[Tile],
        stays: bool,
        by_element: bool,
        local: LocalArrays | None = None,
    ) -> None:
        """Note how a value was made: it may be recomputed elsewhere, instead of being moved.

        `stays`: its operator leaves elements where they are; `by_element`: and changes each alone.
        `local` runs it on local arrays if it is not an operator of JAX.
        """
        result = results[0] if len(results) == 1 else None
        if result is None:
            return
        if eqn.primitive in VIEWS:
            self.available.add_view(eqn, result, operands[0])
        if (stays or eqn.primitive is p.iota_p) and _is_index(result):
            self.available.add_maker(result, eqn, operands)
        if (by_element or eqn.primitive in REARRANGING) and not any(
            t.is_unreduced or t.sharding.manual or t.sharding.ragged is not None
            for t in (*operands, result)
        ):
            self.place.made[Identity(result.array)] = Made(result, eqn, tuple(operands), local)

    def _recomputed(self, tile: Tile, target: Sharding, reason: Reason) -> Tile | None:
        """`tile` recomputed from resharded operands; None if moving it is cheaper."""
        made = self.place.made.get(Identity(tile.array))
        if made is None or not tile.is_standard:
            return None
        direct = reshard_cost(tile.sharding, target, tile.shape, tile.array.dtype)
        cost = self._recompute_cost(made, target, direct, DEPTH)
        # What a reshape is made of can be reshaped otherwise for another operator.
        if cost > direct or (cost == direct and made.eqn.primitive is not p.reshape_p):
            return None
        wanted = made.operands_under(target) or []
        operands = zip(made.operands, wanted, strict=True)
        moved = [self.reshard(t, s, reason).array for t, s in operands]
        return Tile(made.run(moved, target.local_shape(tile.shape)), target, tile.shape)

    def _recompute_cost(self, made: Made, target: Sharding, limit: float, depth: int) -> float:
        """The cost of recomputing a value under `target`, or any above `limit` if it is higher."""
        wanted = made.operands_under(target)
        if wanted is None or not depth:
            return math.inf
        local = target.local_shape(made.result.shape)
        total = 0.0
        if made.eqn.primitive is not p.reshape_p:  # which copies nothing
            total = worked(touched=byte_size(local, made.result.array.dtype))
        for tile, sharding in zip(made.operands, wanted, strict=True):
            if total > limit:
                return total
            if tile.sharding == sharding or self.available.under(tile, sharding) is not None:
                continue
            cost = reshard_cost(tile.sharding, sharding, tile.shape, tile.array.dtype)
            inner = self.place.made.get(Identity(tile.array))
            if inner is not None:
                cost = min(cost, self._recompute_cost(inner, sharding, cost, depth - 1))
            total += cost
        return total

    def _recomputed_replicated(self, tile: Tile, depth: int = 50) -> Tile | None:
        """A replicated integer tensor, recomputed if that sends nothing; else None.

        Indices are often iotas, or computed from values that were replicated, as a sort's results.
        """
        replicated = Sharding.replicated(tile.sharding.rank, tile.sharding.num_devices)
        if tile.sharding.is_replicated:
            return tile
        found = self.available.moved_to(tile, replicated)
        if found is not None:
            return found
        maker = self.available.maker(tile)
        if maker is None or not depth:
            return None
        eqn, tiles = maker
        ready: list[Tile] = []
        for operand in tiles:
            made = self._recomputed_replicated(operand, depth - 1)
            if made is None:
                return None
            ready.append(made)
        made = self.rerun(eqn, ready, replicated)
        self.available.add_made(tile, made)
        return made


def _is_index(tile: Tile) -> bool:
    """Whether a tensor consists of integers or masks."""
    dtype = getattr(tile.array, "dtype", None)
    return dtype is not None and not is_key_type(dtype) and dtype.kind in "iub"
