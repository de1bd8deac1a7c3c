"""Values available during planning: under which shardings, and how to get them under others.

A rule that asks for a tensor under some sharding gets an existing copy if there is one: the tensor
as it was resharded for another operator, a transpose of that, or the tensor it was sliced from. The
body of a loop may use what is available outside: that is moved once, before the loop. Where moving
a value's operands sends fewer bytes, those are moved and the value is recomputed (`recompute`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from gshard import _jax
from gshard.graph.reason import Reason
from gshard.moving.fetch import retile
from gshard.moving.partial import combine
from gshard.moving.plan import reshard, reshard_cost
from gshard.moving.recompute import Made
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile, Value


@dataclass
class Available:
    """Values under the shardings under which they are available, and later views of them.

    None: free to recompute on demand.
    """

    forms: dict[Value | None, dict[Sharding, Tile | None]] = field(default_factory=dict)
    viewed: dict[Value | None, Made] = field(default_factory=dict)  # values as views of views

    def inner(self) -> Available:
        """What is available at the start of a body; what the body adds stays inside."""
        forms = {value: dict(found) for value, found in self.forms.items()}
        return Available(forms, dict(self.viewed))

    def of(self, tile: Tile) -> Mapping[Sharding, Tile | None]:
        """`tile` under all shardings to which it was brought."""
        return self.forms.get(tile.value, {})

    def made(self, tile: Tile) -> tuple[Made, ...]:
        """How a tensor can be recomputed: as it was made, or from a view of it."""
        own, view = tile.value and tile.value.made, self.viewed.get(tile.value)
        return tuple(made for made in (own, view) if made and made.gives(tile))

    def add(self, tile: Tile, moved: Tile) -> None:
        """Remember that a tensor has been moved."""
        if tile.value:
            self.forms.setdefault(tile.value, {tile.sharding: tile})[moved.sharding] = moved

    def add_index(self, index: Tile, made: Made) -> None:
        """Remember integers that are free to replicate if their operands are."""
        forms = [(t.sharding, *self.of(t)) for t in made.operands]
        if all(any(form.is_replicated for form in found) for found in forms):
            replicated = Sharding.replicated(index.sharding.rank, index.sharding.num_devices)
            self.forms.setdefault(index.value, {})[replicated] = None


class Mover:
    """Brings values under the shardings that operators need; a repeated request moves nothing."""

    def __init__(self, place: Place, seen: Seen):
        self.place = place
        self.seen = seen
        self.available = Available()
        self.decided: dict[Any, int | None] = {}  # how values are recomputed, or None

    def reshard(self, tile: Tile, target: Sharding, reason: Reason) -> Tile:
        """`tile` under another sharding.

        A value that enters a manual region without `auto_to_manual` is replicated first.
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
        found = self.available.of(tile).get(target)
        if found is None:
            found = self._recomputed(tile, target, reason)
            if found is None and here == target and 0 not in tile.shape:
                found = retile(self.place, tile, target.local_shape(tile.shape), reason)
            found = found or reshard(self.place, tile, target, reason)
            found = found.of(tile.value)
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
        if found := self.available.of(tile).get(target):
            return found
        held = (*tile.shape[:dim], split.tiles * tile.array.shape[dim], *tile.shape[dim + 1 :])
        even = Tile(tile.array, tile.sharding.replace(dim, split.even), held)
        moved = self.reshard(even, target.replace(dim, split.even), reason)
        found = Tile(moved.array, target, tile.shape, value=tile.value)
        self.available.add(tile, found)
        return found

    def views(self, tile: Tile) -> list[Made]:
        """What a tensor is a view of: a transpose or a reversal, or the inverse of one."""
        return [made for made in self.available.made(tile) if made.is_view]

    def forms(self, tile: Tile) -> frozenset[Sharding]:
        """The shardings under which `tile` is available, or what it is a view of."""
        known = frozenset(self.available.of(tile))
        for view in self.views(tile):
            known |= view.local_forms(self.available.of(view.operands[0]))
        return known

    def remember(self, var: Any, tile: Tile, made: Made | None = None) -> Tile:
        """The tile of a variable, which may be recomputed elsewhere, instead of being moved."""
        if tile.value:
            return tile  # of an earlier variable
        tile = tile.of(Value(var, made))
        if made is not None and made.is_view and not self.views(made.operands[0]):
            self.available.viewed[made.operands[0].value] = made.inverse(tile)
        if made is not None and made.is_index and made.gives(tile):
            self.available.add_index(tile, made)
        return tile

    def _recomputed(self, tile: Tile, target: Sharding, reason: Reason) -> Tile | None:
        """`tile` recomputed from resharded operands, as decided on tiles without elements.

        None if moving it is cheaper.
        """
        if tile.value is None:
            return None
        key = (tile.value.var, tile.sharding, target)
        if tile.is_blank:
            _, self.decided[key] = self.cheapest(tile, target, {})
        if (number := self.decided.get(key)) is None:
            return None
        made = self.available.made(tile)[number]
        operands = zip(made.operands, made.operands_under(target) or (), strict=True)
        moved = [self.reshard(t, s, reason).array for t, s in operands]
        if tile.is_blank:
            return Tile.blank(target, tile.shape, tile.array.dtype)
        return Tile(made.run(moved, target.local_shape(tile.shape)), target, tile.shape)

    def cheapest(
        self, tile: Tile, target: Sharding, known: dict[Any, Any], depth: int | None = None
    ) -> tuple[float, int | None]:
        """The cost of `tile` under `target`, and how it is recomputed; None where it is moved.

        `known` are costs that were found before, `depth` the operators that may be recomputed.
        """
        if tile.sharding == target or self.available.of(tile).get(target) is not None:
            return 0.0, None
        key = (tile.value, target)
        if key not in known:
            best, found = reshard_cost(tile.sharding, target, tile.shape, tile.array.dtype), None
            known[key] = best, found  # while it is recomputed from views of itself
            for number, made in enumerate(self.available.made(tile)):
                left = made.depth if depth is None else depth
                cost = self._recompute_cost(made, target, best, left, known)
                # What a reshape is made of can be reshaped otherwise for another operator.
                if cost < best or (found is None and cost == best and made.is_reshape):
                    best, found = cost, number
            known[key] = best, found
        return known[key]

    def _recompute_cost(
        self, made: Made, target: Sharding, limit: float, depth: int, known: dict[Any, Any]
    ) -> float:
        """The cost of recomputing a value under `target`, or any above `limit` if it is higher."""
        wanted = made.operands_under(target) if depth else None
        total = inf if wanted is None else made.work(target)
        for tile, sharding in zip(made.operands, wanted or (), strict=False):
            if total <= limit:
                total += self.cheapest(tile, sharding, known, depth - 1)[0]
        return total


