"""What a stage does in a tick, on what one device has: forward, backward, weight gradients.

A stage has buffers of slots for what waits, and sums. With one slot of each, and these operations
one after the other for every microbatch, it is what a pipeline means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from gshard.graph.ticks import Ticks
from gshard.pipelining.passes import floats, is_float
from gshard.pipelining.routes import Row
from gshard.tensors import padding
from gshard.tensors.keys import is_key_type

Arrays = list[Any]


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
    """A pass of a layer, or the head, as a function of arrays; the types of its results."""

    run: Callable[..., Arrays]
    results: Sequence[Any]


@dataclass(frozen=True, eq=False)
class Machine:
    """One stage. `arrays` are the operands of each kind, weights as [chunk, layer, ...].

    `layers` are the numbers of layers of all chunks, of this stage and others.
    """

    passes: Sequence[Pass | None]  # of `passes.Passes`, and the head
    arrays: Sequence[Arrays]
    layers: Sequence[int]

    @property
    def forward_only(self) -> bool:
        """Whether there are no gradients."""
        return self.passes[1] is None

    def start(self, slots: tuple[int, int, int], microbatches: int) -> State:
        """Empty slots, so many of each kind, and sums of nothing."""
        inputs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.arrays[3]]
        ahead, behind, late, head = (found.results if found else [] for found in self.passes)
        gradients = [] if self.forward_only else floats(inputs)
        closures, (messages, residuals, pending) = len(floats(self.arrays[1])), slots
        leaving, rows = (inputs, 0) if self.passes[3] is None else (gradients, 1)
        most = max(self.layers)
        return State(
            _made(_unused, inputs),
            _made(_unused, inputs, messages),
            _made(_unused, ahead[len(inputs) :], residuals, most),
            _made(_unused, behind[len(gradients) :], pending, most),
            _made(_zeros, head[: len(head) - len(gradients)]),
            _made(_zeros, late[:closures]),
            _made(_zeros, late[closures:], len(self.arrays[2][0]), most),
            _made(_zeros, leaving, microbatches + rows),
        )

    def results(self, end: State, microbatches: int) -> Arrays:
        """Scores and gradients, of weights by row; or what there is without gradients."""
        rows = [w.reshape(-1, *w.shape[2:]) for w in end.weights]
        return [*end.scores, *end.closures, *rows, *(x[:microbatches] for x in end.batch)]

    def forward(self, row: Row, state: State) -> State:
        """F: the output is handed on, residuals are saved."""
        pairs = zip(self.arrays[3], state.message, strict=True)
        x = [jnp.where(row.first == 1, _at(a, row.microbatch), b) for a, b in pairs]

        def one(layer: Any, x: Arrays, saved: Arrays) -> tuple[Arrays, Arrays]:
            y, residuals = _cut(self._run(0, row, layer, x), len(x))
            return y, put(saved, residuals, row.saved, layer)

        message, saved = self._layers(one, (x, state.saved), row)
        return state._replace(message=message, saved=saved)

    def scored(self, row: Row, state: State) -> State:
        """The head on the last output: the gradient is handed on to B of this stage."""
        head, y = self.passes[3], state.message
        if head is None:
            return state._replace(batch=put(state.batch, y, row.microbatch))
        targets = all_at(self.arrays[4], row.microbatch)
        found = head.run(*self.arrays[0], *y, *targets, *self.arrays[5])
        scores, gradient = _cut(found, len(state.scores))
        message = _with_floats(y, gradient)
        return state._replace(scores=_added(state.scores, scores), message=message)

    def backward(self, row: Row, state: State) -> State:
        """B: the gradient of the input is handed on, or leaves the pipeline."""

        def one(layer: Any, g: Arrays, kept: Arrays) -> tuple[Arrays, Arrays]:
            residuals = all_at(state.saved, row.saved, layer)
            g, needed = _cut(self._run(1, row, layer, residuals, g), len(g))
            return g, put(kept, needed, row.kept, layer)

        start = (floats(state.message), state.kept)
        gradient, kept = self._layers(one, start, row, reverse=True)
        batch = put(state.batch, gradient, row.batch)
        message = _with_floats(state.message, gradient)
        return state._replace(message=message, kept=kept, batch=batch)

    def late_gradients(self, row: Row, state: State) -> State:
        """W: gradients are added to the sums."""

        def one(layer: Any, closures: Arrays, sums: Arrays) -> tuple[Arrays, Arrays]:
            found = self._run(2, row, layer, all_at(state.kept, row.kept, layer))
            own, gradients = _cut(found, len(closures))
            added = _added(all_at(sums, row.chunk, layer), gradients)
            return _added(closures, own), put(sums, added, row.chunk, layer)

        closures, weights = self._layers(one, (state.closures, state.weights), row)
        return state._replace(closures=closures, weights=weights)

    def _run(self, number: int, row: Row, layer: Any, *operands: Arrays) -> Arrays:
        """A pass of a layer."""
        chosen, weights = self.passes[number], all_at(self.arrays[2], row.chunk, layer)
        assert chosen
        return chosen.run(*self.arrays[1], *weights, *(a for part in operands for a in part))

    def _layers(
        self,
        run: Callable[..., tuple[Arrays, Arrays]],
        start: tuple[Arrays, Arrays],
        row: Row,
        reverse: bool = False,
    ) -> tuple[Arrays, Arrays]:
        """`run` for the layers of a chunk, one after the other.

        What a layer leaves is written where it waits: a stack of all would be copied there. Chunks
        of several sizes are loops whose length is in the table.
        """
        most = max(self.layers)
        count = most if len(set(self.layers)) == 1 else row.layers

        def one(number: Any, carried: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
            return run(count - 1 - number if reverse else number, *carried)

        with Ticks((0, most), {2: most}, out_of=1).scope():
            return lax.fori_loop(0, count, one, start)


def put(buffers: Arrays, values: Sequence[Any], *slot: Any) -> Arrays:
    """The buffers with values in a slot of each."""
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_slice(b, v[(None,) * len(slot)], _start(b, slot)) for b, v in pairs]


def _start(buffer: Any, slot: Sequence[Any]) -> list[Any]:
    """The first element of a slot."""
    numbers = [0 if size == 1 else n for n, size in zip(slot, buffer.shape, strict=False)]
    return [*numbers, *[0] * (buffer.ndim - len(slot))]


def _at(buffer: Any, *slot: Any) -> jax.Array:
    shape = buffer.shape[len(slot) :]
    found = lax.dynamic_slice(buffer, _start(buffer, slot), (*[1] * len(slot), *shape))
    return found.reshape(shape)


def all_at(buffers: Arrays, *slot: Any) -> Arrays:
    """What is in a slot of each buffer."""
    return [_at(buffer, *slot) for buffer in buffers]


def _with_floats(message: Arrays, gradient: Arrays) -> Arrays:
    """A gradient as a message, of the types of an input; none where only scores are wanted."""
    left = iter(gradient)
    return [next(left) if gradient and is_float(x) else x for x in message]


def _cut(values: Arrays, first: int) -> tuple[Arrays, Arrays]:
    return values[:first], values[first:]


def _added(sums: Sequence[Any], values: Sequence[Any]) -> Arrays:
    return [a + b for a, b in zip(sums, values, strict=True)]


def _made(fill: Callable[..., Any], types: Sequence[Any], *count: int) -> Arrays:
    return [fill((*count, *t.shape), t.dtype) for t in types]


def _zeros(shape: Sequence[int], dtype: Any) -> jax.Array:
    return lax.full(tuple(shape), 0, dtype)


def _unused(shape: Sequence[int], dtype: Any) -> jax.Array:
    """What nothing reads before it is written."""
    return _zeros(shape, dtype) if is_key_type(dtype) else padding.filled(shape, dtype)
