"""One run of a region of the user's program while it is checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from gshard.checking.replaying.lockstep import Path, Value
from gshard.checking.shadow import Known, Shadow
from gshard.moving.seen import Held

Seen = tuple[Held, Value, str]  # how devices hold a value, their tiles, and the line they are at


class Scope:
    """The program itself, or one run of a body of a loop: values that are known, in order.

    `observable` are the variables whose values some device computes.
    """

    def __init__(self, jaxpr: Jaxpr, observable: set[Any], path: Path):
        self.jaxpr = jaxpr
        self.path = path
        self.next = 0  # the equation that is checked next
        self.observable = observable
        self.arguments = {*jaxpr.constvars, *jaxpr.invars}
        self.pending: dict[Any, list[Seen]] = {}
        self.shadows: dict[Any, Known | None] = {}
        self.wrong: set[Any] = set()  # variables whose values differ
        self.uses: dict[Any, int] = {}
        for eqn in jaxpr.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    self.uses[atom] = self.uses.get(atom, 0) + 1
        for atom in (*jaxpr.outvars, *jaxpr.invars):
            if not isinstance(atom, Literal):
                self.uses[atom] = self.uses.get(atom, 0) + 1

    def read(self, atom: Any) -> Known | None:
        """The value of an operand; None if it is not known."""
        if isinstance(atom, Literal):
            return Shadow(np.asarray(atom.val, atom.aval.dtype))
        return self.shadows.get(atom)

    def forget(self, atoms: Any) -> None:
        """Free the values that no equation reads any more."""
        for atom in atoms:
            if not isinstance(atom, Literal):
                self.uses[atom] = self.uses.get(atom, 1) - 1
                if self.uses[atom] <= 0:
                    self.shadows[atom] = None
