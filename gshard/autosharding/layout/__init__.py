"""A layout: a mesh, and which argument is sharded how over it. It can be kept in a file.

For plain `jax.jit`, which has no names for the tensors inside a function, a layout is a mesh,
shardings, and the function with sharding constraints: it is traced, and constraints are put behind
the equations that the layout names; loops get them in their bodies.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.autosharding.cost import sharding_of
from gshard.autosharding.layout.annotations import (
    Annotated,
    AnnotatedInside,
    Dims,
    annotated_in,
    as_text,
    dims_on,
    read,
    spec_of,
)
from gshard.autosharding.layout.for_torch import ForTorch, for_torch
from gshard.autosharding.layout.summary import Considered, as_table, explained, plot, summary
from gshard.autosharding.traced import path_name, result_name
from gshard.capture.calls import StaticLeaves
from gshard.capture.flatten import inline
from gshard.capture.inside import Inside
from gshard.capture.placement import device_order
from gshard.graph.evaluate import bind, evaluate, rebuilt
from gshard.graph.regions import LOOPS
from gshard.jit import Jitted, jit
from gshard.runtime.stages import Lowered
from gshard.tensors.annotate import Annotation, annotate, in_stages
from gshard.tensors.sharding import Sharding


class ForJax(NamedTuple):
    """A layout for `jax.jit`: `jax.jit(function, in_shardings, out_shardings)`.

    `function` is the one that the layout was chosen for, with a sharding constraint at each of the
    tensors that the layout annotates inside.
    """

    mesh: Mesh
    in_shardings: Any
    out_shardings: Any
    function: Callable[..., Any]


def on_mesh(mesh: Mesh, dims: Dims, shape: tuple[int, ...]) -> NamedSharding:
    """The sharding with these mesh axes on each dim, where its size divides by theirs."""

    def divides(names: tuple[str, ...], size: int) -> bool:
        return size % math.prod(mesh.shape[name] for name in names) == 0

    pairs = zip(dims, shape, strict=False)
    return NamedSharding(
        mesh, PartitionSpec(*(names if names and divides(names, n) else None for names, n in pairs))
    )


def constrained(
    fn: Callable[..., Any], inside: Sequence[AnnotatedInside], mesh: Mesh
) -> Callable[..., Any]:
    """`fn` with constraints on the tensors that are annotated inside. A place that only gshard's
    own normal forms have is left to XLA."""
    if not inside:
        return fn

    @functools.wraps(fn)
    def with_constraints(*args: Any, **kwargs: Any) -> Any:
        static, given = StaticLeaves.of(args, kwargs, (), ())
        closed, shapes = jax.make_jaxpr(static.flat(fn), return_shape=True)(*given)
        flat = inline(closed, device_order(mesh.size))
        marked = {
            var: on_mesh(mesh, each.dims, each.shape)
            for var, each in annotated_in(flat, inside).items()
        }

        def interpret(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
            inside = eqn.params if eqn.primitive in LOOPS else {}
            results = bind(eqn, values, **{k: rebuilt(v, interpret) for k, v in inside.items()})
            return [
                jax.lax.with_sharding_constraint(value, marked[var]) if var in marked else value
                for var, value in zip(eqn.outvars, results, strict=True)
            ]

        return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(flat, given, interpret))

    return with_constraints


@dataclasses.dataclass(frozen=True, repr=False)
class Layout:
    """A mesh and annotations that were chosen for a program, and what they were chosen by.

    `annotations` are of arguments, `results` of results that are arguments of the next step,
    `inside` of tensors in between, where propagation alone would choose otherwise. `seconds` and
    `memory_bytes` are the forecast of the lowered program; `bound` is a lower bound of the
    forecasts of all layouts over `meshes`, the meshes that were searched, in which states keep
    their shardings from step to step. `stages` are those of pipelines whose number the program
    leaves open (0: it does not); the bound is for all numbers of stages. `solver_gap` is the
    relative gap of the solver: how far its answer may be above the optimum of its own model.
    """

    mesh: Mapping[str, int]
    annotations: tuple[Annotated, ...]
    hardware: str
    seconds: float
    memory_bytes: int
    bound: float
    solver_gap: float = 0.0
    inside: tuple[AnnotatedInside, ...] = ()
    results: tuple[Annotated, ...] = ()
    stages: int = 0
    considered: tuple[Considered, ...] = dataclasses.field(default=(), compare=False)
    lowered: Lowered | None = dataclasses.field(default=None, compare=False)
    function: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    arguments: Any = dataclasses.field(default=None, compare=False)
    limit: int = dataclasses.field(default=0, compare=False)
    meshes: tuple[tuple[int, ...], ...] = dataclasses.field(default=(), compare=False)
    phases: Mapping[str, tuple[float, float]] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )  # of the search: seconds of work that each took, and that it was given
    layers: int = dataclasses.field(default=0, compare=False)  # equal ones, decided as one

    @property
    def devices(self) -> int:
        """The number of devices of the mesh."""
        return math.prod(self.mesh.values())

    @property
    def gap(self) -> float:
        """How far the forecast may be above that of the best layout, as a share of it."""
        return max(0.0, self.seconds - self.bound) / max(self.seconds, 1e-30)

    @property
    def frontier(self) -> tuple[Considered, ...]:
        """The layouts considered that no other one beats in both memory and time.

        The one with the least memory comes first; each further one is faster.
        """
        found: list[Considered] = []
        for each in sorted(self.considered, key=lambda c: (c.memory_bytes, c.seconds)):
            if not found or each.seconds < found[-1].seconds:
                found.append(each)
        return tuple(found)

    def plot_frontier(self, path: str | Path) -> Path:
        """An SVG file of what less memory costs: `frontier`, the other layouts that were lowered,
        and the memory limit. Needs the extra `plots`."""
        return plot(self, Path(path))

    @property
    def inside_shardings(self) -> tuple[Inside, ...]:
        """The annotations of tensors inside the program, as `gshard.jit` reads them."""
        return tuple(Inside(a.place, a.numbers, self._sharding(a)) for a in self.inside)

    def annotated(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """`fn` with the annotations on its arguments and results."""

        @functools.wraps(fn)
        def with_annotations(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._marked("argument", (args, kwargs), fn)
            with in_stages(self.stages):
                results = fn(*args, **kwargs)
            return self._marked("result", results, fn)

        return with_annotations

    def _marked(self, kind: str, tree: Any, fn: Callable[..., Any]) -> Any:
        """A tree of arguments or results with its annotations."""
        of_results = kind == "result"
        by_path = {a.path: a for a in (self.results if of_results else self.annotations)}
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        name = result_name if of_results else path_name
        named = [(name(path), leaf) for path, leaf in leaves]
        _check(kind, by_path, dict(named), fn)
        return structure.unflatten(self._mark(by_path.get(at), leaf) for at, leaf in named)

    def _mark(self, annotated: Annotated | None, leaf: Any) -> Any:
        if annotated is None:
            return leaf
        sharding = self._sharding(annotated)
        return annotate(leaf, Annotation.of_sharding(f"layout: {annotated}", sharding))

    def _sharding(self, tensor: Annotated | AnnotatedInside) -> Sharding:
        spec = spec_of(tensor.dims, tuple(self.mesh))
        return sharding_of(spec, len(tensor.shape), tuple(self.mesh.values()))

    def jit(self, **keywords: Any) -> Jitted[..., Any]:
        """The function that the layout was chosen for, partitioned by it."""
        if self.function is None:
            raise ValueError(
                "a layout that was loaded has no function: use gshard.jit(fn, annotations=layout)"
            )
        made: Jitted[..., Any] = jit(
            self.function, annotations=self, **{**self.keywords, **keywords}
        )
        return made

    def to_jax(self) -> ForJax:
        """The mesh, on this machine's first devices, and shardings for plain `jax.jit`.

        They are those of the lowered program: an argument without an annotation has what
        propagation gave it, and a dim whose size does not divide is replicated, since JAX has no
        such shardings. `function` has a sharding constraint at each tensor that the layout
        annotates inside:

            jax.jit(given.function, in_shardings=given.in_shardings,
                    out_shardings=given.out_shardings)
        """
        if self.lowered is None or self.function is None:
            raise ValueError(
                "a layout that was loaded has no program: give it to gshard.jit, or search again"
            )
        here = jax.devices()
        if len(here) < self.devices:
            raise ValueError(f"the layout is for {self.devices} devices; here are {len(here)}")
        axes = tuple(self.mesh.values())
        mesh = Mesh(np.array(here[: self.devices]).reshape(axes), tuple(self.mesh))

        def named(sharding: Sharding, leaf: Any) -> NamedSharding:
            return on_mesh(mesh, dims_on(sharding, self.mesh) or (), leaf.shape)

        given = self.lowered.in_info
        _check_arrays(given)
        arguments = jax.tree.map(named, self.lowered.in_shardings, given)
        results = jax.eval_shape(self.function, *given)
        results = jax.tree.map(named, self.lowered.out_shardings, results)
        return ForJax(mesh, arguments, results, constrained(self.function, self.inside, mesh))

    def to_torch(self) -> ForTorch:
        """Placements of DTensor by parameter, for a module of `gshard.contrib.torch`; printed too.

        The text applies them with `fully_shard` and `parallelize_module`. They are those of the
        lowered program: what propagation gave to a parameter without an annotation is there.
        """
        if self.lowered is None:
            raise ValueError("a layout that was loaded has no program: search again")
        given = for_torch(self.lowered.in_info, self.lowered.in_shardings, self.mesh)
        print(given)
        return given

    def save(self, path: str | Path) -> None:
        """Write it as JSON, which can be read and edited."""
        Path(path).write_text(as_text(self), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Layout:
        """Read what `save` wrote; a file with invalid values is an error that says where."""
        return Layout(**read(path))

    def __str__(self) -> str:
        return summary(self)

    def explain(self) -> str:
        """What was considered, why the others lost, and what the time and the memory go to."""
        return explained(self)

    def __repr__(self) -> str:
        return f"<gshard.Layout: {', '.join(summary(self).splitlines()[:2])}>"

    def _repr_html_(self) -> str:
        return as_table(self)


def _check(kind: str, expected: Mapping[str, Annotated], given: Mapping[str, Any], fn: Any) -> None:
    """Refuse a layout of another program, by its arguments or its results."""
    for path, annotation in expected.items():
        if path not in given:
            raise ValueError(
                f"the layout annotates {kind} {path}, which {_described(fn)} does not have; its "
                f"{kind}s are {', '.join(given) or 'none'}"
            )
        shape = tuple(np.shape(given[path]))
        if shape != annotation.shape:
            raise ValueError(
                f"the layout is for {kind} {path} of shape {annotation.shape}; that of "
                f"{_described(fn)} has shape {shape}"
            )


def _described(fn: Any) -> str:
    """The name of a function, and its line where it has one."""
    name = getattr(fn, "__name__", str(fn))
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else name


def _check_arrays(given: Any) -> None:
    """Refuse a function that `jax.jit` cannot be given."""
    for path, leaf in jax.tree_util.tree_flatten_with_path((given, {}))[0]:
        if not hasattr(leaf, "shape"):
            raise ValueError(
                f"argument {path_name(path)} is {leaf!r}, and jax.jit takes arrays only: choose a "
                "layout for a function of arrays, such as equinox.partition makes"
            )
