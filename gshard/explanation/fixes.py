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
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn

from gshard.explanation.names import annotated_name
from gshard.explanation.subject import Subject
from gshard.graph import map_bodies
from gshard.graph.source import source_of, span_of
from gshard.tensors.annotate import Annotation
from gshard.tensors.sharding import Sharding, Split

Changes = dict[JaxprEqn, Annotation | None]  # annotations to be replaced, or taken away
Progress = Callable[[int, int], None]  # told how many of how many candidates are tried


@dataclass(frozen=True)
class Fix:
    """A change of one line, and what a device sends before and after it."""

    source: str
    now: str
    instead: str
    before: int
    after: int
    tensor: str = "tensor"  # what the code calls what is annotated
    left: Mapping[str, int] = field(default_factory=dict)  # bytes after it, by line

    @property
    def removed(self) -> int:
        """Bytes that are not sent any more."""
        return self.before - self.after

    @property
    def change(self) -> str:
        """What to write, in the code's own names."""
        if self.instead == "no annotation":
            return f"no annotation in place of {self._named(self.now)}"
        return f"{self._named(self.instead)} in place of {self._named(self.now)}"

    def _named(self, call: str) -> str:
        return call.replace("tensor", self.tensor)

    def __str__(self) -> str:
        return f"{self.source}: {self.change} takes {self.removed:,} of {self.before:,} B away"


@dataclass(frozen=True)
class FixSearch:
    """What came of a search: the changes that send less, the best first."""

    fixes: tuple[Fix, ...] = ()
    tried: int = 0
    candidates: int = 0

    def for_line(self, source: str, sent: int) -> Fix | None:
        """The best of the changes after which a line that sends `sent` bytes sends less."""
        return next((f for f in self.fixes if f.left.get(source, 0) < sent), None)


def search(
    subject: Subject,
    seconds: float = math.inf,
    first: Sequence[str] = (),
    progress: Progress | None = None,
) -> FixSearch:
    """Try the changes of one annotation, as many as `seconds` allow; those at `first` first."""
    order = {line: number for number, line in enumerate(first)}
    calls = sorted(_by_call(subject), key=lambda c: order.get(source_of(c[0]), len(order)))
    candidates = [
        (call[0], words, changed)
        for call in calls
        for words, changed in _candidates(call, subject.num_devices)
    ]
    found, tried, end = [], 0, time.monotonic() + seconds
    for eqn, words, changed in candidates:
        if time.monotonic() >= end:
            break
        tried += 1
        fix = _tried(subject, eqn, words, changed)
        if fix is not None:
            found.append(fix)
        if progress:
            progress(tried, len(candidates))
    found.sort(key=lambda fix: fix.after)
    return FixSearch(tuple(found), tried, len(candidates))


def _tried(subject: Subject, eqn: JaxprEqn, words: str, changed: Changes) -> Fix | None:
    try:
        plan = subject.variant(_with(subject.flat, changed))
    except ValueError:
        return None  # this change is not allowed at the annotation's place
    if plan.bytes >= subject.sent:
        return None
    left: Counter[str] = Counter()
    for sent in plan.sends:
        left[sent.source] += sent.total_bytes
    place, names = source_of(eqn), _arguments(subject)
    now = str(eqn.params["annotation"]).removeprefix(f"{place}: ")
    tensor = annotated_name(eqn) or names.get(eqn.invars[0]) or "tensor"
    return Fix(place, now, words, subject.sent, plan.bytes, tensor, left)


def _arguments(subject: Subject) -> dict[Any, str]:
    return dict(zip(subject.flat.jaxpr.invars, subject.argument_names, strict=False))


def _by_call(subject: Subject) -> list[list[JaxprEqn]]:
    """The annotations of one call in the code belong together: differentiation repeats them."""
    calls: dict[object, list[JaxprEqn]] = {}
    for eqn in subject.annotations:
        calls.setdefault(span_of(eqn) or eqn, []).append(eqn)
    return list(calls.values())


def _candidates(repeated: list[JaxprEqn], num_devices: int) -> Iterator[tuple[str, Changes]]:
    yield "no annotation", dict.fromkeys(repeated)
    shape = repeated[0].outvars[0].aval.shape
    sharding = repeated[0].params["annotation"].sharding
    if any(len(e.outvars[0].aval.shape) != len(shape) for e in repeated):
        return
    splits = [s for s in sharding.splits if s]
    split: Split | None = splits[0] if splits else Split.of(range(num_devices))
    if not sharding.is_replicated:
        replicated = Sharding.replicated(len(shape), num_devices)
        changed = Annotation.of_sharding("replicate(tensor)", replicated)
        yield "replicate(tensor)", dict.fromkeys(repeated, changed)
    for dim, size in enumerate(shape):
        if split is None or sharding.splits[dim] or size < split.tiles:
            continue
        moved = Sharding.replicated(len(shape), num_devices).replace(dim, split)
        words = f"split(tensor, {dim}, {split.tiles})"
        yield words, {e: Annotation.of_sharding(words, moved) for e in repeated}


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
