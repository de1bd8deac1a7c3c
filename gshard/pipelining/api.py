"""`gshard.pipeline`: layers in stages, a batch in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from gshard.forecast.work import product_of
from gshard.graph.kinds import PRODUCTS
from gshard.graph.regions import bodies, runs_of
from gshard.graph.source import here
from gshard.pipelining import execution, schedules
from gshard.pipelining.meaning import Bodies, Pipe, pipeline_p, run
from gshard.pipelining.passes import differentiated, floats, is_float, scored
from gshard.pipelining.schedules import Schedule
from gshard.tensors.annotate import Annotation, annotate, devices_of_trace
from gshard.tensors.sharding import Sharding, Split

assert execution  # importing it registers the rule
Tree = Any
Operands = Sequence[list[Any]]


def pipeline(
    block: Callable[[Tree, Tree], Tree],
    weights: Tree,
    x: Tree,
    *,
    stages: int,
    microbatches: int,
    schedule: str | Schedule = "auto",
    head: Callable[..., Tree] | None = None,
    targets: Tree = None,
) -> Tree:
    """`block(layer_weights, x)` for every layer, with the layers in stages on different devices.

    The leading dim of `weights` is the layers, that of `x` and `targets` the batch, of which
    microbatch i has the rows i, i + microbatches, and so on. With a `head`, the sum over the
    microbatches of `head(y, targets)`, a scalar or a tree of scalars; without one, the outputs of
    the last layer. It means a scan over the layers, microbatch by microbatch. `gshard.jit` runs it
    as `schedule` says: "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "auto", or a table of your
    own as text, a line for each stage (docs/howto/pipelines.md).
    """
    try:
        chosen = _chosen(schedule, stages, microbatches)
        traced = _traced(block, weights, x, head, targets, microbatches)
        count, positions = devices_of_trace(), len(chosen.positions)
        if count > 1 and (stages > count or count % stages):
            raise ValueError(f"{stages} stages on {count} devices; allowed are divisors of {count}")
        if traced.layers < positions:
            raise ValueError(
                f"{traced.layers} layers cannot be in {positions} parts ({chosen.name}, "
                f"{chosen.chunks} on each of {stages} stages): a part needs a layer"
            )
    except ValueError as error:
        raise ValueError(f"{here()}: gshard.pipeline: {error}") from None
    found = _Run(chosen, traced, count)(*traced.operands)
    if head is None:
        found = [jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]) for y in found]
    return jax.tree.unflatten(traced.results, found)


def _chosen(schedule: str | Schedule, stages: int, microbatches: int) -> Schedule:
    """The schedule that the user named, or gave as a table."""
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name}={value}: at least 1 is allowed")
    if isinstance(schedule, str) and "\n" in schedule.strip():
        schedule = schedules.parse(schedule)
    if isinstance(schedule, str):
        name = "zb-h1" if schedule == "auto" else schedule
        schedule = schedules.make(name, stages, microbatches)
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise ValueError(
            f"the schedule is for {schedule.stages} stages and {schedule.microbatches} "
            f"microbatches, not for {stages} and {microbatches}"
        )
    return schedule


@dataclass(frozen=True, eq=False)
class _Traced:
    """The user's functions as programs of flat operands, and these."""

    layers: int
    block: ClosedJaxpr
    head: ClosedJaxpr | None
    operands: Operands  # closures, the head's, weights, inputs, targets
    results: Any  # their tree


