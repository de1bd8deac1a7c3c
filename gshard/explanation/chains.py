"""How a value got its sharding: the chain of neighbours from an annotation to it.

A split is handed on unchanged, so the shortest way along neighbours that have it leads back to
where it was asked for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn

from gshard.explanation.names import annotated_call, shape
from gshard.explanation.subject import Subject
from gshard.graph.source import source_of
from gshard.tensors.annotate import annotate_p
from gshard.tensors.factors import decompose
from gshard.tensors.sharding import Sharding


@dataclass(frozen=True)
class Link:
    """One neighbour on the way: the operator that hands the split on, and its line."""

    operator: str
    source: str
    shape: str

    def __str__(self) -> str:
        is_keyword = self.operator.startswith(f"{self.source}:")  # in_shardings: P('x')
        return f"{self.operator} {self.shape}" + ("" if is_keyword else f" at {self.source}")


@dataclass(frozen=True)
class SplitOrigin:
    """Where a split was asked for: the value and dim, its annotation, and the way from there.

    Without an annotation, `var` is an argument that arrives sharded.
    """

    var: Any
    dim: int
    annotation: JaxprEqn | None
    links: tuple[Link, ...]

    @property
    def source(self) -> str:
        """The line of the annotation; "" for an argument."""
        return source_of(self.annotation) if self.annotation else ""


def origin(subject: Subject, var: Any, dim: int) -> SplitOrigin | None:
    """Where the split of `dim` comes from: the nearest annotation, else an argument."""
    asked, arguments = subject.annotated, set(subject.flat.jaxpr.invars)
    seen = {(var, dim)}
    queue: deque[tuple[Any, int, tuple[Link, ...]]] = deque([(var, dim, ())])
    arrived = None
    while queue:
        here, at, way = queue.popleft()
        if here in asked:
            first = _link(asked[here], here)
            links = first, *(link for link in way if link != first)
            return SplitOrigin(here, at, asked[here], links)
        if here in arguments and arrived is None:
            arrived = SplitOrigin(here, at, None, way)
        for eqn, other, place in _neighbours(subject, here, at):
            if (other, place) not in seen:
                seen.add((other, place))
                link = _link(eqn, here)
                queue.append((other, place, way if link == (*way, None)[0] else (link, *way)))
    return arrived


def _neighbours(subject: Subject, var: Any, dim: int) -> list[tuple[JaxprEqn, Any, int]]:
    sharding = subject.sharding(var)
    split = sharding.splits[dim] if sharding else None
    if split is None:
        return []
    found = []
    for edge in subject.flow.touching[var]:
        tensors = list(zip(edge.variables, edge.dims.names, strict=True))
        own = [names for atom, names in tensors if atom is var]
        parts = {
            (factor, part)
            for names in own
            for factor, part in decompose(split, names[dim], edge.factors.sizes).items()
        }
        for atom, names in tensors:
            theirs: Sharding | None = subject.sharding(atom)
            if atom is var or theirs is None:
                continue
            for place, other in enumerate(theirs.splits):
                if other and parts & set(
                    decompose(other, names[place], edge.factors.sizes).items()
                ):
                    eqn = edge.eqn or subject.loops.get(atom) or subject.loops[var]
                    found.append((eqn, atom, place))
    return found


def _link(eqn: JaxprEqn, var: Any) -> Link:
    if eqn.primitive is annotate_p:
        return Link(annotated_call(eqn), source_of(eqn), shape(var))
    return Link(eqn.primitive.name, source_of(eqn), shape(var))
