"""A pipeline on devices: one program for all stages, in which the schedule is data.

Each stage is a block of devices. In every tick of a scan a stage runs the branch of a switch that
the table names; the permutes that hand results on are outside of these branches, and all devices
agree on which stages send. Inside, a layer's passes are partitioned for the devices of one stage:
collectives are between these, and all of them take the same branch.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.reason import Reason
from gshard.graph.ticks import Ticks
from gshard.moving import collectives
from gshard.pipelining.machine import Arrays, Machine, State, all_at, put
from gshard.pipelining.meaning import Pipe, pipeline_p
from gshard.pipelining.partition import Stages
from gshard.pipelining.passes import floats
from gshard.pipelining.routes import HEAD, LOCAL, Pairs, Routes, Row, route
from gshard.pipelining.schedules import B, F, W
from gshard.rules.base.rule import Context, Doc, region
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile


@dataclass(frozen=True, eq=False)
class Execution:
    """A pipeline on the devices of a program."""

    stages: Stages
    pipe: Pipe
    machine: Machine

    @functools.cached_property
    def routes(self) -> Routes:
        """What every stage does in every tick."""
        return route(self.pipe.schedule, self.pipe.layers)

    def run(self) -> Arrays:
        """What this device has of the results."""
        (messages, residuals, pending), count = self.routes.slots, self.pipe.schedule.microbatches
        start = self.machine.start((messages + 1, residuals, pending), count)
        end, _ = lax.scan(self.tick, start, self.rows())
        return self.machine.results(end, count)

    def tick(self, state: State, row: Row) -> tuple[State, None]:
        """One operation, then what it hands on, to neighbours or to itself.

        An operation is a loop of no or one run, which updates slots and sums in place: a
        conditional would copy what its branches return, in ticks of other operations as well.
        """
        machine, state = self.machine, state._replace(message=all_at(state.inbox, row.inbox))
        once = functools.partial(self._once, row)
        state = once(state, machine.forward, (F, HEAD), "saved")
        state = once(state, machine.scored, (HEAD,), "scores", "batch")
        if not machine.forward_only:
            state = once(state, machine.backward, (B,), "saved", "kept", "batch")
            state = once(state, machine.late_gradients, (W,), "kept", "closures", "weights")
        inbox = state.inbox
        for channel, slot in enumerate(row.receive):
            inbox = put(inbox, self.handed_on(state.message, channel, row.sends[channel]), slot)
        return state._replace(inbox=inbox), None

    def _once(
        self, row: Row, state: State, change: Callable[..., State], ops: Sequence[int], *names: str
    ) -> State:
        """`change(row, state)` of the message and of the fields `names`, in ticks of `ops`."""
        names = ("message", *names)

        def changed(values: Sequence[Any]) -> State:
            return state._replace(**dict(zip(names, values, strict=True)))

        def once(_: Any, values: Sequence[Any]) -> list[Any]:
            after = change(row, changed(values))
            return [getattr(after, name) for name in names]

        last, op = self.pipe.schedule.positions[-1][0], self.routes.rows.op
        own, slowest = int(np.isin(op[:, last], ops).sum()), int(np.isin(self.slowest, ops).sum())
        ticks = Ticks((len(op) - own, own), {1: len(op) - slowest, 2: slowest})
        runs = ((row.op == ops[0]) | (row.op == ops[-1])).astype(np.int32)
        with ticks.scope():
            return changed(lax.fori_loop(0, runs, once, [getattr(state, name) for name in names]))

    @functools.cached_property
    def slowest(self) -> np.ndarray:
        """The operation that all stages wait for, in every tick."""
        rows, seconds = self.routes.rows, np.array(self.pipe.seconds)
        seconds[HEAD] += seconds[F] * rows.layers[rows.op == HEAD].max(initial=0)
        spent = np.where(rows.op == HEAD, seconds[HEAD], rows.layers * seconds[rows.op])
        return np.take_along_axis(rows.op, spent.argmax(1)[:, None], 1)[:, 0]

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

    def rows(self) -> Row:
        """The table of this device's stage, a row for each tick."""
        leaves, tree = jax.tree.flatten(self.routes.rows)
        table = np.stack(leaves, -1).astype(np.int32).swapaxes(0, 1)  # stages, ticks, columns
        mine = self.stages.ctx.place.lookup(np.arange(self.stages.devices) // self.stages.per_stage)
        own = lax.dynamic_index_in_dim(jnp.asarray(table), mine, 0, keepdims=False)
        return jax.tree.unflatten(tree, [own[:, i] for i in range(len(leaves))])


@region(pipeline_p, doc=Doc(halo="from stage to stage: CollectivePermute"))
def _partition(ctx: Context, eqn: JaxprEqn, tiles: list[Tile], _: list[Sharding]) -> list[Tile]:
    """The passes of a layer partitioned for the devices of a stage, and run there."""
    pipe, bodies = eqn.params["pipe"], eqn.params["bodies"]
    stages, parts = Stages(ctx, pipe.schedule.stages, ctx.place.num_devices), pipe.operands(tiles)
    types = [[stages.type_of(t, lead=n in (2, 3, 4)) for t in part] for n, part in enumerate(parts)]
    own, closures, weights, inputs, targets, cotangents = types
    share, fixed = 1 / pipe.schedule.microbatches, [*closures, *weights]
    forward, backward, later, score = (body and stages.inside(body) for body in bodies)
    ahead = stages.piece(forward, [*fixed, *inputs])
    inputs = types[3] = ahead.agreed(inputs, len(fixed))
    ahead = stages.piece(forward, [*fixed, *inputs], inputs)
    behind = late = head = None
    gradients = floats(inputs) if backward else []
    if backward and later:
        residuals = ahead.results[len(inputs) :]
        behind = stages.piece(backward, [*fixed, *residuals, *gradients], gradients)
        sums = dict.fromkeys(range(len(floats(fixed))), share)
        late = stages.piece(later, [*fixed, *behind.results[len(gradients) :]], (), sums)
    if score:
        sums = dict.fromkeys(range(len(score.out_avals) - len(gradients)), share)
        wanted = [*[None] * len(sums), *gradients]
        head = stages.piece(score, [*own, *inputs, *targets, *cotangents], wanted, sums)
    leading = ((), (), (stages.split,), (None,), (None,), ())  # dims before those of a layer
    arrays = [
        [stages.placed(t, kind, *lead) for t, kind in zip(part, kinds, strict=True)]
        for part, kinds, lead in zip(parts, types, leading, strict=True)
    ]
    chunks = (pipe.schedule.chunks, max(pipe.layers))
    arrays[2] = [w.reshape(*chunks, *w.shape[1:]) for w in arrays[2]]
    passes = [piece.as_pass() if piece else None for piece in (ahead, behind, late, head)]
    found = iter(Execution(stages, pipe, Machine(passes, arrays, pipe.layers)).run())
    scores = head.results[: len(head.results) - len(gradients)] if head else ()
    sums_of, n = late.results if late else (), len(floats(closures))
    leaving, count = gradients if head else inputs, pipe.schedule.microbatches
    return [
        *(stages.summed(next(found), t) for t in (*scores, *sums_of[:n])),
        *(stages.by_stage(next(found), t) for t in sums_of[n:]),
        *(stages.summed(array, t, count) for array, t in zip(found, leaving, strict=True)),
    ]
