"""`gshard.pipeline`: layers in stages, a batch in microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from gshard.forecast.work import product_of
from gshard.graph.kinds import PRODUCTS
from gshard.graph.regions import bodies, runs_of
from gshard.graph.source import here
from gshard.pipelining import (
    execution,  # noqa: F401  (registers the rule)
    schedules,
)
from gshard.pipelining.meaning import Bodies, Pipe, forward, pipeline_p, with_gradients
from gshard.pipelining.passes import differentiated, floats, is_float, scored
from gshard.pipelining.schedules import Schedule
from gshard.tensors.annotate import Annotation, annotate, devices_of_trace
from gshard.tensors.sharding import Sharding, Split

Tree = Any


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
    as `schedule` says: one of `gshard.pipelining.schedules.NAMES`, or a table of your own.
    """
    chosen = _chosen(schedule, stages, microbatches)
    traced = _Traced.of(block, weights, x, head, targets, microbatches)
    count = devices_of_trace()
    if count > 1 and (stages > count or count % stages):
        raise ValueError(
            f"{here()}: gshard.pipeline: {stages} stages on {count} devices; allowed are divisors "
            f"of {count}"
        )
    positions = len(chosen.positions)
    if traced.layers < positions:
        raise ValueError(
            f"{here()}: gshard.pipeline: {traced.layers} layers cannot be in {positions} parts "
            f"({chosen.name}, {chosen.chunks} on each of {stages} stages): a part needs a layer"
        )
    return traced.result(_Run(chosen, traced, count)(*traced.operands))


def _chosen(schedule: str | Schedule, stages: int, microbatches: int) -> Schedule:
    """The schedule that the user named, or gave as a table."""
    for name, value in (("stages", stages), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{here()}: gshard.pipeline: {name}={value}: at least 1 is allowed")
    try:
        if isinstance(schedule, str) and "\n" in schedule.strip():
            schedule = schedules.parse(schedule)
        if isinstance(schedule, str):
            name = "zb-h1" if schedule == "auto" else schedule
            schedule = schedules.make(name, stages, microbatches)
    except ValueError as error:
        raise ValueError(f"{here()}: gshard.pipeline: {error}") from None
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise ValueError(
            f"{here()}: gshard.pipeline: the schedule is for {schedule.stages} stages and "
            f"{schedule.microbatches} microbatches, not for {stages} and {microbatches}"
        )
    return schedule


@dataclass(frozen=True, eq=False)
class _Traced:
    """The user's functions as programs of flat operands, and these."""

    layers: int
    block: ClosedJaxpr
    head: ClosedJaxpr | None
    operands: tuple[list[Any], ...]  # closures, the head's, weights, inputs, targets
    tree: Any  # of the results
    microbatches: int

    @staticmethod
    def of(
        block: Callable[..., Any],
        weights: Tree,
        x: Tree,
        head: Callable[..., Any] | None,
        targets: Tree,
        microbatches: int,
    ) -> _Traced:
        """The functions, traced for a layer and a microbatch."""
        flat = jax.tree.leaves(weights)
        layers = _leading(flat, "weights", "layers")
        inputs = _microbatches(x, microbatches, "x")
        goals = _microbatches(targets, microbatches, "targets")
        rows = [jax.tree.leaves(part)[0].shape[1] for part in (inputs, goals) if part is not None]
        if len(set(rows)) > 1:
            raise ValueError(
                f"{here()}: gshard.pipeline: x has {rows[0] * microbatches} rows, and targets "
                f"have {rows[1] * microbatches}: the batch of both has to be one size"
            )
        of_layer, of_input, of_target = (
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), part)
            for part in (weights, inputs, goals)
        )
        found, output = jax.make_jaxpr(block, return_shape=True)(of_layer, of_input)
        if _described(output) != _described(of_input):
            raise ValueError(
                f"{here()}: gshard.pipeline: block returns {_described(output)}, but takes "
                f"{_described(of_input)}: the next layer could not take what it returns"
            )
        scores, own = None, list[Any]()
        if head is not None:
            given = (output,) if targets is None else (output, of_target)
            scores, output = jax.make_jaxpr(head, return_shape=True)(*given)
            if any(a.shape for a in scores.out_avals):
                raise ValueError(
                    f"{here()}: gshard.pipeline: head returns {_described(output)}; allowed are "
                    "scalars, which are summed over the microbatches"
                )
            own = list(scores.consts)
            scores = _without_constants(scores)
        leaves = [jax.tree.leaves(part) for part in (inputs, goals)]
        operands = (list(found.consts), own, flat, *leaves)
        results = jax.tree.structure(output)
        return _Traced(layers, _without_constants(found), scores, operands, results, microbatches)

    def result(self, flat: Sequence[Any]) -> Tree:
        """Scores, or outputs in the order of the batch, as the user's functions return them."""
        if self.head is None:
            flat = [jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]) for y in flat]
        return jax.tree.unflatten(self.tree, flat)


