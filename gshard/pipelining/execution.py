"""A pipeline on devices: one program for all stages, in which the schedule is data.

Stage s has the s-th block of devices. In every tick of a scan a stage runs what its row of the
table names; the permutes that hand results on are outside of that, and all devices agree on which
stages send. A layer's passes are planned for the devices of one stage: a value that every stage has
for itself has a sharding within the block, the same one in all, and collectives are inside of it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from gshard.capture.simplify import PASSES
from gshard.graph.history import History
from gshard.graph.reason import Reason
from gshard.graph.regions import map_bodies
from gshard.graph.source import source_of
from gshard.graph.ticks import Ticks
from gshard.moving import collectives
from gshard.pipelining.meaning import Arrays, Machine, Pass, Pipe, State, pipeline_p, put
from gshard.pipelining.passes import is_float, lifted
from gshard.pipelining.schedules import LOCAL, B, Pairs, Row, route
from gshard.planning.planner import Planner
from gshard.propagation.propagate import Propagated
from gshard.propagation.stage import Known, shard
from gshard.rules.base.rule import Context, Doc, region
from gshard.tensors.annotate import annotate_p
from gshard.tensors.devices import Place
from gshard.tensors.manual import MANUAL
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import Tile

_OPERAND = Reason("operand", "pipeline")


class Stages:
    """The devices of a program in blocks, one for each stage.

    `split` is that of a dim over the stages. A blank tile is how a stage's devices hold a value.
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

    def placed(self, tile: Tile, kind: Tile, *lead: Split | None) -> Any:
        """What a device has of an operand, as the stages need it."""
        return self.ctx.reshard(tile, self.outside(kind, *lead), _OPERAND).array

    def summed(self, array: Any, kind: Tile, *rows: int) -> Tile:
        """A value that is the sum of what the stages have; as many such values as `rows`."""
        sharding = self.outside(kind, *(None for _ in rows))
        more = (self.split,) if self.split else ()
        sharding = sharding.unreduced_over((*sharding.unreduced, *more))
        return Tile(array, sharding, (*rows, *kind.shape), kind.origin or "pipeline")

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

    def _planned(
        self, body: ClosedJaxpr, operands: Sequence[Tile]
    ) -> tuple[ClosedJaxpr, Propagated]:
        with jax.ensure_compile_time_eval():  # constants of passes are no part of the trace
            for change in PASSES if self.per_stage > 1 else ():
                body = change(body)
        given = [kind.sharding for kind in operands]
        known = Known(self.per_stage, self.ctx.memory_limit, given, {})
        return shard(body, known, True, History())

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
        self, body: ClosedJaxpr, operands: Sequence[Tile], wanted: Sequence[Tile | None] = (),
        sums: Mapping[int, float] | None = None,
    ) -> Pass:  # fmt: skip
        """A program planned for one stage, called with what a device has of its operands.

        Its first results are as `wanted`; `sums` are results that may be unreduced.
        """
        flat, found = self._planned(body, operands)
        first, rest = lifted(flat)
        made = list[Tile]()

        def planner() -> Planner:
            place = Place(self.ctx.place.axes, self.per_stage, blocks=self.count)  # of this trace
            return Planner(place, found, self.ctx.memory_limit)

        fixed = planner().run_body(first, [])

        def run(*arrays: Any) -> list[Any]:
            own = planner()
            ready = [
                own.reshard(kind.holding(a), found.shardings[v], _OPERAND)
                for a, kind, v in zip(arrays, operands, flat.jaxpr.invars, strict=True)
            ]
            made[:] = own.run_body(rest, [*ready, *fixed], sums or {})
            for number, kind in enumerate(wanted):
                if kind is not None:
                    reason = Reason("result", "pipeline")
                    made[number] = own.reshard(made[number], kind.sharding, reason)
            return [t.array for t in made]

        jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(k.array.shape, k.array.dtype) for k in operands))
        kinds = [t.without_elements() for t in made]
        return Pass(run, [kind.array for kind in kinds], kinds)


