"""The borders of loops and branches: a value outside and the same one inside."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from gshard.autosharding.memory import Floats, Ints
from gshard.autosharding.problem import FORBIDDEN
from gshard.autosharding.specs import NONE, MeshShape, specs_of
from gshard.graph.regions import Loop, walk
from gshard.propagation.flow import Edge


def leaving(flat: ClosedJaxpr) -> set[tuple[Any, Any]]:
    """The borders, by their ends, at which a value leaves a body or is carried to its next run."""
    found = set()
    for loop in filter(None, map(Loop.of, walk(flat.jaxpr))):
        given = {var for body in loop.bodies for var in body.jaxpr.invars}
        made = [v for body in loop.bodies for v in body.jaxpr.outvars]
        carried = {var for var in made if not isinstance(var, Literal)}
        for outer, inner, _ in loop.links:
            if outer in loop.eqn.outvars or (outer in given and inner in carried):
                found.add((outer, inner))
    return found


def ends(edge: Edge, outwards: set[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Of a border where a value comes from, and where it goes to."""
    (outer,), (inner,) = edge.atoms
    return (inner, outer) if (outer, inner) in outwards else (outer, inner)


def table(edge: Edge, source: Any, mesh: MeshShape, moved: Floats, optimistic: bool) -> Floats:
    """What crossing a border costs, by the specs of its two ends in the order of `ends`.

    `moved` is what resharding the value outside costs. A scan takes and stacks slices as they are,
    one in each step: what moves is the slice, inside.
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
    if more and not optimistic:
        outside = np.array(list(position)).reshape(-1, 1, len(mesh))
        stacked = (outside < more) & (outside != NONE)
        same = stacked | (outside == np.array(specs).reshape(1, -1, len(mesh)))
        crossed = np.where(same.all(axis=2), crossed, FORBIDDEN)
    return crossed.T if source is inner else crossed