class _Run:
    """A pipeline as a function of its flat operands, with a gradient of its own."""

    def __init__(self, schedule: Schedule, traced: _Traced, devices: int):
        self.schedule, self.traced, self.devices = schedule, traced, devices
        self.layers = balanced(traced.layers, len(schedule.positions), _head_layers(traced))
        run = jax.custom_vjp(self._forward)
        run.defvjp(self._with_residuals, self._backward, symbolic_zeros=True)
        self._call = run

    def __call__(self, *operands: list[Any]) -> Any:
        return self._call(*operands)

    def _pipe(self, operands: Sequence[list[Any]], schedule: Schedule) -> Pipe:
        return Pipe(schedule, self.layers, tuple(map(len, operands)))

    def _forward(self, *operands: list[Any]) -> list[Any]:
        traced = self.traced
        pipe = self._pipe((*operands, []), schedules.forward_only(self.schedule))
        return self._run(pipe, (traced.block, None, None, traced.head), (*operands, []))

    def _gradients(
        self, head: ClosedJaxpr, operands: Sequence[list[Any]], cotangents: Sequence[Any]
    ) -> list[Any]:
        """The scores, and gradients as `meaning.with_gradients` has them."""
        closures, own, weights, inputs, *_ = operands
        layer = differentiated(self.traced.block, len(closures) + len(weights))
        score = scored(head, len(own), len(inputs))
        everything = (*operands, list(cotangents))
        pipe = self._pipe(everything, self.schedule)
        passes = (layer.forward, layer.backward, layer.weights, score)
        return self._run(pipe, passes, everything)

    def _run(self, pipe: Pipe, passes: Bodies, operands: Sequence[list[Any]]) -> list[Any]:
        """In stages where `gshard.jit` traces for several devices; otherwise what it means."""
        if self.devices == 1:
            return (forward if passes[1] is None else with_gradients)(pipe, passes, operands)
        closures, own, weights, inputs, targets, cotangents = operands
        per_stage = self.devices // self.schedule.stages
        split = Split.of(np.arange(self.devices) // per_stage)
        staged = [annotate(w, _by_stage(split, w.ndim, self.devices)) for w in pipe.staged(weights)]
        flat = [*closures, *own, *staged, *inputs, *targets, *cotangents]
        results = pipeline_p.bind(*flat, pipe=pipe, bodies=passes)
        if passes[1] is None:
            return results
        last = len(results) - len(floats(inputs))
        first = last - len(floats(weights))
        rows = [annotate(g, _by_stage(split, g.ndim, self.devices)) for g in results[first:last]]
        return [*results[:first], *pipe.unstaged(rows), *results[last:]]

    def _with_residuals(self, *marked: Any) -> tuple[Any, Any]:
        """Where one score has a gradient, all gradients at once; they are scaled afterwards."""
        operands = jax.tree.map(lambda primal: primal.value, marked, is_leaf=_is_primal)
        if any(
            p.perturbed and is_float(p.value)
            for p in jax.tree.leaves(marked[4], is_leaf=_is_primal)
        ):
            raise ValueError(
                f"{here()}: gshard.pipeline: targets have no gradient; wrap them in "
                "jax.lax.stop_gradient, or take them out of what is differentiated"
            )
        head = self.traced.head
        sensitive = _sensitive(head, self.traced.operands) if head is not None else []
        if head is None or sum(sensitive) > 1:
            return self._forward(*operands), (operands, None)
        chosen = [s for s, a in zip(sensitive, head.out_avals, strict=True) if is_float(a)]
        cotangents = [
            jnp.asarray(s, a.dtype) for s, a in zip(chosen, floats(head.out_avals), strict=True)
        ]
        results = self._gradients(head, operands, cotangents)
        scores = len(head.out_avals)
        return results[:scores], (operands, results[scores:])

    def _backward(self, residuals: Any, cotangents: Any) -> Any:
        operands, gradients = residuals
        head, found = self.traced.head, list(map(_plain, cotangents))
        if head is None:
            operands = (*operands[:4], floats(found))
            outputs = [jax.ShapeDtypeStruct(y.shape[1:], y.dtype) for y in operands[3]]
            found, head = [jnp.float32(1)], _product(outputs)
            operands = (operands[0], [], *operands[2:])
            gradients = self._gradients(head, operands, found)[1:]
        elif gradients is None:
            scores = len(head.out_avals)
            gradients = self._gradients(head, operands, floats(found))[scores:]
        else:
            sensitive = _sensitive(head, self.traced.operands)
            scale = [c for c, s in zip(found, sensitive, strict=True) if s]
            gradients = [
                g * c.astype(g.dtype) for g in gradients for c in scale or [jnp.float32(0)]
            ]
        left = iter(gradients)
        own = [[next(left) if is_float(a) else None for a in part] for part in operands[:4]]
        return (*own, [None] * len(self.traced.operands[4]))


def _is_primal(value: Any) -> bool:
    return hasattr(value, "perturbed")


def _plain(cotangent: Any) -> Any:
    """A cotangent as an array."""
    if isinstance(cotangent, SymbolicZero):
        return (
            jnp.zeros(cotangent.shape, jnp.result_type(cotangent.dtype))
            if is_float(cotangent)
            else cotangent
        )
    return cotangent


def _by_stage(split: Split | None, rank: int, devices: int) -> Annotation:
    sharding = Sharding((split, *(None,) * (rank - 1)), devices)
    return Annotation.of_sharding("pipeline", sharding, tuple(range(1, rank)))


def _product(outputs: Sequence[Any]) -> ClosedJaxpr:
    """The head whose gradient is its targets."""

    def product(ys: list[Any], cotangents: list[Any]) -> Any:
        pairs = zip(floats(ys), cotangents, strict=True)
        return sum(jnp.sum(y * c).astype(jnp.float32) for y, c in pairs)

    return jax.make_jaxpr(product)(list(outputs), floats(outputs))


def _sensitive(head: ClosedJaxpr, operands: Sequence[list[Any]]) -> list[bool]:
    """Which scores have a gradient."""
    fixed = len(operands[1]) + len(operands[3])
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in head.in_avals]
    run = jaxpr_as_fun(head)

    def tangents(given: list[Any], changes: list[Any]) -> list[Any]:
        def of_floats(*varying: Any) -> list[Any]:
            left = iter(varying)
            own = [next(left) if is_float(a) else a for a in given[:fixed]]
            return floats(run(*own, *given[fixed:]))

        return jax.jvp(of_floats, floats(given[:fixed]), changes)[1]

    traced = jax.make_jaxpr(tangents)(structs, floats(structs[:fixed])).jaxpr
    reached = set(traced.invars[len(structs) :])
    for eqn in traced.eqns:
        if any(not isinstance(a, Literal) and a in reached for a in eqn.invars):
            reached.update(eqn.outvars)
    left = iter(traced.outvars)
    return [is_float(a) and _in(next(left), reached) for a in head.out_avals]


