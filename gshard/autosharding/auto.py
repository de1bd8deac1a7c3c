"""`gshard.auto`: a mesh and annotations for a program, chosen by a solver and checked by lowering.

For each mesh two models of the program are solved: a likely one (`cost.model`), whose answers
become layouts, and one that no layout undercuts (`cost.lower_bound`), for a bound. The best answers
are lowered; what counts then is the forecast of the lowered program. At the end, annotations that
propagation finds by itself are removed. Each phase has a share of the time (`budget.PHASES`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from gshard.autosharding.annotate import (
    TOLERANCE,
    AnnotationSearch,
    best_of,
    coordinate_descent,
    fewest,
    slowest,
)
from gshard.autosharding.budget import LEAST, PHASES, WORK, Budget, Clock, bytes_of
from gshard.autosharding.cost import MeshShape, distinct_meshes
from gshard.autosharding.evaluate import DONATED, Evaluator, ModelAnswer
from gshard.autosharding.layers import transferred, without_equal_layers
from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import Annotated, dims_of
from gshard.autosharding.traced import TracedProgram
from gshard.forecast.hardware import Hardware, present
from gshard.forecast.hardware import hardware as hardware_of
from gshard.graph.readable import size

# The meshes whose answers are lowered.
_LOWERED_MESHES = 3

# How often the model is asked for less memory, where the lowered program holds too much, and for
# how much less at least.
_TIGHTENED = 10
_LESS = 0.95

# Keywords of `gshard.jit` that have the same meaning for a part of a function's arguments.
_MOVABLE = {*DONATED, "memory_limit", "strict", "reproducible"}


def auto(
    fn: Callable[..., Any],
    /,
    *args: Any,
    devices: int | None = None,
    hardware: str | Path | Hardware | None = None,
    memory: str | int | None = None,
    seconds: float = 60.0,
    **keywords: Any,
) -> Layout:
    """A mesh and annotations for `fn` on arguments like these, arrays or abstract values.

    `devices` is their number, by default all that JAX has; `hardware` what they are (a name, a TOML
    file or `Hardware`), by default what JAX reports; `memory` the bytes that a step may hold on
    each ("16 GB"), by default the hardware's. Annotations that `fn` has are kept. The search costs
    about `seconds` of a free core at most, or 10 until a layout fits: work is counted, not time, so
    that the layout is the same where the machine is busy. Other keywords are those of `gshard.jit`.
    """
    count = jax.device_count() if devices is None else devices
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"devices is {devices!r}; allowed is a positive number")
    machine = present() if hardware is None else hardware_of(hardware)
    limit = machine.memory if memory is None else bytes_of(memory)
    machine = machine.replace(memory=limit)
    clock = Clock(seconds, counted=True)
    subject = TracedProgram.of(fn, args, count, machine)
    numbers, found, errors = subject.stage_numbers, list[Layout](), list[TooLargeError]()
    for number in numbers or [0]:  # of stages, each with a part of the time
        own = TracedProgram.of(fn, args, count, machine, number) if number else subject
        clock = Clock(seconds / len(numbers), counted=True) if number else clock
        try:
            found.append(_chosen(Evaluator(own, machine, limit, keywords, clock)))
        except TooLargeError as error:
            errors.append(error)
    if not found:
        raise min(errors, key=lambda error: error.missing)
    bound = min([layout.bound for layout in found] + [error.bound for error in errors])
    considered = tuple(each for layout in found for each in layout.considered)
    return dataclasses.replace(best_of(found), bound=bound, considered=considered)


class TooLargeError(ValueError):
    """No layout was found that fits: bytes that the smallest one lacks, and a bound of all."""

    missing, bound = 0, 0.0


def _chosen(evaluator: Evaluator) -> Layout:
    """The best layout of a program."""
    evaluator.clock.charge(WORK.tracing * evaluator.equations)
    movable = evaluator.keywords.keys() <= _MOVABLE and evaluator.subject.devices > 1
    if movable and (short := without_equal_layers(evaluator.subject)) is not None:
        return _chosen_for_one_layer(evaluator, *short)
    return _Chooser(evaluator).chosen()


def _chosen_for_one_layer(
    evaluator: Evaluator, short: TracedProgram, shorter: TracedProgram
) -> Layout:
    """The layout of a program with few of its equal layers, used for all of them.

    Where that holds too much after all, it is chosen again for less memory.
    """
    clock, limit = evaluator.clock, evaluator.limit
    clock.charge(evaluator.lowering_work)

    def few(part: TracedProgram, shorter: Evaluator | None = None) -> Evaluator:
        keywords = {k: v for k, v in evaluator.keywords.items() if k not in DONATED}
        if evaluator.donates:
            states = (argument - part.closed_over for _, argument in part.returned)
            keywords["donate_argnums"] = tuple(states)
        machine = evaluator.machine.replace(memory=limit)
        return Evaluator(part, machine, limit, keywords, clock, shorter=shorter)

    for _ in range(_TIGHTENED):
        best = _Chooser(few(short, few(shorter))).chosen()
        given = transferred(best, short, evaluator.subject)
        found = evaluator.evaluate(tuple(best.mesh.values()), **given)
        if found.memory_bytes <= evaluator.limit:
            figures = {n: getattr(best, n) for n in ("bound", "solver_gap", "meshes", "phases")}
            figures["considered"] = (*best.considered, *found.considered)
            return dataclasses.replace(found, **figures, layers=short.repeated.layers)
        limit = int(_LESS * limit * evaluator.limit / found.memory_bytes)
        clock.extend(LEAST)
        if clock.left <= 0:
            break
    raise too_large(found, evaluator, best.bound)


@dataclasses.dataclass
class _Chooser:
    evaluator: Evaluator
    gaps: list[float] = dataclasses.field(default_factory=list)
    looked_at: tuple[MeshShape, ...] = ()

    def __post_init__(self) -> None:
        self.subject, self.machine = self.evaluator.subject, self.evaluator.machine
        self.limit, self.clock = self.evaluator.limit, self.evaluator.clock
        self.budget = Budget(self.clock)
        self.untried = _first_annotations(self.subject)

    def chosen(self) -> Layout:
        """The best layout."""
        layouts = self._simplest(self.budget.enter("first layouts"))
        limits = dict.fromkeys(self._meshes(), float(self.limit))
        for number in range(_TIGHTENED):
            clock = self.budget.enter("solving")
            if (needed := not self._fits(layouts)) and clock.left < LEAST:
                clock = self._more(LEAST, "solving")
            choices = self._choices(limits, clock, needed)
            if number == 0:
                meshes = dict.fromkeys(c.model.mesh for c in choices)
                self.looked_at = tuple(meshes) or tuple(limits)[:1]
            layouts += self._lowered(choices, layouts, self.budget.enter("annotations"))
            if not self._fits(layouts):
                layouts += self._simplest(None)
            fitting = [a for a in layouts if a.memory_bytes <= self.limit]
            if fitting:
                return self._finished(fitting)
            limits = self._tightened(limits, choices[:_LOWERED_MESHES], layouts)
            if not limits or self._more(LEAST * (len(limits) + 1), "solving").left <= 0:
                break
        least = min(layouts, key=lambda a: a.memory_bytes)
        raise too_large(least, self.evaluator, self._bound(self.budget.enter("bound")))

    def _more(self, seconds: float, phase: str) -> Clock:
        """Begin a phase again, with more time for all: nothing that fits was found."""
        self.clock.extend(seconds / PHASES[phase])
        self.budget.restart()
        return self.budget.enter(phase)

    def _tightened(
        self,
        limits: Mapping[MeshShape, float],
        choices: Sequence[ModelAnswer],
        layouts: Sequence[Layout],
    ) -> dict[MeshShape, float]:
        """Limits for the model by mesh, where lowered programs hold more than the model counts:
        less than it has found, by as much as the program holds too much. A mesh over which the
        model itself did not meet its limit is left out."""
        found = {}
        for choice in choices:
            mesh = choice.model.mesh
            if choice.peak > limits[mesh]:
                continue
            held = [a.memory_bytes for a in layouts if tuple(a.mesh.values()) == mesh]
            too_much = self.limit / min(held, default=self.limit)
            found[mesh] = choice.peak * min(_LESS, too_much)
        return found

    def _finished(self, fitting: Sequence[Layout]) -> Layout:
        """The best of these with a bound, and without the annotations that it does not need."""
        bound = self._bound(self.budget.enter("bound"))
        more = self._more_time(self.budget.enter("single changes"))
        # What is annotated inside stays as it is, so that arguments alone are another start.
        alone, first = [a for a in fitting if not a.inside], best_of(fitting)
        for start in (first, best_of(alone)) if first.inside and alone else (first,):
            fitting = [*fitting, *coordinate_descent(start, self.evaluator, more)]
        more = self._more_time(self.budget.enter("removal"))
        most = slowest(min(a.seconds for a in fitting), bound)
        near = [layout for layout in fitting if layout.seconds <= most]
        best = fewest(best_of(near), most, self.evaluator, more)
        gap = min(1.0, max(self.gaps, default=1.0))
        best = dataclasses.replace(best, meshes=self.looked_at, phases=self.budget.report())
        return dataclasses.replace(best, bound=bound, solver_gap=gap)

    def _meshes(self) -> list[MeshShape]:
        """The meshes to look at: those of few axes first, then those along the nodes of the
        hardware."""
        node = self.machine.network.devices_per_node
        found = distinct_meshes(self.machine, self.subject.devices)
        return sorted(found, key=lambda m: (len(m), abs(math.log(m[-1] / node))))

    def _bound(self, clock: Clock) -> float:
        """Seconds that the forecast of no layout over the meshes that were looked at is below."""
        least, meshes = math.inf, sorted(self.looked_at, key=self.evaluator.building_work)
        for done, mesh in enumerate(meshes):
            share = clock.part(clock.left / (len(meshes) - done))
            least = min(least, self.evaluator.bound(mesh, self.limit, share))
        return least if math.isfinite(least) else 0.0

    def _choices(
        self, limits: Mapping[MeshShape, float], clock: Clock, needed: bool
    ) -> list[ModelAnswer]:
        """The likely model's answers on as many meshes as time allows, the cheapest first."""
        found: list[ModelAnswer] = []
        for done, (mesh, limit) in enumerate(limits.items()):
            share = clock.left / (len(limits) - done)
            least = 0.0 if done else LEAST + 2 * self.evaluator.building_work(mesh)
            part = clock.part(max(share, least))
            choice = self.evaluator.choice(mesh, limit, part, needed and not done)
            if choice is not None:
                found.append(choice)
            elif found:  # those that follow have as many axes, or more
                break
        found.sort(key=lambda c: (c.cost, len(c.model.mesh)))
        self.gaps = [choice.gap for choice in found]
        return found

    def _more_time(self, clock: Clock) -> Callable[[], bool]:
        """Whether a phase has time to lower one more layout."""
        one = self.evaluator
        return lambda: clock.left > one.lowering_work and clock.guard_left > one.lowering_seconds

    def _lowered(
        self, choices: Sequence[ModelAnswer], before: Sequence[Layout], clock: Clock
    ) -> list[Layout]:
        """Layouts that are like the answers on the best meshes: with few annotations, and with all
        only where these do not hold what the model promises; then what arguments alone make."""
        layouts, best = list[Layout](), choices[:_LOWERED_MESHES]
        for done, choice in enumerate(best):
            needed = not self._fits([*before, *layouts])
            if not needed and not self._more_time(clock)():
                continue
            part = clock.part(clock.left / (len(best) - done))
            search, more = AnnotationSearch(self.evaluator, choice), self._more_time(part)
            few = search.few(part)
            found = [] if few is None else [few]
            worse = self._all_worse_than_model(found, choice) and more()
            if worse or (needed and not self._fits(found)):
                found.append(search.everything())
            layouts += found
        for choice in best:
            if self._more_time(clock)():
                layouts.append(AnnotationSearch(self.evaluator, choice).arguments())
        return layouts

    def _fits(self, layouts: Sequence[Layout]) -> bool:
        """Whether one of these holds as little as is allowed."""
        return any(layout.memory_bytes <= self.limit for layout in layouts)

    def _all_worse_than_model(self, layouts: Sequence[Layout], choice: ModelAnswer) -> bool:
        """Whether all of these are slower than the model of the answer says, or too large."""
        most = (1 + TOLERANCE) * choice.cost
        return not any(a.seconds <= most and a.memory_bytes <= self.limit for a in layouts)

    def _simplest(self, clock: Clock | None) -> list[Layout]:
        """The layouts that people try first, as far as a clock has time, without those that were
        lowered before. They precede the solver, which would leave them no time."""
        found = []
        while self.untried and (clock is None or self._more_time(clock)()):
            found.append(self.evaluator.evaluate((self.subject.devices,), self.untried.pop(0)))
        return found


