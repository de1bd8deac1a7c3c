"""What a pipeline means: the layers one after the other, microbatch by microbatch.

`pipeline_p` is that, as an operator. Wherever no stages are, this is what runs: eagerly, under
`jax.jit`, in `gshard.check` and in replays. Gradients are summed in the order of the microbatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from gshard._jax import ad, batching, mlir
from gshard.graph.regions import MEANINGS
from gshard.pipelining.machine import Machine, Pass, State
from gshard.pipelining.routes import Row
from gshard.pipelining.schedules import Schedule

Bodies = tuple[ClosedJaxpr | None, ...]  # the passes of a layer (`passes.Passes`), and the head


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline, without its arrays.

    `layers` are the numbers of layers at each position of the schedule. `counts` are those of the
    operands: the head's closures, closures, weights, inputs, targets and cotangents of the scores.
    `seconds` are those of IDLE, F, B and W of a layer, and of the head, relative to each other.
    `numbers` are those of stages that it might have, where the program leaves that open.
    """

    schedule: Schedule
    layers: tuple[int, ...]
    counts: tuple[int, ...]
    seconds: tuple[float, ...] = (0.0, 1.0, 1.0, 1.0, 0.0)
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        schedule, costs = self.schedule, [0.0] * self.schedule.stages
        for (stage, _), layers in zip(schedule.positions, self.layers, strict=True):
            costs[stage] += layers
        costs[schedule.positions[-1][0]] += self.seconds[4] / (sum(self.seconds[:4]) or 1.0)
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


pipeline_p = Primitive("pipeline")
pipeline_p.multiple_results = True


def run(*flat: Any, pipe: Pipe, bodies: Bodies) -> list[Any]:
    """The pipeline on staged weights: scores, and gradients of closures, weights and inputs."""
    operands, count = pipe.operands(flat), pipe.schedule.microbatches
    layers = pipe.taken(operands[2], pipe.places)
    operands[2] = [w[None] for w in layers]
    passes = [body and Pass(jaxpr_as_fun(body), body.out_avals) for body in bodies]
    machine = Machine(passes, operands, [sum(pipe.layers)])

    def step(state: State, number: Any) -> tuple[State, None]:
        row = Row(0, 0, number, 1, 0, 0, 0, sum(pipe.layers), number)
        state = machine.scored(row, machine.forward(row, state))
        if not machine.forward_only:
            state = machine.late_gradients(row, machine.backward(row, state))
        return state, None

    end, _ = lax.scan(step, machine.start((1, 1, 1), count), np.arange(count))
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
