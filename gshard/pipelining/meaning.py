"""What a pipeline means, and what a stage does in a tick: forward, backward, weight gradients.

`pipeline_p` is the layers one after the other, microbatch by microbatch, as an operator. Wherever
no stages are, this is what runs: eagerly, under `jax.jit`, in `gshard.check` and in replays. A
machine has buffers of slots for what waits, and sums; with one slot of each, and the operations of
every microbatch one after the other, it is what the operator means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from gshard._jax import ad, batching, mlir
from gshard.graph.regions import MEANINGS
from gshard.pipelining.passes import floats, is_float
from gshard.pipelining.schedules import EQUAL, HEAD, B, F, Row, Schedule, W
from gshard.tensors import padding
from gshard.tensors.keys import is_key_type

Arrays = list[Any]
Bodies = tuple[ClosedJaxpr | None, ...]  # the passes of a layer (`passes.Passes`), and the head


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline, without its arrays.

    `layers` are the numbers of layers at each position of the schedule. `counts` are those of the
    operands: the head's closures, closures, weights, inputs, targets and cotangents of the scores.
    `seconds` are `schedules.Seconds`, relative to each other.
    `numbers` are those of stages that it might have, where the program leaves that open.
    """

    schedule: Schedule
    layers: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[float, ...] = EQUAL
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        schedule, costs = self.schedule, [0.0] * self.schedule.stages
        for (stage, _), layers in zip(schedule.positions, self.layers, strict=True):
            costs[stage] += layers
        costs[schedule.positions[-1][0]] += self.seconds[HEAD] / (sum(self.seconds[:HEAD]) or 1.0)
        slowest, mean = costs.index(max(costs)), sum(costs) / len(costs)
        late = f", stage {slowest} slowest by {100 * (max(costs) / mean - 1):.0f}%"
        return (
            f"{schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.name}: "
            f"bubble {100 * schedule.bubble:.1f}%{late if max(costs) > 1.005 * mean else ''}, "
            f"{schedule.in_flight} in flight"
        )

    @property
    def rows(self) -> np.ndarray:
        """For each row of the staged weights, by stage, chunk and layer, the layer it holds.

        Where a position has fewer layers than another, its last one again.
        """
        schedule, most = self.schedule, max(self.layers)
        starts = np.cumsum([0, *self.layers])
        found = np.zeros((schedule.stages, schedule.chunks, most), int)
        for place, start, count in zip(schedule.positions, starts, self.layers, strict=False):
            found[place] = start + np.minimum(np.arange(most), count - 1)
        return found.ravel()

    @property
    def places(self) -> np.ndarray:
        """For each layer, its first row of the staged weights."""
        return np.unique(self.rows, return_index=True)[1]

    @property
    def is_staged(self) -> bool:
        """Whether the rows are the layers in their order."""
        return np.array_equal(self.rows, np.arange(sum(self.layers)))

    def operands(self, flat: Sequence[Any]) -> list[list[Any]]:
        """The operands of each kind."""
        ends = np.cumsum(self.counts).tolist()
        return [list(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def taken(self, weights: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """Rows of the weights: slices, of which each device is sent those that it needs."""
        if self.is_staged:
            return list(weights)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return [jnp.concatenate([w[run[0] : run[-1] + 1] for run in runs]) for w in weights]


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
    """A pass of a layer, or the head, as a function of arrays; the types of its results.

    `kinds` are how the devices of a stage hold these.
    """

    run: Callable[..., Arrays]
    results: Sequence[Any]
    kinds: Sequence[Any] = ()


@dataclass(frozen=True, eq=False)
class Machine:
    """One stage. `arrays` are the operands of each kind, weights as [chunk, layer, ...].

    `once(ops, row, run, carried)` calls `run(*carried)` in a tick that does one of `ops`, and in it
    `layers(ops, row, run, carried)` calls `run(layer, *carried)` for the layers of the tick. They
    carry what changes alone, which is updated in place.
    """

    passes: Sequence[Pass | None]  # of `passes.Passes`, and the head
    arrays: Sequence[Arrays]
    once: Callable[..., tuple[Arrays, ...]]
    layers: Callable[..., tuple[Arrays, ...]]

    def start(self, slots: tuple[int, int, int], microbatches: int, flat: bool = False) -> State:
        """Empty slots, so many of each kind, `flat` or of the shapes of values; sums of nothing."""
        inputs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.arrays[3]]
        ahead, behind, late, head = (found.results if found else [] for found in self.passes)
        gradients = [] if self.passes[1] is None else floats(inputs)
        closures, (messages, residuals, pending) = len(floats(self.arrays[1])), slots
        leaving, rows = (inputs, 0) if self.passes[3] is None else (gradients, 1)
        chunks, most = self.arrays[2][0].shape[:2]
        unused = _flat if flat else _unused
        return State(
            _made(_unused, inputs),
            _made(_unused, inputs, messages),
            _made(unused, ahead[len(inputs) :], residuals, most),
            _made(unused, behind[len(gradients) :] if pending else [], pending, most),
            _made(jnp.zeros, head[: len(head) - len(gradients)]),
            _made(jnp.zeros, late[:closures]),
            _made(jnp.zeros, late[closures:], chunks, most),
            _made(jnp.zeros, leaving, microbatches + rows),
        )

    def results(self, end: State, microbatches: int) -> Arrays:
        """Scores and gradients, of weights by row; or what there is without gradients."""
        rows = [w.reshape(-1, *w.shape[2:]) for w in end.weights]
        return [*end.scores, *end.closures, *rows, *(x[:microbatches] for x in end.batch)]

    def forward(self, row: Row, state: State) -> State:
        """F: the output is handed on, residuals are saved.

        The last output is for the head: its gradient is handed on to B of this stage.
        """

        def one(layer: Any, x: Arrays, saved: Arrays) -> tuple[Arrays, Arrays]:
            y, residuals = _cut(self._run(0, row, layer, x), len(x))
            return y, put(saved, residuals, row.saved, layer)

        def scored(y: Arrays, scores: Arrays, batch: Arrays) -> tuple[Arrays, ...]:
            if (head := self.passes[3]) is None:
                return y, scores, put(batch, y, row.microbatch)
            targets = all_at(self.arrays[4], row.microbatch)
            found = head.run(*self.arrays[0], *y, *targets, *self.arrays[5])
            own, gradient = _cut(found, len(scores))
            return _with_floats(y, gradient), _added(scores, own), batch

        def every(_: Arrays, saved: Arrays, scores: Arrays, batch: Arrays) -> tuple[Arrays, ...]:
            pairs = zip(self.arrays[3], all_at(state.inbox, row.inbox), strict=True)
            x = [jnp.where(row.first == 1, _at(a, row.microbatch), b) for a, b in pairs]
            y, saved = self.layers((F, HEAD), row, one, (x, saved))
            y, *sums = self.once((HEAD,), row, scored, (y, scores, batch), (F, HEAD))
            return y, saved, *sums

        carried = (state.message, state.saved, state.scores, state.batch)
        message, saved, scores, batch = self.once((F, HEAD), row, every, carried)
        return state._replace(message=message, saved=saved, scores=scores, batch=batch)

    def backward(self, row: Row, state: State) -> State:
        """B and W: the gradient of the input is handed on, or leaves; the others are added up.

        Where W comes later, what it needs is kept. Otherwise both are done for a layer at once: for
        the upper half of the layers in the tick of B, and for the lower half in that of W.
        """

        def handed(layer: Any, g: Arrays, kept: Arrays) -> tuple[Arrays, ...]:
            g, needed = self._input_gradient(row, layer, state.saved, g)
            return g, put(kept, needed, row.kept, layer)

        def summed(layer: Any, *sums: Arrays) -> tuple[Arrays, ...]:
            needed = self._waiting(1, len(floats(state.message)), state.kept, row.kept, layer)
            return self._weight_gradients(row, layer, needed, *sums)

        def both(layer: Any, g: Arrays, *sums: Arrays) -> tuple[Arrays, ...]:
            g, needed = self._input_gradient(row, layer, state.saved, g)
            return g, *self._weight_gradients(row, layer, needed, *sums)

        one, ops = (handed, (B,)) if state.kept else (both, (B, W))

        def begun(_: Arrays, batch: Arrays, *carried: Arrays) -> tuple[Arrays, ...]:
            received = all_at(state.inbox, row.inbox)
            g, *rest = self.layers(ops, row, one, (floats(received), *carried))
            return _with_floats(received, g), put(batch, g, row.batch), *rest

        def later(*sums: Arrays) -> tuple[Arrays, ...]:
            return self.layers((W,), row, summed, sums)

        sums, first = (state.closures, state.weights), (state.message, state.batch)
        message, batch, *rest = self.once(
            ops, row, begun, (*first, *([state.kept] if state.kept else sums))
        )
        state = state._replace(message=message, batch=batch)
        if state.kept:
            state = state._replace(kept=rest[0])
            rest = list(self.once((W,), row, later, sums))
        return state._replace(closures=rest[0], weights=rest[1])

    def _input_gradient(self, row: Row, layer: Any, saved: Arrays, g: Arrays) -> Any:
        """The gradient of a layer's input, and what the gradients of its weights need."""
        residuals = self._waiting(0, len(self.arrays[3]), saved, row.saved, layer)
        return _cut(self._run(1, row, layer, residuals, g), len(g))

    def _waiting(self, number: int, first: int, buffers: Arrays, *slot: Any) -> Arrays:
        """The results of a pass, from `first` on, that wait in a slot."""
        made = self.passes[number]
        assert made
        pairs = zip(buffers, made.results[first:], strict=True)
        return [_at(buffer, *slot, like=kind) for buffer, kind in pairs]

    def _weight_gradients(
        self, row: Row, layer: Any, needed: Arrays, closures: Arrays, sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The sums with the gradients of a layer."""
        own, gradients = _cut(self._run(2, row, layer, needed), len(closures))
        added = _added(all_at(sums, row.chunk, layer), gradients)
        return _added(closures, own), put(sums, added, row.chunk, layer)

    def _run(self, number: int, row: Row, layer: Any, *operands: Arrays) -> Arrays:
        """A pass of a layer."""
        chosen, weights = self.passes[number], all_at(self.arrays[2], row.chunk, layer)
        assert chosen
        return chosen.run(*self.arrays[1], *weights, *(a for part in operands for a in part))


def put(buffers: Arrays, values: Sequence[Any], *slot: Any) -> Arrays:
    """The buffers with values in a slot of each, which may be flat."""
    lead = (1,) * len(slot)
    values = [v.reshape(*lead, *b.shape[len(slot) :]) for b, v in zip(buffers, values, strict=True)]
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_slice(b, v, _start(b, slot)) for b, v in pairs]


def _start(buffer: Any, slot: Sequence[Any]) -> list[Any]:
    """The first element of a slot."""
    numbers = [0 if size == 1 else n for n, size in zip(slot, buffer.shape, strict=False)]
    return [*numbers, *[0] * (buffer.ndim - len(slot))]


def _at(buffer: Any, *slot: Any, like: Any = None) -> jax.Array:
    shape = buffer.shape[len(slot) :]
    found = lax.dynamic_slice(buffer, _start(buffer, slot), (*[1] * len(slot), *shape))
    return found.reshape(shape if like is None else like.shape)


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


def _unused(shape: Sequence[int], dtype: Any) -> jax.Array:
    """What nothing reads before it is written."""
    return lax.full(shape, 0, dtype) if is_key_type(dtype) else padding.filled(shape, dtype)


def _flat(shape: Sequence[int], dtype: Any) -> jax.Array:
    return _unused((*shape[:2], math.prod(shape[2:])), dtype)


pipeline_p = Primitive("pipeline")
pipeline_p.multiple_results = True


def run(*flat: Any, pipe: Pipe, bodies: Bodies) -> list[Any]:
    """The pipeline on staged weights: scores, and gradients of closures, weights and inputs."""
    operands, count = pipe.operands(flat), pipe.schedule.microbatches
    layers = pipe.taken(operands[2], pipe.places)
    operands[2] = [w[None] for w in layers]
    passes = [body and Pass(jaxpr_as_fun(body), body.out_avals) for body in bodies]
    last = sum(pipe.layers) - 1

    def each_layer(ops: Sequence[int], _: Row, one: Any, carried: Any) -> Any:
        def each(number: Any, found: Any) -> Any:
            return tuple(one(last - number if B in ops else number, *found))

        return lax.fori_loop(0, last + 1, each, carried)

    machine = Machine(passes, operands, lambda _, __, run, carried, *___: run(*carried), each_layer)

    def step(state: State, number: Any) -> tuple[State, None]:
        row = Row(0, 0, number, 1, 0, 0, 0, 0, last + 1, number)
        state = machine.forward(row, state)
        if machine.passes[1] is None:
            return state, None
        return machine.backward(row, state._replace(inbox=put(state.inbox, state.message, 0))), None

    end, _ = lax.scan(step, machine.start((1, 1, 0), count), np.arange(count))
    if not pipe.is_staged:  # a row that is there again has no gradient
        empty = [jnp.zeros((1, len(pipe.rows), *w.shape[2:]), w.dtype) for w in end.weights]
        pairs = zip(empty, end.weights, strict=True)
        end = end._replace(weights=[e.at[:, pipe.places].set(w) for e, w in pairs])
    return machine.results(end, count)


def program(avals: Sequence[Any], params: Any) -> ClosedJaxpr:
    """What the operator stands for."""
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
    return jax.make_jaxpr(lambda *flat: run(*flat, **params))(*structs)


MEANINGS[pipeline_p] = lambda eqn: program([a.aval for a in eqn.invars], eqn.params)
pipeline_p.def_abstract_eval(lambda *avals, **params: program(avals, params).out_avals)


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(lambda *flat: run(*flat, **params), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


pipeline_p.def_impl(lambda *flat, **params: jax.jit(lambda *given: run(*given, **params))(*flat))
batching.primitive_batchers[pipeline_p] = _batched
ad.primitive_jvps[pipeline_p] = lambda primals, tangents, **params: jax.jvp(
    lambda *flat: run(*flat, **params), primals, [ad.instantiate_zeros(t) for t in tangents]
)
mlir.register_lowering(pipeline_p, mlir.lower_fun(run, multiple_results=True))
