"""The interface of a plan: how global arrays become tiles, and tiles global arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import Mesh

from gshard import _jax
from gshard.capture.placement import DeviceOrder
from gshard.graph import bodies
from gshard.graph.history import History
from gshard.moving.seen import Seen, replaced
from gshard.planning.improve import Pass
from gshard.planning.plan import Plan, plan_note
from gshard.propagation.propagate import Propagated
from gshard.runtime.ports import Port, labelled, ports
from gshard.tensors.devices import Place
from gshard.tensors.meshes import axis_names, make_mesh
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

    def improved(self, passes: Sequence[Pass], history: History) -> Arrangement:
        """The same with a plan that passes have improved, one after the other."""
        planned = self.plan.jaxpr
        for improvement in passes:
            before, planned = planned, improvement(planned)
            self.seen.same |= replaced(before, planned)
            history.add(improvement.__name__, planned, plan_note)
        return replace(self, plan=Plan(planned, self.plan.num_devices))


def arrange(
    local: Local,
    flat: ClosedJaxpr,
    found: Propagated,
    closed_over: Sequence[Any],
    order: DeviceOrder,
    user_mesh: Mesh | None,
    types: Sequence[Any],
    history: History,
    seen: Seen,
) -> Arrangement:
    """The plan of `local` as a function of global arrays, with results of `types`."""
    jaxpr, count, shardings = flat.jaxpr, order.count, found.shardings
    entering = (*jaxpr.constvars, *jaxpr.invars)
    inputs = [shardings[v] for v in entering]
    outputs = [
        Sharding.replicated(v.aval.ndim, count) if isinstance(v, Literal) else shardings[v]
        for v in jaxpr.outvars
    ]
    check_results(jaxpr.outvars, shardings)
    shapes = [tuple(v.aval.shape) for v in (*entering, *jaxpr.outvars)]
    like = None if user_mesh is None else user_mesh.devices.shape
    like = like if like and math.prod(like) == count else None
    axes, crossing = ports([*inputs, *outputs], shapes, count, like)
    mesh = make_mesh(axes, order.devices)
    crossing = labelled(crossing, user_mesh, order.numbers)
    into, out_of = tuple(crossing[: len(inputs)]), tuple(crossing[len(inputs) :])

    def on_device(*arrays: jax.Array) -> list[jax.Array]:
        place = Place(axis_names(axes), count)
        tiles = [p.enter(a) for p, a in zip(into, arrays, strict=True)]
        results = [p.leave(t) for p, t in zip(out_of, local(place, tiles), strict=True)]
        return [_of_type(x, aval) for x, aval in zip(results, types, strict=True)]

    step = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=tuple(p.spec for p in into),
        out_specs=[p.spec for p in out_of],
        check_vma=False,
    )
    consts = (*flat.consts, *closed_over)
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
    history.add("plan", planned, plan_note)
    return Arrangement(
        flat, found, mesh, consts, into, out_of, tuple(structs), mapped, Plan(planned, count), seen
    )


def check_results(results: Sequence[Any], shardings: Mapping[Any, Sharding]) -> None:
    """Reject results that are values of a manual region."""
    if any(not isinstance(v, Literal) and shardings[v].manual for v in results):
        raise ValueError(
            "the function returns a value of a manual region; convert it with "
            "manual_to_auto_spmd_partition, which says which part of the result each device has"
        )


def _of_type(result: jax.Array, aval: Any) -> jax.Array:
    """A result with the weak type of the user's function, which no operator preserves."""
    assert result.dtype == aval.dtype, (result.dtype, aval)
    weak = getattr(aval, "weak_type", False)
    if weak == jax.typeof(result).weak_type:
        return result
    params = {"new_dtype": result.dtype, "weak_type": weak, "sharding": None}
    return convert_element_type_p.bind(result, **params)
