"""The interface of a plan: how global arrays become tiles, and tiles global arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.placement import DeviceOrder
from gshard.capture.stage import Captured
from gshard.graph import bodies
from gshard.moving.seen import Seen
from gshard.planning.plan import Plan
from gshard.propagation.propagate import Propagated
from gshard.runtime.ports import Port, ports
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

Local = Callable[[Place, Sequence[Tile]], list[Tile]]  # the per-device program, on tiles


@dataclass(frozen=True, eq=False)
class Arrangement:
    """A plan, and the ports that convert its arguments and results.

    `mapped` is a function of global arrays: a `shard_map` whose body is the plan before
    any pass improved it. `consts` are the values that the user's function closes over; they are
    the first arguments.
    """

    flat: ClosedJaxpr
    found: Propagated
    mesh: Any  # of real devices, or an abstract one
    consts: tuple[Any, ...]
    into: tuple[Port, ...]
    out_of: tuple[Port, ...]
    structs: tuple[jax.ShapeDtypeStruct, ...]
    mapped: ClosedJaxpr
    plan: Plan
    seen: Seen


def arrange(
    local: Local,
    flat: ClosedJaxpr,
    found: Propagated,
    captured: Captured,
    order: DeviceOrder,
    user_mesh: Mesh | None,
    seen: Seen,
) -> Arrangement:
    """The plan of `local` as a function of global arrays, with results of the user's types."""
    jaxpr, count, shardings = flat.jaxpr, order.count, found.shardings
    entering = (*jaxpr.constvars, *jaxpr.invars)
    inputs = [shardings[v] for v in entering]
    outputs = [
        Sharding((None,) * v.aval.ndim, count) if isinstance(v, Literal) else shardings[v]
        for v in jaxpr.outvars
    ]
    shapes = [tuple(v.aval.shape) for v in (*entering, *jaxpr.outvars)]
    mesh, crossing = ports([*inputs, *outputs], shapes, order, user_mesh)
    into, out_of = tuple(crossing[: len(inputs)]), tuple(crossing[len(inputs) :])

    def on_device(*arrays: jax.Array) -> list[jax.Array]:
        opaque = arrays[0] if captured.variant.opaque_first else None
        place = Place(mesh.axis_names, count, opaque=opaque)
        tiles = [p.enter(a) for p, a in zip(into, arrays, strict=True)]
        results = zip(out_of, local(place, tiles), captured.types, strict=True)
        return [p.leave(t, aval) for p, t, aval in results]

    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(p.spec for p in into),
        out_specs=[p.spec for p in out_of],
        check_vma=False,
    )
    consts = (*flat.consts, *captured.closed_over)
    structs = [
        jax.ShapeDtypeStruct(
            p.physical_shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)
        )
        for p, v in zip(into, entering, strict=True)
    ]
    with _jax.without_mesh():
        mapped = jax.make_jaxpr(step)(*structs)
    (mapping,) = [eqn for eqn in mapped.jaxpr.eqns if eqn.primitive is _jax.shard_map_p]
    (planned,) = bodies(mapping)
    return Arrangement(
        flat, found, mesh, consts, into, out_of, tuple(structs), mapped, Plan(planned, count), seen
    )
