"""A pipeline on devices: one program for all stages, in which the schedule is data.

Stage s has the s-th block of devices. A layer's passes are planned for the devices of one stage: a
value that every stage has for itself has a sharding within the block, the same one in all, and
collectives are inside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, jaxpr_as_fun

from gshard.capture.simplify import PASSES
from gshard.graph.history import History
from gshard.graph.reason import Reason
from gshard.graph.regions import map_bodies
from gshard.graph.source import source_of
from gshard.moving.partial import combine_disjoint
from gshard.pipelining.machine import Machine, Pass
from gshard.pipelining.meaning import pipeline_p
from gshard.pipelining.passes import is_float, lifted
from gshard.planning.planner import Planner
from gshard.propagation.propagate import Propagated
from gshard.propagation.stage import Known, shard
from gshard.rules.base.rule import Context, Doc, region
from gshard.tensors.annotate import annotate_p
from gshard.tensors.devices import Place
from gshard.tensors.manual import MANUAL
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile

_OPERAND, _RESULT = Reason("operand", "pipeline"), Reason("result", "pipeline")


class Stages:
    """The devices of a program in blocks, one for each stage; `split` is that of a dim over these.

    A blank tile is how a stage's devices hold a value.
    """

    def __init__(self, ctx: Context, count: int):
        self.ctx, self.count, self.devices = ctx, count, ctx.place.num_devices
        self.per_stage = self.devices // count
        self.split = Split.of(np.arange(self.devices) // self.per_stage)

    def within(self, split: Split | None) -> Split | None:
        """A split as the devices of a stage see it; None unless it is the same in every stage."""
        if split is None or split.idle:
            return None
        blocks = split.coords.reshape(self.count, self.per_stage)
        alike = (blocks == blocks[:1]).all() and len(np.unique(blocks[0])) == split.tiles
        return Split.of(blocks[0]) if alike else None

    def kind_of(self, tile: Tile, lead: bool) -> Tile:
        """A tile as a value of a stage, without its leading dim if it has one row after another."""
        sharding = Sharding(tuple(map(self.within, tile.sharding.splits[lead:])), self.per_stage)
        return Tile.blank(sharding, tile.shape[lead:], tile.array.dtype)

    def outside(self, kind: Tile, *lead: Split | None) -> Sharding:
        """The sharding on all devices of a value that every stage has for itself."""
        old = kind.sharding
        splits, unreduced = (
            [s and Split.of(np.tile(s.coords, self.count)) for s in part]
            for part in (old.splits, old.unreduced)
        )
        return Sharding((*lead, *splits), self.devices, False, tuple(s for s in unreduced if s))

    def summed(self, array: Any, kind: Tile, *rows: int) -> Tile:
        """A value that is the sum of what the stages have; as many such values as `rows`."""
        sharding = self.outside(kind, *(None for _ in rows))
        more = (self.split,) if self.split else ()
        sharding = sharding.unreduced_over((*sharding.unreduced, *more))
        tile = Tile(array, sharding, (*rows, *kind.shape), kind.origin or "pipeline")
        if jnp.issubdtype(array.dtype, np.number):
            return tile
        return combine_disjoint(self.ctx.place, tile, sharding.reduced)  # keys and truth values

    def by_stage(self, array: Any, kind: Tile) -> Tile:
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

    def _planned(self, body: ClosedJaxpr, kinds: Sequence[Tile]) -> tuple[ClosedJaxpr, Propagated]:
        with jax.ensure_compile_time_eval():  # constants of passes are no part of the trace
            for change in PASSES if self.per_stage > 1 else ():
                body = change(body)
        known = Known(self.per_stage, self.ctx.memory_limit, [k.sharding for k in kinds], {})
        return shard(body, known, None, History())

    def agreed(self, body: ClosedJaxpr, operands: Sequence[Tile], first: int) -> list[Tile]:
        """The inputs of a layer, operands from `first`, as its output can be held, too."""
        flat, found = self._planned(body, operands)
        kinds, variables = [], (flat.jaxpr.invars[first:], flat.jaxpr.outvars)
        for kind, var, out in zip(operands[first:], *variables, strict=False):
            sharding = found.shardings[var]
            if not any(sharding.splits) and not isinstance(out, Literal):
                sharding = found.shardings[out]
            kinds.append(Tile.blank(sharding, kind.shape, kind.array.dtype))
        return kinds

    def piece(
        self, body: ClosedJaxpr, operands: Sequence[Tile], wanted: Sequence[Tile] = (),
        share: float = 0, masks: bool = False,
    ) -> Pass:  # fmt: skip
        """A program planned for one stage, called with what a device has of its operands.

        Its first results are as `wanted`, or its last ones after sums of a `share` of the batch
        each, which may be unreduced.
        """
        flat, found = self._planned(body, operands)
        first, made = len(flat.jaxpr.outvars) - len(wanted) if share else 0, list[Tile]()

        def run(*arrays: Any) -> list[Any]:
            place = Place(self.ctx.place.axes, self.per_stage, blocks=self.count)  # of this trace
            planner = Planner(place, found, self.ctx.memory_limit)
            ready = [
                planner.reshard(kind.holding(a), found.shardings[v], _OPERAND)
                for a, kind, v in zip(arrays, operands, flat.jaxpr.invars, strict=True)
            ]
            made[:] = planner.run_body(flat, ready, dict.fromkeys(range(first), share))
            for number, kind in enumerate(wanted, first):
                made[number] = planner.reshard(made[number], kind.sharding, _RESULT)
            return [t.array for t in made]

        types = [jax.ShapeDtypeStruct(k.array.shape, k.array.dtype) for k in operands]
        once, rest = lifted(jax.make_jaxpr(run)(*types), masks)
        again = functools.partial(jaxpr_as_fun(rest), *jaxpr_as_fun(once)())

        def shaped(*arrays: Any) -> list[Any]:
            return again(*(a.reshape(t.shape) for a, t in zip(arrays, types, strict=True)))

        return Pass(shaped, [t.without_elements() for t in made])


@region(pipeline_p, doc=Doc(halo="from stage to stage: CollectivePermute"))
def _partition(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], _: list[Sharding]) -> list[Tile]:
    """The passes of a layer partitioned for the devices of a stage, and run there."""
    pipe, bodies = eqn.params["pipe"], eqn.params["passes"]
    stages, parts = Stages(ctx, pipe.schedule.stages), pipe.operands(tiles)
    kinds = [[stages.kind_of(t, n in (2, 3, 4)) for t in part] for n, part in enumerate(parts)]
    own, closures, weights, inputs, targets, cotangents = kinds
    share, fixed = 1 / pipe.schedule.microbatches, [*closures, *weights]
    forward, backward, later, score = (body and stages.inside(body) for body in bodies)
    inputs = kinds[3] = stages.agreed(forward, [*fixed, *inputs], len(fixed))
    ahead = stages.piece(forward, [*fixed, *inputs], inputs, masks=True)
    behind = late = head = None
    gradients = [k for k in inputs if is_float(k.array)] if backward else []
    count = sum(is_float(k.array) for k in closures)
    if backward and later:
        residuals = ahead.kinds[len(inputs) :]
        behind = stages.piece(backward, [*fixed, *residuals, *gradients], gradients)
        late = stages.piece(later, [*fixed, *behind.kinds[len(gradients) :]], share=share)
    if score:
        head = stages.piece(score, [*own, *inputs, *targets, *cotangents], gradients, share)
    leading = ((), (), (stages.split,), (None,), (None,), ())  # dims before those of a layer
    arrays = [
        [
            ctx.reshard(t, stages.outside(k, *lead), _OPERAND).array
            for t, k in zip(*both, strict=True)
        ]
        for *both, lead in zip(parts, kinds, leading, strict=True)
    ]
    found = iter(Machine(pipe, (ahead, behind, late, head), arrays, ctx.place).run())
    scores = head.kinds[: len(head.kinds) - len(gradients)] if head else ()
    sums_of, leaving = late.kinds if late else (), gradients if head else inputs
    rows = pipe.schedule.microbatches
    return [
        *(stages.summed(next(found), t) for t in (*scores, *sums_of[:count])),
        *(stages.by_stage(next(found), t) for t in sums_of[count:]),
        *(stages.summed(array, t, rows) for array, t in zip(found, leaving, strict=True)),
    ]
