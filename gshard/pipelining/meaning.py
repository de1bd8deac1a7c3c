"""What a pipeline means: the layers one after the other, microbatch by microbatch, as an operator.

Wherever no stages are, this is what runs: eagerly, under `jax.jit`, in `gshard.check` and in
replays.
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
from gshard.pipelining.passes import floats
from gshard.pipelining.schedules import EQUAL, HEAD, Schedule

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


pipeline_p = Primitive("pipeline")
pipeline_p.multiple_results = True


def run(*flat: Any, pipe: Pipe, bodies: Bodies) -> list[Any]:
    """The pipeline on staged weights: scores, and gradients of closures, weights and inputs."""
    own, closures, weights, inputs, targets, cotangents = pipe.operands(flat)
    functions: list[Any] = [body and jaxpr_as_fun(body) for body in bodies]
    forward, backward, later, head = functions
    layers, count = pipe.taken(weights, pipe.places), len(floats(closures))

    def ahead(x: Arrays, w: Arrays) -> tuple[Arrays, Arrays]:
        return cut(forward(*closures, *w, *x), len(x))

    def behind(carried: tuple[Arrays, Arrays], layer: Any) -> Any:
        (g, sums), (w, residuals) = carried, layer
        g, needed = cut(backward(*closures, *w, *residuals, *g), len(g))
        found, gradients = cut(later(*closures, *w, *needed), count)
        return (g, added(sums, found)), gradients

    def step(sums: Arrays, microbatch: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        x, goals = microbatch
        y, residuals = lax.scan(ahead, x, layers)
        if head is None:
            return sums, y
        found = head(*own, *y, *goals, *cotangents)
        if backward is None:
            return added(sums, found), []
        scores, g = cut(found, len(found) - len(floats(x)))
        none = [jnp.zeros_like(c) for c in floats(closures)]
        (g, others), gradients = lax.scan(behind, (g, none), (layers, residuals), reverse=True)
        return added(sums, [*scores, *others, *gradients]), g

    types = list(bodies[3].out_avals) if bodies[3] else []
    if backward:
        types = [*types[: len(types) - len(floats(inputs))], *floats([*closures, *layers])]
    sums, batch = lax.scan(step, [jnp.zeros(a.shape, a.dtype) for a in types], (inputs, targets))
    if backward and not pipe.is_staged:  # a row that is there again has no gradient
        first = len(sums) - len(floats(layers))
        rows = [jnp.zeros((len(pipe.rows), *w.shape[1:]), w.dtype) for w in sums[first:]]
        sums[first:] = [e.at[pipe.places].set(w) for e, w in zip(rows, sums[first:], strict=True)]
    return [*sums, *batch]


def cut(values: Arrays, first: int) -> tuple[Arrays, Arrays]:
    """The first values, and the others."""
    return values[:first], values[first:]


def added(sums: Arrays, values: Arrays) -> Arrays:
    """The sums with other values."""
    return [a + b for a, b in zip(sums, values, strict=True)]


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
