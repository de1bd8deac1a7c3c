"""Programs on the devices of one stage: their shardings there, and on the devices of all stages.

Stage s has the s-th block of devices. A value that every stage has for itself has a sharding within
the block, the same one in all. Planning for one block keeps communication inside of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from gshard.capture.simplify import PASSES
from gshard.graph.history import History
from gshard.graph.reason import Reason
from gshard.graph.regions import map_bodies
from gshard.graph.source import source_of
from gshard.pipelining.machine import Pass
from gshard.planning.planner import Planner
from gshard.propagation.propagate import Propagated
from gshard.propagation.stage import Known, shard
from gshard.rules.base.rule import Context
from gshard.tensors.annotate import annotate_p
from gshard.tensors.devices import Place
from gshard.tensors.manual import MANUAL
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile


@dataclass(frozen=True)
class Type:
    """A value of a stage: how its devices hold it."""

    sharding: Sharding
    shape: tuple[int, ...]
    dtype: Any
    origin: str = ""

    @property
    def local(self) -> tuple[int, ...]:
        """The shape on a device."""
        return self.sharding.local_shape(self.shape)


@dataclass(frozen=True, eq=False)
class Piece:
    """A program that is planned for one stage, called with what a device has of its operands."""

    stages: Stages
    flat: ClosedJaxpr
    found: Propagated
    operands: Sequence[Type]
    wanted: Sequence[Type | None]
    sums: Mapping[int, float]  # results that may be unreduced
    results: Sequence[Type]

    def as_pass(self) -> Pass:
        """As a function of what a device has."""
        types = [jax.ShapeDtypeStruct(t.local, t.dtype) for t in self.results]
        return Pass(lambda *arrays: [t.array for t in self.run(arrays)], types)

    def run(self, arrays: Sequence[Any]) -> list[Tile]:
        """The results, the first ones under the shardings that are wanted."""
        planner = self.stages.planner(self.found)
        reason = Reason("operand", "pipeline")
        ready = [
            planner.reshard(Tile(a, t.sharding, t.shape, t.origin), self.found.shardings[v], reason)
            for a, t, v in zip(arrays, self.operands, self.flat.jaxpr.invars, strict=True)
        ]
        results = planner.run_body(self.flat, ready, self.sums)
        for number, kind in enumerate(self.wanted):
            if kind is not None:
                reason = Reason("result", "pipeline")
                results[number] = planner.reshard(results[number], kind.sharding, reason)
        return results

    def agreed(self, inputs: Sequence[Type], first: int) -> list[Type]:
        """The shardings of a layer's input that its output can have, too: operands from `first`."""
        found = []
        variables = self.flat.jaxpr.invars[first:], self.flat.jaxpr.outvars
        for kind, var, out in zip(inputs, *variables, strict=False):
            sharding = self.found.shardings[var]
            if not any(sharding.splits) and not isinstance(out, Literal):
                sharding = self.found.shardings[out]
            found.append(replace(kind, sharding=sharding))
        return found