class Execution:
    """A pipeline on the devices of a program: `routes` are what every stage does in every tick."""

    def __init__(self, stages: Stages, pipe: Pipe, machine: Callable[..., Machine]):
        self.stages, self.pipe, self.machine = stages, pipe, machine(self.once, self.layers)
        self.routes = route(pipe.schedule, pipe.layers, pipe.seconds)

    def run(self) -> Arrays:
        """What this device has of the results.

        Slots are flat: XLA would give a buffer the layout that a product wants of what is in it,
        and copy all of it in every tick from the one into the other.
        """
        (messages, residuals, pending), count = self.routes.slots, self.pipe.schedule.microbatches
        machine, tree = self.machine, jax.tree.structure(self.routes.rows)

        def tick(state: State, columns: Any) -> tuple[State, None]:
            """One operation, then what it hands on, to neighbours or to itself."""
            row = jax.tree.unflatten(tree, list(columns))
            state = machine.forward(row, state)
            state = state if machine.passes[1] is None else machine.backward(row, state)
            inbox = state.inbox
            for channel, slot in enumerate(row.receive):
                inbox = put(inbox, self.handed_on(state.message, channel, row.sends[channel]), slot)
            return state._replace(inbox=inbox), None

        start = machine.start((messages + 1, residuals, pending), count, flat=True)
        end, _ = lax.scan(tick, start, self.rows())
        return machine.results(end, count)

    def once(
        self, ops: Sequence[int], row: Row, run: Callable[..., Any], carried: tuple[Arrays, ...],
        among: Sequence[int] = (),
    ) -> tuple[Arrays, ...]:  # fmt: skip
        """`run` in a tick that does one of `ops`; `among` are those of the `once` around it.

        A loop of no or one run updates what it carries in place: a conditional would copy what its
        branches return, in ticks of other operations as well.
        """
        on = functools.reduce(jnp.logical_or, (row.op == n for n in ops))
        with self._ticks(self._does(ops), self._does(among)).scope():
            return lax.fori_loop(0, on.astype(np.int32), lambda _, held: tuple(run(*held)), carried)

    def layers(
        self, ops: Sequence[int], row: Row, run: Callable[..., Any], carried: tuple[Arrays, ...]
    ) -> tuple[Arrays, ...]:
        """`run` for the layers of a tick: as many as in every such tick, and those of some.

        A GPU waits for the host before every run of a loop whose length is data.
        """
        does, counts = self._does(ops), self.routes.rows.layers
        least, most = int(counts[does].min()), int(counts[does].max())

        def one(number: Any, carried: Any) -> tuple[Arrays, ...]:
            last = row.layers - 1
            return tuple(run(row.base + (last - number if B in ops else number), *carried))

        carried = lax.fori_loop(0, least, one, carried)
        if least == most:
            return carried
        with self._ticks(does * (counts - least), does).scope():
            return lax.fori_loop(least, row.layers, one, carried)

    def _does(self, ops: Sequence[int]) -> np.ndarray:
        """The ticks and stages that do one of `ops`; all without any."""
        op = self.routes.rows.op
        return np.isin(op, ops) if ops else np.ones_like(op, bool)

    def _ticks(self, runs: np.ndarray, among: np.ndarray) -> Ticks:
        """How often a loop runs of the runs of the one around it.

        On the stage with the most, and on that which the others wait for.
        """
        busiest, slowest = runs.sum(0).argmax(), self.routes.spent.argmax(1)[:, None]
        (own, waited), (around, beside) = (
            (int(each[:, busiest].sum()), int(np.take_along_axis(each, slowest, 1).sum()))
            for each in (runs, among)
        )
        own, waited, total = own * beside, waited * around, around * beside
        if around == beside:
            own, waited, total = own // around, waited // around, around
        return Ticks((max(total - own, 0), own), {1: max(total - waited, 0), 2: waited}, total)

    def handed_on(self, sent: Arrays, channel: int, number: Any) -> Arrays:
        """What arrives on a channel from the stages that have something to send."""
        name, sets = list(self.routes.send.items())[channel]
        if name == LOCAL:
            return sent
        sends = self.routes.rows.sends[channel][:, 0].tolist()
        busiest = Counter(a for n in sends for a, _ in sets[n]).most_common(1)[0][0]
        counts = np.bincount(sends, minlength=len(sets)).tolist()
        own = [n * (busiest in dict(pairs)) for n, pairs in zip(counts, sets, strict=True)]
        size, place = self.stages.per_stage, self.stages.ctx.place
        reason = Reason("step", "pipeline", f"microbatches handed {name}")

        def permute(pairs: Pairs, arrays: Arrays) -> Arrays:
            devices = [(a * size + d, b * size + d) for a, b in pairs for d in range(size)]
            if not devices:
                return arrays
            return [collectives.collective_permute(place, x, devices, reason) for x in arrays]

        with Ticks(tuple(own), {1 << n: count for n, count in enumerate(counts)}).scope():
            return lax.switch(number, [functools.partial(permute, pairs) for pairs in sets], sent)

    def rows(self) -> jax.Array:
        """The table of this device's stage, a row for each tick."""
        table = (
            np.stack(jax.tree.leaves(self.routes.rows), -1).astype(np.int32).swapaxes(0, 1)
        )  # stages, ticks, columns
        mine = self.stages.ctx.place.lookup(np.arange(self.stages.devices) // self.stages.per_stage)
        return lax.dynamic_index_in_dim(jnp.asarray(table), mine, 0, keepdims=False)


@region(pipeline_p, doc=Doc(halo="from stage to stage: CollectivePermute"))
def _partition(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], _: list[Sharding]) -> list[Tile]:
    """The passes of a layer partitioned for the devices of a stage, and run there."""
    pipe, bodies = eqn.params["pipe"], eqn.params["bodies"]
    stages, parts = Stages(ctx, pipe.schedule.stages), pipe.operands(tiles)
    kinds = [[stages.kind_of(t, n in (2, 3, 4)) for t in part] for n, part in enumerate(parts)]
    own, closures, weights, inputs, targets, cotangents = kinds
    share, fixed = 1 / pipe.schedule.microbatches, [*closures, *weights]
    forward, backward, later, score = (body and stages.inside(body) for body in bodies)
    inputs = kinds[3] = stages.agreed(forward, [*fixed, *inputs], len(fixed))
    ahead = stages.piece(forward, [*fixed, *inputs], inputs)
    behind = late = head = None
    gradients = [k for k in inputs if is_float(k.array)] if backward else []
    count = sum(is_float(k.array) for k in closures)
    if backward and later:
        residuals = ahead.kinds[len(inputs) :]
        behind = stages.piece(backward, [*fixed, *residuals, *gradients], gradients)
        sums = dict.fromkeys(range(count + sum(is_float(k.array) for k in weights)), share)
        late = stages.piece(later, [*fixed, *behind.kinds[len(gradients) :]], (), sums)
    if score:
        sums = dict.fromkeys(range(len(score.out_avals) - len(gradients)), share)
        wanted = [*[None] * len(sums), *gradients]
        head = stages.piece(score, [*own, *inputs, *targets, *cotangents], wanted, sums)
    leading = ((), (), (stages.split,), (None,), (None,), ())  # dims before those of a layer
    arrays = [
        [stages.placed(t, kind, *lead) for t, kind in zip(part, kinds, strict=True)]
        for part, kinds, lead in zip(parts, kinds, leading, strict=True)
    ]
    chunks = (pipe.schedule.chunks, max(pipe.layers))
    arrays[2] = [w.reshape(*chunks, *w.shape[1:]) for w in arrays[2]]
    machine = functools.partial(Machine, (ahead, behind, late, head), arrays)
    found = iter(Execution(stages, pipe, machine).run())
    scores = head.kinds[: len(head.kinds) - len(gradients)] if head else ()
    sums_of, leaving = late.kinds if late else (), gradients if head else inputs
    rows = pipe.schedule.microbatches
    return [
        *(stages.summed(next(found), t) for t in (*scores, *sums_of[:count])),
        *(stages.by_stage(next(found), t) for t in sums_of[count:]),
        *(stages.summed(array, t, rows) for array, t in zip(found, leaving, strict=True)),
    ]
