"""How often branches, and loops of no or one run, are taken where a pipeline's schedule chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core.primitives import cond_p, while_p

from gshard.graph.regions import bodies
from gshard.graph.source import TICKS, trips


class Ticks(NamedTuple):
    """The branches of a conditional in a loop, and in how many runs of the loop they run.

    `own` is how often one device takes each. `together` are the branches that devices are in at the
    same time, as the bits of a number, and how often. Both are in `out_of` runs of the loop around
    them, by default as many as `together` has.
    """

    own: tuple[int, ...]
    together: Mapping[int, int]
    out_of: int = 0

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """Mark the conditionals and loops made inside."""
        numbers = (self.own, self.together.keys(), self.together.values(), (self.out_of,))
        return jax.named_scope("|".join([TICKS, *(".".join(map(str, n)) for n in numbers)]))

    @staticmethod
    def of(eqn: JaxprEqn) -> Ticks | None:
        """The ticks of a conditional, or of such a loop (its condition, its body)."""
        stack = eqn.source_info.name_stack.stack if eqn.primitive in (cond_p, while_p) else ()
        for part in reversed(stack):
            tag, *parts = getattr(part, "name", "").split("|")
            if tag == TICKS:
                own, bits, counts, (out_of,) = (tuple(map(int, text.split("."))) for text in parts)
                return Ticks(own, dict(zip(bits, counts, strict=True)), out_of)
        return None

    @property
    def runs(self) -> int:
        """How often the loop runs."""
        return self.out_of or sum(self.together.values())

    def slowest(self, costs: Sequence[float]) -> list[int]:
        """In how many runs of the loop each branch is the one that the others wait for."""
        found = [0] * len(costs)
        for bits, count in self.together.items():
            running = [branch for branch in range(len(costs)) if bits >> branch & 1]
            found[max(running, key=costs.__getitem__)] += count
        return found


def runs_inside(eqn: JaxprEqn, times: int) -> list[int]:
    """How often a device runs each program inside an equation, which it runs `times` times."""
    if (ticks := Ticks.of(eqn)) is None:
        return [times * trips(eqn)] * len(bodies(eqn))
    return [times * count // ticks.runs for count in ticks.own]
