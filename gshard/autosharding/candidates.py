"""Layouts from the answers of the solver, with the forecasts of their lowered programs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from gshard import _jax
from gshard.autosharding.budget import Clock
from gshard.autosharding.cost.model import MeshProblem
from gshard.autosharding.cost.specs import NONE, MeshShape, Spec, sharding_of, specs_of
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import (
    AXES,
    Annotated,
    AnnotatedInside,
    dims_of,
    dims_on,
)
from gshard.autosharding.layout.summary import Considered
from gshard.autosharding.solver.problem import Ints
from gshard.autosharding.traced import TracedProgram
from gshard.capture.inside import TensorSite, places
from gshard.forecast.hardware import Hardware
from gshard.forecast.report import Forecast
from gshard.graph.regions import loop_bodies, walk
from gshard.jit import jit
from gshard.moving.costs import use_cost_model
from gshard.propagation.flow import Edge, Flow
from gshard.propagation.propagate import propagate
from gshard.tensors.sharding import Sharding

# Seconds of work for each equation, to lower a program and to propagate in it.
_LOWERING, _PROPAGATING = 1e-3, 2e-4

# How often propagation is asked what it makes of the annotations so far.
_ROUNDS = 2


@dataclasses.dataclass(frozen=True)
class ModelAnswer:
    """An answer of a model: what it costs there, and the most bytes that it counts."""

    cost: float
    model: MeshProblem
    answer: Ints
    peak: float
    gap: float = 0.0  # to the best cost of the model, as a share

    def spec(self, var: Any) -> Spec | None:
        """How the answer shards a tensor; None for scalars."""
        node = self.model.nodes.get(var, -1)
        return None if node < 0 else specs_of(var.aval.shape, self.model.mesh)[self.answer[node]]

    def sharding(self, var: Any) -> Sharding:
        """The sharding of a tensor that is no scalar."""
        return sharding_of(self.spec(var) or (), len(var.aval.shape), self.model.mesh)


@dataclasses.dataclass
class Candidates:
    """Lowers layouts of one program, and remembers what became of each."""

    subject: TracedProgram
    machine: Hardware
    limit: int
    keywords: Mapping[str, Any]
    clock: Clock
    considered: list[Considered] = dataclasses.field(default_factory=list)
    lowering_seconds: float = 0.0  # of processor time that the slowest one took

    def of_arguments(self, choice: ModelAnswer) -> Layout:
        """The layout that annotates arguments as an answer has them."""
        return self.priced(choice.model.mesh, self.arguments(choice))

    def of_all(self, choice: ModelAnswer) -> Layout:
        """The layout of which propagation makes all of an answer.

        What it would shard otherwise by itself is annotated too: arguments that stay replicated,
        results of operators that are not pointwise, and of pointwise ones that move an operand or
        read the results of loops.
        """
        fixed, jaxpr = self.split_arguments(choice), self.subject.flat.jaxpr
        wanted = {var: choice.sharding(var) for var in self._deciding(choice)}
        for number in range(_ROUNDS + 1):
            found = self.propagated(fixed)
            if number == _ROUNDS:
                break
            missed = {v: s for v, s in wanted.items() if v not in fixed and found.get(v) != s}
            for result, argument in self.subject.returned:
                var = jaxpr.invars[argument]
                if var in wanted and found.get(jaxpr.outvars[result], wanted[var]) != wanted[var]:
                    missed[var] = wanted[var]
            if not missed:
                break
            fixed |= missed
        arguments, mesh = self.arguments(choice, fixed), choice.model.mesh
        inside, held = self._inside(choice, fixed), self._held(found, mesh)
        return self.priced(mesh, arguments, inside, held)

    def split_arguments(self, choice: ModelAnswer) -> dict[Any, Sharding]:
        """The arguments that an answer splits, and results that replace them."""
        jaxpr = self.subject.flat.jaxpr
        found = {
            var: choice.sharding(var)
            for var in jaxpr.invars
            if any(at != NONE for at in choice.spec(var) or ())
        }
        for result, argument in self.subject.returned:
            var = jaxpr.invars[argument]
            if var in found and not isinstance(jaxpr.outvars[result], Literal):
                found[jaxpr.outvars[result]] = found[var]
        return found

    @property
    def propagating_work(self) -> float:
        """Seconds of work to propagate in the program."""
        return _PROPAGATING * self.equations

    def propagated(self, fixed: Mapping[Any, Sharding]) -> Mapping[Any, Sharding]:
        """What propagation makes of some annotations."""
        self.clock.charge(self.propagating_work)
        with _jax.without_mesh(), use_cost_model(self.machine.cost_model):
            found = propagate(self.subject.flat, self.subject.devices, inside=fixed)
        return found.shardings

    def arguments(
        self, choice: ModelAnswer, annotated: Mapping[Any, Any] | None = None
    ) -> tuple[Annotated, ...]:
        """The arguments that are split, or those among the annotated tensors."""
        chosen = self.split_arguments(choice) if annotated is None else annotated
        given = self.subject.flat.jaxpr.invars[self.subject.closed_over :]
        return tuple(
            Annotated(path, shape, dims_of(choice.spec(var) or (), len(shape)))
            for (path, shape), var in zip(self.subject.paths, given, strict=True)
            if shape and var in chosen
        )

    def _inside(
        self, choice: ModelAnswer, annotated: Mapping[Any, Any]
    ) -> tuple[AnnotatedInside, ...]:
        by_place: dict[TensorSite, list[Spec]] = {}
        for var, (place, _) in self.places.items():
            spec = choice.spec(var)
            by_place.setdefault(place, []).append(() if spec is None else spec)
        found = []
        states = {self.subject.flat.jaxpr.outvars[r] for r, _ in self.subject.returned}
        made = self.places.keys() & annotated.keys() - states  # states are annotated as results
        for place in {self.places[var][0] for var in made}:
            specs = by_place[place]
            for spec in dict.fromkeys(specs):
                numbers = tuple(n for n, s in enumerate(specs) if s == spec)
                every = len(numbers) == len(specs)
                dims = dims_of(spec, len(place.shape))
                found.append(AnnotatedInside(place, None if every else numbers, dims))
        return tuple(sorted(found, key=str))

    def _deciding(self, choice: ModelAnswer) -> list[Any]:
        """The tensors that decide how all are sharded."""
        made = [
            result
            for edge in self.operators
            if (result := edge.atoms[1][0]) in self.places and choice.spec(result) is not None
            if edge.level or self._reads_loop(edge) or _moves(edge, choice)
        ]
        arguments = [v for v in self.subject.flat.jaxpr.invars if choice.spec(v) is not None]
        return arguments + made

    @functools.cached_property
    def places(self) -> dict[Any, tuple[TensorSite, int]]:
        """The place of every tensor that the program makes, and its number there."""
        return places(self.subject.flat)

    @functools.cached_property
    def operators(self) -> list[Edge]:
        """The operators of the program, with their factors."""
        flow = Flow(self.subject.flat.jaxpr, self.subject.devices)
        return [e for e in flow.edges if e.eqn is not None and e.atoms[1]]

    @functools.cached_property
    def _of_loops(self) -> set[Any]:
        loops = (eqn for eqn in walk(self.subject.flat.jaxpr) if loop_bodies(eqn))
        return {var for eqn in loops for var in eqn.outvars}

    def _reads_loop(self, edge: Edge) -> bool:
        """Whether an operator reads the result of a loop, which cannot be annotated itself."""
        return not self._of_loops.isdisjoint(a for a in edge.atoms[0] if not isinstance(a, Literal))

    def priced(
        self,
        mesh: MeshShape,
        annotations: tuple[Annotated, ...],
        inside: tuple[AnnotatedInside, ...] = (),
        results: Mapping[str, Annotated] | None = None,
    ) -> Layout:
        """A layout with the figures of its lowered program.

        States keep their shardings from step to step: a result that is the argument of the next
        step is annotated like that argument, where it is not sharded so by itself. `results` are
        annotations that are known to be needed for it.
        """
        names = dict(zip(AXES, mesh, strict=False))
        by_path = {a.path: a for a in annotations}
        known = {
            result: dataclasses.replace(by_path[argument], path=result)
            for result, argument in self.subject.states
            if argument in by_path
        }
        layout = Layout(names, annotations, self.machine.name, 0.0, 0, 0.0, inside=inside)
        needed = {**(results or {}), **known}
        layout, forecast = self._lowered(layout, needed)
        changing = self._changing(layout)
        if changing.keys() - known.keys():
            layout, forecast = self._lowered(layout, {**needed, **changing, **known})
        count = len(annotations) + len(inside)
        name = f"mesh {' x '.join(map(str, mesh))}, {count} annotations"
        self.considered.append(Considered.of(name, forecast, self.limit))
        return dataclasses.replace(layout, considered=tuple(self.considered), limit=self.limit)

    @functools.cached_property
    def equations(self) -> int:
        """The equations of the program, loops counted once."""
        return sum(1 for _ in walk(self.subject.flat.jaxpr))

    @property
    def lowering_work(self) -> float:
        """Seconds of work to lower a layout."""
        return _LOWERING * self.equations

    def _lowered(self, layout: Layout, results: Mapping[str, Annotated]) -> tuple[Layout, Forecast]:
        layout = dataclasses.replace(layout, results=tuple(results.values()))
        subject, began = self.subject, time.process_time()
        keywords = {"hardware": self.machine, **self.keywords}
        keywords["devices"] = subject.devices
        lowered = jit(subject.fn, annotations=layout, **keywords).lower(*subject.args)
        forecast = lowered.forecast(self.machine)
        self.clock.charge(self.lowering_work)
        self.lowering_seconds = max(self.lowering_seconds, time.process_time() - began)
        layout = dataclasses.replace(
            layout,
            seconds=forecast.serial_seconds,  # the model does not count overlap either
            memory_bytes=forecast.memory_bytes,
            lowered=lowered,
            function=subject.fn,
            keywords={**keywords, "devices": self._present()},
            arguments=subject.args,
        )
        return layout, forecast

    def _changing(self, layout: Layout) -> dict[str, Annotated]:
        """Annotations for results that are not sharded like the argument they replace."""
        assert layout.lowered is not None
        given, made = layout.lowered.flat_shardings
        first = self.subject.closed_over
        ends = [(made[result], given[place - first]) for result, place in self.subject.returned]
        return self._like_arguments(ends, layout.mesh)

    def _held(self, found: Mapping[Any, Sharding], mesh: MeshShape) -> dict[str, Annotated]:
        """The same by what propagation finds, before anything is lowered."""
        jaxpr = self.subject.flat.jaxpr
        ends = [
            (None if isinstance(var, Literal) else found.get(var), found.get(jaxpr.invars[place]))
            for var, place in ((jaxpr.outvars[r], place) for r, place in self.subject.returned)
        ]
        return self._like_arguments(ends, dict(zip(AXES, mesh, strict=False)))

    def _like_arguments(
        self, ends: Sequence[tuple[Sharding | None, Sharding | None]], mesh: Mapping[str, int]
    ) -> dict[str, Annotated]:
        """Annotations, as of their arguments, for the results whose two ends differ."""
        shapes, found = dict(self.subject.paths), {}
        for (result, argument), (own, held) in zip(self.subject.states, ends, strict=True):
            if own is not held and held is not None and shapes[argument]:
                dims = dims_on(held, mesh)
                if dims is not None:
                    found[result] = Annotated(result, shapes[argument], dims)
        return found

    def _present(self) -> Any:
        """The devices to run on, where there are enough; else their number."""
        here = jax.devices()
        count = self.subject.devices
        return here[:count] if len(here) >= count else count


def _moves(edge: Edge, choice: ModelAnswer) -> bool:
    """Whether an answer sends an operand of a pointwise operator elsewhere."""
    (result, *_), (made, *_) = edge.atoms[1], edge.factors.results
    to = choice.spec(result)
    for atom, dims in zip(edge.atoms[0], edge.factors.operands, strict=True):
        here = None if isinstance(atom, Literal) or to is None else choice.spec(atom)
        for own, at in zip(here or (), to or (), strict=False):
            if own != NONE and (at == NONE or not set(dims[own]) & set(made[at])):
                return True
    return False
