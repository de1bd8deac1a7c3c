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
from gshard.runtime.ports import Port
from gshard.runtime.program import GlobalFunction, Program, XlaSettings
from gshard.runtime.xla_manual import Stacks
from gshard.tensors.annotate import annotate_p
from gshard.tensors.meshes import expressed, make_mesh, partition_spec
from gshard.tensors.sharding import Sharding


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
    into = [
        Port(shardings[v], v.aval.shape, jax.P() if spec is None else spec, False)
        for v, spec in zip(arguments, passed, strict=True)
    ]
    structs = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=v.aval.weak_type)
        for v in arguments
    ]
    placed = [p.named(own) for p in into]
    laid_out = zip(flat.jaxpr.outvars, settings.out_layouts, strict=True)
    results = [None if layout is None else named(v) for v, layout in laid_out]
    step = settings.trace(constrained, traced.fun_name, structs, placed, results=results)
    return XlaProgram(step, own, into, flat, closed_over)


@dataclass(frozen=True, eq=False)
class XlaProgram(GlobalFunction):
    """A program that XLA partitions when it compiles it; what does not divide is replicated.

    XLA takes the values that the user's function closes over as constants.
    """

    traced: jax.stages.Traced
    mesh: Mesh
    into: Sequence[Port]
    flat: ClosedJaxpr  # the user's program
    closed_over: Sequence[Any]  # its first arguments
    conflicts = ()

    name = property(lambda self: self.traced.fun_name)

    @property
    def jaxpr(self) -> Jaxpr:
        """The annotated program, on logical shapes: XLA partitions it when it compiles."""
        return self.traced.jaxpr.jaxpr

    @functools.cached_property
    def _compiled(self) -> jax.stages.Compiled:
        return self.traced.lower().compile()

    def collectives(self, beside: Beside) -> list[Collective]:
        """The collectives of XLA's compiled program."""
        return list(collectives_of_hlo(self._compiled.as_text() or "", self.num_devices))

    def text(self) -> str:
        """The annotated program."""
        return self.traced.lower().as_text()

    def output_shardings(self) -> list[Any]:
        """What XLA chose for the results."""
        return jax.tree.leaves(self._compiled.output_shardings)

    def named_results(self) -> list[Any]:
        """JAX's shardings of the results."""
        return self.output_shardings()

    def compile(self, compiler_options: dict[str, Any] | None) -> jax.stages.Compiled:
        """The program, partitioned and compiled by XLA."""
        if compiler_options:
            return self.traced.lower().compile(compiler_options=compiler_options)
        return self._compiled

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
