"""What a device does in every tick: the operation that its row of the table names, then messages.

A machine has slots for what waits, and sums: rows of buffers that a scan over the ticks
carries, and loops update in place. The permutes that hand results on are outside of these loops.
"""

from __future__ import annotations

import functools
import math
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
from gshard.pipelining.schedules import BOTH, HEAD, B, F, Row, W
from gshard.tensors import padding
from gshard.tensors.devices import Place
from gshard.tensors.keys import is_key_type

_FIRST = {"allow_negative_indices": False}  # no kernels that add to an index


class State(NamedTuple):
    """What the operation of a tick reads and changes."""

    message: Arrays  # received, then sent: an input of the next layers, or its gradient
    saved: Arrays  # slots: residuals, what weight gradients need
    kept: Arrays
    scores: Arrays  # sums: scores and gradients of the head's closures; of closures, of weights
    closures: Arrays
    weights: Arrays
    done: Any = 0  # layers and heads in the tick


Carry = tuple[State, Arrays, Arrays]  # between ticks, with what was received, and what leaves


class Pass(NamedTuple):
    """A pass of a layer, or the head, on what a device has; `kinds` are blank tiles of results.

    Operands may be flat.
    """

    run: Callable[..., Arrays]
    kinds: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Machine:
    """A stage of `pipe` on its devices: the passes of a layer, and the head, on operands by kind.

    Weights have a row for every layer of every chunk, inputs and targets one for each microbatch.
    """

    pipe: Pipe
    passes: Sequence[Pass | None]
    arrays: Sequence[Arrays]
    place: Place

    def run(self) -> Arrays:
        """What this device has of the scores and gradients, or of what there is without these."""
        leaves, tree = jax.tree.flatten(self.pipe.routes.rows)

        def tick(carry: Carry, columns: Any) -> tuple[Carry, None]:
            """One operation, then what it hands on, to neighbours or to itself."""
            row, (state, inbox, batch) = jax.tree.unflatten(tree, list(columns)), carry
            state = self._layers((F, HEAD), row, state._replace(message=self._received(row, inbox)))
            if self.passes[3]:
                state = self._repeated((HEAD,), row, state, functools.partial(self._scored, row))
            for op in (BOTH, B, W):
                state = self._layers((op,), row, state)
            message = state.message
            batch = put(batch, self._leaving(message), row.batch)
            for channel, slot in enumerate(row.receive):
                number = jnp.where(state.done < 0, 0, row.sends[channel])
                inbox = put(inbox, self._handed_on(message, channel, number), slot)
            return (state._replace(message=[], done=0), inbox, batch), None

        table = np.stack(leaves, -1).astype(np.int32).swapaxes(0, 1)
        devices, schedule = np.arange(self.place.num_devices), self.pipe.schedule
        own = jnp.asarray(table)[self.place.lookup(devices * schedule.stages // len(devices))]
        (end, _, batch), _ = lax.scan(tick, self._start(), own)
        batch = [x[: schedule.microbatches] for x in batch]
        return [*end.scores, *end.closures, *end.weights, *batch]

    def _start(self) -> Carry:
        """Empty slots, sums of nothing, an empty inbox, and what leaves, by microbatch.

        Slots are flat: XLA would give a buffer the layout that a product wants of what is in it,
        and copy all of it in every tick from the one into the other. W has two at least: one would
        be read whole whatever the layer is, and XLA would do its products in every tick. What
        leaves is in no loop of a tick, so that gradients of inputs are dropped where nobody needs
        them.
        """
        inputs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.arrays[3]]
        kinds = [found.kinds if found else () for found in self.passes]
        ahead, behind, late, head = ([kind.array for kind in part] for part in kinds)
        gradients = floats(inputs) if self.passes[1] else []
        closures, layers = len(floats(self.arrays[1])), max(self.pipe.layers)
        waiting = behind[len(gradients) :]
        messages, residuals, pending = self.pipe.routes.slots
        state = State(
            [],
            _flat(ahead[len(inputs) :], residuals * layers),
            _flat(waiting if pending else [], max(2, pending * layers), len(ahead)),
            _made(head[: len(head) - len(gradients)]),
            _made(late[:closures]),
            _made(late[closures:], len(self.arrays[2][0])),
        )
        inbox = [_unused((messages + 1, *x.shape), x.dtype) for x in inputs]
        return state, inbox, _made(self._leaving(inputs), self.pipe.schedule.microbatches + 1)

    def _leaving(self, message: Arrays) -> Arrays:
        """What of a message leaves the pipeline at its end: gradients of the inputs, or outputs."""
        if self.passes[1]:
            return floats(message)
        return [] if self.passes[3] else message

    def _received(self, row: Row, inbox: Arrays) -> Arrays:
        """What the tick is about: an input of the batch, or what has come."""
        given = taken(self.arrays[3], row.microbatch), taken(inbox, row.inbox)
        is_first = row.inbox == self.pipe.routes.slots[0]
        return [jnp.where(is_first, a, b) for a, b in zip(*given, strict=True)]

    def _layer(self, op: int, row: Row, layer: Any, state: State) -> State:
        """What an operation does for a layer: the result of F or B is handed on.

        Where W comes later than B, what it needs is kept. Otherwise both are done for a layer at
        once: for the upper half of the layers in the tick of B, for the lower half in that of W.
        """
        message = state.message
        if op == F:
            message, residuals = cut(self._pass(0, row, layer, message), len(message))
            saved = put(state.saved, residuals, self._slot(row.saved, layer))
            return state._replace(message=message, saved=saved)
        if op == W:
            needed = taken(state.kept, self._slot(row.kept, layer))
        else:
            g, residuals = floats(message), taken(state.saved, self._slot(row.saved, layer))
            g, needed = cut(self._pass(1, row, layer, residuals, g), len(g))
            state = state._replace(message=_with_floats(message, g))
        if op == B:
            return state._replace(kept=put(state.kept, needed, self._slot(row.kept, layer)))
        own, gradients = cut(self._pass(2, row, layer, needed), len(state.closures))
        slot = self._slot(row.chunk, layer)
        weights = put(state.weights, added(taken(state.weights, slot), gradients), slot)
        return state._replace(closures=added(state.closures, own), weights=weights)

    def _scored(self, row: Row, _: Any, state: State) -> State:
        """The head, after the last F: the gradient of the scores is what B of this stage takes."""
        y, targets, (*_, head) = state.message, taken(self.arrays[4], row.microbatch), self.passes
        assert head
        found = head.run(*self.arrays[0], *y, *targets, *self.arrays[5])
        own, gradient = cut(found, len(state.scores))
        message, scores = _with_floats(y, gradient), added(state.scores, own)
        return state._replace(message=message, scores=scores, done=state.done + 1)

    def _layers(self, ops: tuple[int, ...], row: Row, state: State) -> State:
        """Every layer of this tick's operation, if that is one of `ops`.

        One loop has the constant number of layers that every such tick has, one the others: a GPU
        waits for the host in every run of a loop whose length is data. XLA may not see that a layer
        is always number zero: it would hoist what depends on nothing else into every tick.
        """
        counts = self.pipe.routes.rows.layers[np.isin(self.pipe.routes.rows.op, ops)]
        least = int(counts.min(initial=counts.max(initial=0)))

        def one(number: Any, state: State) -> State:
            layer = row.base + (number if F in ops else row.layers - 1 - number)
            return self._layer(ops[0], row, layer, state._replace(done=state.done + 1))

        def first(zero: Any, state: State) -> State:
            return lax.fori_loop(0, least, lambda number, state: one(zero + number, state), state)

        state = self._repeated(ops, row, state, first)
        return self._repeated(
            ops, row, state, lambda n, s: one(least + n, s), lambda r: r.layers - least
        )

    def _repeated(
        self, ops: tuple[int, ...], row: Row, state: State, run: Callable[[Any, State], State],
        times: Callable[[Row], Any] = lambda row: 1,
    ) -> State:  # fmt: skip
        """`run`, so many `times`, in a tick that does one of `ops`.

        A loop of no or one run updates what it changes in place: a conditional would copy what its
        branches return, in ticks of other operations as well. Forecasts count its runs on one
        stage, that with most layers to run of those that do it, and on those that others wait for.
        Permutes read what is `done`: XLA's CPUs run side by side what no data orders, and a loop's
        collectives would meet theirs in another order on another device.
        """

        def count(row: Row) -> Any:
            return sum((row.op == op).astype(np.int32) for op in ops) * times(row)

        routes = self.pipe.routes
        table, ticks = count(routes.rows), self.pipe.schedule.ticks
        if not table.any():
            return state
        busiest = (routes.rows.layers.sum(0) * table.any(0)).argmax()
        own, waited = int(table[:, busiest].sum()), int(table[range(ticks), routes.critical].sum())
        idle, other = (max(ticks - n, 0) for n in (own, waited))
        with Ticks((idle, own), {1: other, 2: waited}, ticks).scope():
            return lax.fori_loop(0, count(row), run, state)

    def _pass(self, number: int, row: Row, layer: Any, *operands: Arrays) -> Arrays:
        chosen, weights = self.passes[number], taken(self.arrays[2], self._slot(row.chunk, layer))
        assert chosen
        return chosen.run(*self.arrays[1], *weights, *(a for part in operands for a in part))

    def _slot(self, first: Any, layer: Any) -> Any:
        """The row of a layer, in a buffer with a row for each."""
        return first * max(self.pipe.layers) + layer

    def _handed_on(self, sent: Arrays, channel: int, number: Any) -> Arrays:
        """What arrives on a channel from the stages that have something to send."""
        distance, sets = list(self.pipe.routes.send.items())[channel]
        if distance == 0:
            return sent
        name = {1: "down", -1: "up"}.get(distance, "around" if distance < 0 else "back")
        reason = Reason("step", "pipeline", f"microbatches handed {name}")
        size = self.place.num_devices // self.pipe.schedule.stages

        def permute(senders: np.ndarray, arrays: Arrays) -> Arrays:
            first = np.flatnonzero(np.repeat(senders, size))
            pairs = list(zip(first.tolist(), (first + distance * size).tolist(), strict=True))
            if not pairs:
                return arrays
            return [collectives.collective_permute(self.place, x, pairs, reason) for x in arrays]

        counts = np.bincount(self.pipe.routes.rows.sends[channel][:, 0], minlength=len(sets))
        own = max((counts * sets.T).tolist(), key=sum)
        with Ticks(tuple(own), {1 << n: int(count) for n, count in enumerate(counts)}).scope():
            return lax.switch(number, [functools.partial(permute, each) for each in sets], sent)


def put(buffers: Arrays, values: Arrays, row: Any) -> Arrays:
    """The buffers with values in a row of each."""
    pairs = ((b, v.reshape(1, *b.shape[1:])) for b, v in zip(buffers, values, strict=True))
    return [lax.dynamic_update_slice_in_dim(*pair, row, 0, **_FIRST) for pair in pairs]


def taken(buffers: Arrays, row: Any) -> Arrays:
    """What is in a row of each buffer."""
    return [lax.dynamic_index_in_dim(b, row, 0, keepdims=False, **_FIRST) for b in buffers]


def _with_floats(message: Arrays, gradient: Arrays) -> Arrays:
    """A gradient as a message, of the types of an input; none where only scores are wanted."""
    left = iter(gradient)
    return [next(left) if gradient and is_float(x) else x for x in message]


def _made(types: Sequence[Any], *rows: int) -> Arrays:
    return [jnp.zeros((*rows, *t.shape), t.dtype) for t in types]


def _flat(types: Sequence[Any], rows: int, first: int = 0) -> Arrays:
    """Flat slots, each with a number of its own: of equal ones XLA would fill one and copy it."""
    return [_unused((rows, math.prod(t.shape)), t.dtype, n) for n, t in enumerate(types, first)]


def _unused(shape: Sequence[int], dtype: Any, number: int = 0) -> jax.Array:
    """What nothing reads before it is written."""
    number *= jnp.issubdtype(dtype, jnp.inexact)
    start = 0 if is_key_type(dtype) else padding.garbage(dtype) + np.asarray(number, dtype)
    return lax.full(shape, start, dtype)
