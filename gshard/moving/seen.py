"""What a plan has of the user's values: which variable of it holds which value, and how.

The planner notes it while it plans, at no cost to the plan: `lowered.replay` and `gshard.check`
read from it where in the whole array a tile belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard import _jax
from gshard.graph import bodies
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

    def made(self, values: Mapping[Any, Tile]) -> None:
        """Note the tiles of some variables of the flat program."""
        for value, tile in values.items():
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

    def after(self, same: Mapping[Any, Any]) -> dict[Any, list[Held]]:
        """What is held after passes that replaced variables by others that are the `same`."""
        left: dict[Any, list[Held]] = {}
        for var, found in self.held.items():
            while var in same:
                var = same[var]
            left.setdefault(var, []).extend(found)
        return left


def replaced(before: Jaxpr, after: Jaxpr) -> dict[Any, Any]:
    """The variables in whose place a pass over a plan put others: equations that read these now.

    An equation is the same one before and after if its results and its operator are, and its
    operands have the same shapes.
    """
    found: dict[Any, Any] = {}
    kept = {eqn.outvars[0]: eqn for eqn in after.eqns if eqn.outvars}
    both_have = [e for e in before.eqns if e.outvars and e.outvars[0] in kept]
    pairs = [(e, kept[e.outvars[0]]) for e in both_have if _alike(e, kept[e.outvars[0]])]
    reads = [(old.invars, new.invars) for old, new in pairs if old is not new]
    for old, new in [*reads, (before.outvars, after.outvars)]:
        if len(old) == len(new):
            both = zip(old, new, strict=True)
            found |= {a: b for a, b in both if not isinstance(a, Literal) and a is not b}
    for eqn, same in pairs:
        if eqn is not same:
            for inner, other in zip(bodies(eqn), bodies(same), strict=False):
                found |= replaced(inner, other)
    return found


def _alike(old: JaxprEqn, new: JaxprEqn) -> bool:
    shapes = [[a.aval.shape for a in e.invars if hasattr(a.aval, "shape")] for e in (old, new)]
    return old.primitive is new.primitive and shapes[0] == shapes[1]
