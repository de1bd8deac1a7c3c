"""Layouts from the answers of the solver, with the forecasts of their lowered programs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping
from typing import Any

import jax

from gshard.autosharding.annotated import AXES, Annotated, AnnotatedInside, dims_of, dims_on
from gshard.autosharding.explained import Considered
from gshard.autosharding.layout import Layout
from gshard.autosharding.memory import Ints
from gshard.autosharding.model import Model
from gshard.autosharding.specs import NONE, MeshShape, Spec, specs_of
from gshard.autosharding.subject import Subject
from gshard.forecast.hardware import Hardware
from gshard.forecast.report import Forecast
from gshard.jit import jit
from gshard.propagation.flow import Flow
from gshard.propagation.inside import Place, places


@dataclasses.dataclass(frozen=True)
class Choice:
    """An answer of a model: what it costs there, and the most bytes that it counts."""

    cost: float
    model: Model
    answer: Ints
    peak: float

    def spec(self, var: Any) -> Spec | None:
        """How the answer shards a tensor; None for scalars."""
        node = self.model.nodes.get(var, -1)
        return None if node < 0 else specs_of(var.aval.shape, self.model.mesh)[self.answer[node]]


@dataclasses.dataclass
class Candidates:
    """Lowers layouts of one program, and remembers what became of each."""

    subject: Subject
    machine: Hardware
    limit: int
    keywords: Mapping[str, Any]
    considered: list[Considered] = dataclasses.field(default_factory=list)
    lowering_seconds: float = 0.0  # what the slowest one took

    def of_arguments(self, choice: Choice) -> Layout:
        """The layout that annotates arguments as an answer has them."""
        return self.priced(choice.model.mesh, self._arguments(choice))

    def of_all(self, choice: Choice) -> Layout:
        """The layout that also annotates the results of all operators that are not pointwise."""
        return self.priced(choice.model.mesh, self._arguments(choice), self._inside(choice))

    def _arguments(self, choice: Choice) -> tuple[Annotated, ...]:
        specs = choice.model.specs(choice.answer)[self.subject.closed_over :]
        return tuple(
            Annotated(path, shape, dims_of(spec, len(shape)))
            for (path, shape), spec in zip(self.subject.paths, specs, strict=True)
            if spec is not None and any(at != NONE for at in spec)
        )

    def _inside(self, choice: Choice) -> tuple[AnnotatedInside, ...]:
        by_place: dict[Place, list[Spec]] = {}
        for var, (place, _) in self._places.items():
            spec = choice.spec(var)
            by_place.setdefault(place, []).append(() if spec is None else spec)
        decisive = {self._places[v][0] for v in self._decisive if v in self._places}
        found = []
        for place in decisive:
            specs = by_place[place]
            for spec in dict.fromkeys(specs):
                numbers = tuple(n for n, s in enumerate(specs) if s == spec)
                every = len(numbers) == len(specs)
                dims = dims_of(spec, len(place.shape))
                found.append(AnnotatedInside(place, None if every else numbers, dims))
        return tuple(sorted(found, key=str))

    @functools.cached_property
    def _places(self) -> dict[Any, tuple[Place, int]]:
        return places(self.subject.flat)

    @functools.cached_property
    def _decisive(self) -> list[Any]:
        """The results of operators that do not leave elements where they are."""
        flow = Flow(self.subject.devices)
        flow.add(self.subject.flat.jaxpr)
        return [e.atoms[1][0] for e in flow.edges if e.eqn is not None and e.level and e.atoms[1]]

    def priced(
        self,
        mesh: MeshShape,
        annotations: tuple[Annotated, ...],
        inside: tuple[AnnotatedInside, ...] = (),
    ) -> Layout:
        """A layout with the figures of its lowered program.

        States keep their shardings from step to step: a result that is the argument of the next
        step is annotated like that argument, where it is not sharded so by itself.
        """
        names = dict(zip(AXES, mesh, strict=False))
        by_path = {a.path: a for a in annotations}
        results = tuple(
            dataclasses.replace(by_path[argument], path=result)
            for result, argument in self.subject.states
            if argument in by_path
        )
        layout = Layout(
            names, annotations, self.machine.name, 0.0, 0, 0.0, inside=inside, results=results
        )
        began = time.monotonic()
        layout, forecast = self._lowered(layout)
        self.lowering_seconds = max(self.lowering_seconds, time.monotonic() - began)
        if changing := self._changing(layout):
            layout = dataclasses.replace(layout, results=(*results, *changing))
            layout, forecast = self._lowered(layout)
        count = len(annotations) + len(inside)
        name = f"mesh {' x '.join(map(str, mesh))}, {count} annotations"
        self.considered.append(Considered.of(name, forecast, self.limit))
        return dataclasses.replace(layout, considered=tuple(self.considered), limit=self.limit)

    def _lowered(self, layout: Layout) -> tuple[Layout, Forecast]:
        subject = self.subject
        keywords = {"hardware": self.machine, **self.keywords, "devices": subject.devices}
        lowered = jit(subject.fn, annotations=layout, **keywords).lower(*subject.args)
        forecast = lowered.forecast(self.machine)
        layout = dataclasses.replace(
            layout,
            seconds=forecast.step_seconds,
            memory_bytes=forecast.memory_bytes,
            lowered=lowered,
            function=subject.fn,
            keywords={**keywords, "devices": self._present()},
            arguments=subject.args,
        )
        return layout, forecast

    def _changing(self, layout: Layout) -> list[Annotated]:
        """Annotations for results that would not be sharded like the argument they replace."""
        assert layout.lowered is not None
        known = {a.path for a in layout.results}
        shapes = dict(self.subject.paths)
        given, made = layout.lowered.flat_shardings
        found = []
        for (result, argument), (number, place) in zip(
            self.subject.states, self.subject.returned, strict=True
        ):
            own, held = made[number], given[place - self.subject.closed_over]
            if result not in known and own != held and shapes[argument]:
                dims = dims_on(held, layout.mesh)
                if dims is not None:
                    found.append(Annotated(result, shapes[argument], dims))
        return found

    def _present(self) -> Any:
        """The devices to run on, where there are enough; else their number."""
        here = jax.devices()
        count = self.subject.devices
        return here[:count] if len(here) >= count else count
