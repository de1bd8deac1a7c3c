"""Manual regions (section 3.2) for XLA's partitioner: `jax.shard_map` around each operator.

Between operators, a value of a manual region is a stack: an array with one more dim, the last one,
over all devices. It is split over them, so no data moves from one operator to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p
from jax.sharding import Mesh, PartitionSpec

from gshard.graph.evaluate import Interpret, bind, rebuilt
from gshard.graph.regions import loop_bodies
from gshard.graph.source import source_of
from gshard.rules.base.rule import REGIONS
from gshard.tensors.devices import Place
from gshard.tensors.manual import MAKES_MANUAL, to_auto_p, to_manual_p
from gshard.tensors.meshes import partition_spec
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
