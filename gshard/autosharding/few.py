"""Few annotations of which propagation makes nearly all of an answer.

Where propagation by itself departs from the answer, and the model says that this costs time or
memory, the tensor that it costs most around is annotated, and propagation asked again. Then those
annotations are left out that others have made superfluous.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.departures import Departed, Departures
from gshard.tensors.sharding import Sharding

# By how much what propagation makes of the annotations may be worse than the answer, as a share of
# the answer: less than what a lowered layout may be; and where time runs out.
_WORSE = 0.008
_NEARLY = 0.02

# Of what is still too much, the share that the annotations of a round are to save.
_ROUND = 0.5

Shardings = Mapping[Any, Sharding]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Tensors that are annotated together, with the same spec."""

    name: str
    variables: tuple[Any, ...]


@dataclasses.dataclass
class Few:
    """Finds the annotations. `propagated` is what propagation makes of the shardings of some
    tensors, `more_time` whether it may be asked once more."""

    departures: Departures
    units: Sequence[Unit]
    sharding: Callable[[Any], Sharding]
    base: Shardings
    propagated: Callable[[Shardings], Shardings]
    more_time: Callable[[], bool]
    cost: float  # seconds that the answer takes
    chosen: dict[Unit, float] = dataclasses.field(default_factory=dict)  # with what each saves

    def find(self) -> bool:
        """Whether units were found in time with which propagation makes nearly all of the answer.

        A round may make propagation depart elsewhere, which the next one mends: the best is kept.
        """
        now = self._priced(())
        best, units = now, dict(self.chosen)
        while not self._enough(now):
            added = self._worst(now)
            if not added or not self.more_time():
                break
            before, now = now, self._priced((*self.chosen, *added))
            total, saved = sum(added.values()), max(0.0, before.seconds - now.seconds)
            self.chosen |= {unit: saved * share / total for unit, share in added.items()}
            if (now.too_much, now.seconds) < (best.too_much, best.seconds):
                best, units = now, dict(self.chosen)
        self.chosen = units
        allowed = _WORSE if self._enough(best) else _NEARLY
        if self._enough(best, allowed):
            self._prune(best, allowed)
        return self._enough(best, allowed)

    def fixed(self, units: Sequence[Unit]) -> dict[Any, Sharding]:
        """The annotations of some units, and those that are made in any case."""
        chosen = {var: self.sharding(var) for unit in units for var in unit.variables}
        return {**self.base, **chosen}

    def _priced(self, units: Sequence[Unit]) -> Departed:
        return self.departures.priced(self.propagated(self.fixed(units)))

    def _enough(self, found: Departed, worse: float = _WORSE) -> bool:
        return self._missing(found, worse) <= 0

    def _missing(self, found: Departed, worse: float = _WORSE) -> float:
        """By how much it is too slow, in the unit of `worse`, or the bytes that are too much."""
        if found.too_much > 0:
            return found.too_much
        return (found.seconds - worse * self.cost) * PICO

    def _worst(self, found: Departed) -> dict[Unit, float]:
        """The units around which the most is lost, and how much."""
        different = set(found.tensors)
        left = {
            unit: self.departures.around(v for v in unit.variables if v in different)
            for unit in self.units
            if unit not in self.chosen and not different.isdisjoint(unit.variables)
        }
        worse, taken = found.worse.clip(min=0.0), {}
        wanted = _ROUND * self._missing(found)
        while left and wanted > 0:
            share = {unit: float(worse[list(nodes)].sum()) for unit, nodes in left.items()}
            unit = min(share, key=lambda each: (-share[each], each.name))
            if share[unit] <= 0:
                break
            taken[unit] = share[unit]
            wanted -= share[unit]
            worse[list(left.pop(unit))] = 0.0  # so that its neighbours are not taken for the same
        return taken

    def _prune(self, now: Departed, allowed: float) -> None:
        """Leave out units: halves of them first, those that seem to save least, then halves of the
        halves."""
        waiting = [sorted(self.chosen, key=lambda each: (self.chosen[each], each.name))]
        while waiting and self.more_time():
            left_out = waiting.pop()
            without = self._priced([each for each in self.chosen if each not in left_out])
            middle = len(left_out) // 2
            if self._enough(without, allowed):
                now = without
                self.chosen = {u: saves for u, saves in self.chosen.items() if u not in left_out}
            elif middle:
                waiting += [left_out[middle:], left_out[:middle]]
            else:
                self.chosen[left_out[0]] = max(0.0, without.seconds - now.seconds)
