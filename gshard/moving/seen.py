"""What a plan has of the user's values: which variable of it holds which value, and how.

The planner notes it while it plans, at no cost to the plan: `lowered.replay` and `gshard.check`
read from it where in the whole array a tile belongs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gshard import _jax
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


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

    A variable may hold several values: an annotation changes nothing.
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
