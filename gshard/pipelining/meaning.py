"""What a pipeline means: the layers one after the other, microbatch by microbatch.

`pipeline_p` is that, as an operator. Wherever no stages are, this is what runs: eagerly, under
`jax.jit`, in `gshard.check` and in replays. With gradients, these are summed in the order of the
microbatches.
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
from gshard.graph.regions import FLATTENED
from gshard.pipelining.passes import floats
from gshard.pipelining.schedules import Schedule


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline, without its arrays.

    `layers` are the numbers of layers at each position of the schedule. `counts` are those of the
    operands: closures, the head's closures, weights, inputs, targets and cotangents of the scores.
    """

    schedule: Schedule
    layers: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most layers at a position; every position has as many rows of the weights."""
        return max(self.layers)

    @property
    def rows(self) -> np.ndarray:
        """For each row of the staged weights, by stage, chunk and layer, the layer it holds."""
        schedule, most = self.schedule, self.most
        starts = np.cumsum([0, *self.layers])
        found = np.zeros((schedule.stages, schedule.chunks, most), int)
        for (stage, chunk), start, count in zip(
            schedule.positions, starts, self.layers, strict=False
        ):
            found[stage, chunk] = start + np.minimum(np.arange(most), count - 1)
        return found.ravel()

    @property
    def places(self) -> np.ndarray:
        """For each layer, its first row of the staged weights."""
        _, first = np.unique(self.rows, return_index=True)
        return first

    @property
    def is_staged(self) -> bool:
        """Whether the rows are the layers in their order."""
        return np.array_equal(self.rows, np.arange(sum(self.layers)))

    def operands(self, flat: Sequence[Any]) -> list[list[Any]]:
        """The operands of each kind."""
        ends = np.cumsum(self.counts).tolist()
        return [list(flat[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def staged(self, layers: Sequence[Any]) -> list[Any]:
        """Weights as the stages hold them."""
        if self.is_staged:
            return list(layers)
        return [jnp.take(w, self.rows, axis=0, mode="clip") for w in layers]

    def unstaged(self, rows: Sequence[Any]) -> list[Any]:
        """Weights in the order of the layers."""
        if self.is_staged:
            return list(rows)
        return [jnp.take(w, self.places, axis=0, mode="clip") for w in rows]


Bodies = tuple[ClosedJaxpr | None, ...]  # forward, backward, weights, head

pipeline_p = Primitive("pipeline")
pipeline_p.multiple_results = True
FLATTENED.add(pipeline_p)


def run(*flat: Any, pipe: Pipe, bodies: Bodies) -> list[Any]:
    """The pipeline on staged weights, in one place after the other."""
    closures, own, staged, inputs, targets, cotangents = pipe.operands(flat)
    operands = closures, own, pipe.unstaged(staged), inputs, targets, cotangents
    if bodies[1] is None:
        return forward(pipe, bodies, operands)
    results = with_gradients(pipe, bodies, operands)
    first = len(results) - len(floats(inputs)) - len(floats(staged))
    last = len(results) - len(floats(inputs))
    rows = results[first:last]
    if not pipe.is_staged:  # a padded row has no gradient
        rows = [_spread(pipe, gradient) for gradient in rows]
    return [*results[:first], *rows, *results[last:]]


def _spread(pipe: Pipe, gradient: Any) -> Any:
    empty = jnp.zeros((len(pipe.rows), *gradient.shape[1:]), gradient.dtype)
    return empty.at[pipe.places].set(gradient)


def forward(pipe: Pipe, bodies: Bodies, operands: Sequence[list[Any]]) -> list[Any]:
    """The sums of the scores over the microbatches; without a head, the outputs of each."""
    closures, own, weights, inputs, targets, _ = operands
    layer, head = bodies[0], bodies[3]
    assert layer is not None

    def through(x: list[Any]) -> list[Any]:
        def one(x: list[Any], layer_weights: list[Any]) -> tuple[list[Any], None]:
            return jaxpr_as_fun(layer)(*closures, *layer_weights, *x)[: len(x)], None

        return lax.scan(one, x, weights, length=sum(pipe.layers))[0]

    def outputs(_: None, x: list[Any]) -> tuple[None, list[Any]]:
        return None, through(x)

    if head is None:
        return lax.scan(outputs, None, inputs)[1]
    score = jaxpr_as_fun(head)

    def step(sums: list[Any], batch: tuple[list[Any], list[Any]]) -> tuple[list[Any], None]:
        x, target = batch
        return _added(sums, score(*own, *through(x), *target)), None

    sums = [jnp.zeros(a.shape, a.dtype) for a in head.out_avals]
    return lax.scan(step, sums, (inputs, targets))[0]


def with_gradients(pipe: Pipe, bodies: Bodies, operands: Sequence[list[Any]]) -> list[Any]:
    """Scores, and gradients: of closures, the head's closures, weights by layer, and inputs."""
    closures, own, weights, inputs, targets, cotangents = operands
    ahead, back, late, score = (jaxpr_as_fun(body) for body in bodies if body is not None)
    scores = len(bodies[3].out_avals) - len(floats(own)) - len(floats(inputs))  # type: ignore[union-attr]
    n_inputs, n_closures = len(inputs), len(floats(closures))

    def step(sums: list[Any], batch: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
        x, target = batch

        def up(x: list[Any], w: list[Any]) -> tuple[list[Any], list[Any]]:
            results = ahead(*closures, *w, *x)
            return results[:n_inputs], results[n_inputs:]

        y, residuals = lax.scan(up, x, weights, length=sum(pipe.layers))
        scored = score(*own, *y, *target, *cotangents)
        gradient, first = scored[scores + len(floats(own)) :], scored[: scores + len(floats(own))]

        def down(g: list[Any], saved: Any) -> tuple[list[Any], list[Any]]:
            w, residual = saved
            results = back(*closures, *w, *residual, *g)
            return results[: len(g)], results[len(g) :]

        gradient, kept = lax.scan(down, gradient, (weights, residuals), reverse=True)

        def gradients(total: list[Any], saved: Any) -> tuple[list[Any], list[Any]]:
            w, needed = saved
            results = late(*closures, *w, *needed)
            return _added(total, results[:n_closures]), results[n_closures:]

        zeros = [jnp.zeros_like(c) for c in floats(closures)]
        total, by_layer = lax.scan(gradients, zeros, (weights, kept))
        return _added(sums, [*total, *first, *by_layer]), gradient

    shapes = jax.eval_shape(lambda: step_shapes(pipe, bodies, operands))
    zeros = [jnp.zeros(s.shape, s.dtype) for s in shapes]
    sums, gradients = lax.scan(step, zeros, (inputs, targets))
    gc, rest = sums[:n_closures], sums[n_closures:]
    return [*rest[:scores], *gc, *rest[scores:], *gradients]


def step_shapes(pipe: Pipe, bodies: Bodies, operands: Sequence[list[Any]]) -> list[Any]:
    """Zeros like what is summed: closures' gradients, scores, the head's, weights'."""
    closures, own, weights, inputs, *_ = operands
    head = bodies[3]
    assert head is not None
    scores = head.out_avals[: len(head.out_avals) - len(floats(own)) - len(floats(inputs))]
    zeros = [jnp.zeros(a.shape, a.dtype) for a in scores]
    return [
        *(jnp.zeros_like(c) for c in floats(closures)),
        *zeros,
        *(jnp.zeros_like(c) for c in (*floats(own), *floats(weights))),
    ]


def _added(sums: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    return [a + b for a, b in zip(sums, values, strict=True)]


@pipeline_p.def_abstract_eval
def _results(*avals: Any, pipe: Pipe, bodies: Bodies) -> list[Any]:
    shapes = jax.eval_shape(
        lambda *flat: run(*flat, pipe=pipe, bodies=bodies),
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals),
    )
    return [jax.core.ShapedArray(s.shape, s.dtype) for s in shapes]


def _batched(args: Any, dims: Any, **params: Any) -> Any:
    results = jax.vmap(lambda *flat: run(*flat, **params), in_axes=tuple(dims))(*args)
    return results, [0] * len(results)


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return jax.jvp(
        lambda *flat: run(*flat, **params),
        primals,
        [ad.instantiate_zeros(t) for t in tangents],
    )


pipeline_p.def_impl(lambda *flat, **params: jax.jit(lambda *f: run(*f, **params))(*flat))
batching.primitive_batchers[pipeline_p] = _batched
ad.primitive_jvps[pipeline_p] = _jvp
mlir.register_lowering(pipeline_p, mlir.lower_fun(run, multiple_results=True))
