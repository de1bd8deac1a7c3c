"""The program that a layout is chosen for: traced and flat, its arguments by their paths, and the
borders of its loops: a value outside and the same value inside.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard import _jax
from gshard.autosharding.cost import NONE, MeshShape, specs_of
from gshard.autosharding.solver.problem import FORBIDDEN, Floats, Ints
from gshard.capture.calls import StaticLeaves
from gshard.capture.placement import device_order
from gshard.capture.stage import USUAL, capture
from gshard.graph.history import History
from gshard.graph.regions import Loop, bodies, walk
from gshard.graph.source import source_of
from gshard.pipelining.meaning import pipeline_p
from gshard.propagation.flow import Edge, Flow
from gshard.tensors.annotate import in_stages, tracing_for

# Arrays that an argument has at least to be taken for a state: what returns a single array of the
# shape of an argument may be anything.
_STATE = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Repeated:
    """Equations of one of `layers` equal layers, which represent those of removed layers: each runs
    `times` times. Values of all other layers are sharded `like` those of this one."""

    times: int = 1
    eqns: frozenset[JaxprEqn] = frozenset()
    like: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    layers: int = 0


ONCE = Repeated()
STANDING = "one of equal layers"  # the name scope of what is made for such equations


@dataclasses.dataclass(frozen=True, eq=False)
class TracedProgram:
    """A function and its arguments, and the program that they make.

    `returned` are pairs of a result and an argument of the program, by number: the result is the
    argument of the next step. `states` has the paths of the same pairs. `stages` are those of its
    pipelines, where it leaves their number open, and `stage_numbers` the numbers to choose from.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    devices: int
    flat: ClosedJaxpr
    paths: list[tuple[str, tuple[int, ...]]]  # of the arrays among the arguments, with shapes
    closed_over: int  # arrays that the function closes over: the first arguments of the program
    returned: list[tuple[int, int]]
    states: list[tuple[str, str]]
    constants: Sequence[Any] = ()  # what it closes over
    repeated: Repeated = ONCE
    stages: int = 0

    @property
    def arguments(self) -> list[Any]:
        """The variables of the arrays among the arguments."""
        return self.flat.jaxpr.invars[self.closed_over :]

    @functools.cached_property
    def flow(self) -> Flow:
        """How the shardings of its tensors depend on each other, and how often each is made; an
        equation that represents removed ones runs as often as all of them."""
        flow = Flow(self.flat.jaxpr, self.devices)
        times, eqns = self.repeated.times, self.repeated.eqns
        alone = {v for edge in flow.edges if edge.eqn in eqns for v in edge.variables}
        for edge in flow.edges:
            edge.runs *= times if edge.eqn in eqns else 1
            alone.difference_update(() if edge.eqn in eqns else edge.variables)
        made = {var for eqn in eqns for var in eqn.outvars}
        for var in made | alone.intersection(self.flat.jaxpr.invars):
            flow.runs[var] *= times
        return flow

    @property
    def stage_numbers(self) -> list[int]:
        """How many stages its pipelines may have; none where it says, or has no pipelines."""
        pipes = [e.params["pipe"] for e in walk(self.flat.jaxpr) if e.primitive is pipeline_p]
        return sorted({number for pipe in pipes for number in pipe.numbers})

    @staticmethod
    def of(
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        devices: int,
        hardware: Any = None,
        stages: int = 0,
    ) -> TracedProgram:
        """Trace the function, for this hardware if it is known."""
        static, arrays = StaticLeaves.of(args, {}, (), ())
        run, order = static.flat(fn), device_order(devices)
        structs = [_jax.struct_of(x) for x in arrays]
        with tracing_for(order, hardware=hardware), in_stages(stages):
            traced = jax.jit(lambda *values: arrays_of(run(*values))).trace(*structs)
        captured = capture(traced, order, USUAL, History())
        _check_effects(captured.original)
        flat, constants = captured.flat, captured.closed_over
        given = jax.tree_util.tree_flatten_with_path((args, {}))[0]
        arguments = ((path, x) for path, x in given if _jax.is_array_like(x))
        paths = [(path_name(path), tuple(np.shape(x))) for path, x in arguments]
        first = len(constants)
        pairs = _returned(arrays_of(args), traced.out_info)
        results = jax.tree_util.tree_flatten_with_path(traced.out_info)[0]
        states = [(result_name(results[r][0]), paths[a][0]) for r, a in pairs]
        returned = [(result, argument + first) for result, argument in pairs]
        found = (fn, args, devices, flat, paths, first, returned, states, constants)
        return TracedProgram(*found, stages=stages)


