"""Where NaNs and infinities come from: the first step whose operands have none, on any device.

Padding may hold anything, so only values that are a part of the user's count. What an operator
computes on the way is taken to have what its operands have: which of it is padding is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Literal

from gshard.checking.collectives import RUN_TOGETHER
from gshard.checking.exact.number import beside, is_float
from gshard.checking.lockstep import Event
from gshard.checking.tiles import Tiling
from gshard.moving.seen import Held


class Finite:
    """Keeps track of which values have a NaN or an infinity; `held` says what a variable holds.

    For each of `count` devices it has two truth values: whether there is a NaN, and an infinity.
    """

    def __init__(self, count: int, held: Callable[[Any], Held | None]):
        self._none = np.zeros((count, 2), bool)
        self._held = held
        self._known: dict[Any, np.ndarray] = {}

    def look(self, event: Event) -> tuple[int, str] | None:
        """The device and the kind of what this event makes first, if it does."""
        pairs = list(zip(event.variables, event.values, strict=True))
        seen = [self._seen(var, value) for var, value in pairs]
        begins = event.eqn is None and not self._known  # the arguments of the program
        inside = event.eqn is None or event.ends
        before = self._none if inside else self._operands(event)
        made = []
        for found, (var, value) in zip(seen, pairs, strict=True):
            if found is None:
                self._known[var] = self._kinds(value) if inside else before
            else:
                self._known[var] = found & event.active[:, None]
                made.append(self._known[var])
        return _first(made, before) if begins or not inside else None

    def _kinds(self, value: np.ndarray, real: Any = True) -> np.ndarray:
        """What the real elements have on each device."""
        if not is_float(value.dtype):
            return self._none
        dims = tuple(range(1, value.ndim))
        kinds = [(test(value) & real).any(dims) for test in (np.isnan, np.isinf)]
        return np.broadcast_to(np.stack(kinds, -1), self._none.shape)

    def _seen(self, var: Any, value: np.ndarray) -> np.ndarray | None:
        """The same, of a value of the user's; None if it is not known which are real."""
        held = self._held(var)
        if held is None:
            return None
        manual = held.sharding.manual or value.ndim <= len(held.shape)
        return self._kinds(value, manual or beside(Tiling(*held[1:3]).real, value))

    def _operands(self, event: Event) -> np.ndarray:
        """What the operands have on each device; to a collective, all devices hand theirs."""
        assert event.eqn is not None
        found = self._none
        for atom in event.eqn.invars:
            if isinstance(atom, Literal):
                found = found | self._kinds(np.asarray(atom.val)[None])
            else:
                found = found | self._known.get(atom, self._none)
        together = event.eqn.primitive in RUN_TOGETHER
        return np.broadcast_to(found.any(0), found.shape) if together else found


def _first(seen: Sequence[np.ndarray], before: np.ndarray) -> tuple[int, str] | None:
    for found in seen:
        for device in np.flatnonzero(found.any(1)):
            if found[device, 0] and not before[device, 0]:
                return int(device), f"the first NaN, on device {device}"
            if found[device, 1] and not before[device].any():
                return int(device), f"the first infinity, on device {device}"
    return None
