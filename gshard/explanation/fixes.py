"""Which annotation to change: each candidate is tried, and its bytes are counted.

Nothing is guessed. An annotation is taken away, made `replicate`, or moved to another dim; the
program is planned again, and what it sends is read off the plan. That takes as long as a lowering
each time, so the search has a budget, and begins with the annotations behind the costliest lines.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jax.extend.core import ClosedJaxpr, JaxprEqn

from gshard.explanation.names import annotated_name, spelled
from gshard.explanation.subject import Subject
from gshard.graph import map_bodies
from gshard.graph.readable import size
from gshard.graph.source import source_of, span_of
from gshard.tensors.annotate import Annotation, shard_call
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import size_of

_NOTHING = "no annotation"
_WORTH = 0.01  # the least share of the bytes that a change has to save

Changes = dict[JaxprEqn, Annotation | None]  # annotations to be replaced, or taken away
Progress = Callable[[int, int], None]  # told how many of how many candidates are tried
Copies = list[JaxprEqn]  # the annotation of one tensor: differentiation repeats it


@dataclass(frozen=True)
class Fix:
    """A change of one line, and what a device sends before and after it.

    A line in a loop, or in `jax.tree.map`, annotates several tensors: `count` of them change.
    """

    source: str
    now: str
    instead: str
    before: int
    after: int
    tensor: str = "tensor"  # what the code calls what is annotated, or the first of several
    left: Mapping[str, int] = field(default_factory=dict)  # bytes after it, by line
    count: int = 1
    is_all: bool = True  # of the tensors that the line annotates; else those of one shape
    memory: int = 0  # bytes of arguments that a device has more

    @property
    def removed(self) -> int:
        """Bytes that are not sent any more."""
        return self.before - self.after

    def is_covered(self, by: Fix) -> bool:
        """Whether `by`, a change of fewer tensors or in less memory, saves as much."""
        same = (self.count, self.tensor) == (by.count, by.tensor)
        more = same and (self.memory > by.memory or self.after == by.after)
        no_better = self.after >= by.after and self.memory >= by.memory
        return self.source == by.source and no_better and (more or self.count > by.count)

    @property
    def change(self) -> str:
        """What to write, in the code's own names."""
        several = self.count > 1
        tensor = "tensor" if several else self.tensor
        now, instead = (call.replace("tensor", tensor) for call in (self.now, self.instead))
        words = f"removing {now}" if self.instead == _NOTHING else f"{instead} instead of {now}"
        which = f"the {self.count} tensors that have the shape of {self.tensor}"
        if self.is_all:
            both = "both" if self.count == 2 else f"all {self.count}"
            which = f"{both} tensors of this line ({self.tensor} and {self.count - 1} more)"
        return f"{words} of {which}" if several else words

    @property
    def cost(self) -> str:
        """What it needs in return, if anything."""
        return f", and needs {size(self.memory)} more on each device" if self.memory > 0 else ""

    def __str__(self) -> str:
        saved = f"saves {self.removed:,} of {self.before:,} B"
        return f"{self.source}: {self.change} {saved}{self.cost}"


@dataclass(frozen=True)
class FixSearch:
    """What came of a search: the changes that send less, the best first."""

    fixes: tuple[Fix, ...] = ()
    tried: int = 0
    candidates: int = 0

    def for_line(self, source: str, sent: int) -> Fix | None:
        """The change that saves most at a line that sends `sent` bytes, and not at others' cost."""

        def saved(fix: Fix) -> int:
            return min(sent - fix.left.get(source, 0), fix.removed)

        better = [f for f in self.fixes if saved(f) > 0]
        return min(better, key=lambda f: (-saved(f), f.count), default=None)


def search(
    subject: Subject,
    seconds: float = math.inf,
    first: Sequence[str] = (),
    progress: Progress | None = None,
) -> FixSearch:
    """Try the changes of one annotation, as many as `seconds` allow; those at `first` first."""
    order = {line: number for number, line in enumerate(first)}
    calls = sorted(_by_call(subject), key=lambda c: order.get(source_of(c[0][0]), len(order)))
    candidates = [
        (unit, words, changed)
        for call in calls
        for unit in _units(call)
        for words, changed in _candidates(unit, subject.num_devices)
    ]
    found, tried, end = [], 0, time.monotonic() + seconds
    for unit, words, changed in candidates:
        if time.monotonic() >= end:
            break
        tried += 1
        fix = _tried(subject, unit, words, changed)
        if fix is not None:
            found.append(fix)
        if progress:
            progress(tried, len(candidates))
    found.sort(key=lambda fix: (fix.after, fix.count, fix.memory))
    kept = (f for n, f in enumerate(found) if not any(f.is_covered(by) for by in found[:n]))
    return FixSearch(tuple(kept), tried, len(candidates))


