"""XLA's partitioner on the same annotations, for comparison and as a fallback.

The annotations become sharding constraints; XLA does everything else. Its collectives are read
from the compiled program, so that both partitioners are measured alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gshard import _jax
from gshard.capture.flatten import inline
from gshard.capture.placement import DeviceOrder
from gshard.explanation.hlo import collectives_of_hlo
from gshard.graph.evaluate import Interpret, bind, evaluate, rebuilt
from gshard.graph.regions import loop_bodies
from gshard.graph.source import on_behalf_of, source_of
from gshard.moving.inventory import Collective, Overlaps
from gshard.propagation.propagate import propagate
from gshard.rules.base.rule import REGIONS
from gshard.runtime.ports import Port
from gshard.runtime.program import GlobalFunction, Program, XlaSettings
from gshard.tensors.annotate import annotate_p
from gshard.tensors.devices import Place
from gshard.tensors.manual import MAKES_MANUAL, to_auto_p, to_manual_p
from gshard.tensors.meshes import expressed, make_mesh, partition_spec
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile
from gshard.tensors.uneven import stack, unstack


@dataclass(frozen=True)
class Stacks:
    """The values of manual regions, on a mesh of all devices, and the variables that have them."""

    mesh: Mesh
    shardings: Mapping[Any, Sharding]

    def is_manual(self, atom: Any) -> bool:
        """Whether a variable is a value of a manual region."""
        return not isinstance(atom, Literal) and self.shardings[atom].manual

    def struct(self, var: Any) -> jax.ShapeDtypeStruct:
        """The type of a variable, or of its stack."""
        aval = var.aval
        shape = (*aval.shape, self.mesh.size) if self.is_manual(var) else aval.shape
        return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    def runs(self, eqn: JaxprEqn) -> bool:
        """Whether an equation belongs to a manual region or enters or leaves one."""
        borders = (to_manual_p, to_auto_p)
        return eqn.primitive in borders or any(map(self.is_manual, (*eqn.invars, *eqn.outvars)))

    def interpret(self, eqn: JaxprEqn, values: Sequence[Any], outside: Interpret) -> Sequence[Any]:
        """The results of such an equation; `outside` interprets bodies with such borders."""
        if eqn.primitive is to_manual_p:
            return [self._enter(eqn, values[0])]
        if eqn.primitive is to_auto_p:
            return [self._leave(eqn, values[0])]
        if any(_has_borders(body) for body in loop_bodies(eqn)):
            return self._across(eqn, values, outside)
        into = [self._spec(a) if self.is_manual(a) else PartitionSpec() for a in eqn.invars]

        def on_device(*arrays: Any) -> list[Any]:
            own = [
                x[..., 0] if self.is_manual(a) else x
                for x, a in zip(arrays, eqn.invars, strict=True)
            ]
            return [y[..., None] for y in _DeviceInterpreter(self._place()).interpret(eqn, own)]

        return self._mapped(on_device, into, [self._spec(v) for v in eqn.outvars])(*values)

    def _across(self, eqn: JaxprEqn, values: Sequence[Any], outside: Interpret) -> Sequence[Any]:
        """A loop that contains the border of a region, and carries values of another region."""
        if eqn.primitive is not p.scan_p:
            raise NotImplementedError(
                f"{source_of(eqn)}: {eqn.primitive.name} with values of a manual region as "
                "operands, and the border of one inside, is not supported by partitioner='xla'; "
                "leave the region with manual_to_auto_spmd_partition before it"
            )
        body = eqn.params["jaxpr"]
        operands = [
            self._everywhere(x) if self.is_manual(inner) and not self.is_manual(a) else x
            for x, a, inner in zip(values, eqn.invars, body.jaxpr.invars, strict=True)
        ]
        return bind(eqn, operands, jaxpr=rebuilt(body, outside, self.struct))

    def _everywhere(self, value: Any) -> Any:
        """A replicated value from outside the region, as a stack."""
        return jnp.broadcast_to(jnp.expand_dims(value, -1), (*jnp.shape(value), self.mesh.size))

    def _enter(self, eqn: JaxprEqn, value: Any) -> Any:
        (out,), count = eqn.outvars, self.mesh.size
        sharding = eqn.params["annotation"].sharding
        spec = self._named(sharding, value.shape)

        def entered(array: Any) -> Any:
            tile = Tile(array, sharding, value.shape)
            return _by_rule(self._place(), eqn, [tile])[0][..., None]

        if spec is not None:
            return self._mapped(entered, [spec], self._spec(out))(value)
        tiles = stack(value, sharding).reshape(count, *out.aval.shape)
        own = self._mapped(lambda x: entered(x[..., 0]), [self._spec(out)], self._spec(out))
        return own(jnp.moveaxis(tiles, 0, -1))

    def _leave(self, eqn: JaxprEqn, value: Any) -> Any:
        (atom,), shape, count = eqn.invars, tuple(eqn.params["shape"]), self.mesh.size
        sharding = eqn.params["annotation"].sharding
        spec = self._named(sharding, shape)

        def left(array: Any) -> Any:
            return _by_rule(self._place(), eqn, [_own(array[..., 0], count)])[0]

        into = [self._spec(atom)]
        if spec is not None:
            return self._mapped(left, into, spec)(value)
        tiles = self._mapped(lambda x: left(x)[..., None], into, self._spec(atom))(value)
        tiles = jnp.moveaxis(tiles, -1, 0)
        return unstack(tiles.reshape(-1, *tiles.shape[2:]), sharding, shape)

    def _named(self, sharding: Sharding, shape: Sequence[int]) -> PartitionSpec | None:
        return partition_spec(sharding, shape, self.mesh.devices.shape)

    def _spec(self, atom: Any) -> PartitionSpec:
        """How a stack is split: its last dim, over all devices."""
        return PartitionSpec(*[None] * len(atom.aval.shape), self.mesh.axis_names)

    def _place(self) -> Place:
        return Place(self.mesh.axis_names, self.mesh.size, planned=False)

    def _mapped(self, fn: Callable[..., Any], into: Sequence[Any], out_of: Any) -> Any:
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=tuple(into), out_specs=out_of, check_vma=False
        )


@dataclass(frozen=True)
class _DeviceInterpreter:
    """The interpreter of one device inside a manual region."""

    place: Place

    def interpret(self, eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation on this device's parts."""
        if eqn.primitive in MAKES_MANUAL:
            tiles = [_own(jnp.asarray(x), self.place.num_devices) for x in values]
            return _by_rule(self.place, eqn, tiles)
        inside = _DeviceInterpreter(self.place.inner()).interpret
        changed = {k: rebuilt(v, inside) for k, v in eqn.params.items()} if loop_bodies(eqn) else {}
        return bind(eqn, values, **changed)


def _by_rule(place: Place, eqn: JaxprEqn, tiles: list[Tile]) -> list[Any]:
    """The results of gshard's own rule on tiles that need no resharding."""
    rule = REGIONS[eqn.primitive].partition
    ctx: Any = SimpleNamespace(place=place, reshard=lambda tile, *_: tile)
    return [tile.array for tile in rule(ctx, eqn, tiles, [])]


def _own(array: Any, count: int) -> Tile:
    return Tile(array, Sharding((None,) * array.ndim, count, manual=True), array.shape)


def _has_borders(program: ClosedJaxpr) -> bool:
    return any(
        eqn.primitive in (to_manual_p, to_auto_p) or any(map(_has_borders, loop_bodies(eqn)))
        for eqn in program.jaxpr.eqns
    )


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
        hint = "leave devices out for all there are, or give some of jax.devices()"
        raise ValueError(f"partitioner='xla' needs real devices, not {order.devices}: {hint}")
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

    def collectives(self, overlaps: Overlaps) -> list[Collective]:
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
