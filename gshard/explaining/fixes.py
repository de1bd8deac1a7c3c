"""Which annotation to change: each candidate is tried, and its bytes are counted.

Nothing is guessed. An annotation is taken away, made `replicate`, or moved to another dim; the
program is partitioned again, and what it sends is read off the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from gshard.annotate import Annotation, annotate_p
from gshard.explain import collectives_of
from gshard.explaining.subject import Subject
from gshard.sharding import Sharding, Split
from gshard.source import short_source, source_of


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
            f"{short_source(self.source)}: {self.instead} in place of {self.now} "
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
                jaxpr = subject.variant(_with(subject.flat, changed))
            except ValueError:
                continue  # this change is not allowed where the annotation stands
            after = sum(c.total_bytes for c in collectives_of(jaxpr, subject.num_devices))
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


def _candidates(
    repeated: list[JaxprEqn], num_devices: int
) -> Iterator[tuple[str, dict[int, Annotation | None]]]:
    first: Annotation = repeated[0].params["annotation"]
    yield "no annotation", dict.fromkeys(map(id, repeated))
    shape = repeated[0].outvars[0].aval.shape
    sharding = first.resolve(num_devices)
    if any(len(e.outvars[0].aval.shape) != len(shape) for e in repeated):
        return
    splits = [s for s in sharding.splits if s]
    split: Split | None = splits[0] if splits else Split.of(range(num_devices))
    if not sharding.is_replicated:
        whole = Sharding.replicated(len(shape), num_devices)
        changed = Annotation.of_sharding("replicate", whole)
        yield "replicate", {id(e): changed for e in repeated}
    for dim, size in enumerate(shape):
        if split is None or sharding.splits[dim] or size < split.tiles:
            continue
        moved = Sharding.replicated(len(shape), num_devices).replace(dim, split)
        words = f"split(tensor, {dim}, {split.tiles})"
        yield words, {id(e): Annotation.of_sharding(words, moved) for e in repeated}


def _with(closed: ClosedJaxpr, changed: dict[int, Annotation | None]) -> ClosedJaxpr:
    return ClosedJaxpr(_changed(closed.jaxpr, changed), closed.consts)


def _changed(jaxpr: Jaxpr, changed: dict[int, Annotation | None]) -> Jaxpr:
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive is annotate_p and id(eqn) in changed:
            annotation = changed[id(eqn)]
            rank = len(eqn.outvars[0].aval.shape)
            if annotation is None:  # an annotation with all dims open says nothing
                nothing = Sharding.replicated(rank, _devices(eqn))
                annotation = Annotation("nothing", nothing.tiles, None, tuple(range(rank)))
            eqn = eqn.replace(params={**eqn.params, "annotation": annotation})
        else:
            params = {k: _inside(v, changed) for k, v in eqn.params.items()}
            eqn = eqn.replace(params=params)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _devices(eqn: JaxprEqn) -> int:
    meant = eqn.params["annotation"].meant
    return meant.num_devices if meant is not None else 1


def _inside(value: Any, changed: dict[int, Annotation | None]) -> Any:
    if isinstance(value, ClosedJaxpr):
        return _with(value, changed)
    if isinstance(value, Jaxpr):
        return _changed(value, changed)
    if isinstance(value, tuple) and any(isinstance(v, (ClosedJaxpr, Jaxpr)) for v in value):
        return tuple(_inside(v, changed) for v in value)
    return value