def _in(atom: Any, found: set[Any]) -> bool:
    return not isinstance(atom, Literal) and atom in found


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


def _head_layers(traced: _Traced) -> float:
    """What the head costs, in layers, by the operations of their products."""
    if traced.head is None:
        return 0.0
    return _flops(traced.head.jaxpr) / max(_flops(traced.block.jaxpr), 1.0)


def _flops(jaxpr: Any) -> float:
    own = sum(product_of(eqn).flops for eqn in jaxpr.eqns if eqn.primitive in PRODUCTS)
    return own + sum(runs_of(eqn) * _flops(body) for eqn in jaxpr.eqns for body in bodies(eqn))


def _without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants as first arguments."""
    jaxpr = closed.jaxpr
    moved = jaxpr.replace(
        constvars=[],
        invars=[*jaxpr.constvars, *jaxpr.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return ClosedJaxpr(moved, [])


def _leading(leaves: Sequence[Any], name: str, what: str) -> int:
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        shapes = sorted({str(np.shape(leaf)) for leaf in leaves})
        raise ValueError(
            f"{here()}: gshard.pipeline: {name} have the shapes {', '.join(shapes) or 'none'}: the "
            f"leading dim of all has to be the {what}"
        )
    ((size,),) = sizes
    return int(size)


def _microbatches(tree: Tree, count: int, name: str) -> Tree:
    """A batch as [microbatch, row of it, ...]; tiles of the batch have rows of each microbatch."""
    if tree is None:
        return None
    rows = _leading(jax.tree.leaves(tree), name, "batch")
    if rows % count:
        raise ValueError(
            f"{here()}: gshard.pipeline: the {rows} rows of {name} do not divide into {count} "
            "microbatches"
        )
    return jax.tree.map(
        lambda a: jnp.swapaxes(a.reshape(rows // count, count, *np.shape(a)[1:]), 0, 1), tree
    )


def _described(tree: Tree) -> str:
    return str(jax.tree.map(lambda a: jax.core.ShapedArray(a.shape, a.dtype).str_short(), tree))
