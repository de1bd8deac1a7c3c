"""What a program sends, why, and which annotation to change: as data, which text and page show."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gshard.explanation.costs import ROUNDING, LineCost, bounds, by_kind, by_line, counts, headline
from gshard.explanation.fixes import FixSearch, Progress, search
from gshard.explanation.names import LocalNames, Names, shape
from gshard.explanation.subject import Subject
from gshard.explanation.why import Why
from gshard.forecast import Forecast
from gshard.graph.readable import duration, size
from gshard.graph.source import source_of
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import byte_size

EXPLAINED = 6  # lines that are explained, the costliest first
LINES = 12  # of each list of a text: the largest first
_LARGE = 0.02  # a replicated value is named if it takes this share of the arguments
QUICK = 1500  # equations up to which changes of annotations are tried without being asked


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
        return by_line(self.subject, self.forecast)

    @functools.cached_property
    def kinds(self) -> list[LineCost]:
        """The same by kind of collective."""
        return by_kind(self.subject, self.forecast)

    @functools.cached_property
    def sentence(self) -> str:
        """What the costliest line sends, and its share of the step."""
        return headline(self.forecast, self.lines)

    @property
    def bounds(self) -> str:
        """Which resource bounds the step, with the shares of all."""
        return bounds(self.forecast)

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
            f"{self.name} on {self.hardware}: {counts(self.subject)}, "
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
