"""What a pipeline means: the layers one after the other, microbatch by microbatch, as an operator.

Wherever no stages are, this is what runs: eagerly, under `jax.jit`, in `gshard.check` and in
replays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from gshard._jax import ad, batching, mlir
from gshard.graph.regions import MEANINGS
from gshard.pipelining.passes import floats, structs, with_gradients
from gshard.pipelining.schedules import EQUAL, Routes, Schedule, Seconds, route

Arrays = list[Any]
Bodies = tuple[ClosedJaxpr | None, ...]  # the passes of a layer (`passes.Passes`), and the head


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline, without its arrays.

    `layers` are the numbers of layers at each position of the schedule, `counts` those of operands:
    the head's closures, closures, weights, inputs, targets and cotangents of the scores. `numbers`
    are those of stages that it might have, where the program leaves that open.
    """

    schedule: Schedule
    layers: tuple[int, ...]
    seconds: Seconds = EQUAL
    numbers: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()

    @cached_property
    def routes(self) -> Routes:
        """What each stage does in every tick, and what it sends."""
        return route(self.schedule, self.layers, self.seconds)

    def __str__(self) -> str:
        schedule, spent = self.schedule, self.routes.spent.sum(0)
        more = spent.max() / (spent.mean() or 1.0) - 1
        late = f", stage {spent.argmax()} slowest by {100 * more:.0f}%" if more > 0.005 else ""
        return (
            f"{schedule.stages} stages, {schedule.microbatches} microbatches, {schedule.schedule}: "
            f"bubble {100 * schedule.bubble:.1f}%{late}, {schedule.in_flight} in flight"
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

    def operands(self, flat: Sequence[Any]) -> list[list[Any]]:
        """The operands of each kind."""
        ends = np.cumsum(self.counts).tolist()
        return [list(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def taken(self, weights: Sequence[Any], rows: np.ndarray) -> list[Any]:
        """Rows of the weights: slices, of which each device is sent those that it needs."""
        if np.array_equal(self.rows, np.arange(sum(self.layers))):  # they are there
            return list(weights)
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return [jnp.concatenate([w[run[0] : run[-1] + 1] for run in runs]) for w in weights]


pipeline_p = Primitive("pipeline")
pipeline_p.multiple_results = True


def run(*flat: Any, pipe: Pipe, block: ClosedJaxpr, head: ClosedJaxpr | None,
        passes: Bodies) -> list[Any]:  # fmt: skip
    """The pipeline on staged weights: scores, and gradients of closures, weights and inputs."""
    *shared, inputs, targets, cotangents = pipe.operands(flat)
    fixed, sums = [array for part in shared for array in part], list(head.out_avals if head else ())

    def one(*flat: Any) -> Arrays:
        own, closures, weights, x, goals, _ = pipe.operands(flat)
        layers, layer = pipe.taken(weights, pipe.places), jaxpr_as_fun(block)
        y, _ = lax.scan(lambda x, w: (layer(*closures, *w, *x), None), x, layers)
        return jaxpr_as_fun(head)(*own, *y, *goals) if head else y

    def step(sums: Arrays, microbatch: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
        given = [*fixed, *microbatch[0], *microbatch[1]]
        if not passes[1]:
            found = one(*given)
        else:
            program = with_gradients(jax.make_jaxpr(one)(*given), len(fixed) + len(inputs))
            found = jaxpr_as_fun(program)(*given, *cotangents)
        own, batch = cut(found, len(sums))
        return added(sums, own), batch

    sums += floats(fixed) if passes[1] else []
    start = [jnp.zeros(a.shape, a.dtype) for a in sums]
    sums, batch = lax.scan(step, start, (inputs, targets))
    return [*sums, *batch]


def cut(values: Arrays, first: int) -> tuple[Arrays, Arrays]:
    """The first values, and the others."""
    return values[:first], values[first:]


def added(sums: Arrays, values: Arrays) -> Arrays:
    """The sums with other values."""
    return [a + b for a, b in zip(sums, values, strict=True)]


def program(avals: Sequence[Any], params: Any) -> ClosedJaxpr:
    """What the operator stands for."""
    return jax.make_jaxpr(partial(run, **params))(*structs(avals))


MEANINGS[pipeline_p] = lambda eqn: program([a.aval for a in eqn.invars], eqn.params)
pipeline_p.def_abstract_eval(lambda *avals, **params: program(avals, params).out_avals)


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(partial(run, **params), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


pipeline_p.def_impl(lambda *flat, **params: jax.jit(partial(run, **params))(*flat))
batching.primitive_batchers[pipeline_p] = _batched
ad.primitive_jvps[pipeline_p] = lambda primals, tangents, **params: jax.jvp(
    partial(run, **params), primals, tuple(map(ad.instantiate_zeros, tangents))
)
mlir.register_lowering(pipeline_p, mlir.lower_fun(run, multiple_results=True))
