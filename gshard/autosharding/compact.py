"""Layouts with few annotations, from the answers of the solver."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from jax.extend.core import Literal

from gshard.autosharding.candidates import Candidates, ModelAnswer
from gshard.autosharding.cost.sharing import name_of
from gshard.autosharding.cost.specs import NONE, Spec
from gshard.autosharding.departures import Departures
from gshard.autosharding.few import Few, Unit
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import Annotated, AnnotatedInside, dims_of
from gshard.capture.inside import TensorSite
from gshard.forecast.ops import PRODUCTS
from gshard.propagation.flow import Edge
from gshard.tensors.sharding import Sharding

# Share of a step that reading a tile of a tensor takes, for the tensor to be large.
_LARGE = 1e-4

# Lowering takes long where it takes more than this part of the time for finding annotations.
_LONG = 0.5


@dataclasses.dataclass(frozen=True)
class Compact:
    """Layouts of one answer."""

    candidates: Candidates
    choice: ModelAnswer

    def layouts(self, seconds: float) -> Iterator[Layout]:
        """Layouts with few annotations of which propagation makes nearly all of the answer: the
        arguments that are split, and those tensors where it would depart from the answer at a
        cost. None where they were not found in so many seconds of work.

        The second one has those of products too that a lowered program may compute otherwise than
        the model. Where lowering takes long, it is the only one.
        """
        found = self._found(seconds)
        if found is None:
            return
        arguments, inside = found
        both = tuple(sorted((*inside, *self._sums(inside)), key=str))
        if self.candidates.lowering_work <= _LONG * seconds or both == inside:
            yield self._priced(arguments, inside)
        if both != inside:
            yield self._priced(arguments, both)

    def _priced(
        self, arguments: tuple[Annotated, ...], inside: tuple[AnnotatedInside, ...]
    ) -> Layout:
        return self.candidates.priced(self.choice.model.mesh, arguments, inside, self._results())

    def _found(
        self, seconds: float
    ) -> tuple[tuple[Annotated, ...], tuple[AnnotatedInside, ...]] | None:
        """The annotations of arguments, and those inside."""
        candidates, choice = self.candidates, self.choice
        until = candidates.clock.now() + seconds - candidates.propagating_work
        fixed = {**candidates.split_arguments(choice), **self._states()}
        units = self._units(fixed)
        few = Few(
            Departures(choice.model, choice.answer),
            list(units),
            choice.sharding,
            fixed,
            candidates.propagated,
            lambda: candidates.clock.now() <= until,
            choice.cost,
        )
        if not few.find():
            return None
        inside = [
            dataclasses.replace(annotation, saves=saves)
            for unit, saves in few.chosen.items()
            if (annotation := units[unit]) is not None
        ]
        arguments = candidates.arguments(choice, few.fixed(list(few.chosen)))
        return arguments, tuple(sorted(inside, key=str))

    def _sums(self, known: Collection[AnnotatedInside]) -> list[AnnotatedInside]:
        """Annotations, beside those that are known, of products that may leave partial sums instead
        of moving an operand: one operand alone is split along a factor that is summed."""
        made = {edge.atoms[1][0] for edge in self.candidates.operators if self._may_sum(edge)}
        return [
            annotation
            for unit, annotation in self._units(()).items()
            if annotation is not None and not made.isdisjoint(unit.variables)
            if annotation not in known
        ]

    def _may_sum(self, edge: Edge) -> bool:
        """Whether one operand alone of a large product is split along a factor that is summed."""
        result, choice = edge.atoms[1][0], self.choice
        if name_of(edge) not in PRODUCTS or choice.spec(result) is None:
            return False
        kept = {factor for dims in edge.factors.results[0] for factor in dims}
        split = 0
        for atom, dims in zip(edge.atoms[0], edge.factors.operands, strict=True):
            spec = None if isinstance(atom, Literal) else choice.spec(atom)
            split += sum(at != NONE and kept.isdisjoint(dims[at]) for at in spec or ())
        seconds = choice.model.sizes(result).min() / self.candidates.machine.memory_bandwidth
        return split == 1 and bool(seconds * edge.runs > _LARGE * choice.cost)

    def _states(self) -> dict[Any, Sharding]:
        """The results that are arguments of the next step, sharded like these."""
        subject, found = self.candidates.subject, {}
        for result, argument in subject.returned:
            var, given = subject.flat.jaxpr.outvars[result], subject.flat.jaxpr.invars[argument]
            if not isinstance(var, Literal) and self.choice.spec(given) is not None:
                found[var] = self.choice.sharding(given)
        return found

    def _results(self) -> dict[str, Annotated]:
        """The annotations of the same results."""
        subject, found = self.candidates.subject, {}
        for (path, _), (_, argument) in zip(subject.states, subject.returned, strict=True):
            given = subject.flat.jaxpr.invars[argument]
            spec, shape = self.choice.spec(given), given.aval.shape
            if spec is not None:
                found[path] = Annotated(path, shape, dims_of(spec, len(shape)))
        return found

    def _units(self, fixed: Collection[Any]) -> dict[Unit, AnnotatedInside | None]:
        """What can be annotated beside tensors that are fixed: tensors inside that are made at one
        place and are sharded alike, with their annotation, and equal arguments."""
        places = self.candidates.places
        together: dict[tuple[TensorSite | None, tuple[int, ...], Spec], list[Any]] = {}
        for var in (*self.candidates.subject.flat.jaxpr.invars, *places):
            spec = self.choice.spec(var)
            if spec is not None and var not in fixed:
                place = places[var][0] if var in places else None
                together.setdefault((place, var.aval.shape, spec), []).append(var)
        counts = Counter(place for place, _ in places.values())
        found: dict[Unit, AnnotatedInside | None] = {}
        for (place, shape, spec), made in together.items():
            unit = Unit(f"{place} {shape} {spec}", tuple(made))
            found[unit] = None
            if place is not None:
                numbers = tuple(places[var][1] for var in made)
                every = len(numbers) == counts[place]
                dims = dims_of(spec, len(shape))
                found[unit] = AnnotatedInside(place, None if every else numbers, dims)
        return found