# -------------------------------------------------- what a plan has of the user's values


class Held(NamedTuple):
    """How the devices hold a value of the user's program: tiles of an array of logical `shape`.

    `value` is the value's variable in the flat program. `moved` is the reason of the reshard that
    brought it there; empty for the tiles that its own operator left.
    """

    value: Any
    sharding: Sharding
    shape: tuple[int, ...]
    moved: str = ""


@dataclass
class Seen:
    """Variables of a plan, and the values of the user's program that they hold.

    A variable may hold several values: an annotation changes nothing. It is noted while a program
    is planned, at no cost to the plan: `lowered.replay` and `gshard.check` read from it.
    """

    held: dict[Any, list[Held]] = field(default_factory=dict)

    def made(self, values: Iterable[tuple[Any, Tile]]) -> None:
        """Note the tiles of some variables of the flat program."""
        for value, tile in values:
            self._add(value, tile, "")

    def moved(self, before: Tile, after: Tile, reason: str) -> None:
        """Note that a tensor was brought under another sharding."""
        if after.array is before.array:
            return
        var = _jax.variable_of(before.array)
        for held in tuple(self.held.get(var, ())) if isinstance(var, _jax.Var) else ():
            self._add(held.value, after, reason)

    def _add(self, value: Any, tile: Tile, moved: str) -> None:
        var = _jax.variable_of(tile.array)
        if isinstance(var, _jax.Var):
            held = Held(value, tile.sharding, tuple(tile.shape), moved)
            known = self.held.setdefault(var, [])
            if held not in known:
                known.append(held)

    def after(self, now: Callable[[Any], Any]) -> dict[Any, list[Held]]:
        """What is held after passes: `now` says which variable each one became."""
        left: dict[Any, list[Held]] = {}
        for var, found in self.held.items():
            left.setdefault(now(var), []).extend(found)
        return left