def _first_annotations(subject: TracedProgram) -> list[tuple[Annotated, ...]]:
    """Nothing split, the batch, the batch and the states. Arguments that are no states are taken
    for the batch."""
    count, states = subject.devices, {argument for _, argument in subject.states}
    batch, both = list[Annotated](), list[Annotated]()
    for path, shape in subject.paths:
        dims = [dim for dim, rows in enumerate(shape) if rows >= count > 1]
        if dims[:1] == [0] or (dims and path in states):
            split = Annotated(path, shape, dims_of(dims[:1], len(shape)))
            both.append(split)
            batch += [] if path in states else [split]
    return list(dict.fromkeys([(), tuple(batch), tuple(both)]))


def too_large(least: Layout, evaluator: Evaluator, bound: float) -> TooLargeError:
    """The error that no layout fits, where this one holds least."""
    assert least.lowered is not None
    where = least.lowered.forecast(evaluator.machine).memory.where
    missing = least.memory_bytes - evaluator.limit
    error = TooLargeError(
        f"no layout was found that holds at most {size(evaluator.limit)} on each of "
        f"{evaluator.subject.devices} devices; the smallest one holds {size(least.memory_bytes)}, "
        f"{size(missing)} too much"
        + (f"; its peak is at {where}" if where else "")
        + ("; the time of the search was over" if evaluator.clock.left <= 0 else "")
    )
    error.missing, error.bound = missing, bound
    return error
