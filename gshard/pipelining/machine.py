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
import numpy as np
from jax import lax

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

        def one(x: Arrays, weights: Arrays) -> tuple[Arrays, Arrays]:
            return _cut(self._run(0, weights, x), len(x))

        y, residuals = self._layers(one, x, (self._chunk(row),), row.layers)
        return state._replace(message=y, saved=put(state.saved, residuals, row.saved))

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

        def one(g: Arrays, weights: Arrays, residuals: Arrays) -> tuple[Arrays, Arrays]:
            return _cut(self._run(1, weights, residuals, g), len(g))

        rows, gradient = (self._chunk(row), all_at(state.saved, row.saved)), floats(state.message)
        gradient, kept = self._layers(one, gradient, rows, row.layers, reverse=True)
        batch, kept = put(state.batch, gradient, row.batch), put(state.kept, kept, row.kept)
        message = _with_floats(state.message, gradient)
        return state._replace(message=message, kept=kept, batch=batch)

    def late_gradients(self, row: Row, state: State) -> State:
        """W: gradients are added to the sums."""

        def one(sums: Arrays, weights: Arrays, needed: Arrays) -> tuple[Arrays, Arrays]:
            closures, gradients = _cut(self._run(2, weights, needed), len(sums))
            return _added(sums, closures), gradients

        rows = (self._chunk(row), all_at(state.kept, row.kept))
        closures, found = self._layers(one, state.closures, rows, row.layers)
        sums = _added(all_at(state.weights, row.chunk), found)
        return state._replace(closures=closures, weights=put(state.weights, sums, row.chunk))

    def _chunk(self, row: Row) -> Arrays:
        return all_at(self.arrays[2], row.chunk)

    def _run(self, number: int, *operands: Arrays) -> Arrays:
        chosen = self.passes[number]
        assert chosen
        return chosen.run(*self.arrays[1], *(array for part in operands for array in part))

    def _layers(
        self,
        run: Callable[..., tuple[Arrays, Arrays]],
        carried: Arrays,
        rows: tuple[Arrays, ...],
        count: Any,
        reverse: bool = False,
    ) -> tuple[Arrays, Arrays]:
        """`run` for every layer of a chunk, one after the other; rows after `count` are padding."""

        def one(carried: Arrays, row: tuple[Any, ...]) -> tuple[Arrays, Arrays]:
            *layer, number = row
            if len(set(self.layers)) == 1:
                return run(carried, *layer)
            made = jax.eval_shape(run, carried, *layer)[1]
            nothing = carried, _made(_zeros, made)
            return lax.cond(number < count, lambda: run(carried, *layer), lambda: nothing)

        return lax.scan(one, carried, (*rows, np.arange(max(self.layers))), reverse=reverse)


def put(buffers: Arrays, values: Sequence[Any], slot: Any) -> Arrays:
    """The buffers with values in a slot of each."""
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_index_in_dim(b, v, slot, 0) for b, v in pairs]


def _at(buffer: Any, number: Any) -> jax.Array:
    only = len(buffer) == 1  # a view
    return buffer[0] if only else lax.dynamic_index_in_dim(buffer, number, 0, keepdims=False)


def all_at(buffers: Arrays, number: Any) -> Arrays:
    """What is in a slot of each buffer."""
    return [_at(buffer, number) for buffer in buffers]


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
