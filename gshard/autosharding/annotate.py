"""Annotations from which propagation finds a solver's answer: as few as possible.

Propagation by itself deviates from an answer. Lowering a program to see what that costs takes long,
so the model prices the shardings that propagation finds: tensors are given, operators choose again.
The tensor around which the deviation costs most is annotated and propagation runs again, until it
costs little. Then annotations that the others make superfluous are removed.

At the end, forecasts of lowered programs, which see what the model does not, improve the best
layout: the sharding of one argument is changed at a time, and annotations are removed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jax.extend.core import Literal

from gshard.autosharding.budget import Clock
from gshard.autosharding.cost import NONE, Spec, specs_of
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.evaluate import Deviation, Deviations, Evaluator, ModelAnswer
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import (
    Annotated,
    AnnotatedInside,
    Group,
    dims_of,
    groups,
)
from gshard.capture.inside import TensorSite
from gshard.tensors.sharding import Sharding

# How much slower than the fastest layout one with fewer annotations, or mesh axes, may be, and by
# the model annotations than the answer that they are made from.
TOLERANCE = 0.01

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class SpecGroup:
    """Tensors that are annotated together, with one spec: those of one place in the program, with
    their annotation, or equal arguments."""

    name: str
    variables: tuple[Any, ...]
    annotation: AnnotatedInside | None


@dataclasses.dataclass
class AnnotationSearch:
    """Layouts that are like one answer of the solver."""

    evaluator: Evaluator
    choice: ModelAnswer

    def few(self, clock: Clock) -> Layout | None:
        """The layout with few annotations from which propagation finds nearly all of the answer:
        the arguments that are split, and tensors where it would deviate at a cost. None where they
        were not found in time, of which the layout needs a part."""
        chosen = self._chosen(clock.part(clock.left - self.evaluator.lowering_work))
        return None if chosen is None else self._layout(chosen)

    def arguments(self) -> Layout:
        """The layout that annotates arguments alone."""
        return self._layout({})

    def everything(self) -> Layout:
        """The layout from which propagation finds all of the answer: every tensor is annotated at
        which it deviates."""
        chosen: dict[SpecGroup, float] = {}
        for _ in range(2):  # annotations of the first round may make propagation deviate elsewhere
            found = self.evaluator.propagated(self._fixed(chosen))
            for unit in self._units:
                if any(found.get(var) != self.choice.sharding(var) for var in unit.variables):
                    chosen[unit] = 0.0
        return self._layout(chosen)

    def _layout(self, chosen: Mapping[SpecGroup, float]) -> Layout:
        """The layout that annotates some units beside the arguments that are split; with what each
        saves."""
        subject, fixed = self.evaluator.subject, self._fixed(chosen)
        given = subject.flat.jaxpr.invars[subject.closed_over :]
        arguments = tuple(
            Annotated(path, shape, dims_of(self.choice.spec(var) or (), len(shape)))
            for (path, shape), var in zip(subject.paths, given, strict=True)
            if shape and var in fixed
        )
        inside = [
            dataclasses.replace(unit.annotation, saves=saves)
            for unit, saves in chosen.items()
            if unit.annotation is not None
        ]
        results: dict[str, Annotated] = {}
        for (path, _), (_, number) in zip(subject.states, subject.returned, strict=True):
            var = subject.flat.jaxpr.invars[number]
            if (spec := self.choice.spec(var)) is not None:
                shape = var.aval.shape
                results[path] = Annotated(path, shape, dims_of(spec, len(shape)))
        ordered = tuple(sorted(inside, key=str))
        return self.evaluator.evaluate(self.choice.model.mesh, arguments, ordered, results)

    @functools.cached_property
    def _base(self) -> dict[Any, Sharding]:
        """The arguments that are split, and results that are arguments of the next step."""
        subject, choice = self.evaluator.subject, self.choice
        jaxpr = subject.flat.jaxpr
        split = (v for v in jaxpr.invars if any(at != NONE for at in choice.spec(v) or ()))
        found = {var: choice.sharding(var) for var in split}
        for result, argument in subject.returned:
            var, given = jaxpr.outvars[result], jaxpr.invars[argument]
            if not isinstance(var, Literal) and choice.spec(given) is not None:
                found[var] = choice.sharding(given)
        return found

    @functools.cached_property
    def _units(self) -> list[SpecGroup]:
        """What can be annotated beside the base."""
        places = self.evaluator.places
        together: dict[tuple[TensorSite | None, tuple[int, ...], Spec], list[Any]] = {}
        for var in (*self.evaluator.subject.flat.jaxpr.invars, *places):
            spec = self.choice.spec(var)
            if spec is not None and var not in self._base:
                place = places[var][0] if var in places else None
                together.setdefault((place, var.aval.shape, spec), []).append(var)
        counts = Counter(place for place, _ in places.values())
        found = []
        for (place, shape, spec), made in together.items():
            annotation = None
            if place is not None:
                numbers = tuple(places[var][1] for var in made)
                every = len(numbers) == counts[place]
                dims = dims_of(spec, len(shape))
                annotation = AnnotatedInside(place, None if every else numbers, dims)
            found.append(SpecGroup(f"{place} {shape} {spec}", tuple(made), annotation))
        return found

    def _fixed(self, units: Iterable[SpecGroup]) -> dict[Any, Sharding]:
        """The shardings of some units, and those of the base."""
        chosen = {var: self.choice.sharding(var) for unit in units for var in unit.variables}
        return {**self._base, **chosen}

    def _chosen(self, clock: Clock) -> dict[SpecGroup, float] | None:
        """Units with which propagation finds nearly all of the answer, and what each saves.

        A round may make propagation deviate elsewhere, which the next one mends: the best is kept.
        """
        deviations = Deviations(self.choice.model, self.choice.answer)
        work = self.evaluator.propagating_work

        def priced(units: Iterable[SpecGroup]) -> Deviation:
            return deviations.priced(self.evaluator.propagated(self._fixed(units)))

        def missing(found: Deviation) -> float:
            """The bytes that are too much, or picoseconds of too slow a step."""
            return found.excess_bytes or (found.seconds - TOLERANCE * self.choice.cost) * PICO

        def more_time() -> bool:
            return clock.left >= work

        chosen: dict[SpecGroup, float] = {}
        best = now = priced(())
        kept = chosen
        while missing(now) > 0 and more_time():
            added = self._worst(now, chosen, deviations, missing(now))
            if not added:
                break
            before, now = now, priced((*chosen, *added))
            total, saved = sum(added.values()), max(0.0, before.seconds - now.seconds)
            chosen = chosen | {unit: saved * share / total for unit, share in added.items()}
            if (now.excess_bytes, now.seconds) < (best.excess_bytes, best.seconds):
                best, kept = now, chosen
        if missing(best) > 0:
            return None

        def removable(group: Sequence[SpecGroup]) -> bool:
            nonlocal best, kept
            without = priced([each for each in kept if each not in group])
            if missing(without) <= 0:
                best, kept = without, {u: s for u, s in kept.items() if u not in group}
                return True
            if len(group) == 1:
                kept = kept | {group[0]: max(0.0, without.seconds - best.seconds)}
            return False

        _bisect(sorted(kept, key=lambda each: (kept[each], each.name)), removable, more_time)
        return kept

    def _worst(
        self, found: Deviation, chosen: Collection[SpecGroup], deviations: Deviations, wanted: float
    ) -> dict[SpecGroup, float]:
        """The units around which the most is lost, enough to save what is wanted, and how much."""
        left = {
            unit: list(deviations.around(v for v in unit.variables if v in found.tensors))
            for unit in self._units
            if unit not in chosen and not found.tensors.isdisjoint(unit.variables)
        }
        extra, taken = found.extra_cost.clip(min=0.0), {}
        while left and wanted > 0:
            share = {unit: float(extra[nodes].sum()) for unit, nodes in left.items()}
            unit = min(share, key=lambda each: (-share[each], each.name))
            if share[unit] <= 0:
                break
            taken[unit] = share[unit]
            wanted -= share[unit]
            extra[left.pop(unit)] = 0.0  # so that its neighbours are not taken for the same
        return taken


def _bisect(
    items: Sequence[_T], removable: Callable[[Sequence[_T]], bool], more_time: Callable[[], bool]
) -> None:
    """Try to remove all items, then halves of those that stay, as long as there is time."""
    waiting = [items] if items else []
    while waiting and more_time():
        group = waiting.pop()
        middle = len(group) // 2
        if not removable(group) and middle:
            waiting += [group[middle:], group[:middle]]


def slowest(least: float, bound: float) -> float:
    """The seconds that a layout with fewer annotations may take: a little more than the best one,
    and not so much more that a small gap to the bound is lost."""
    proven = bound / (1 - TOLERANCE)
    most = (1 + TOLERANCE) * least
    return min(most, proven) if proven >= least else most


def best_of(layouts: Sequence[Layout]) -> Layout:
    """The layout with the fewest mesh axes, and the fewest annotations inside, among those that are
    nearly as fast as the fastest."""
    least = min(layout.seconds for layout in layouts)
    equal = [layout for layout in layouts if layout.seconds <= least * (1 + TOLERANCE)]
    return min(equal, key=lambda a: (len(a.mesh), len(groups(a.inside)), a.seconds))


def coordinate_descent(
    best: Layout, evaluator: Evaluator, more_time: Callable[[], bool]
) -> list[Layout]:
    """Layouts each faster than the one before: the sharding of one argument is changed, then that
    of the next, the largest first, until no change helps or time runs out."""
    found, tried, mesh = [best], {frozenset(best.annotations)}, tuple(best.mesh.values())
    shapes = sorted(evaluator.subject.paths, key=lambda p: -math.prod(p[1]))
    improved = True
    while improved:
        improved = False
        for path, shape in shapes:
            for spec in specs_of(shape, mesh) if shape else ():
                annotations = tuple(a for a in found[-1].annotations if a.path != path)
                if any(at != NONE for at in spec):
                    annotations += (Annotated(path, shape, dims_of(spec, len(shape))),)
                if frozenset(annotations) in tried:
                    continue
                if not more_time():
                    return found
                tried.add(frozenset(annotations))
                layout = evaluator.evaluate(mesh, annotations, best.inside)
                faster = layout.seconds < (1 - TOLERANCE / 10) * found[-1].seconds
                if faster and layout.memory_bytes <= evaluator.limit:
                    found.append(layout)
                    improved = True
    return found


def fewest(
    best: Layout, limit: float, evaluator: Evaluator, more_time: Callable[[], bool]
) -> Layout:
    """Remove annotations by bisection while the forecast stays below `limit`, and note what each of
    the others saves: first those inside. Where none of these is needed, those of arguments are
    tried one after the other; else arguments say best what the layout is."""

    def removable(chosen: Sequence[Group]) -> bool:
        nonlocal best
        removed = {a for group in chosen for a in group}
        tried = evaluator.evaluate(
            tuple(best.mesh.values()),
            tuple(a for a in best.annotations if a not in removed),
            tuple(a for a in best.inside if a not in removed),
        )
        if tried.seconds <= limit and tried.memory_bytes <= evaluator.limit:
            best = tried
            return True
        if len(chosen) == 1:
            saves = max(0.0, tried.seconds - best.seconds)
            sides: tuple[Any, ...] = (best.annotations, best.inside)
            annotations, inside = (
                tuple(dataclasses.replace(a, saves=saves) if a in removed else a for a in side)
                for side in sides
            )
            best = dataclasses.replace(best, annotations=annotations, inside=inside)
        return False

    _bisect(groups(best.inside), removable, more_time)
    for group in [] if best.inside else groups(best.annotations):
        _bisect([group], removable, more_time)
    return dataclasses.replace(best, considered=tuple(evaluator.considered))