@dataclass(frozen=True, eq=False)
class Stages:
    """The devices of a program in blocks, one for each stage."""

    ctx: Context
    count: int
    devices: int  # all of them

    @property
    def per_stage(self) -> int:
        """The devices of a stage."""
        return self.devices // self.count

    @property
    def split(self) -> Split | None:
        """A dim over the stages."""
        return Split.of(np.arange(self.devices) // self.per_stage)

    def planner(self, found: Propagated) -> Planner:
        """A planner for the devices of one stage."""
        place = Place(self.ctx.place.axes, self.per_stage, blocks=self.count)
        return Planner(place, found, self.ctx.memory_limit)

    def within(self, split: Split | None) -> Split | None:
        """A split as the devices of a stage see it; None unless it is the same in every stage."""
        if split is None or split.idle:
            return None
        blocks = split.coords.reshape(self.count, self.per_stage)
        alike = (blocks == blocks[:1]).all() and len(np.unique(blocks[0])) == split.tiles
        return Split.of(blocks[0]) if alike else None

    def everywhere(self, split: Split | None) -> Split | None:
        """A split of a stage's devices, the same in every stage."""
        return split and Split.of(np.tile(split.coords, self.count))

    def type_of(self, tile: Tile, lead: bool) -> Type:
        """A tile as a value of a stage, without its leading dim if it has one row after another."""
        splits = tuple(map(self.within, tile.sharding.splits[lead:]))
        return Type(Sharding(splits, self.per_stage), tile.shape[lead:], tile.array.dtype)

    def outside(self, kind: Type, *lead: Split | None) -> Sharding:
        """The sharding on all devices of a value that every stage has for itself."""
        splits = (*lead, *map(self.everywhere, kind.sharding.splits))
        unreduced = tuple(s for s in map(self.everywhere, kind.sharding.unreduced) if s)
        return Sharding(splits, self.devices, False, unreduced)

    def placed(self, tile: Tile, kind: Type, *lead: Split | None) -> Any:
        """What a device has of an operand, as the stages need it."""
        reason = Reason("operand", "pipeline")
        return self.ctx.reshard(tile, self.outside(kind, *lead), reason).array

    def summed(self, array: Any, kind: Type, *rows: int) -> Tile:
        """A value that is the sum of what the stages have; as many such values as `rows`."""
        sharding = self.outside(kind, *(None for _ in rows))
        more = (self.split,) if self.split else ()
        sharding = sharding.unreduced_over((*sharding.unreduced, *more))
        return Tile(array, sharding, (*rows, *kind.shape), kind.origin or "pipeline")

    def by_stage(self, array: Any, kind: Type) -> Tile:
        """Rows of which every stage has its own."""
        shape = (array.shape[0] * self.count, *kind.shape)
        return Tile(array, self.outside(kind, self.split), shape, kind.origin)

    def inside(self, body: ClosedJaxpr) -> ClosedJaxpr:
        """A program with its annotations for the devices of one stage."""
        return body.replace(jaxpr=body.jaxpr.replace(eqns=list(map(self._inside, body.jaxpr.eqns))))

    def _inside(self, eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive in MANUAL:
            raise NotImplementedError(
                f"{source_of(eqn)}: a manual region inside of gshard.pipeline: its layers are "
                "partitioned for the devices of a stage; annotate tensors there instead"
            )
        if eqn.primitive is not annotate_p:
            return map_bodies(eqn, self.inside)
        annotation = eqn.params["annotation"]
        old = annotation.sharding
        splits = tuple(map(self.within, old.splits))
        lost = [d for d, (a, b) in enumerate(zip(old.splits, splits, strict=True)) if a and not b]
        if lost:
            raise ValueError(
                f"{source_of(eqn)}: {annotation} inside of gshard.pipeline splits dim {lost[0]} "
                f"over devices of several stages; a stage has {self.per_stage} of the "
                f"{self.devices} devices, in order: at most {self.per_stage} partitions"
            )
        new = replace(annotation, sharding=Sharding(splits, self.per_stage))
        return eqn.replace(params={**eqn.params, "annotation": new})

    def piece(
        self,
        body: ClosedJaxpr,
        operands: Sequence[Type],
        wanted: Sequence[Type | None] = (),
        sums: Mapping[int, float] | None = None,
    ) -> Piece:
        """A program planned for one stage, given how its operands are held."""
        with jax.ensure_compile_time_eval():  # constants of passes are no part of the trace
            for change in PASSES if self.per_stage > 1 else ():
                body = change(body)
        limit, given = self.ctx.memory_limit, [kind.sharding for kind in operands]
        known = Known(self.per_stage, limit, given, {})
        flat, found = shard(body, known, True, History())
        piece = Piece(self, flat, found, operands, wanted, sums or {}, ())
        made: list[Tile] = []

        def trial(*arrays: Any) -> list[Any]:
            made[:] = piece.run(arrays)
            return [t.array for t in made]

        jax.make_jaxpr(trial)(*(jax.ShapeDtypeStruct(k.local, k.dtype) for k in operands))
        types = [Type(t.sharding, t.shape, t.array.dtype, t.origin) for t in made]
        return replace(piece, results=types)
