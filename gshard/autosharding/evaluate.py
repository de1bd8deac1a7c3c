"""Solve the models of a program, lower layouts of it, and forecast them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from gshard import _jax
from gshard.autosharding.budget import WORK, Clock
from gshard.autosharding.cost import MeshShape, Spec, sharding_of, specs_of
from gshard.autosharding.cost.lower_bound import LowerBoundBuilder
from gshard.autosharding.cost.model import MeshProblem, ModelBuilder
from gshard.autosharding.cost.strategies import PICO
from gshard.autosharding.layers import transferred
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import AXES, Annotated, AnnotatedInside, dims_on
from gshard.autosharding.layout.summary import Considered
from gshard.autosharding.solver import solve, solve_near_limit
from gshard.autosharding.solver.problem import ROUNDING, Floats, Ints, NoAnswerError
from gshard.autosharding.solver.search import improve
from gshard.autosharding.traced import TracedProgram
from gshard.capture.inside import TensorSite, places
from gshard.forecast.hardware import Hardware
from gshard.forecast.report import Forecast
from gshard.graph.readable import counted
from gshard.graph.regions import walk
from gshard.jit import jit
from gshard.moving.costs import use_cost_model
from gshard.propagation.propagate import propagate
from gshard.tensors.sharding import Sharding

DONATED = ("donate_argnums", "donate_argnames")


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
class Evaluator:
    """Solves the models of one program, lowers layouts of it, and remembers what became of each."""

    subject: TracedProgram
    machine: Hardware
    limit: int
    keywords: Mapping[str, Any]
    clock: Clock
    considered: list[Considered] = dataclasses.field(default_factory=list)
    lowering_seconds: float = 0.0  # of processor time that the slowest one took
    shorter: Evaluator | None = None  # of the same program with fewer layers

    @property
    def donates(self) -> bool:
        """Whether the program may overwrite some of its arguments."""
        return any(self.keywords.get(how) for how in DONATED)

    @property
    def propagating_work(self) -> float:
        """Seconds of work to propagate in the program."""
        return WORK.propagating * self.equations

    def propagated(self, fixed: Mapping[Any, Sharding]) -> Mapping[Any, Sharding]:
        """What propagation makes of some annotations."""
        self.clock.charge(self.propagating_work)
        with _jax.without_mesh(), use_cost_model(self.machine.cost_model):
            found = propagate(self.subject.flat, self.subject.devices, inside=fixed)
        return found.shardings

    @functools.cached_property
    def places(self) -> dict[Any, tuple[TensorSite, int]]:
        """The place of every tensor that the program makes, and its number there."""
        return places(self.subject.flat)

    def evaluate(
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
        began, subject = time.process_time(), self.subject
        by_path = {a.path: a for a in annotations}
        known = {
            result: dataclasses.replace(by_path[argument], path=result)
            for result, argument in subject.states
            if argument in by_path
        }
        here, devices = jax.devices(), subject.devices
        present = here[:devices] if len(here) >= devices else devices  # to run on
        names = dict(zip(AXES, mesh, strict=False))
        layout = Layout(
            names,
            annotations,
            self.machine.name,
            *(0.0, 0, 0.0),  # until it is lowered
            inside=inside,
            stages=subject.stages,
            function=subject.fn,
            keywords={"hardware": self.machine, **self.keywords, "devices": present},
            arguments=subject.args,
            limit=self.limit,
        )
        needed = {**(results or {}), **known}
        layout, forecast = self._lowered(layout, needed)
        changing = self._changing(layout)
        if changing.keys() - known.keys():
            layout, forecast = self._lowered(layout, {**needed, **changing, **known})
        count = len(annotations) + len(inside)
        name = f"mesh {' x '.join(map(str, mesh))}, {counted(count, 'annotation')}"
        name += f", {subject.stages} stages" if subject.stages else ""
        figures = Considered.of(name, forecast, self.limit)
        if self.shorter is not None:
            fewer, gone = self.shorter.subject, subject.repeated.times - 1
            given = transferred(layout, subject, fewer)
            more = figures.memory_bytes - self.shorter.evaluate(mesh, **given).memory_bytes
            memory = max(0, more) // (fewer.repeated.times - 1 - gone) * gone
            figures = figures.with_more(forecast, gone, memory, self.limit)
        self.considered.append(figures)
        self.lowering_seconds = max(self.lowering_seconds, time.process_time() - began)
        return dataclasses.replace(
            layout,
            seconds=figures.seconds,
            memory_bytes=figures.memory_bytes,
            considered=tuple(self.considered),
        )

    def building_work(self, mesh: MeshShape) -> float:
        """Seconds of work to build a model on a mesh."""
        edges = self.subject.flow.edges
        shapes = Counter(
            max((a.aval.shape for side in edge.atoms for a in side), key=len, default=())
            for edge in edges
        )
        pairs = sum(count * len(specs_of(shape, mesh)) ** 2 for shape, count in shapes.items())
        return WORK.model_edge * len(edges) + WORK.model_pair * pairs

    def choice(
        self, mesh: MeshShape, limit: float, clock: Clock, needed: bool
    ) -> ModelAnswer | None:
        """The answer of the likely model on a mesh; copies count where they break the limit.

        None where there is no time for it, unless it is needed: presolving takes as long as
        building.
        """
        best: ModelAnswer | None = None
        paired: Collection[Any] = ()
        work = self.building_work(mesh)
        for first in (True, False):  # copies count from the second time on
            if 2 * work > clock.left and not (needed and first):
                break
            clock.charge(work)
            given = (limit, paired, self.donates)
            model = ModelBuilder(self.subject, mesh, self.machine, *given).built()
            share = clock.part(2 / 3 * clock.left if first else clock.left)
            result = solve_near_limit(model.problem, share, needed and first)
            if result.answer is None:
                break
            peak = float(model.problem.memory.profile(result.answer).max(initial=0.0))
            best = ModelAnswer(result.cost / PICO, model, result.answer, peak, result.gap)
            if not model.uncounted(result.answer):
                break
            paired = set(model.copies)
        return best

    def bound(self, mesh: MeshShape, limit: float, clock: Clock) -> float:
        """Seconds that the forecast of no layout over a mesh is below; infinite if none fits."""
        subject, work = self.subject, self.building_work(mesh)
        if work > clock.left:
            return 0.0
        clock.charge(work)
        problem = LowerBoundBuilder(subject, mesh, self.machine, limit).built().problem
        # A bound at once: every operator at its cheapest, and nothing moves.
        own = problem.constant + sum(float(c.min(initial=math.inf)) for c in problem.costs)
        try:
            own = max(own, solve(problem, clock).bound)
        except NoAnswerError:  # arguments alone do not fit over this mesh
            return math.inf
        return (1 - ROUNDING) * own / PICO

    @functools.cached_property
    def equations(self) -> int:
        """The equations of the program, loops counted once."""
        return sum(1 for _ in walk(self.subject.flat.jaxpr))

    @property
    def lowering_work(self) -> float:
        """Seconds of work to lower a layout."""
        more = self.shorter.lowering_work if self.shorter else 0.0
        return WORK.lowering * self.equations + more

    def _lowered(self, layout: Layout, results: Mapping[str, Annotated]) -> tuple[Layout, Forecast]:
        layout = dataclasses.replace(layout, results=tuple(results.values()))
        keywords = {**layout.keywords, "devices": self.subject.devices}
        lowered = jit(self.subject.fn, annotations=layout, **keywords).lower(*self.subject.args)
        self.clock.charge(WORK.lowering * self.equations)
        return dataclasses.replace(layout, lowered=lowered), lowered.forecast(self.machine)

    def _changing(self, layout: Layout) -> dict[str, Annotated]:
        """Annotations, like those of their arguments, for results that are sharded otherwise than
        the argument they replace."""
        assert layout.lowered is not None
        given, made = layout.lowered.flat_shardings
        shapes, found, first = dict(self.subject.paths), {}, self.subject.closed_over
        pairs = zip(self.subject.states, self.subject.returned, strict=True)
        for (result, argument), (number, place) in pairs:
            held = given[place - first]
            if made[number] is not held and shapes[argument]:
                dims = dims_on(held, layout.mesh)
                if dims is not None:
                    found[result] = Annotated(result, shapes[argument], dims)
        return found


@dataclasses.dataclass(frozen=True)
class Deviation:
    """Shardings that differ from those of an answer, priced.

    `seconds` is what they cost more, `excess_bytes` what they hold above the memory limit;
    `extra_cost` is the share of each node in the one, or where memory is exceeded in the other.
    """

    seconds: float
    excess_bytes: float
    tensors: frozenset[Any]
    extra_cost: Floats


class Deviations:
    """Prices other shardings than those of an answer."""

    def __init__(self, model: MeshProblem, answer: Ints) -> None:
        self.model, self.answer = model, answer
        problem = model.problem
        # Forbidden pairs cost more than all that is allowed, and can be added.
        self.tables = [{n: np.minimum(t, 1e18) for n, t in own.items()} for own in problem.tables]
        tensors = set(model.nodes.values())
        self.operators = [node for node in range(len(problem.costs)) if node not in tensors]
        self.best = self._costs(answer)

    def priced(self, found: Mapping[Any, Sharding]) -> Deviation:
        """What these shardings cost more than the answer."""
        answer, different = self.answer.copy(), set()
        for var, node in self.model.nodes.items():
            numbers = _numbers(var.aval.shape, self.model.mesh)
            decides = var in found and self.model.like.get(var, var) is var
            number = numbers.get(found[var]) if decides else None
            if number is not None and number != answer[node]:
                different.add(var)
                answer[node] = number
        answer = self._with_operators(answer)
        extra = self._costs(answer) - self.best
        seconds, excess = float(extra.sum()) / PICO, self.model.problem.excess(answer)
        if excess > 0:
            extra = self._extra_bytes(answer)
        return Deviation(seconds, excess, frozenset(different), extra)

    def around(self, variables: Iterable[Any]) -> set[int]:
        """The nodes of some tensors, and those next to them."""
        own = {self.model.nodes[var] for var in variables if var in self.model.nodes}
        return own.union(*(self.tables[each].keys() for each in own))

    def _with_operators(self, answer: Ints) -> Ints:
        """The answer in which operators, and the copies that they read, choose again."""
        costs, random = self.model.problem.costs, np.random.default_rng(0)
        every = [np.arange(len(own)) for own in costs]
        return improve(self.tables, costs, answer, self.operators, every, random)

    def _costs(self, answer: Ints) -> Floats:
        """The cost of each node, with half of that of its edges. A forbidden pair costs as much as
        the most expensive allowed one: a lowered program has a way for it."""
        found = np.array([own[answer[node]] for node, own in enumerate(self.model.problem.costs)])
        for edge in self.model.problem.edges:
            cost = edge.costs[answer[edge.first], answer[edge.second]]
            if not np.isfinite(cost):
                cost = edge.costs[np.isfinite(edge.costs)].max(initial=0.0)
            found[[edge.first, edge.second]] += cost / 2
        return found

    def _extra_bytes(self, answer: Ints) -> Floats:
        """The bytes that each node holds more than in the best answer, when most is exceeded."""
        memory = self.model.problem.memory
        time = int(np.argmax(memory.profile(answer) - memory.limit))
        live = memory.live(time)
        nodes, first = memory.node[live], memory.first[live]
        more = memory.usage[first + answer[nodes]] - memory.usage[first + self.answer[nodes]]
        return np.bincount(nodes, more, len(answer)).astype(np.float64)


@functools.lru_cache(maxsize=4096)
def _numbers(shape: tuple[int, ...], mesh: MeshShape) -> dict[Sharding, int]:
    """The strategies of a tensor by its sharding."""
    specs = specs_of(shape, mesh)
    return {sharding_of(spec, len(shape), mesh): n for n, spec in reversed([*enumerate(specs)])}