def _tried(subject: Subject, unit: list[Copies], words: str, changed: Changes) -> Fix | None:
    try:
        plan = subject.variant(_with(subject.flat, changed))
    except ValueError:
        return None  # this change is not allowed at the annotation's place
    if plan.bytes > (1 - _WORTH) * subject.sent:
        return None
    left: Counter[str] = Counter()
    for sent in plan.sends:
        left[sent.source] += sent.total_bytes
    eqn = unit[0][0]
    place = source_of(eqn)
    names = dict(zip(subject.flat.jaxpr.invars, subject.argument_names, strict=False))
    calls = {spelled(copies[0]).removeprefix(f"{place}: ") for copies in unit}
    now = calls.pop() if len(calls) == 1 else "the annotations"
    named = names.get(eqn.invars[0]), annotated_name(eqn)
    call = next(call for call in _by_call(subject) if any(eqn in copies for copies in call))
    tensor = next(filter(None, named if len(call) > 1 else named[::-1]), "tensor")
    memory, before = (sum(map(size_of, j.invars)) for j in (plan.jaxpr, subject.jaxpr))
    count = len(unit), len(unit) == len(call), memory - before
    return Fix(place, now, words, subject.sent, plan.bytes, tensor, left, *count)


def _by_call(subject: Subject) -> list[list[Copies]]:
    """The tensors that each call in the code annotates."""
    calls: dict[object, dict[int, Copies]] = {}
    for eqn in subject.annotations:
        tensors = calls.setdefault(span_of(eqn) or eqn, {})
        tensors.setdefault(eqn.params["annotation"].number, []).append(eqn)
    return [list(tensors.values()) for tensors in calls.values()]


def _units(call: list[Copies]) -> Iterator[list[Copies]]:
    """Tensors to be changed together: all of a call, those that are alike, and each."""
    yield call
    alike: dict[object, list[Copies]] = {}
    for copies in call:
        alike.setdefault(_kind(copies[0]), []).append(copies)
    if len(call) > 1:
        yield from (unit for unit in alike.values() if 1 < len(unit) < len(call))
        for copies in sorted(call, key=lambda c: -math.prod(c[0].outvars[0].aval.shape)):
            yield [copies]


def _kind(eqn: JaxprEqn) -> object:
    return eqn.outvars[0].aval.shape, eqn.params["annotation"]


def _candidates(unit: list[Copies], num_devices: int) -> Iterator[tuple[str, Changes]]:
    every = [eqn for copies in unit for eqn in copies]
    yield _NOTHING, dict.fromkeys(every)
    asked, shapes = every[0].params["annotation"], [eqn.outvars[0].aval.shape for eqn in every]
    if any(e.params["annotation"] != asked for e in every) or len(set(map(len, shapes))) > 1:
        return
    sharding, rank = asked.sharding, len(shapes[0])
    split = next(filter(None, sharding.splits), Split.of(range(num_devices)))
    replicated = Sharding.replicated(rank, num_devices)
    others = {} if sharding.is_replicated else {"replicate(tensor)": replicated}
    for dim, rows in enumerate(map(min, zip(*shapes, strict=True))):
        if split and not sharding.splits[dim] and rows >= split.tiles:
            other = replicated.replace(dim, split)
            others[_call(other, dim)] = other
    for words, other in others.items():
        yield words, dict.fromkeys(every, Annotation.of_sharding(words, other))


def _call(sharding: Sharding, dim: int) -> str:
    """The call that asks for a sharding of one dim."""
    first = sharding.devices[..., 0]
    if first.ravel().tolist() == list(range(first.size)):
        return f"split(tensor, {dim}, {first.size})"
    return shard_call(first)


def _with(closed: ClosedJaxpr, changed: Changes) -> ClosedJaxpr:
    """The program, and the bodies in it, with other annotations."""
    eqns = [
        _annotated(eqn, changed[eqn])
        if eqn in changed
        else map_bodies(eqn, lambda body: _with(body, changed))
        for eqn in closed.jaxpr.eqns
    ]
    return closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns))


def _annotated(eqn: JaxprEqn, annotation: Annotation | None) -> JaxprEqn:
    if annotation is None:  # an annotation with all dims open says nothing
        open_dims = tuple(range(len(eqn.outvars[0].aval.shape)))
        nothing = Sharding.replicated(len(open_dims), eqn.params["annotation"].sharding.num_devices)
        annotation = Annotation.of_sharding("nothing", nothing, open_dims)
    return eqn.replace(params={**eqn.params, "annotation": annotation})
