"""What each line, function or kind of collective costs: bytes, and time on some hardware."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gshard.explanation.subject import Subject
from gshard.forecast import Forecast
from gshard.graph.readable import duration, size
from gshard.moving.inventory import Collective

ROUNDING = 1e-9  # seconds: less is a difference of rounded sums


@dataclass(frozen=True)
class LineCost:
    """The collectives of one line, or of one kind, together."""

    name: str
    values: tuple[Collective, ...]  # what is sent, value by value, the largest first
    seconds: float
    runs: int  # of the collectives that send them, which may send others too

    @property
    def sent(self) -> int:
        """Bytes that one device sends."""
        return sum(c.total_bytes for c in self.values)

    @property
    def count(self) -> int:
        """How many values are sent, each as often as it is."""
        return sum(c.count for c in self.values)

    @property
    def shown_seconds(self) -> str:
        """Its time on the step's path, or that products hide all of it."""
        return duration(self.seconds) if self.seconds > ROUNDING else "hidden"

    @property
    def kinds(self) -> str:
        """The kinds of collectives, the one with the most bytes first."""
        return ", ".join(dict.fromkeys(c.kind for c in self.values))


def by_line(subject: Subject, forecast: Forecast) -> list[LineCost]:
    """The lines that send something, the one that takes the most time first."""
    seconds, runs = defaultdict[str, float](float), Counter[str]()
    for t in forecast.values:
        seconds[t.source] += float(t.total_seconds) if t.collective else 0.0
    for c in subject.collectives:
        runs.update(dict.fromkeys({value.source for value in c.members or (c,)}, c.count))
    return summed(subject.values, lambda c: c.source, seconds, runs)


def by_kind(subject: Subject, forecast: Forecast) -> list[LineCost]:
    """The kinds of collectives, the one that takes the most time first."""
    seconds, runs = defaultdict[str, float](float), Counter[str]()
    for t in forecast.operators:
        seconds[t.collective] += float(t.total_seconds)
    for c in subject.collectives:
        runs[c.kind] += c.count
    return summed(subject.collectives, lambda c: c.kind, seconds, runs)


def summed(
    collectives: Iterable[Collective],
    key: Callable[[Collective], str],
    seconds: Mapping[str, float],
    runs: Mapping[str, int],
) -> list[LineCost]:
    """Collectives with the same key together, those that take the most time first."""
    groups: dict[str, list[Collective]] = {}
    for c in collectives:
        groups.setdefault(key(c), []).append(c)
    found = [
        LineCost(
            name,
            tuple(sorted(members, key=lambda c: -c.total_bytes)),
            seconds.get(name, 0.0),
            runs.get(name, len(members)),
        )
        for name, members in groups.items()
    ]
    return sorted(found, key=lambda cost: (-cost.seconds, -cost.sent))


def counts(subject: Subject) -> str:
    """How many collectives there are, how often they run and how many values they carry."""
    number, values = len(subject.collectives), len(subject.values)
    runs = sum(c.count for c in subject.collectives)
    text = f"{number:,} collective{'s' * (number != 1)}"
    if runs > number:
        text += f", run {runs:,} times"
    return f"{text}, for {values:,} values" if values > number else text


def headline(forecast: Forecast, lines: Sequence[LineCost]) -> str:
    """One sentence: what the costliest line sends, and its share of the step."""
    if not lines:
        return "Nothing is sent: every device works on what it has."
    worst = lines[0]
    what = f"One {worst.kinds}" if worst.runs == 1 else f"{worst.runs:,} x {worst.kinds}"
    if ", " in worst.kinds:
        what = f"{worst.runs:,} collectives ({worst.kinds})"
    share = worst.seconds / (forecast.step_seconds or 1.0)
    part = f"{share:.0%}" if share >= 0.01 else "less than 1%"
    verb = "takes" if worst.runs == 1 else "take"
    return f"{what} of {size(worst.sent)} at {worst.name} {verb} {part} of the step."


_BOUNDS = {"arithmetic": "compute", "memory": "memory traffic", "links": "communication"}


def bounds(forecast: Forecast) -> str:
    """One sentence: which resource bounds the step, with the shares of all and the worst line."""
    step = forecast.step_seconds or 1.0
    shares = {_BOUNDS[t]: p.seconds / step for t, p in forecast.by(lambda t: t.bound).items()}
    if not shares:
        return "Nothing is computed."
    lines = forecast.by(lambda t: f"{_BOUNDS[t.bound]} at {t.source}")
    words = ""
    for name in sorted(shares, key=lambda name: -shares[name]):
        here = [(k, p.seconds / step) for k, p in lines.items() if k.startswith(name)]
        at, most = here[0][0].removeprefix(f"{name} at "), here[0][1]
        # The line that communicates most has a sentence of its own.
        shown = at and len(here) > 1 and most >= 0.01 and (name != "communication" or not words)
        share = f"{shares[name]:.0%}"
        words += f", {name} {share}" if words else f"{name.capitalize()} is {share} of the step"
        words += f" ({most:.0%} at {at})" if shown else ""
    hidden = forecast.hidden_seconds
    hides = hidden > ROUNDING
    return f"{words}; {duration(hidden)} of communication is hidden." if hides else f"{words}."
