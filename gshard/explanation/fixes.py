"""Which annotation to change: each candidate is tried, and its bytes are counted.

Nothing is guessed. An annotation is taken away, made `replicate`, or moved to another dim; the
program is planned again, and what it sends is read off the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax.extend.core import ClosedJaxpr, JaxprEqn

from gshard.annotate import Annotation
from gshard.explanation.subject import Subject
from gshard.graph import map_bodies
from gshard.graph.source import source_of
from gshard.tensors.sharding import Sharding, Split

Changes = dict[JaxprEqn, Annotation | None]  # annotations to be replaced, or taken away


@dataclass(frozen=True)
class Fix:
    """A change of one line, and what a device sends before and after it."""

    source: str
    now: str
    instead: str
    before: int
    after: int

    @property
    def removed(self) -> int:
        """Bytes that are not sent any more."""
        return self.before - self.after

    def __str__(self) -> str:
        return (
            f"{self.source}: {self.instead} in place of {self.now} "
            f"takes {self.removed:,} of {self.before:,} B away"
        )


def fixes(subject: Subject, limit: int = 24) -> list[Fix]:
    """The changes of one annotation that remove bytes, the most first; `limit` tries at most."""
    found = []
    tried = 0
    for line, repeated in _by_line(subject).items():
        for words, changed in _candidates(repeated, subject.num_devices):
            if tried == limit:
                break
            tried += 1
            try:
                after = subject.variant(_with(subject.flat, changed)).bytes
            except ValueError:
                continue  # this change is not allowed where the annotation stands
            if after < subject.sent:
                now = str(repeated[0].params["annotation"])
                found.append(Fix(line, now, words, subject.sent, after))
    return sorted(found, key=lambda fix: fix.after)


def _by_line(subject: Subject) -> dict[str, list[JaxprEqn]]:
    """The annotations of one line belong together: differentiation repeats them."""
    lines: dict[str, list[JaxprEqn]] = {}
    for eqn in subject.annotations:
        lines.setdefault(source_of(eqn), []).append(eqn)
    return lines


def _candidates(repeated: list[JaxprEqn], num_devices: int) -> Iterator[tuple[str, Changes]]:
    first: Annotation = repeated[0].params["annotation"]
    yield "no annotation", dict.fromkeys(repeated)
    shape = repeated[0].outvars[0].aval.shape
    sharding = first.resolve(num_devices)
    if any(len(e.outvars[0].aval.shape) != len(shape) for e in repeated):
        return
    splits = [s for s in sharding.splits if s]
    split: Split | None = splits[0] if splits else Split.of(range(num_devices))
    if not sharding.is_replicated:
        whole = Sharding.replicated(len(shape), num_devices)
        changed = Annotation.of_sharding("replicate", whole)
        yield "replicate", dict.fromkeys(repeated, changed)
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
    rank = len(eqn.outvars[0].aval.shape)
    if annotation is None:  # an annotation with all dims open says nothing
        nothing = Sharding.replicated(rank, _devices(eqn))
        annotation = Annotation("nothing", nothing.tiles, None, tuple(range(rank)))
    return eqn.replace(params={**eqn.params, "annotation": annotation})


def _devices(eqn: JaxprEqn) -> int:
    sharding = eqn.params["annotation"].sharding
    return sharding.num_devices if sharding is not None else 1
