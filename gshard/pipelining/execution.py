"""A pipeline on devices: one program for all stages, in which the schedule is data.

Each stage is a block of devices. In every tick of a scan a stage runs the branch of a switch that
the table names; the permutes that hand results on are outside of the branches. Inside, a layer's
passes are partitioned like any program, for the devices of one stage: collectives are between
these, and all of them take the same branch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.reason import Reason
from gshard.moving import collectives
from gshard.pipelining.meaning import Bodies, Pipe, pipeline_p
from gshard.pipelining.partition import Piece, Stages, Type
from gshard.pipelining.passes import floats, is_float
from gshard.pipelining.routes import HEAD, LOCAL, Routes, route
from gshard.pipelining.schedules import IDLE, B, F, W
from gshard.rules.base.rule import Context, Doc, Rule, register
from gshard.tensors import padding
from gshard.tensors.factors import no_factors
from gshard.tensors.keys import is_key_type
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

Arrays = list[Any]


class State(NamedTuple):
    """What a stage has between two ticks: buffers of slots, and sums."""

    inbox: Arrays
    saved: Arrays
    kept: Arrays
    closures: Arrays  # gradients, as the three after it; of closures of the block
    own: Arrays  # of those of the head
    weights: Arrays
    scores: Arrays
    batch: Arrays  # gradients of the inputs, or outputs, by microbatch


class Row(NamedTuple):
    """The entries of the table for a stage and a tick."""

    op: Any
    chunk: Any
    microbatch: Any
    first: Any
    inbox: Any
    saved: Any
    kept: Any
    layers: Any  # that the chunk has
    batch: Any  # the microbatch whose gradient or output leaves the pipeline, if one does
    receive: tuple[Any, ...]  # a slot for each channel


@dataclass(eq=False)
class Execution:
    """One pipeline of a program, on tiles."""

    ctx: Context
    stages: Stages
    pipe: Pipe
    operands: Sequence[list[Tile]]  # on the devices of all stages
    types: Sequence[list[Type]]  # of the same for the devices of one
    passes: Sequence[Piece | None]
    arrays: Sequence[Arrays] = field(default_factory=list)

    @property
    def forward_only(self) -> bool:
        """Whether there are no gradients."""
        return self.passes[1] is None

    @functools.cached_property
    def routes(self) -> Routes:
        """What every stage does."""
        return route(self.pipe.schedule)

    # ------------------------------------------------------------ the passes of a stage

    def through(self, chunk: Arrays, x: Arrays, count: Any) -> tuple[Arrays, Arrays]:
        """The layers of a chunk on an input: the output, and residuals of every layer."""
        ahead = self.passes[0]
        assert ahead

        def one(x: Arrays, layer: tuple[Arrays, Any]) -> tuple[Arrays, Arrays]:
            weights, number = layer

            def run(x: Arrays) -> tuple[Arrays, Arrays]:
                return self._split(ahead(*self.arrays[0], *weights, *x), len(x))

            return self._if_layer(number < count, run, x)

        return lax.scan(one, x, (chunk, np.arange(self.pipe.most)))

    def back(self, chunk: Arrays, saved: Arrays, g: Arrays, count: Any) -> tuple[Arrays, Arrays]:
        """The gradient of a chunk's input, and what the weights' gradients need of every layer."""
        behind = self.passes[1]
        assert behind

        def one(g: Arrays, layer: tuple[Arrays, Arrays, Any]) -> tuple[Arrays, Arrays]:
            weights, residuals, number = layer

            def run(g: Arrays) -> tuple[Arrays, Arrays]:
                return self._split(behind(*self.arrays[0], *weights, *residuals, *g), len(g))

            return self._if_layer(number < count, run, g)

        return lax.scan(one, g, (chunk, saved, np.arange(self.pipe.most)), reverse=True)

    def late(self, sums: Arrays, chunk: Arrays, kept: Arrays, count: Any) -> tuple[Arrays, Arrays]:
        """Gradients of the closures, added to `sums`, and of every layer of a chunk."""
        last = self.passes[2]
        assert last

        def one(sums: Arrays, layer: tuple[Arrays, Arrays, Any]) -> tuple[Arrays, Arrays]:
            weights, needed, number = layer

            def run(sums: Arrays) -> tuple[Arrays, Arrays]:
                found, own = self._split(last(*self.arrays[0], *weights, *needed), len(sums))
                return [a + b for a, b in zip(sums, found, strict=True)], own

            return self._if_layer(number < count, run, sums)

        return lax.scan(one, sums, (chunk, kept, np.arange(self.pipe.most)))

    @staticmethod
    def _split(results: Arrays, first: int) -> tuple[Arrays, Arrays]:
        return results[:first], results[first:]

    def _if_layer(
        self, is_one: Any, run: Callable[[Arrays], tuple[Arrays, Arrays]], carried: Arrays
    ) -> tuple[Arrays, Arrays]:
        """`run`, unless the row is padding: stages may have different numbers of layers."""
        if len(set(self.pipe.layers)) == 1:
            return run(carried)
        shapes = jax.eval_shape(run, carried)[1]
        nothing = [_zeros(s.shape, s.dtype) for s in shapes]
        return lax.cond(is_one, run, lambda carried: (carried, nothing), carried)

    # ------------------------------------------------------------ the branches of a tick

    def idle(self, row: Row, state: State) -> tuple[Arrays, State]:
        """Nothing."""
        return self.message(()), state

    def forward(self, row: Row, state: State) -> tuple[Arrays, State]:
        """F: the output is handed on, residuals are kept."""
        chunk, x = self.chunk(row), self.input(row, state)
        y, residuals = self.through(chunk, x, row.layers)
        saved = [] if self.forward_only else _put(state.saved, residuals, row.saved)
        return y, state._replace(saved=saved)

    def last_forward(self, row: Row, state: State) -> tuple[Arrays, State]:
        """F at the last position, and the head: the gradient is handed on to B of this stage."""
        y, state = self.forward(row, state)
        head = self.passes[3]
        if head is None:
            return self.message(()), state._replace(batch=_put(state.batch, y, row.microbatch))
        targets = [_row(t, row.microbatch) for t in self.arrays[4]]
        results = head(*self.arrays[1], *y, *targets, *self.arrays[5])
        scores, rest = results[: len(state.scores)], results[len(state.scores) :]
        own, gradient = self._split(rest, len(state.own))
        state = state._replace(
            scores=[a + b for a, b in zip(state.scores, scores, strict=True)],
            own=[a + b for a, b in zip(state.own, own, strict=True)],
        )
        return self.message(gradient), state

    def backward(self, row: Row, state: State) -> tuple[Arrays, State]:
        """B: the gradient of the input is handed on."""
        types = self.types[3]
        received = [b for b, t in zip(state.inbox, types, strict=True) if is_float(t)]
        gradient = [_row(b, row.inbox) for b in received]
        saved = [_row(b, row.saved) for b in state.saved]
        gradient, kept = self.back(self.chunk(row), saved, gradient, row.layers)
        return self.message(gradient), state._replace(kept=_put(state.kept, kept, row.kept))

    def late_gradients(self, row: Row, state: State) -> tuple[Arrays, State]:
        """W: gradients are added to the sums."""
        kept = [_row(b, row.kept) for b in state.kept]
        closures, found = self.late(state.closures, self.chunk(row), kept, row.layers)
        sums = [
            lax.dynamic_update_index_in_dim(b, _row(b, row.chunk) + g, row.chunk, 0)
            for b, g in zip(state.weights, found, strict=True)
        ]
        return self.message(()), state._replace(closures=closures, weights=sums)

    def chunk(self, row: Row) -> Arrays:
        """The weights of the chunk that works."""
        return [_row(w, row.chunk) for w in self.arrays[2]]

    def input(self, row: Row, state: State) -> Arrays:
        """What a forward pass works on: a microbatch of the batch, or what was received."""
        pairs = zip(self.arrays[3], state.inbox, strict=True)
        return [
            jnp.where(row.first == 1, _row(x, row.microbatch), _row(b, row.inbox)) for x, b in pairs
        ]

    def message(self, gradient: Sequence[Any]) -> Arrays:
        """A gradient, or nothing, as something to hand on: of the type of an input."""
        left = iter(gradient)
        return [
            next(left) if is_float(t) and gradient else _unused(t.local, t.dtype)
            for t in self.types[3]
        ]

    # ------------------------------------------------------------ the scan over ticks

    def tick(self, state: State, row: Row) -> tuple[State, None]:
        """One branch, then what it hands on, to neighbours or to itself."""
        branches = [self.idle, self.forward, self.last_forward]
        if not self.forward_only:
            branches += [self.backward, self.late_gradients]
        sent, state = lax.switch(row.op, branches, row, state)
        inbox = state.inbox
        for channel, slot in zip(self.routes.send, row.receive, strict=True):
            arrived = self.handed_on(sent, channel)
            inbox = _put(inbox, arrived, slot)
        batch = state.batch
        if not self.forward_only:
            own = [a for a, t in zip(sent, self.types[3], strict=True) if is_float(t)]
            batch = _put(batch, own, row.batch)
        return state._replace(inbox=inbox, batch=batch), None

    def handed_on(self, sent: Arrays, channel: str) -> Arrays:
        """What arrives on a channel: an open chain of stages, each device to its like."""
        if channel == LOCAL:
            return sent
        size = self.stages.per_stage
        pairs = [
            (a * size + d, b * size + d) for a, b in self.routes.send[channel] for d in range(size)
        ]
        reason = Reason("step", "pipeline", f"microbatches handed {channel}")
        return [collectives.collective_permute(self.ctx.place, x, pairs, reason) for x in sent]

    def rows(self) -> Row:
        """The table of this device's stage, a row for each tick."""
        routes, pipe = self.routes, self.pipe
        number = np.array([0, 1, 3, 4, 2])  # of the branch of an operation
        assert (IDLE, F, B, W, HEAD) == (0, 1, 2, 3, 4)
        count = np.zeros((pipe.schedule.stages, pipe.schedule.chunks), int)
        for place, layers in zip(pipe.schedule.positions, pipe.layers, strict=True):
            count[place] = layers
        stage = np.arange(pipe.schedule.stages)[None]
        leaves = (routes.op == B) & (stage == pipe.schedule.positions[0][0]) & (routes.chunk == 0)
        columns = [
            number[routes.op], routes.chunk, routes.microbatch, routes.first, routes.inbox,
            routes.saved, routes.kept, count[stage, routes.chunk],
            np.where(leaves, routes.microbatch, pipe.schedule.microbatches),
            *(routes.receive[c] for c in routes.send),
        ]  # fmt: skip
        table = np.stack(columns, -1).astype(np.int32).swapaxes(0, 1)  # stages, ticks, columns
        mine = self.ctx.place.lookup(np.arange(self.stages.devices) // self.stages.per_stage)
        own = lax.dynamic_index_in_dim(jnp.asarray(table), mine, 0, keepdims=False)
        found = [own[:, i] for i in range(len(columns))]
        return Row._make([*found[:9], tuple(found[9:])])

    def start(self) -> State:
        """Empty slots, and sums of nothing."""
        routes, pipe, inputs = self.routes, self.pipe, self.types[3]
        messages, residuals, pending = routes.slots
        most, microbatches = pipe.most, pipe.schedule.microbatches

        def sums(types: Sequence[Type], *count: int) -> Arrays:
            return [_zeros((*count, *t.local), t.dtype) for t in types]

        def slots(types: Sequence[Type], *count: int) -> Arrays:
            return [_unused((*count, *t.local), t.dtype) for t in types]

        inbox = slots(inputs, messages + 1)
        if self.forward_only:
            head = self.passes[3]
            scores = sums(head.results) if head else []
            outputs = [] if head else sums(inputs, microbatches)
            return State(inbox, [], [], [], [], [], scores, outputs)
        ahead, behind, last, head = self.passes
        assert ahead
        assert behind
        assert last
        assert head
        n_closures, n_inputs = len(floats(self.types[0])), len(inputs)
        n_scores = len(head.results) - len(floats(self.types[1])) - len(floats(inputs))
        n_own = len(floats(self.types[1]))
        return State(
            inbox,
            slots(ahead.results[n_inputs:], residuals, most),
            slots(behind.results[len(floats(inputs)) :], pending, most),
            sums(last.results[:n_closures]),
            sums(head.results[n_scores : n_scores + n_own]),
            sums(last.results[n_closures:], pipe.schedule.chunks, most),
            sums(head.results[:n_scores]),
            sums(floats(inputs), microbatches + 1),
        )

    def run(self) -> list[Tile]:
        """The results of the pipeline."""
        pipe, stages = self.pipe, self.stages
        tiles = [t for part in self.operands for t in part]
        arrays = pipe.operands([t.array for t in tiles])
        chunks = (pipe.schedule.chunks, pipe.most)
        arrays[2] = [w.reshape(*chunks, *w.shape[1:]) for w in arrays[2]]
        self.arrays = arrays
        end, _ = lax.scan(self.tick, self.start(), self.rows())
        last, head = self.passes[2:]
        microbatches, inputs = pipe.schedule.microbatches, self.types[3]
        if self.forward_only:
            if head:
                return [stages.summed(a, t) for a, t in zip(end.scores, head.results, strict=True)]
            return [
                stages.stacked(a, t, microbatches) for a, t in zip(end.batch, inputs, strict=True)
            ]
        assert last
        assert head
        n_scores, n_closures = len(end.scores), len(end.closures)
        rows = [w.reshape(-1, *w.shape[2:]) for w in end.weights]
        return [
            *map(stages.summed, end.scores, head.results),
            *map(stages.summed, end.closures, last.results),
            *map(stages.summed, end.own, head.results[n_scores:]),
            *map(stages.by_stage, rows, last.results[n_closures:]),
            *(
                stages.stacked(a[:microbatches], t, microbatches)
                for a, t in zip(end.batch, floats(inputs), strict=True)
            ),
        ]


def _zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    return lax.full(tuple(shape), 0, dtype)


def _unused(shape: Sequence[int], dtype: Any) -> jax.Array:
    """What nothing reads before it is written."""
    return _zeros(shape, dtype) if is_key_type(dtype) else padding.filled(tuple(shape), dtype)


def _row(buffer: Any, number: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(buffer, number, 0, keepdims=False)


def _put(buffers: Arrays, values: Sequence[Any], slot: Any) -> Arrays:
    """The buffers with values in a slot of each."""
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_index_in_dim(b, v, slot, 0) for b, v in pairs]


def _partition(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    pipe: Pipe = eqn.params["pipe"]
    stages = Stages(ctx, pipe.schedule.stages)
    return planned(ctx, stages, pipe, eqn.params["bodies"], tiles).run()


def planned(
    ctx: Context, stages: Stages, pipe: Pipe, bodies: Bodies, tiles: Sequence[Tile]
) -> Execution:
    """The passes of a layer partitioned for the devices of a stage, and the operands for them."""
    parts = pipe.operands(tiles)
    types = [[stages.type_of(t, lead=i in (2, 3, 4)) for t in part] for i, part in enumerate(parts)]
    closures, own, weights, inputs, targets, cotangents = types
    share = 1 / pipe.schedule.microbatches
    body = [b and stages.inside(b) for b in bodies]
    assert body[0]
    ahead = stages.piece(body[0], [*closures, *weights, *inputs])
    inputs = types[3] = ahead.agreed(inputs, len(closures) + len(weights))
    ahead = stages.piece(body[0], [*closures, *weights, *inputs], inputs)
    behind = last = head = None
    if body[1] and body[2]:
        n_inputs, n_fixed = len(inputs), len(floats([*closures, *weights]))
        residuals, gradients = ahead.results[n_inputs:], floats(inputs)
        behind = stages.piece(body[1], [*closures, *weights, *residuals, *gradients], gradients)
        kept = behind.results[len(gradients) :]
        late = dict.fromkeys(range(n_fixed), share)
        last = stages.piece(body[2], [*closures, *weights, *kept], (), late)
    if body[3]:
        given = [*own, *inputs, *targets, *cotangents]
        results = body[3].out_avals
        gradients = floats(inputs) if behind else []
        sums = dict.fromkeys(range(len(results) - len(gradients)), share)
        wanted = [*[None] * len(sums), *gradients]
        head = stages.piece(body[3], given, wanted, sums)
    operands = [
        [
            stages.placed(t, kind, i == 2, None if i in (2, 3, 4) else 0)
            for t, kind in zip(part, types[i], strict=True)
        ]
        for i, part in enumerate(parts)
    ]
    return Execution(ctx, stages, pipe, operands, types, (ahead, behind, last, head))


register(
    Rule(no_factors, partition=_partition, doc=Doc(halo="from stage to stage: CollectivePermute")),
    pipeline_p,
)
