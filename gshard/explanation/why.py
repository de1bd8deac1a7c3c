"""Why something is sent, in one sentence: which splits meet at a line, and what that asks for.

How a value got its split is the chain of neighbours from an annotation to it. A split is handed on
unchanged, so the shortest way along neighbours that have it leads back to where it was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.explanation.names import Names, annotated_call, einsums, shape
from gshard.explanation.subject import Subject
from gshard.graph.source import source_of
from gshard.moving.inventory import Collective
from gshard.tensors.annotate import annotate_p
from gshard.tensors.factors import decompose
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import size_of

_NEEDS = {
    "all_gather": "needs all of it on every device",
    "all_reduce": "runs over a split dim, and the devices combine their parts",
    "reduce_scatter": "runs over a split dim, and the devices add up their parts",
    "collective_permute": "needs rows that neighbouring devices hold",
    "all_to_all": "has to move the split to another dim",
}
_OF_SEVERAL = {
    "all_gather": "takes operands split along different dims, so that one of them is gathered",
    "all_to_all": "has to turn one into the other",
}
_WORDS = {
    "dot_general": "product",
    "conv_general_dilated": "convolution",
    "row_map": "composition of slices, pads and concatenations",
    "reduce_sum": "sum",
    "reduce_max": "maximum",
    "reduce_min": "minimum",
}


class Why:
    """The sentences of one program."""

    def __init__(self, subject: Subject, names: Names):
        self._subject, self._names = subject, names
        self._at: dict[str, list[JaxprEqn]] = {}
        for eqn in subject.equations:
            self._at.setdefault(source_of(eqn), []).append(eqn)
        self._known: dict[str, list[SplitOrigin]] = {}

    def origins(self, collective: Collective) -> list[SplitOrigin]:
        """Where the splits of the values at its line were asked for, each once."""
        key = f"{collective.source} {collective.why.operator}"
        if key not in self._known:
            self._known[key] = list(self._origins(collective))
        return self._known[key]

    def sentence(self, collective: Collective) -> str:
        """Which splits meet there, and what the operator makes of them."""
        here = collective.source
        eqn = next(iter(self._operators(collective)), None)
        found = self.origins(collective)[:3]
        if eqn is None or not found:
            return f"{collective.reason or 'gshard added it'}."
        asked = [self._split(o, here, first=n == 0) for n, o in enumerate(found)]
        needs = _NEEDS.get(collective.kind, "needs it otherwise")
        if len(found) > 1:
            needs = _OF_SEVERAL.get(collective.kind, needs)
        return f"{', '.join(asked)}; {self._operator(eqn, here)} {needs}."

    def _split(self, found: SplitOrigin, here: str, first: bool) -> str:
        name, dim = self._names.value(found.var), self._names.dim(found.var, found.dim)
        where = f"at {near(found.source, here)}" if found.source else "as an argument"
        if found.source.endswith("_shardings"):
            where = f"({found.source})"
        return f"{name} {'is split ' if first else ''}by {dim} {where}"

    def _operator(self, eqn: JaxprEqn, here: str) -> str:
        if eqn.primitive is annotate_p:
            return f"{annotated_call(eqn)} at {near(here, here)}"
        spec = einsums(eqn)
        name = f"einsum {spec[0]}" if spec else _WORDS.get(eqn.primitive.name, eqn.primitive.name)
        return f"the {name} at {near(here, here)}"

    def _operators(self, collective: Collective) -> list[JaxprEqn]:
        here = self._at.get(collective.source, [])
        asked = [e for e in reversed(here) if e.primitive is annotate_p]  # the last one decides
        named = [e for e in here if e.primitive.name == collective.why.operator]
        if set(named) <= set(asked):
            return asked or here
        members = max(collective.group_size, 2)
        size = collective.bytes * members // (members - 1)

        def is_other(eqn: JaxprEqn) -> bool:
            """Whether another of the products at a line has, or adds up, what is sent."""
            if "reduce" in collective.kind and eqn.primitive is p.dot_general_p:
                summed = zip(eqn.invars, eqn.params["dimension_numbers"][0], strict=False)
                found = [(self._subject.sharding(atom), dims) for atom, dims in summed]
                return not any(s and s.splits[dim] for s, dims in found for dim in dims)
            return all(size_of(v) != size for v in (*eqn.invars, *eqn.outvars))

        return sorted(named, key=is_other)

    def _origins(self, collective: Collective) -> Iterator[SplitOrigin]:
        seen = set()
        for eqn in self._operators(collective)[:4]:
            for atom in (*eqn.invars, *eqn.outvars):
                for found in self._of(atom):
                    key = (found.source, found.dim, self._names.value(found.var))
                    if key not in seen:
                        seen.add(key)
                        yield found

    def _of(self, atom: Any) -> Iterator[SplitOrigin]:
        sharding = self._subject.sharding(atom)
        for dim, split in enumerate(sharding.splits if sharding else ()):
            found = origin(self._subject, atom, dim) if split else None
            if found:
                yield found


def near(source: str, here: str) -> str:
    """A line as one says it in the file of another."""
    file, _, line = source.rpartition(":")
    return f"line {line}" if file and file == here.rpartition(":")[0] else source


# ---------------------------------------------------------------- chains


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