def _traced(
    block: Callable[..., Any],
    weights: Tree,
    x: Tree,
    head: Callable[..., Any] | None,
    targets: Tree,
    microbatches: int,
) -> _Traced:
    """The functions, traced for a layer and a microbatch."""
    layers = _leading(weights, "weights", "layers")
    inputs, goals = _cut(x, microbatches, "x"), _cut(targets, microbatches, "targets")
    rows = [_leading(part, name, "batch") for part, name in ((x, "x"), (targets, "targets"))]
    if targets is not None and rows[0] != rows[1]:
        raise ValueError(f"x has {rows[0]} rows, and targets have {rows[1]}: a batch has one size")
    of_layer, of_input, of_target = (
        jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a)[1:], a.dtype), part)
        for part in (weights, inputs, goals)
    )
    found, output = jax.make_jaxpr(block, return_shape=True)(of_layer, of_input)
    if _described(output) != _described(of_input):
        raise ValueError(
            f"block returns {_described(output)}, but takes {_described(of_input)}: the next layer "
            "could not take what it returns"
        )
    scores, own = None, list[Any]()
    if head is not None:
        given = (output,) if targets is None else (output, of_target)
        scores, output = jax.make_jaxpr(head, return_shape=True)(*given)
        if any(a.shape for a in scores.out_avals):
            raise ValueError(
                f"head returns {_described(output)}; allowed are scalars, which are summed over "
                "the microbatches"
            )
        scores, own = _without_constants(scores), list(scores.consts)
    leaves = (jax.tree.leaves(part) for part in (weights, inputs, goals))
    operands = (list(found.consts), own, *leaves)
    return _Traced(layers, _without_constants(found), scores, operands, jax.tree.structure(output))


