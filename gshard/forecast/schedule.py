"""When the steps of a program run, if transfers overlap with arithmetic, as on GPUs.

A transfer begins when what it sends is there and the links are free. A step that waits for one lets
later steps pass, but not many: schedules that save memory do not move products far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

AHEAD = 8  # products among which a step is chosen that need not wait

Step = tuple[Any, Sequence[Any], Sequence[Any]]  # its name, what it reads and what it makes
Times = Mapping[Any, float]  # of steps, by their names


@dataclass(frozen=True)
class Sent:
    """A transfer: the time for which it is exposed, and the products that run then."""

    exposed: float
    overlapped: tuple[Any, ...]


@dataclass(frozen=True)
class _Ran:
    step: Any
    begin: float
    end: float

    def shared(self, begin: float, end: float) -> float:
        """How much of this time is within another."""
        return max(0.0, min(self.end, end) - max(self.begin, begin))


def overlapped(
    steps: Sequence[Step], sends: Times, works: Times, products: Set[Any]
) -> dict[Any, Sent]:
    """The transfers of a program in its schedule; `sends` and `works` have the times of its steps.

    `products` are those of `works` that count as hiding a transfer.
    """
    schedule = _TwoUnits(steps, sends, works, products)
    schedule.run()
    return {
        sent.step: Sent(
            sum(gap.shared(sent.begin, sent.end) for gap in schedule.idle),
            tuple(
                ran.step
                for ran in schedule.worked
                if ran.step in products and ran.shared(sent.begin, sent.end) > 0
            ),
        )
        for sent in schedule.sent
    }


class _TwoUnits:
    """One unit that computes, one that sends; the first step in order that can run does."""

    def __init__(self, steps: Sequence[Step], sends: Times, works: Times, products: Set[Any]):
        self.steps, self.sends, self.works, self.products = steps, sends, works, products
        made = {v for _, _, writes in steps for v in writes}
        self.reads = [
            [v for v in reads if not isinstance(v, Literal) and v in made] for _, reads, _ in steps
        ]
        self.ready: dict[Any, float] = {}
        self.working = self.sending = 0.0  # until when each unit is busy
        self.idle: list[_Ran] = []  # when nothing is computed
        self.worked: list[_Ran] = []
        self.sent: list[_Ran] = []

    def run(self) -> None:
        """All steps; at the end, what is still being sent is waited for."""
        left = dict.fromkeys(range(len(self.steps)))
        while left:
            number = self._next(left)
            if number is not None:
                self._work(number)
                del left[number]
        self._wait(self.sending)

    def _next(self, left: dict[int, None]) -> int | None:
        """The step to compute next; transfers on the way to it begin."""
        first: tuple[float, int] | None = None  # of those that wait: when it can run
        begun, passed, chosen = [], 0, None
        for number in left:
            step, when = self.steps[number][0], self._when(number)
            if step in self.sends:
                if when is not None:
                    self._send(number, when)
                    begun.append(number)
                continue
            if when is not None and when <= self.working:
                chosen = number
                break
            if when is not None and (first is None or when < first[0]):
                first = when, number
            passed += step in self.products
            if passed == AHEAD and first is not None:
                break
        for number in begun:
            del left[number]
        return first[1] if chosen is None and first is not None else chosen

    def _when(self, number: int) -> float | None:
        """When a step has all that it reads; None as long as something of it is not computed."""
        latest = 0.0
        for var in self.reads[number]:
            when = self.ready.get(var)
            if when is None:
                return None
            latest = max(latest, when)
        return latest

    def _send(self, number: int, when: float) -> None:
        step, _, writes = self.steps[number]
        begin = max(when, self.sending)
        self.sending = begin + self.sends[step]
        self.sent.append(_Ran(step, begin, self.sending))
        self.ready.update(dict.fromkeys(writes, self.sending))

    def _work(self, number: int) -> None:
        step, _, writes = self.steps[number]
        self._wait(self._when(number) or 0.0)
        begin = self.working
        self.working += self.works.get(step, 0.0)
        if self.working > begin:
            self.worked.append(_Ran(step, begin, self.working))
        self.ready.update(dict.fromkeys(writes, self.working))

    def _wait(self, until: float) -> None:
        if until > self.working:
            self.idle.append(_Ran(None, self.working, until))
            self.working = until