def path_name(path: Any) -> str:
    """The path of a leaf of (args, kwargs): `[0]['w']` of positional, `name['w']` of others."""
    first, second, *rest = path
    tail = jax.tree_util.keystr(tuple(rest))
    if first.idx == 0:
        return f"[{second.idx}]{tail}"
    return f"{second.key}{tail}"


def result_name(path: Any) -> str:
    """The path of a leaf of the results."""
    return f"result{jax.tree_util.keystr(path)}"


def _check_effects(flat: ClosedJaxpr) -> None:
    """Refuse what has effects: it runs on one device, for a time that no forecast knows."""
    for eqn in walk(flat.jaxpr):
        # Names of mesh axes are effects too, of collectives in manual regions.
        kinds = {type(effect).__name__.removesuffix("Effect") for effect in eqn.effects}
        found = sorted(kinds - {"NamedAxis"})
        if found and not bodies(eqn):  # a loop has the effects of its body
            raise ValueError(
                f"{source_of(eqn)}: {eqn.primitive.name!r} has an effect ({', '.join(found)}), and "
                "gshard.auto takes functions without effects only. Choose a layout for the "
                "function without it; gshard.jit(fn, annotations=layout) runs effects"
            )


def arrays_of(tree: Any) -> Any:
    """A tree without its leaves that are not arrays."""
    return jax.tree.map(lambda leaf: leaf if _jax.is_array_like(leaf) else None, tree)


def _returned(arguments: Sequence[Any], results: Any) -> list[tuple[int, int]]:
    """Results that look like an argument, such as a state: pairs of numbers of leaves.

    All results together may be one (a state that is a list of layers), or each of them by itself.
    """
    together = any(_alike(argument, results) for argument in arguments)
    trees = map(jax.tree.structure, (arguments, results))
    given, made = (jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees)
    several = isinstance(results, (tuple, list)) and not together
    pairs: list[tuple[int, int]] = []
    taken: set[int] = set()
    for part, numbers in zip(results, made, strict=True) if several else [(results, made)]:
        for argument, own in zip(arguments, map(jax.tree.leaves, given), strict=True):
            if len(own) >= _STATE and taken.isdisjoint(own) and _alike(argument, part):
                pairs += zip(jax.tree.leaves(numbers), own, strict=True)
                taken.update(own)
                break
    return pairs


def _alike(one: Any, two: Any) -> bool:
    if jax.tree.structure(one) != jax.tree.structure(two):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(np.shape(a) == b.shape and a.dtype == b.dtype for a, b in pairs)


def leaving_borders(jaxpr: Jaxpr) -> set[tuple[Any, Any]]:
    """The borders, by their ends, at which a value leaves a body or is carried to its next run."""
    found = set()
    for loop in filter(None, map(Loop.of, walk(jaxpr))):
        given = {var for body in loop.bodies for var in body.jaxpr.invars}
        made = [v for body in loop.bodies for v in body.jaxpr.outvars]
        carried = {var for var in made if not isinstance(var, Literal)}
        for outer, inner, _ in loop.links:
            if outer in loop.eqn.outvars or (outer in given and inner in carried):
                found.add((outer, inner))
    return found


def border_ends(edge: Edge, outwards: set[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The source and the destination of a loop border."""
    (outer,), (inner,) = edge.atoms
    return (inner, outer) if (outer, inner) in outwards else (outer, inner)


def border_table(
    edge: Edge, source: Any, mesh: MeshShape, moved: Floats, slices_stay: bool
) -> Floats:
    """What crossing a border costs, by the specs of its two ends in the order of `border_ends`.

    `moved` is what resharding the value outside costs. Where `slices_stay`, a scan takes and stacks
    slices as they are, one in each step: what moves is the slice, inside.
    """
    (outer,), (inner,) = edge.atoms
    more = len(outer.aval.shape) - len(inner.aval.shape)
    position = {spec: i for i, spec in enumerate(specs_of(outer.aval.shape, mesh))}
    specs = [
        tuple(at if at == NONE else at + more for at in spec)
        for spec in specs_of(inner.aval.shape, mesh)
    ]
    columns: Ints = np.array([position[spec] for spec in specs], dtype=np.int64)
    crossed = moved[columns].T if source is inner else moved[:, columns]
    if more and slices_stay:
        outside = np.array(list(position)).reshape(-1, 1, len(mesh))
        stacked = (outside < more) & (outside != NONE)
        same = stacked | (outside == np.array(specs).reshape(1, -1, len(mesh)))
        crossed = np.where(same.all(axis=2), crossed, FORBIDDEN)
    return crossed.T if source is inner else crossed