class _Run:
    """A pipeline as a function of its flat operands, with a gradient of its own."""

    def __init__(self, schedule: Schedule, traced: _Traced, devices: int):
        self.schedule, self.traced, self.devices = schedule, traced, devices
        self.head = _flops(traced.head) / max(_flops(traced.block), 1.0)  # in layers
        self._call = jax.custom_vjp(self._forward)
        self._call.defvjp(self._with_residuals, self._backward, symbolic_zeros=True)

    def __call__(self, *operands: list[Any]) -> Any:
        return self._call(*operands)

    def _forward(self, *operands: list[Any]) -> list[Any]:
        passes = (self.traced.block, None, None, self.traced.head)
        return self._run(schedules.forward_only(self.schedule), passes, (*operands, []))

    def _gradients(
        self, head: ClosedJaxpr, operands: Operands, cotangents: Sequence[Any]
    ) -> list[Any]:
        """Gradients of closures, the head's closures, weights and inputs, after the scores."""
        closures, own, weights, inputs, *_ = operands
        layer = differentiated(self.traced.block, len(closures) + len(weights))
        score = scored(head, len(own), len(inputs))
        passes = (layer.forward, layer.backward, layer.weights, score)
        return self._run(self.schedule, passes, (*operands, list(cotangents)))

    def _run(self, schedule: Schedule, passes: Bodies, operands: Operands) -> list[Any]:
        """In stages where `gshard.jit` traces for several devices; otherwise what it means."""
        if self.devices == 1:
            schedule = schedules.make("1f1b", 1, schedule.microbatches)
        layers = balanced(self.traced.layers, len(schedule.positions), self.head)
        pipe = Pipe(schedule, layers, tuple(map(len, operands)), self.head)
        closures, own, weights, inputs, *rest = operands
        others = (*inputs, *(array for part in rest for array in part))
        if self.devices == 1:
            return run(*closures, *own, *weights, *others, pipe=pipe, bodies=passes)
        staged = map(self._by_stage, pipe.taken(weights, pipe.rows))
        results = pipeline_p.bind(*closures, *own, *staged, *others, pipe=pipe, bodies=passes)
        last = len(results) - len(floats(inputs))
        first = last - len(floats(weights)) if passes[1] else last
        rows = list(map(self._by_stage, results[first:last]))
        return [*results[:first], *pipe.taken(rows, pipe.places), *results[last:]]

    def _by_stage(self, rows: Any) -> Any:
        """Weights, or their gradients, annotated: every stage has its own rows."""
        split = Split.of(np.arange(self.devices) * self.schedule.stages // self.devices)
        sharding = Sharding((split, *(None,) * (rows.ndim - 1)), self.devices)
        dims = tuple(range(1, rows.ndim))
        return annotate(rows, Annotation.of_sharding("pipeline", sharding, dims))

    def _with_residuals(self, *marked: Any) -> tuple[Any, Any]:
        """Where one score is a float, all gradients at once; they are scaled afterwards.

        Where several are, their gradients are taken when their cotangents are known, in a second
        run: as for outputs, whose cotangents are the targets of a head that multiplies by them.
        """
        operands = [[primal.value for primal in part] for part in marked]
        if any(primal.perturbed and is_float(primal.value) for primal in marked[4]):
            raise ValueError(
                f"{here()}: gshard.pipeline: targets have no gradient; wrap them in "
                "jax.lax.stop_gradient, or take them out of what is differentiated"
            )
        head = self.traced.head
        if head is None or len(floats(head.out_avals)) != 1:
            return self._forward(*operands), (operands, None)
        ones = [jnp.ones((), a.dtype) for a in floats(head.out_avals)]
        results, scores = self._gradients(head, operands, ones), len(head.out_avals)
        return results[:scores], (operands, results[scores:])

    def _backward(self, residuals: Any, cotangents: Any) -> Any:
        operands, gradients = residuals
        found, head = [_plain(c) for c in cotangents if is_float(c)], self.traced.head
        if head is None:
            outputs = [jax.ShapeDtypeStruct(y.shape[1:], y.dtype) for y in operands[3]]
            operands = [operands[0], [], *operands[2:4], found]
            gradients = self._gradients(_product(outputs), operands, [jnp.float32(1)])[1:]
        elif gradients is None:
            gradients = self._gradients(head, operands, found)[len(head.out_avals) :]
        else:
            gradients = [g * found[0].astype(g.dtype) for g in gradients]
        left = iter(gradients)
        own = [[next(left) if is_float(a) else None for a in part] for part in operands[:4]]
        return (*own, [None] * len(self.traced.operands[4]))


def _plain(cotangent: Any) -> Any:
    """A cotangent as an array."""
    is_zero = isinstance(cotangent, SymbolicZero)
    return jnp.zeros(cotangent.shape, cotangent.dtype) if is_zero else cotangent


def _product(outputs: Sequence[Any]) -> ClosedJaxpr:
    """The head whose gradient is its targets."""

    def product(ys: list[Any], cotangents: list[Any]) -> Any:
        pairs = zip(floats(ys), cotangents, strict=True)
        return sum(jnp.sum(y * c).astype(jnp.float32) for y, c in pairs)

    return jax.make_jaxpr(product)(list(outputs), floats(outputs))


def balanced(layers: int, positions: int, head: float) -> tuple[int, ...]:
    """How many layers each position has, at least one; the head costs the last `head` more.

    Equal numbers, where others gain nothing: rows of the weights are then where they are needed.
    """
    costs, counts = [1.0] * (positions - 1) + [1.0 + head], [1] * positions
    for _ in range(layers - positions):
        least = costs.index(min(costs))
        costs[least] += 1
        counts[least] += 1
    even = layers // positions
    if layers % positions == 0 and even + head <= max(costs):
        return (even,) * positions
    return tuple(counts)


def _flops(program: Any) -> float:
    """The operations of a program's products."""
    eqns = program.eqns if program is not None else ()
    own = sum(product_of(eqn).flops for eqn in eqns if eqn.primitive in PRODUCTS)
    return float(own + sum(runs_of(eqn) * _flops(body) for eqn in eqns for body in bodies(eqn)))


def _without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants as first arguments."""
    jaxpr, unnamed = closed.jaxpr, closed.jaxpr.debug_info.with_unknown_names()
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=unnamed), [])


def _leading(tree: Tree, name: str, what: str) -> int:
    leaves = jax.tree.leaves(tree)
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if tree is not None and (len(sizes) != 1 or () in sizes):
        shapes = ", ".join(sorted({str(np.shape(leaf)) for leaf in leaves})) or "none"
        raise ValueError(
            f"{name} have the shapes {shapes}: the leading dim of all has to be the {what}"
        )
    return int(next(iter(sizes))[0]) if sizes else 0


def _cut(tree: Tree, count: int, name: str) -> Tree:
    """A batch as [microbatch, row of it, ...]; tiles of the batch have rows of each microbatch."""
    rows = _leading(tree, name, "batch")
    if rows % count:
        raise ValueError(f"the {rows} rows of {name} do not divide into {count} microbatches")
    return jax.tree.map(
        lambda a: jnp.swapaxes(a.reshape(rows // count, count, *np.shape(a)[1:]), 0, 1), tree
    )


def _described(tree: Tree) -> str:
    return str(jax.tree.map(lambda a: jax.core.ShapedArray(a.shape, a.dtype).str_short(), tree))
