"""`gshard.pipeline`: layers in stages, a batch in microbatches."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr

from gshard.forecast.hardware import Hardware, accelerator, hardware
from gshard.graph.regions import with_calls_inlined
from gshard.graph.source import here
from gshard.pipelining import execution
from gshard.pipelining.choice import Costs, chosen
from gshard.pipelining.meaning import Pipe, pipeline_p, run
from gshard.pipelining.passes import Passes, differentiated, floats, is_float, with_gradients
from gshard.pipelining.schedules import Schedule, forward_only, make, parse
from gshard.tensors.annotate import (
    Annotation,
    annotate,
    annotate_p,
    devices_of_trace,
    hardware_of_trace,
    in_stages,
)  # fmt: skip
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import byte_size

assert execution  # importing it registers the rule
Tree = Any
Splits = tuple[Split | None, ...]
Operands = Sequence[list[Any]]


def pipeline(
    block: Callable[[Tree, Tree], Tree],
    weights: Tree,
    x: Tree,
    *,
    stages: int | str,
    microbatches: int | str,
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
    own as text, a line for each stage (docs/howto/pipelines.md). With `stages="auto"` or
    `microbatches="auto"` it is their number too that makes the step fastest within the memory of
    the device.
    """
    runs, wrong = list[_Run](), ValueError()
    try:
        stages = stages if stages == "auto" else _number(stages, "stages")
        if targets is not None and head is None:
            raise ValueError("targets are given, and no head that reads them")
        for count in _counts(microbatches, x, targets):
            try:
                run = _Run(block, weights, x, head, targets, count)
                run.choose(_given(schedule, stages, count), stages)
                runs.append(run)
            except ValueError as error:
                wrong = error
        if not runs:
            raise wrong
    except ValueError as error:  # ours, or the block's, where it has its own lines
        error.args = (f"{here()}: gshard.pipeline: {error}",)
        raise
    best = min(runs, key=lambda run: run.rank)
    found = best.call(*best.operands)
    if head is None:
        found = [jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]) for y in found]
    return jax.tree.unflatten(best.results, found)


def _counts(microbatches: int | str, x: Tree, targets: Tree) -> Sequence[int]:
    """The numbers of microbatches to choose from: a bubble is short with 8 for each device."""
    rows = _leading(x, "x", "batch")
    if targets is not None and (goals := _leading(targets, "targets", "batch")) != rows:
        raise ValueError(f"x has {rows} rows, and targets have {goals}: a batch has one")
    if microbatches == "auto":
        most = min(rows, 8 * devices_of_trace()) if devices_of_trace() > 1 else 1
        return [n for n in range(1, most + 1) if rows % n == 0]
    count = _number(microbatches, "microbatches")
    if rows % count:
        raise ValueError(f"the {rows} rows of x do not divide into {count} microbatches")
    return [count]


def _number(value: Any, name: str) -> int:
    if not isinstance(value, SupportsIndex) or operator.index(value) < 1:
        raise ValueError(f"{name}={value!r}: allowed are numbers from 1 on, and 'auto'")
    return operator.index(value)


def _given(schedule: str | Schedule, stages: int | str, microbatches: int) -> Schedule | None:
    """The schedule that the user named, or gave as a table; None for "auto"."""
    if schedule == "auto":
        return None
    if isinstance(stages, str):
        raise ValueError(
            f"stages='auto' with schedule={schedule!r}: allowed are a number, and 'auto' with "
            "schedule='auto'"
        )
    if not isinstance(schedule, Schedule):
        is_table = "\n" in str(schedule).strip()
        schedule = parse(schedule) if is_table else make(schedule, stages, microbatches)
    if (schedule.stages, schedule.microbatches) != (stages, microbatches):
        raise ValueError(
            f"the schedule is for {schedule.stages} stages and {schedule.microbatches} "
            f"microbatches, not for {stages} and {microbatches}"
        )
    return schedule


