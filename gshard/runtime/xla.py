"""XLA's partitioner on the same annotations, for comparison and as a fallback.

The annotations become sharding constraints; XLA does everything else. Its collectives are read
from the compiled program, so that both partitioners are measured alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh, NamedSharding

from gshard import _jax
from gshard.capture.flatten import inline
from gshard.capture.placement import DeviceOrder
from gshard.graph.evaluate import bind, evaluate, rebuilt
from gshard.graph.regions import loop_bodies
from gshard.graph.source import on_behalf_of
from gshard.moving.inventory import Beside, Collective
from gshard.propagation.propagate import propagate
from gshard.runtime.hlo import collectives_of_hlo
from gshard.runtime.ports import in_place
from gshard.runtime.program import Program, XlaSettings
from gshard.runtime.xla_manual import Stacks
from gshard.tensors.annotate import annotate_p
from gshard.tensors.meshes import expressed, make_mesh, partition_spec
from gshard.tensors.sharding import Sharding
from gshard.tensors.uneven import UnevenArray


def lower_with_xla(
    traced: jax.stages.Traced,
    given: Sequence[Sharding | None],
    order: DeviceOrder,
    mesh: Mesh | None,
    settings: XlaSettings,
    options: Any,
) -> XlaProgram:
    """Annotations become constraints for XLA; arguments have the shardings of gshard's plan."""
    if isinstance(order.devices, int):
        raise ValueError("partitioner='xla' needs real devices: XLA partitions when it compiles")
    flat = inline(traced.jaxpr, order)
    current = {v: s for v, s in zip(flat.jaxpr.invars, given, strict=True) if s is not None}
    shardings = propagate(flat, order.count, current).shardings
    closed_over = _jax.closed_over(traced)
    variables = [*flat.jaxpr.constvars, *flat.jaxpr.invars]
    shapes = [tuple(v.aval.shape) for v in variables]
    axes, specs = expressed([shardings[v] for v in variables], shapes, order.count)
    own = make_mesh(axes, order.devices)
    assert isinstance(own, Mesh)
    stacks = Stacks(own, shardings)

    def named(var: Any) -> NamedSharding | None:
        spec = partition_spec(shardings[var], var.aval.shape, axes)
        return None if spec is None else NamedSharding(own, spec)

    def constrained(*arrays: jax.Array) -> list[Any]:
        arguments = [*closed_over, *arrays]
        return _constrained(flat, arguments, named, stacks)

    arguments = flat.jaxpr.invars[len(closed_over) :]
    passed = specs[len(specs) - len(arguments) :]
    into = [NamedSharding(own, jax.P() if spec is None else spec) for spec in passed]
    constrained.__name__ = constrained.__qualname__ = traced.fun_name
    jitted = jax.jit(
        constrained,
        in_shardings=into,
        donate_argnums=settings.donated,
        keep_unused=settings.keep_unused,
        compiler_options=dict(settings.compiler_options) or None,
    )
    structs = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in arguments
    ]
    with _jax.without_mesh():
        return XlaProgram(
            jitted.trace(*structs), order.count, into, [shardings[v] for v in arguments]
        )


@dataclass(frozen=True, eq=False)
class XlaProgram:
    """A program that XLA partitions when it compiles it."""

    traced: jax.stages.Traced
    num_devices: int
    into: list[NamedSharding]
    inputs: list[Sharding]
    wraps = wraps_arguments = False
    per_device = False

    @property
    def subject(self) -> Any:
        """There is no per-device program to explain until XLA has compiled."""
        raise NotImplementedError("XLA partitions when it compiles; nothing to explain yet")

    plan = history = emitted = finished = subject
    conflicts = ()

    @property
    def name(self) -> str:
        """That of the user's function."""
        return self.traced.fun_name

    @property
    def jaxpr(self) -> Jaxpr:
        """The annotated program, on logical shapes: XLA partitions it when it compiles."""
        return self.traced.jaxpr.jaxpr

    @functools.cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.traced.lower().compile()

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether arguments with these shardings need no resharding."""
        own = given[len(given) - len(self.inputs) :]
        return all(g is None or g == s for g, s in zip(own, self.inputs, strict=True))

    def collectives(self, beside: Beside) -> list[Collective]:
        """The collectives of XLA's compiled program."""
        return list(collectives_of_hlo(self._compiled.as_text() or "", self.num_devices))

    def text(self) -> str:
        """The annotated program."""
        return self.traced.lower().as_text()

    def input_shardings(self) -> list[Any]:
        """The shardings of the arguments, those of gshard's plan."""
        return self.inputs

    def output_shardings(self) -> list[Any]:
        """What XLA chose for the results."""
        return jax.tree.leaves(self._compiled.output_shardings)

    def named_results(self) -> list[Any]:
        """JAX's shardings of the results."""
        return self.output_shardings()

    def structs(self, dtypes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes with their shardings."""
        avals = self.traced.jaxpr.in_avals
        return [
            jax.ShapeDtypeStruct(a.shape, dtype, sharding=s)
            for a, dtype, s in zip(avals, dtypes, self.into, strict=True)
        ]

    def compile(self, compiler_options: dict[str, Any] | None) -> jax.stages.Compiled:
        """The program, partitioned and compiled by XLA."""
        if compiler_options:
            return self.traced.lower().compile(compiler_options=compiler_options)
        return self._compiled

    def placed_consts(self) -> list[jax.Array]:
        """None: XLA takes the values that the user's function closes over as constants."""
        return []

    def put(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments under the program's shardings."""
        return [
            x
            if isinstance(x, jax.Array) and in_place(x.sharding, s, x.ndim)
            else jax.device_put(x.logical() if isinstance(x, UnevenArray) else x, s)
            for x, s in zip(leaves, self.into, strict=True)
        ]

    def shown(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arguments, as they are."""
        return list(arrays)

    def get(self, out: Sequence[jax.Array]) -> list[jax.Array]:
        """The results, as they are."""
        return list(out)

    def logical(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The program on logical values."""
        return self.traced(*arguments)


Partitioned = Program | XlaProgram  # what a partitioner makes of a traced function


def _constrained(
    program: ClosedJaxpr,
    arrays: Sequence[Any],
    sharding_of: Callable[[Any], NamedSharding | None],
    stacks: Stacks,
) -> list[Any]:
    """The program, with each annotation that divides as a constraint (XLA drops the others)."""

    def interpret(eqn: JaxprEqn, values: list[Any]) -> Sequence[Any]:
        with on_behalf_of(eqn):
            if eqn.primitive is annotate_p:
                wanted = sharding_of(eqn.outvars[0])
                if wanted is None:
                    return values
                return [jax.lax.with_sharding_constraint(values[0], wanted)]
            if stacks.runs(eqn):
                return stacks.interpret(eqn, values, interpret)
            inside = eqn.params if loop_bodies(eqn) else {}
            return bind(eqn, values, **{k: rebuilt(v, interpret) for k, v in inside.items()})

    return evaluate(program, arrays, interpret)
