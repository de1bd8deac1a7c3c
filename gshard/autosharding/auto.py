"""`gshard.auto`: a mesh and annotations for a program, chosen by a solver and checked by lowering.

For each mesh the model of the program (`model`) is solved. The answers with the least cost are
lowered; what counts then is the forecast of the lowered program. At the end, annotations that
propagation finds by itself are left out.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gshard import _jax
from gshard.annotate import tracing_for
from gshard.autosharding.layout import AXES, Annotated, Layout, dims_of, path_name
from gshard.autosharding.model import PICO, build
from gshard.autosharding.problem import FORBIDDEN, NoAnswerError, Problem
from gshard.autosharding.program import Result
from gshard.autosharding.solve import solve
from gshard.autosharding.specs import NONE, MeshShape, Spec, mesh_shapes, specs_of
from gshard.capture.flatten import inline
from gshard.capture.placement import device_order
from gshard.forecast.hardware import Hardware, present
from gshard.forecast.hardware import hardware as hardware_of
from gshard.forecast.report import size
from gshard.jit import jit
from gshard.simplify import PASSES, simplify

# Layouts within this share of the best one are as good, if they have fewer annotations.
_TOLERANCE = 0.01

# The meshes whose answers are lowered, and the annotations that are tried without.
_LOWERED_MESHES = 3
_TRIED_WITHOUT = 24

# How often the model is asked for less memory, where the lowered program holds too much.
_TIGHTENED = 5
_LESS = 0.85

# Of the time given, the share for layouts with a single annotation.
_SINGLE_SHARE = 0.25

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


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
    """A mesh and annotations for `fn` on arguments like these (arrays or `ShapeDtypeStruct`s).

    `devices` is their number, by default all that JAX has; `hardware` what they are (a name, a TOML
    file or `Hardware`), by default what JAX reports; `memory` the bytes that a step may hold on
    each ("16 GB"), by default the hardware's. Annotations that `fn` has are kept. The solver works
    at most `seconds`. Other keywords are those of `gshard.jit`.
    """
    count = jax.device_count() if devices is None else devices
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"devices is {devices!r}; allowed is a positive number")
    machine = present() if hardware is None else hardware_of(hardware)
    limit = machine.memory if memory is None else bytes_of(memory)
    chooser = _Chooser(fn, args, count, machine, limit, seconds, keywords)
    return chooser.chosen()


def bytes_of(memory: str | int) -> int:
    """Bytes from a number, or from text such as "16 GB" or "80 GiB"."""
    if isinstance(memory, int) and memory > 0:
        return memory
    number, _, unit = str(memory).strip().partition(" ")
    try:
        found = float(number) * _UNITS[(unit or "B").upper()]
    except (ValueError, KeyError):
        found = 0.0
    if found <= 0:
        raise ValueError(f"memory is {memory!r}; allowed are bytes, or text such as '16 GB'")
    return int(found)


@dataclasses.dataclass(frozen=True)
class _Found:
    """An answer of the model: seconds, the specs of the arguments, and the most bytes it counts."""

    cost: float
    bound: float
    mesh: MeshShape
    specs: list[Spec | None]
    peak: float


@dataclasses.dataclass
class _Chooser:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    devices: int
    machine: Hardware
    limit: int
    seconds: float
    keywords: Mapping[str, Any]
    considered: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def chosen(self) -> Layout:
        """The best layout."""
        flat, returned = self._traced()
        layouts: list[Layout] = []
        limit = float(self.limit)
        for _ in range(_TIGHTENED):
            found = self._solved(flat, returned, limit)
            layouts += self._lowered_best(found)
            if limit == self.limit:
                layouts += self._single(layouts[0].bound)
            fitting = [a for a in layouts if a.memory_bytes <= self.limit]
            if fitting:
                return self._modelled(self._smaller(_best(fitting)), flat, returned)
            # The program holds more than the model counts: ask it for less than it has found.
            limit = _LESS * min(f.peak for f in found)
        raise self._too_large(min(layouts, key=lambda a: a.memory_bytes))

    def _traced(self) -> tuple[Any, list[tuple[int, int]]]:
        """The program, flat, and which of its results are arguments of the next step."""
        given = jax.tree_util.tree_flatten_with_path((self.args, {}))[0]
        tree = jax.tree.structure(self.args)
        leaves = [leaf for _, leaf in given]
        arrays = [i for i, leaf in enumerate(leaves) if _jax.is_array_like(leaf)]

        def of_arrays(*values: Any) -> Any:
            filled = list(leaves)
            for i, value in zip(arrays, values, strict=True):
                filled[i] = value
            return _arrays_of(self.fn(*tree.unflatten(filled)))

        order = device_order(self.devices)
        structs = [_jax.struct_of(leaves[i]) for i in arrays]
        with tracing_for(order):
            traced = jax.jit(of_arrays).trace(*structs)
        flat = inline(traced.jaxpr, order)
        for normal_form in PASSES if self.devices > 1 else ():
            flat = simplify(flat, normal_form)
        self.paths = [(path_name(given[i][0]), tuple(np.shape(leaves[i]))) for i in arrays]
        first = len(flat.jaxpr.invars) - len(arrays)  # what the function closes over comes before
        self.closed_over = first
        pairs = _returned(_arrays_of(self.args), traced.out_info)
        return flat, [(result, argument + first) for result, argument in pairs]

    def _solved(self, flat: Any, returned: Sequence[tuple[int, int]], limit: float) -> list[_Found]:
        """The answer of each mesh, the cheapest first."""
        until = time.monotonic() + self.seconds
        found, meshes = [], mesh_shapes(self.devices)
        for done, mesh in enumerate(meshes):
            share = max((until - time.monotonic()) / (len(meshes) - done), 1.0)
            model = build(flat, mesh, self.machine, limit, returned)
            try:
                result = solve(model.problem, share)
            except NoAnswerError:
                result = _with_least_memory(model.problem, share)
            if result.answer is not None:
                peak = float(model.problem.memory.profile(result.answer).max(initial=0.0))
                specs = model.specs(result.answer)[self.closed_over :]
                found.append(_Found(result.cost / PICO, result.bound / PICO, mesh, specs, peak))
        return sorted(found, key=lambda f: (f.cost, len(f.mesh)))

    def _lowered_best(self, found: list[_Found]) -> list[Layout]:
        """The layouts of the best meshes, with the forecasts of their programs."""
        bound = min(f.bound for f in found)
        return [self._layout(f.mesh, f.specs, f.cost, bound) for f in found[:_LOWERED_MESHES]]

    def _modelled(self, layout: Layout, flat: Any, returned: Sequence[tuple[int, int]]) -> Layout:
        """The layout with what it takes in the model, where that is not known yet."""
        if not math.isnan(layout.model_seconds):
            return layout
        mesh = tuple(layout.mesh.values())
        model = build(flat, mesh, self.machine, math.inf, returned)
        costs, dims = list(model.problem.costs), {a.path: a.dims for a in layout.annotations}
        for (path, shape), node in zip(
            self.paths, model.arguments[self.closed_over :], strict=True
        ):
            if path in dims:
                specs = specs_of(shape, mesh)
                taken = [dims_of(spec, len(shape), mesh) == dims[path] for spec in specs]
                costs[node] = np.where(taken, costs[node], FORBIDDEN)
        problem = dataclasses.replace(model.problem, costs=tuple(costs))
        return dataclasses.replace(layout, model_seconds=solve(problem).cost / PICO)

    def _single(self, bound: float) -> list[Layout]:
        """Layouts with one annotation: a dim of one argument over all devices.

        Propagation makes whole layouts of them, data parallelism for one, that the model may
        misjudge. Arguments with the most bytes come first, as far as time allows.
        """
        until, mesh = time.monotonic() + _SINGLE_SHARE * self.seconds, (self.devices,)
        layouts, seen = [], set()
        for number in sorted(range(len(self.paths)), key=lambda i: -math.prod(self.paths[i][1])):
            shape = self.paths[number][1]
            if shape in seen:
                continue
            seen.add(shape)
            for dim in range(len(shape)):
                if shape[dim] >= self.devices > 1 and time.monotonic() < until:
                    specs: list[Spec | None] = [None] * len(self.paths)
                    specs[number] = (dim,)
                    layouts.append(self._layout(mesh, specs, math.nan, bound))
        return layouts

    def _too_large(self, least: Layout) -> ValueError:
        assert least.lowered is not None
        where = least.lowered.forecast(self.machine).memory.where
        missing = least.memory_bytes - self.limit
        return ValueError(
            f"no layout was found that holds at most {size(self.limit)} on each of "
            f"{self.devices} devices; the smallest one holds {size(least.memory_bytes)}, "
            f"{size(missing)} too much" + (f"; its peak is at {where}" if where else "")
        )

    def _layout(
        self, mesh: MeshShape, specs: Sequence[Spec | None], cost: float, bound: float
    ) -> Layout:
        annotations = tuple(
            Annotated(path, shape, dims_of(spec, len(shape), mesh))
            for (path, shape), spec in zip(self.paths, specs, strict=True)
            if spec is not None and any(at != NONE for at in spec)
        )
        names = dict(zip(AXES, mesh, strict=False))
        empty = Layout(names, annotations, self.machine.name, 0.0, 0, cost, bound)
        return self._priced(empty, " x ".join(map(str, mesh)))

    def _priced(self, layout: Layout, name: str) -> Layout:
        """The layout with the figures of its lowered program."""
        keywords = {"devices": self.devices, "hardware": self.machine, **self.keywords}
        lowered = jit(layout.annotated(self.fn), **keywords).lower(*self.args)
        forecast = lowered.forecast(self.machine)
        entry = {
            "name": f"mesh {name}, {len(layout.annotations)} annotations",
            "seconds": forecast.step_seconds,
            "memory_bytes": forecast.memory_bytes,
            "fits": forecast.memory_bytes <= self.limit,
        }
        self.considered.append(entry)
        return dataclasses.replace(
            layout,
            seconds=forecast.step_seconds,
            memory_bytes=forecast.memory_bytes,
            lowered=lowered,
            function=self.fn,
            keywords={**keywords, "devices": self._present()},
            arguments=self.args,
            considered=tuple(self.considered),
        )

    def _present(self) -> Any:
        """The devices to run on, where there are enough; else their number."""
        here = jax.devices()
        return here[: self.devices] if len(here) >= self.devices else self.devices

    def _smaller(self, best: Layout) -> Layout:
        """Without the annotations that make no difference, those of equal arguments together."""
        groups: dict[Any, list[Annotated]] = {}
        for annotation in best.annotations:
            groups.setdefault((annotation.shape, annotation.dims), []).append(annotation)
        most = best.seconds * (1 + _TOLERANCE)
        name = " x ".join(map(str, best.mesh.values()))
        for group in list(groups.values())[:_TRIED_WITHOUT]:
            rest = tuple(a for a in best.annotations if a not in group)
            tried = self._priced(dataclasses.replace(best, annotations=rest), name)
            if tried.seconds <= most and tried.memory_bytes <= self.limit:
                best = tried
        return dataclasses.replace(best, considered=tuple(self.considered))


def _arrays_of(tree: Any) -> Any:
    """A tree without its leaves that are not arrays."""
    return jax.tree.map(lambda leaf: leaf if _jax.is_array_like(leaf) else None, tree)


def _returned(arguments: tuple[Any, ...], results: Any) -> list[tuple[int, int]]:
    """Results that look like whole arguments, such as a state: pairs of numbers of leaves."""
    parts = results if isinstance(results, (tuple, list)) else (results,)
    pairs: list[tuple[int, int]] = []
    at_result = 0
    taken: set[int] = set()
    for part in parts:
        at_argument = 0
        for number, argument in enumerate(arguments):
            count = len(jax.tree.leaves(argument))
            if number not in taken and count and _alike(argument, part):
                pairs += [(at_result + i, at_argument + i) for i in range(count)]
                taken.add(number)
                break
            at_argument += count
        at_result += len(jax.tree.leaves(part))
    return pairs


def _alike(one: Any, two: Any) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(two):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.shape(a) == b.shape and a.dtype == b.dtype for a, b in pairs)


def _with_least_memory(problem: Problem, seconds: float) -> Result:
    """The model counts more than a compiler holds: an answer with nearly the least that it can."""
    low, high, best = 1.0, 2.0, None
    while best is None or high / low > 1.1:
        middle = high if best is None else (low * high) ** 0.5
        looser = dataclasses.replace(problem.memory, limit=problem.memory.limit * middle)
        try:
            best = solve(dataclasses.replace(problem, memory=looser), seconds / 8)
            high = middle
        except NoAnswerError:
            low = middle
            high = high * 2 if best is None else high
    return best


def _best(layouts: Sequence[Layout]) -> Layout:
    """The fastest; of equally fast ones, that with the fewest mesh axes."""
    least = min(layout.seconds for layout in layouts)
    equal = [layout for layout in layouts if layout.seconds <= least * (1 + 1e-6)]
    return min(equal, key=lambda layout: len(layout.mesh))
