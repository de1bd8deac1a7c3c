"""Where NaNs and infinities come from: the first step whose operands have none, on any device.

Padding may hold anything, so only values that are a part of the user's count. What an operator
computes on the way is taken to have what its operands have: which of it is padding is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from gshard.checking.replaying.collectives import RUN_TOGETHER
from gshard.checking.replaying.lockstep import Event
from gshard.checking.replaying.tiles import place_of, plain, real
from gshard.moving.seen import Held

Kinds = frozenset[str]
_NONE: Kinds = frozenset()


def _kinds(array: np.ndarray) -> Kinds:
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return _NONE
    tests = {"NaN": np.isnan, "infinity": np.isinf}
    return frozenset(kind for kind, test in tests.items() if test(array).any())


class Finite:
    """Keeps track of which values have a NaN or an infinity; `held` says what a variable holds."""

    def __init__(self, held: Callable[[Any], Held | None]):
        self._held = held
        self._known: dict[Any, list[Kinds]] = {}

    def look(self, event: Event) -> tuple[int, str] | None:
        """The device and the kind of what this event makes first, if it does."""
        seen = [
            self._seen(var, value) for var, value in zip(event.variables, event.values, strict=True)
        ]
        if event.eqn is None or event.ends:
            first = event.eqn is None and not self._known  # the arguments of the program
            for var, found, value in zip(event.variables, seen, event.values, strict=True):
                inside = [_NONE if x is None else _kinds(plain(x)) for x in value]
                self._known[var] = inside if found is None else found
            return _first(seen, [_NONE] * len(event.values[0])) if first and seen else None
        before = self._operands(event)
        for var, found in zip(event.variables, seen, strict=True):
            self._known[var] = before if found is None else found
        return _first(seen, before)

    def _seen(self, var: Any, value: Sequence[Any]) -> list[Kinds] | None:
        """What the real elements have on each device; None if it is not known which are real."""
        held = self._held(var)
        if held is None:
            return None
        found = []
        for device, tile in enumerate(value):
            array = None if tile is None else plain(tile)
            place = None if array is None else place_of(held, device, array.shape)
            if array is None or place is None:
                found.append(_NONE)
            else:
                found.append(_kinds(real(array, place)))
        return found

    def _operands(self, event: Event) -> list[Kinds]:
        """What the operands have on each device; to a collective, all devices hand theirs."""
        assert event.eqn is not None
        count = len(event.values[0]) if event.values else 0
        found = [_NONE] * count
        for atom in event.eqn.invars:
            if isinstance(atom, Literal):
                kinds = [_kinds(np.asarray(atom.val))] * count
            else:
                kinds = self._known.get(atom, [_NONE] * count)
            found = [a | b for a, b in zip(found, kinds, strict=True)]
        if event.eqn.primitive in RUN_TOGETHER:
            found = [frozenset().union(*found)] * count
        return found


def _first(seen: Sequence[list[Kinds] | None], before: Sequence[Kinds]) -> tuple[int, str] | None:
    for found in seen:
        for device, kinds in enumerate(found or ()):
            if "NaN" in kinds and "NaN" not in before[device]:
                return device, f"the first NaN, on device {device}"
            if "infinity" in kinds and not before[device]:
                return device, f"the first infinity, on device {device}"
    return None
