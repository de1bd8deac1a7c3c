"""What a device does in every tick: the operation that its row of the table names, then messages.

A machine has slots for what waits, and sums. They are rows of buffers that a scan over the ticks
carries, and loops update in place; the permutes that hand results on are outside of these loops,
and all devices agree on which stages send.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard.graph.reason import Reason
from gshard.graph.source import Ticks
from gshard.moving import collectives
from gshard.pipelining.meaning import Arrays, Pipe, added, cut
from gshard.pipelining.passes import floats, is_float
from gshard.pipelining.schedules import HEAD, LOCAL, B, F, Pairs, Routes, Row, W
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.keys import is_key_type

Carried = tuple[Arrays, ...]
_FIRST = {"allow_negative_indices": False}  # no kernels that add to an index


class State(NamedTuple):
    """What a stage has between two ticks."""

    message: Arrays  # that is handed on: an input of the next layers, or its gradient
    inbox: Arrays  # slots: received, residuals, what weight gradients need
    saved: Arrays
    kept: Arrays
    scores: Arrays  # sums: scores and gradients of the head's closures; of closures, of weights
    closures: Arrays
    weights: Arrays
    batch: Arrays  # gradients of the inputs, or outputs, by microbatch


class Pass(NamedTuple):
    """A pass of a layer, or the head, on what a device has; `kinds` are blank tiles of results."""

    run: Callable[..., Arrays]
    kinds: Sequence[Any]

    @property
    def results(self) -> list[Any]:
        """The types of what a device has of the results."""
        return [kind.array for kind in self.kinds]


@dataclass(frozen=True, eq=False)
class Machine:
    """A stage of `pipe` on its devices.

    `passes` are those of `passes.Passes`, and the head. `arrays` are the operands of each kind:
    weights have a row for every layer of every chunk, inputs and targets one for each microbatch.
    """

    pipe: Pipe
    routes: Routes
    passes: Sequence[Pass | None]
    arrays: Sequence[Arrays]
    place: Place

    def run(self) -> Arrays:
        """What this device has of the scores and gradients, or of what there is without these."""
        tree, count = jax.tree.structure(self.routes.rows), self.pipe.schedule.microbatches

        def tick(state: State, columns: Any) -> tuple[State, None]:
            """One operation, then what it hands on, to neighbours or to itself."""
            row = jax.tree.unflatten(tree, list(columns))
            state = self.forward(row, state)
            state = self.backward(row, state) if self.passes[1] else state
            inbox = state.inbox
            for channel, slot in enumerate(row.receive):
                inbox = put(inbox, self.handed_on(state.message, channel, row.sends[channel]), slot)
            return state._replace(inbox=inbox), None

        table = np.stack(jax.tree.leaves(self.routes.rows), -1).astype(np.int32)
        stages = np.repeat(np.arange(self.pipe.schedule.stages), self._per_stage)
        own = jnp.asarray(table.swapaxes(0, 1))[self.place.lookup(stages)]
        end, _ = lax.scan(tick, self._start(), own)
        return [*end.scores, *end.closures, *end.weights, *(x[:count] for x in end.batch)]

    @property
    def _per_stage(self) -> int:
        return self.place.num_devices // self.pipe.schedule.stages

    def _start(self) -> State:
        """Empty slots, and sums of nothing.

        Slots are flat: XLA would give a buffer the layout that a product wants of what is in it,
        and copy all of it in every tick from the one into the other.
        """
        inputs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.arrays[3]]
        ahead, behind, late, head = (found.results if found else [] for found in self.passes)
        gradients, count = floats(inputs) if self.passes[1] else [], self.pipe.schedule.microbatches
        closures, (messages, residuals, pending) = len(floats(self.arrays[1])), self.routes.slots
        leaving = _made(gradients, count + 1) if self.passes[3] else _made(inputs, count)
        layers, rows = max(self.pipe.layers), len(self.arrays[2][0])
        return State(
            [_unused(x.shape, x.dtype) for x in inputs],
            [_unused((messages + 1, *x.shape), x.dtype) for x in inputs],
            _flat(ahead[len(inputs) :], residuals * layers),
            _flat(behind[len(gradients) :] if pending else [], pending * layers),
            _made(head[: len(head) - len(gradients)]),
            _made(late[:closures]),
            _made(late[closures:], rows),
            leaving,
        )

    def forward(self, row: Row, state: State) -> State:
        """F: the output is handed on, residuals are saved.

        The last output is for the head: its gradient is handed on to B of this stage.
        """

        def one(layer: Any, x: Arrays, saved: Arrays) -> Carried:
            y, residuals = cut(self._pass(0, row, layer, x), len(x))
            return y, put(saved, residuals, self._slot(row.saved, layer))

        def scored(y: Arrays, scores: Arrays, batch: Arrays) -> Carried:
            if (head := self.passes[3]) is None:
                return y, scores, put(batch, y, row.microbatch)
            targets = taken(self.arrays[4], row.microbatch)
            found = head.run(*self.arrays[0], *y, *targets, *self.arrays[5])
            own, gradient = cut(found, len(scores))
            return _with_floats(y, gradient), added(scores, own), batch

        def every(_: Arrays, saved: Arrays, *sums: Arrays) -> Carried:
            given = taken(self.arrays[3], row.microbatch), taken(state.inbox, row.inbox)
            x = [jnp.where(row.first == 1, a, b) for a, b in zip(*given, strict=True)]
            y, saved = self.layers((F, HEAD), row, one, (x, saved))
            y, *rest = self.once((HEAD,), row, scored, (y, *sums), (F, HEAD))
            return y, saved, *rest

        carried = (state.message, state.saved, state.scores, state.batch)
        message, saved, scores, batch = self.once((F, HEAD), row, every, carried)
        return state._replace(message=message, saved=saved, scores=scores, batch=batch)

    def backward(self, row: Row, state: State) -> State:
        """B and W: the gradient of the input is handed on, or leaves; the others are added up.

        Where W comes later, what it needs is kept. Otherwise both are done for a layer at once: for
        the upper half of the layers in the tick of B, and for the lower half in that of W.
        """
        keeps, sums = bool(state.kept), (state.closures, state.weights)
        ops = (B,) if keeps else (B, W)

        def one(layer: Any, g: Arrays, *carried: Arrays) -> Carried:
            residuals = self._waiting(0, state.saved, self._slot(row.saved, layer))
            g, needed = cut(self._pass(1, row, layer, residuals, g), len(g))
            if keeps:
                return g, put(carried[0], needed, self._slot(row.kept, layer))
            return g, *self._summed(row, layer, needed, *carried)

        def every(_: Arrays, batch: Arrays, *carried: Arrays) -> Carried:
            received = taken(state.inbox, row.inbox)
            g, *rest = self.layers(ops, row, one, (floats(received), *carried))
            return _with_floats(received, g), put(batch, g, row.batch), *rest

        def later(layer: Any, *sums: Arrays) -> Carried:
            needed = self._waiting(1, kept, self._slot(row.kept, layer))
            return self._summed(row, layer, needed, *sums)

        carried = (state.message, state.batch, *((state.kept,) if keeps else sums))
        message, batch, *rest = self.once(ops, row, every, carried)
        kept = rest[0] if keeps else []
        if keeps:
            rest = [*self.once((W,), row, lambda *s: self.layers((W,), row, later, s), sums)]
        return State(message, state.inbox, state.saved, kept, state.scores, rest[0], rest[1], batch)

    def _waiting(self, number: int, buffers: Arrays, slot: Any) -> Arrays:
        """The results of a pass that wait in a slot, the last ones."""
        made = self.passes[number]
        assert made
        kinds = made.results[len(made.kinds) - len(buffers) :]
        pairs = zip(taken(buffers, slot), kinds, strict=True)
        return [value.reshape(kind.shape) for value, kind in pairs]

    def _summed(
        self, row: Row, layer: Any, needed: Arrays, closures: Arrays, sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The sums with the gradients of a layer."""
        own, gradients = cut(self._pass(2, row, layer, needed), len(closures))
        slot = self._slot(row.chunk, layer)
        return added(closures, own), put(sums, added(taken(sums, slot), gradients), slot)

    def _pass(self, number: int, row: Row, layer: Any, *operands: Arrays) -> Arrays:
        chosen, weights = self.passes[number], taken(self.arrays[2], self._slot(row.chunk, layer))
        assert chosen
        return chosen.run(*self.arrays[1], *weights, *(a for part in operands for a in part))

    def _slot(self, first: Any, layer: Any) -> Any:
        """The row of a layer, in a buffer with a row for each."""
        return first * max(self.pipe.layers) + layer

    def once(
        self, ops: Sequence[int], row: Row, run: Callable[..., Carried], carried: Carried,
        among: Sequence[int] = (),
    ) -> Carried:  # fmt: skip
        """`run` in a tick that does one of `ops`; `among` are those of the `once` around it.

        A loop of no or one run updates what it carries in place: a conditional would copy what its
        branches return, in ticks of other operations as well.
        """
        on = functools.reduce(jnp.logical_or, (row.op == n for n in ops))
        with self._ticks(self._does(ops), self._does(among)).scope():
            return lax.fori_loop(0, on.astype(np.int32), lambda _, held: tuple(run(*held)), carried)

    def layers(
        self, ops: Sequence[int], row: Row, run: Callable[..., Carried], carried: Carried
    ) -> Carried:
        """`run` for the layers of a tick: as many as in every such tick, and those of some.

        A GPU waits for the host before every run of a loop whose length is data.
        """
        does, counts = self._does(ops), self.routes.rows.layers
        least, most = int(counts[does].min()), int(counts[does].max())

        def one(number: Any, carried: Carried) -> Carried:
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
        busiest, slowest = runs.sum(0).argmax(), self.routes.critical[:, None]
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
        size, reason = self._per_stage, Reason("step", "pipeline", f"microbatches handed {name}")

        def permute(pairs: Pairs, arrays: Arrays) -> Arrays:
            devices = [(a * size + d, b * size + d) for a, b in pairs for d in range(size)]
            if not devices:
                return arrays
            return [collectives.collective_permute(self.place, x, devices, reason) for x in arrays]

        with Ticks(tuple(own), {1 << n: count for n, count in enumerate(counts)}).scope():
            return lax.switch(number, [functools.partial(permute, pairs) for pairs in sets], sent)


