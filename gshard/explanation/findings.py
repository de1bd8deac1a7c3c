"""What a program sends, why, and which annotation to change: as data, which text and page show."""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gshard.explanation.fixes import FixSearch, Progress, search
from gshard.explanation.names import LocalNames, Names, shape
from gshard.explanation.subject import Subject
from gshard.explanation.why import Why
from gshard.forecast import Forecast
from gshard.graph.readable import duration, size
from gshard.graph.source import source_of
from gshard.moving.inventory import Collective
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size

ROUNDING = 1e-9  # seconds: less is a difference of rounded sums
_BOUNDS = {"arithmetic": "compute", "memory": "memory traffic", "links": "communication"}
EXPLAINED = 6  # lines that are explained, the costliest first
LINES = 12  # of each list of a text: the largest first
_LARGE = 0.02  # a replicated value is named if it takes this share of the arguments
QUICK = 1500  # equations up to which changes of annotations are tried without being asked


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


@dataclass(eq=False, repr=False)
class Findings:
    """What is known about a program's communication.

    `seconds` is the budget of the search for better annotations, which begins when its results
    are first asked for; 0 leaves it out.
    """

    subject: Subject
    forecast: Forecast
    name: str
    seconds: float | None = None
    is_default: bool = False  # whether the hardware is what JAX reports
    _search: FixSearch | None = None

    @functools.cached_property
    def names(self) -> Names:
        """What the code calls values and dims."""
        return Names(self.subject)

    @functools.cached_property
    def local_names(self) -> LocalNames:
        """What the code calls the values of the per-device program."""
        return LocalNames(self.subject)

    @functools.cached_property
    def _why(self) -> Why:
        return Why(self.subject, self.names)

    @functools.cached_property
    def lines(self) -> list[LineCost]:
        """The lines that send something, the one that takes the most time first."""
        seconds, runs = defaultdict[str, float](float), Counter[str]()
        for t in self.forecast.values:
            seconds[t.source] += float(t.total_seconds) if t.collective else 0.0
        for c in self.subject.collectives:
            runs.update(dict.fromkeys({value.source for value in c.members or (c,)}, c.count))
        return summed(self.subject.values, lambda c: c.source, seconds, runs)

    @functools.cached_property
    def kinds(self) -> list[LineCost]:
        """The kinds of collectives, the one that takes the most time first."""
        seconds, runs = defaultdict[str, float](float), Counter[str]()
        for t in self.forecast.operators:
            seconds[t.collective] += float(t.total_seconds)
        for c in self.subject.collectives:
            runs[c.kind] += c.count
        return summed(self.subject.collectives, lambda c: c.kind, seconds, runs)

    @functools.cached_property
    def sentence(self) -> str:
        """One sentence: what the costliest line sends, and its share of the step."""
        if not self.lines:
            return "Nothing is sent: every device works on what it has."
        worst = self.lines[0]
        what = f"One {worst.kinds}" if worst.runs == 1 else f"{worst.runs:,} x {worst.kinds}"
        if ", " in worst.kinds:
            what = f"{worst.runs:,} collectives ({worst.kinds})"
        share = worst.seconds / (self.forecast.step_seconds or 1.0)
        part = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        verb = "takes" if worst.runs == 1 else "take"
        return f"{what} of {size(worst.sent)} at {worst.name} {verb} {part} of the step."

    @property
    def bounds(self) -> str:
        """One sentence: which resource bounds the step, the shares of all, and the worst line."""
        step = self.forecast.step_seconds or 1.0
        shares = {
            _BOUNDS[t]: p.seconds / step for t, p in self.forecast.by(lambda t: t.bound).items()
        }
        if not shares:
            return "Nothing is computed."
        lines = self.forecast.by(lambda t: f"{_BOUNDS[t.bound]} at {t.source}")
        words = ""
        for name in sorted(shares, key=lambda name: -shares[name]):
            here = [(k, p.seconds / step) for k, p in lines.items() if k.startswith(name)]
            at, most = here[0][0].removeprefix(f"{name} at "), here[0][1]
            # The line that communicates most has a sentence of its own.
            shown = at and len(here) > 1 and most >= 0.01 and (name != "communication" or not words)
            share = f"{shares[name]:.0%}"
            words += f", {name} {share}" if words else f"{name.capitalize()} is {share} of the step"
            words += f" ({most:.0%} at {at})" if shown else ""
        hidden = self.forecast.hidden_seconds
        hides = hidden > ROUNDING
        return f"{words}; {duration(hidden)} of communication is hidden." if hides else f"{words}."

    @property
    def counts(self) -> str:
        """How many collectives there are, how often they run and how many values they carry."""
        number, values = len(self.subject.collectives), len(self.subject.values)
        runs = sum(c.count for c in self.subject.collectives)
        text = f"{number:,} collective{'s' * (number != 1)}"
        if runs > number:
            text += f", run {runs:,} times"
        return f"{text}, for {values:,} values" if values > number else text

    @property
    def hardware(self) -> str:
        """Whose times these are."""
        where = f"{self.forecast.devices} x {self.forecast.hardware.name}"
        if not self.is_default:
            return where
        other = ", explain('h100') for a GPU" if self.forecast.hardware.name == "cpu" else ""
        return f"{where} (as JAX reports here{other})"

    @property
    def about(self) -> str:
        """What is sent in all, and whose times these are."""
        hidden = self.forecast.hidden_seconds
        took = self.forecast.exposed_seconds + hidden
        return (
            f"{self.name} on {self.hardware}: {self.counts}, "
            f"{size(self.subject.sent)} sent by each device in {duration(took)}"
        ) + (f", {duration(hidden)} of it hidden" if hidden > ROUNDING else "")

    def why(self, cost: LineCost) -> str:
        """Why a line sends its largest value, in one sentence."""
        return self._why.sentence(cost.values[0])

    def search(self, progress: Progress | None = None) -> FixSearch:
        """Changes of one annotation, each tried: once, within the budget of seconds."""
        if self._search is None:
            origins = [
                o.source
                for cost in self.lines[:EXPLAINED]
                for o in self._why.origins(cost.values[0])
            ]
            first = list(dict.fromkeys([*origins, *(cost.name for cost in self.lines)]))
            quick = 10.0 if len(self.subject.equations) <= QUICK else 0.0
            budget = quick if self.seconds is None else self.seconds
            if self.subject.sent and budget:
                self._search = search(self.subject, budget, first, progress)
            else:
                self._search = FixSearch(candidates=len(self.subject.annotations))
        return self._search

    @property
    def chains(self) -> dict[str, list[str]]:
        """How splits come to the costliest lines, each way once: from an annotation on."""
        found: dict[str, list[str]] = {}
        for cost in self.lines[:EXPLAINED]:
            for o in self._why.origins(cost.values[0]):
                key = f"{self.names.value(o.var)} by {self.names.dim(o.var, o.dim)}"
                if len(o.links) > 2 and key not in found:
                    found[key] = [str(link) for link in o.links]
        return found

    @property
    def conflicts(self) -> list[str]:
        """What was decided about conflicting splits, in the names of annotated tensors."""
        named: dict[tuple[str, str], dict[str, None]] = {}
        for eqn in self.subject.annotations:
            var = eqn.outvars[0]
            named.setdefault((shape(var), f" ({source_of(eqn)})"), {}).setdefault(
                self.names.value(var)
            )
        found = "\n".join(map(str, self.subject.conflicts))
        for (known, place), (first, *others) in named.items():
            more = f" and {len(others)} more" if others else ""
            found = found.replace(f"of {known}{place}", f"of {first}{more}{place}")
        return list(dict.fromkeys(found.splitlines()))

    @functools.cached_property
    def replicated(self) -> list[tuple[str, int]]:
        """Large arguments and results of operators that every device has all of, and their
        bytes."""
        subject = self.subject
        if subject.num_devices == 1:
            return []
        total = sum(_local_bytes(subject, v) for v in subject.flat.jaxpr.invars) or 1
        arguments = dict.fromkeys(subject.flat.jaxpr.invars, "an argument")
        made = {v: source_of(e) for e in subject.equations for v in e.outvars}
        found: dict[str, int] = {}
        for var, where in {**arguments, **made}.items():
            sharding = subject.sharding(var)
            if sharding is not None and sharding.is_replicated and not sharding.manual:
                here = _local_bytes(subject, var)
                if here >= max(_LARGE * total, 2**16):
                    what = f"{self.names.name(var)} {shape(var)}".lstrip() + f"  {where}"
                    found[what] = max(here, found.get(what, 0))
        return sorted(found.items(), key=lambda item: -item[1])[:LINES]


def describe(sharding: Sharding, dims: Sequence[str] = ()) -> str:
    """A sharding in words, with names for the dims where the code has some."""
    parts = [
        f"{name or f'dim {d}'} by {s.tiles}"
        for (d, s), name in itertools.zip_longest(enumerate(sharding.splits), dims)
        if s
    ]
    return "split: " + ", ".join(parts) if parts else "replicated"


def _local_bytes(subject: Subject, var: Any) -> int:
    sharding = subject.sharding(var)
    if sharding is None or not hasattr(var.aval, "shape"):
        return 0
    return byte_size(sharding.local_shape(var.aval.shape), var.aval.dtype)