class _Run:
    """A pipeline as a function of its flat operands, with a gradient of its own.

    `operands` are the head's closures, closures, weights, inputs and targets; `block` and `head`
    are programs of these.
    """

    def __init__(
        self, block: Callable[..., Any], weights: Tree, x: Tree, head: Callable[..., Any] | None,
        targets: Tree, count: int,
    ):  # fmt: skip
        self.count, self.depth = count, _leading(weights, "weights", "layers")
        inputs, goals = _cut((x, targets), count)
        of_layer, of_input, of_target = (
            jax.tree.map(lambda a: jax.ShapeDtypeStruct(np.shape(a)[1:], a.dtype), part)
            for part in (weights, inputs, goals)
        )
        found, output = jax.make_jaxpr(block, return_shape=True)(of_layer, of_input)
        if _described(output) != _described(of_input):
            raise ValueError(
                f"block returns {_described(output)}, but takes {_described(of_input)}: the next "
                "layer could not take what it returns"
            )
        self.block, self.head, own = _without_constants(found), None, list[Any]()
        if head is not None:
            given = (output,) if targets is None else (output, of_target)
            scores, output = jax.make_jaxpr(head, return_shape=True)(*given)
            if any(a.shape for a in scores.out_avals):
                raise ValueError(
                    f"head returns {_described(output)}; allowed are scalars, which are summed "
                    "over the microbatches"
                )
            self.head, own = _without_constants(scores), list(scores.consts)
        leaves = (jax.tree.leaves(part) for part in (weights, inputs, goals))
        self.operands: Operands = (own, list(found.consts), *leaves)
        self.results = jax.tree.structure(output)
        self.call = jax.custom_vjp(lambda *operands: self._run(self.head, operands))
        self.call.defvjp(self._with_residuals, self._backward, symbolic_zeros=True)

    def choose(self, given: Schedule | None, stages: int | str) -> None:
        """The schedule that is given, or the best one; `rank` is least for the best of several."""
        self.devices = devices = devices_of_trace()
        number, layers = 1 if isinstance(stages, str) else stages, self.depth
        if devices > 1 and devices % number:
            allowed = f"{stages} stages on {devices} devices; allowed are divisors of {devices}"
            raise ValueError(allowed)
        parts = len(given.positions) if given else number
        if layers < parts:
            raise ValueError(
                f"{layers} layers cannot be in {parts} parts ({parts // number} on each of "
                f"{stages} stages): a part needs a layer"
            )
        self.rank, self.pipe = (0.0, 0.0, 0), Pipe(make("1f1b", 1, self.count), (layers,))
        if devices > 1:
            machine, numbers = hardware_of_trace() or accelerator(), tuple[int, ...]((number,))
            limit, ways = machine.memory if machine else float("inf"), []
            if isinstance(stages, str):
                numbers = tuple(n for n in range(1, layers + 1) if devices % n == 0)
            for each in [n for n in numbers if n == in_stages.value] or numbers:
                costs = self._costs(machine or hardware("h100"), devices // each, stages)
                way = chosen(given, each, self.count, layers, costs, limit)
                ways.append((costs.rank(way, limit), way))
            self.rank, way = min(ways, key=lambda ranked: ranked[0])
            self.pipe = replace(way, numbers=numbers if isinstance(stages, str) else ())

    def _costs(self, machine: Hardware, share: int, stages: int | str) -> Costs:
        """For a stage of `share` devices; each has its weights, where stages are compared."""
        operands, counts = self.operands, [len(part) for part in self.operands[1:3]]
        try:
            head = self.head and with_gradients(self.head, len(operands[0]) + len(operands[3]))
            layer = self._layer
        except (NotImplementedError, ValueError):  # no derivative: forward passes alone
            nothing = jax.make_jaxpr(lambda: ())()
            head, layer = self.head, Passes(self.block, nothing, nothing)
        costs = Costs.of(layer, head, counts, machine, share)
        if not isinstance(stages, str):
            return costs
        pairs = zip(operands[2], self.splits, strict=True)
        parts = [(w, math.prod(s.tiles for s in splits if s)) for w, splits in pairs]
        held = sum(byte_size(w.shape[1:], w.dtype) // n for w, n in parts)
        return replace(costs, weights=held, reduced=2 * held * (share - 1) // share)

    @functools.cached_property
    def _layer(self) -> Passes:
        _, closures, weights, *_ = self.operands
        return differentiated(self.block, len(closures) + len(weights))

    def _run(
        self, head: ClosedJaxpr | None, operands: Operands, cotangents: list[Any] | None = None
    ) -> list[Any]:
        """The outputs, or scores; with cotangents of these, the gradients of all other operands."""
        schedule, passes = forward_only(self.pipe.schedule), (self.block, None, None, head)
        if head and cotangents is not None:
            scored = with_gradients(head, len(operands[0]) + len(operands[3]))
            schedule, passes = self.pipe.schedule, (*self._layer, scored)
        operands = (*operands, cotangents or [])
        pipe = replace(self.pipe, schedule=schedule, counts=tuple(map(len, operands)))
        params = {"pipe": pipe, "block": self.block, "head": head, "passes": passes}
        own, closures, weights, inputs, *rest = operands
        others = (*inputs, *(array for part in rest for array in part))
        if self.devices == 1:
            return run(*own, *closures, *weights, *others, **params)
        staged = self._moved(pipe, weights, self.splits, pipe.rows)
        results = pipeline_p.bind(*own, *closures, *staged, *others, **params)
        last = len(results) - len(floats(inputs))
        first = last - len(floats(weights)) if passes[1] else last
        splits = [s for s, w in zip(self.splits, weights, strict=True) if is_float(w)]
        gradients = self._moved(pipe, results[first:last], splits, pipe.places)
        return [*results[:first], *gradients, *results[last:]]

    @functools.cached_property
    def splits(self) -> list[Splits]:
        """How the block splits each of its weights within a stage, where it annotates them."""
        eqns, _ = with_calls_inlined(self.block.jaxpr)
        found = {
            reads[0]: eqn.params["annotation"].resolve(self.devices).splits
            for eqn, reads, _ in eqns
            if eqn.primitive is annotate_p
        }
        _, closures, weights, *_ = self.operands
        variables = self.block.jaxpr.invars[len(closures) :]
        pairs = zip(variables, weights, strict=False)
        return [found.get(var, (None,) * (w.ndim - 1)) for var, w in pairs]

    def _moved(
        self, pipe: Pipe, arrays: Sequence[Any], splits: Sequence[Splits], rows: np.ndarray
    ) -> list[Any]:
        """Rows of weights, or of their gradients; before and after, every stage has its own."""
        stage = Split.of(np.arange(self.devices) * pipe.schedule.stages // self.devices)

        def by_stage(array: Any, inner: Splits) -> Any:
            dims = tuple(1 + dim for dim, split in enumerate(inner) if split is None)
            sharding = Sharding((stage, *inner), self.devices)
            return annotate(array, Annotation.of_sharding("pipeline", sharding, dims))

        return [*map(by_stage, pipe.taken([*map(by_stage, arrays, splits)], rows), splits)]

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
        head = self.head
        if head is None or len(floats(head.out_avals)) != 1:
            return self._run(head, operands), (operands, None)
        ones = [jnp.ones((), a.dtype) for a in floats(head.out_avals)]
        results, scores = self._run(head, operands, ones), len(head.out_avals)
        return results[:scores], (operands, results[scores:])

    def _backward(self, residuals: Any, cotangents: Any) -> Any:
        (operands, gradients), head = residuals, self.head
        found = [
            jnp.zeros(c.shape, c.dtype) if isinstance(c, SymbolicZero) else c
            for c in floats(cotangents)
        ]
        if head is None:
            outputs = [jax.ShapeDtypeStruct(y.shape[1:], y.dtype) for y in operands[3]]
            operands = [[], *operands[1:4], found]
            gradients = self._run(_product(outputs), operands, [jnp.float32(1)])[1:]
        elif gradients is None:
            gradients = self._run(head, operands, found)[len(head.out_avals) :]
        else:
            gradients = [g * found[0].astype(g.dtype) for g in gradients]
        left = iter(gradients)
        own = [[next(left) if is_float(a) else None for a in part] for part in operands[:4]]
        return (*own, [None] * len(self.operands[4]))


def _product(outputs: Sequence[Any]) -> ClosedJaxpr:
    """The head whose gradient is its targets."""

    def product(ys: list[Any], cotangents: list[Any]) -> Any:
        pairs = zip(floats(ys), cotangents, strict=True)
        return sum(jnp.sum(y * c).astype(jnp.float32) for y, c in pairs)

    return jax.make_jaxpr(product)(list(outputs), floats(outputs))


def _without_constants(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program with its constants as first arguments."""
    jaxpr, unnamed = closed.jaxpr, closed.jaxpr.debug_info.with_unknown_names()
    invars = [*jaxpr.constvars, *jaxpr.invars]
    return ClosedJaxpr(jaxpr.replace(constvars=[], invars=invars, debug_info=unnamed), [])


def _leading(tree: Tree, name: str, what: str) -> int:
    leaves = jax.tree.leaves(tree)
    sizes = {np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(sorted({str(np.shape(leaf)) for leaf in leaves})) or "none"
        raise ValueError(
            f"{name} have the shapes {shapes}: the leading dim of all has to be the {what}"
        )
    return int(sizes.pop()[0])


def _cut(tree: Tree, count: int) -> Tree:
    """A batch as [microbatch, row of it, ...]; tiles of the batch have rows of each microbatch."""
    return jax.tree.map(
        lambda a: jnp.swapaxes(a.reshape(len(a) // count, count, *a.shape[1:]), 0, 1), tree
    )


def _described(tree: Tree) -> str:
    return str(jax.tree.map(lambda a: jax.core.ShapedArray(a.shape, a.dtype).str_short(), tree))