def put(buffers: Arrays, values: Arrays, row: Any) -> Arrays:
    """The buffers with values in a row of each."""
    pairs = ((b, v.reshape(b.shape[1:])) for b, v in zip(buffers, values, strict=True))
    return [lax.dynamic_update_index_in_dim(*pair, row, 0, **_FIRST) for pair in pairs]


def taken(buffers: Arrays, row: Any) -> Arrays:
    """What is in a row of each buffer."""
    return [lax.dynamic_index_in_dim(b, row, 0, keepdims=False, **_FIRST) for b in buffers]


def _with_floats(message: Arrays, gradient: Arrays) -> Arrays:
    """A gradient as a message, of the types of an input; none where only scores are wanted."""
    left = iter(gradient)
    return [next(left) if gradient and is_float(x) else x for x in message]


def _made(types: Sequence[Any], *rows: int) -> Arrays:
    return [jnp.zeros((*rows, *t.shape), t.dtype) for t in types]


def _flat(types: Sequence[Any], rows: int) -> Arrays:
    return [_unused((rows, math.prod(t.shape)), t.dtype) for t in types]


def _unused(shape: Sequence[int], dtype: Any) -> jax.Array:
    """What nothing reads before it is written."""
    return lax.full(shape, 0, dtype) if is_key_type(dtype) else padding.filled(shape, dtype)
