"""A layout for plain `jax.jit`: a mesh, shardings, and the function with constraints inside.

`jax.jit` has no names for the tensors inside a function. What it has are sharding constraints, so
that the function is traced and those constraints are put behind the equations that the layout
names; loops get them in their bodies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard.autosharding.layout.annotations import Dims
from gshard.autosharding.traced import of_arrays
from gshard.capture.flatten import inline
from gshard.capture.inside import TensorSite, places
from gshard.capture.placement import device_order
from gshard.graph import LOOPS, map_bodies
from gshard.graph.evaluate import bind, evaluate

Constraint = tuple[TensorSite, tuple[int, ...] | None, NamedSharding]


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
    fn: Callable[..., Any], constraints: Sequence[Constraint], devices: int
) -> Callable[..., Any]:
    """`fn` with constraints on the tensors at these places."""
    if not constraints:
        return fn

    @functools.wraps(fn)
    def with_constraints(*args: Any, **kwargs: Any) -> Any:
        run, arrays = of_arrays(fn, args, kwargs)
        leaves = jax.tree.leaves((args, kwargs))
        given = [leaves[i] for i in arrays]
        closed, shapes = jax.make_jaxpr(run, return_shape=True)(*given)
        flat = inline(closed, device_order(devices))
        results = jaxpr_as_fun(_with_constraints(flat, _found(flat, constraints)))(*given)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return with_constraints


def _found(flat: ClosedJaxpr, constraints: Sequence[Constraint]) -> dict[Any, NamedSharding]:
    """The tensors of a program that have a constraint.

    A place that only gshard's own normal forms have is left to XLA.
    """
    found = {}
    for var, (place, number) in places(flat).items():
        for wanted, numbers, sharding in constraints:
            if place == wanted and (numbers is None or number in numbers):
                found[var] = sharding
    return found


def _with_constraints(closed: ClosedJaxpr, marked: Mapping[Any, NamedSharding]) -> ClosedJaxpr:
    """The program, and the bodies of its loops, with the constraints."""

    def interpret(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive in LOOPS:
            eqn = map_bodies(eqn, lambda body: _with_constraints(body, marked))
        results = list(bind(eqn, values))
        for i, var in enumerate(eqn.outvars):
            if var in marked:
                results[i] = jax.lax.with_sharding_constraint(results[i], marked[var])
        return results

    def run(*values: Any) -> Any:
        return evaluate(closed, values, interpret)

    return jax.make_jaxpr(run)(*[v.aval for v in closed.jaxpr.invars])
