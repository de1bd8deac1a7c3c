"""Program: a partitioned function with its border, ready for XLA."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core.primitives import convert_element_type_p
from jax.sharding import AbstractMesh, Mesh

from gshard import _jax, explain
from gshard.bundles import combined
from gshard.devices import Place
from gshard.emission import emit
from gshard.evaluate import bind, evaluate
from gshard.explaining import Subject
from gshard.graph import bodies, map_bodies
from gshard.history import History
from gshard.improve import PASSES as IMPROVE
from gshard.meshes import AnyMesh, axis_names, make_mesh
from gshard.placement import DeviceOrder
from gshard.plan import Plan, plan_note
from gshard.ports import Port, labelled, ports
from gshard.propagate import Propagated
from gshard.sharding import Sharding
from gshard.tile import Tile

Local = Callable[[Place, Sequence[Tile]], list[Tile]]  # the per-device program, on tiles


@dataclass(frozen=True)
class Program:
    """One program for all devices, as a function of the flat arrays that cross its border.

    `consts` are the values that the user's function closes over; they cross first.
    """

    traced: jax.stages.Traced
    mesh: Any  # of real devices, or an abstract one
    consts: tuple[Any, ...]
    into: tuple[Port, ...]
    out_of: tuple[Port, ...]
    flat: ClosedJaxpr  # the logical program that it was made of, and its shardings
    found: Propagated
    plan: Plan
    history: History
    variant: Callable[[ClosedJaxpr], Program] | None = None  # of a changed logical program
    per_device = True

    @property
    def subject(self) -> Subject:
        """What explanations are made of."""
        variant = self.variant
        assert variant is not None

        def changed(flat: ClosedJaxpr) -> Jaxpr:
            return variant(flat).jaxpr

        return Subject(self.flat, self.found, self.jaxpr, self.num_devices, changed)

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Splits that wanted the same tensors, and what was decided."""
        return self.found.conflicts

    @property
    def arguments(self) -> tuple[Port, ...]:
        """Where the user's arguments cross."""
        return self.into[len(self.consts) :]

    @property
    def num_devices(self) -> int:
        """How many devices the program is for."""
        return self.mesh.size

    @functools.cached_property
    def wraps(self) -> bool:
        """Whether some arguments or results cross otherwise than the user sees them."""
        return self.wraps_arguments or any(p.stacked for p in self.out_of)

    @functools.cached_property
    def wraps_arguments(self) -> bool:
        """Whether some arguments do."""
        return any(p.stacked for p in self.into)

    @property
    def jaxpr(self) -> Jaxpr:
        """The per-device program."""
        (eqn,) = [e for e in self.traced.jaxpr.eqns if e.primitive.name == "shard_map"]
        inner = eqn.params["jaxpr"]
        return getattr(inner, "jaxpr", inner)

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether it takes arguments that lie like that as they are."""
        ports = self.into[len(self.into) - len(given) :]
        return all(s is None or s == p.sharding for s, p in zip(given, ports, strict=True))

    def collectives(self) -> list[explain.Collective]:
        """What moves, how much, and because of which line: read off the program itself."""
        return explain.collectives_of(self.jaxpr, self.mesh.size)

    def text(self) -> str:
        """The per-device program, readable."""
        return explain.program_text(self.jaxpr, self.mesh.size)

    def input_shardings(self) -> list[Sharding]:
        """The shardings of the arguments."""
        return [p.sharding for p in self.arguments]

    def output_shardings(self) -> list[Sharding]:
        """The shardings of the results."""
        return [p.sharding for p in self.out_of]

    def named_results(self) -> list[Any]:
        """JAX's shardings of the results; one that does not divide is called whole."""
        return [p.struct(self.mesh, jnp.float32).sharding for p in self.out_of]

    def structs(self, dtypes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes with JAX's own shardings."""
        ports = zip(self.arguments, dtypes, strict=True)
        return [p.struct(self.mesh, dtype) for p, dtype in ports]

    def compile(self, compiler_options: dict[str, Any] | None) -> jax.stages.Compiled:
        """The executable, for real devices."""
        if isinstance(self.mesh, AbstractMesh):
            raise RuntimeError(
                f"this program was lowered for {self.mesh.size} abstract devices and cannot run; "
                "give gshard.jit a list of devices (devices=jax.devices()) to compile or call it"
            )
        return self.traced.lower().compile(compiler_options=compiler_options)

    def placed_consts(self) -> list[jax.Array]:
        """The values that the user's function closes over, where the executable wants them."""
        return [p.put(self.mesh, c) for p, c in zip(self.into, self.consts, strict=False)]

    def put(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments as the arrays that cross; nothing moves that is in place."""
        return [p.put(self.mesh, x) for p, x in zip(self.arguments, leaves, strict=True)]

    def shown(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """What the user sees of arguments that would cross as these."""
        return [p.get(self.mesh, x) for p, x in zip(self.arguments, arrays, strict=True)]

    def get(self, out: Sequence[jax.Array]) -> list[jax.Array]:
        """What the user sees of results that crossed."""
        return [p.get(self.mesh, x) for p, x in zip(self.out_of, out, strict=True)]

    def logical(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The program on logical values: what does not divide is stacked inside."""
        values = (*self.consts, *arguments)
        stacks = [p.whole_in(jnp.asarray(x)) for p, x in zip(self.into, values, strict=True)]
        out = self.traced(*stacks)
        return [p.whole_out(x) for p, x in zip(self.out_of, out, strict=True)]


@dataclass(frozen=True)
class Settings:
    """What `jax.jit` is told when the program is handed over to it."""

    donated: tuple[int, ...]
    keep_unused: bool
    compiler_options: tuple[tuple[str, Any], ...]


def arrange(
    local: Local,
    flat: ClosedJaxpr,
    found: Propagated,
    name: str,
    closed_over: Sequence[Any],
    order: DeviceOrder,
    user_mesh: Mesh | None,
    settings: Settings,
    types: Sequence[Any],
    history: History,
) -> Program:
    """The per-device program between global arrays, as a function that XLA compiles.

    Its results have the `types` of those of the user's function.
    """
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
    plan, emitted = _emitted(mapped, mesh, history)
    traced = _traced(emitted, name, structs, into, mesh, len(consts), settings)
    return Program(traced, mesh, consts, into, out_of, flat, found, plan, history)


def check_results(results: Sequence[Any], shardings: Mapping[Any, Sharding]) -> None:
    """Refuse results that are values of a manual region."""
    if any(not isinstance(v, Literal) and shardings[v].manual for v in results):
        raise ValueError(
            "the function returns a value of a manual region; leave it with "
            "manual_to_auto_spmd_partition, which says which part of the result each device has"
        )


def _of_type(result: jax.Array, aval: Any) -> jax.Array:
    """A result as weakly typed as the user's function says, which no operator keeps track of."""
    assert result.dtype == aval.dtype, (result.dtype, aval)
    weak = getattr(aval, "weak_type", False)
    if weak == jax.typeof(result).weak_type:
        return result
    params = {"new_dtype": result.dtype, "weak_type": weak, "sharding": None}
    return convert_element_type_p.bind(result, **params)


def _traced(
    program: ClosedJaxpr,
    name: str,
    structs: Sequence[jax.ShapeDtypeStruct],
    into: Sequence[Port],
    mesh: AnyMesh,
    num_consts: int,
    settings: Settings,
) -> jax.stages.Traced:
    """A program for global arrays, traced under the name of the user's function."""

    def called(*arrays: jax.Array) -> list[jax.Array]:
        return evaluate(program, arrays, _copied)

    called.__name__ = called.__qualname__ = name
    placed = {"in_shardings": [p.named(mesh) for p in into]} if isinstance(mesh, Mesh) else {}
    jitted = jax.jit(
        called,
        donate_argnums=tuple(num_consts + i for i in settings.donated),
        keep_unused=settings.keep_unused,
        compiler_options=dict(settings.compiler_options) or None,
        **placed,
    )
    with _jax.without_mesh():
        return jitted.trace(*structs)


def _emitted(mapped: ClosedJaxpr, mesh: AnyMesh, history: History) -> tuple[Plan, ClosedJaxpr]:
    """The plan in a `shard_map`, improved, and the program with what each device runs instead."""
    (number,) = [i for i, eqn in enumerate(mapped.jaxpr.eqns) if eqn.primitive is _jax.shard_map_p]
    eqn = mapped.jaxpr.eqns[number]
    (jaxpr,) = bodies(eqn)
    history.add("plan", jaxpr, plan_note)
    for improvement in IMPROVE:
        jaxpr = improvement(jaxpr)
        history.add(improvement.__name__, jaxpr, plan_note)
    plan = Plan(jaxpr, mesh.size)
    jaxpr = emit(jaxpr, dict(mesh.shape))
    history.add("emit", jaxpr, explain.collective_note)
    jaxpr = combined(jaxpr, mesh)
    history.add("combine", jaxpr, explain.collective_note)
    eqns = list(mapped.jaxpr.eqns)
    eqns[number] = map_bodies(eqn, lambda closed: closed.replace(jaxpr=jaxpr))
    return plan, mapped.replace(jaxpr=mapped.jaxpr.replace(eqns=eqns))


def _copied(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation in the program that is traced now."""
    results = _jax.copied(eqn, values)
    return bind(eqn, values) if results is None else results
