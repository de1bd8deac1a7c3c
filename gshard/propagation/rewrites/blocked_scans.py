"""Associative scans along a split dim: every tile by itself, then the results of the tiles before.

A device scans its own rows. The last row of every tile, the combination of all its rows, is sent to
all devices, which scan these few; each combines the row before its tile with all of its own. JAX
differentiates that program: for the gradient one more row of each tile is sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard._jax import Var
from gshard.capture.simplify.associative import Recursion, scan
from gshard.graph import Graph, at_every_level, live, renamed
from gshard.graph.evaluate import equations_of
from gshard.graph.source import source_of
from gshard.rules.base.primitives import edge_p
from gshard.tensors.annotate import Annotation, annotate_p
from gshard.tensors.sharding import Sharding


@at_every_level
def block_scans(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with scans along split dims in blocks, and without the marks of any."""
    if not any(eqn.primitive is edge_p for eqn in jaxpr.eqns):
        return jaxpr
    scans, eqns = _Scans(Graph.of(jaxpr), shardings, remarks), list[JaxprEqn]()
    same: dict[Any, Any] = {v: Var(v.aval) for v in scans.terms}
    for eqn in jaxpr.eqns:
        if eqn.primitive is not edge_p:
            same |= {v: Var(v.aval) for v in scans.unfinished(eqn)}
            eqns.append(renamed(eqn, same))
        elif eqn.outvars[0] in scans.blocked:
            eqns += [renamed(each, same) for each in scans.blocked[eqn.outvars[0]]]
        else:
            same[eqn.outvars[0]] = same.get(eqn.invars[0], eqn.invars[0])
    results = [a if isinstance(a, Literal) else same.get(a, a) for a in jaxpr.outvars]
    return jaxpr.replace(eqns=live(eqns, results), outvars=results)


class _Scans:
    """The equations of blocked scans and gradients, by the first of the variables they make."""

    def __init__(self, graph: Graph, shardings: Mapping[Any, Sharding], remarks: list[str]):
        self.graph, self.shardings = graph, shardings
        self.blocked: dict[Any, list[JaxprEqn]] = {}
        self.terms: dict[Any, frozenset[Any]] = {}  # the others of a term, or of a sum of some
        self.added: dict[Any, set[Any]] = {}  # the terms of a sum
        groups: dict[Any, dict[Any, list[JaxprEqn]]] = {}  # by what is scanned, and cotangents
        for eqn in graph.eqns:
            if eqn.primitive is edge_p and (recursion := eqn.params["recursion"]):
                count = 1 + len(recursion.axes) + len(recursion.constants)
                entered, more = tuple(eqn.invars[1:count]), tuple(eqn.invars[count:])
                groups.setdefault(entered, {}).setdefault(more, []).append(eqn)
        for entered, marks in groups.items():
            inputs = [graph.makers[v].invars[0] for v in entered]
            scans, gradients = marks.get((), []), [own for more, own in marks.items() if more]
            first, *others = gradients or [[]]
            blocks = self._blocks(_of(scans or first), inputs)
            if blocks is not None:
                rows = inputs[0].aval.shape[blocks.recursion.axes[0]]
                place = f"at {source_of((scans or first)[0])}: an associative scan"
                remarks.append(f"{place} of {rows} rows in {blocks.tiles} blocks")
                self._make(blocks, inputs, scans, first)
                for own in others:
                    self._make(blocks, inputs, [], own)

    def _blocks(self, recursion: Recursion, inputs: Sequence[Any]) -> _Blocks | None:
        """How a scan is divided; None if its dim is not split, or has fewer rows than tiles."""
        axes = recursion.axes
        here = [(self.shardings[v], axis) for v, axis in zip(inputs, axes, strict=False)]
        splits = {s.splits[axis] for s, axis in here}
        split = splits.pop()
        if splits or split is None or split.idle or split.ragged:
            return None
        if inputs[0].aval.shape[axes[0]] < split.tiles:
            return None
        name = "a row of each block"
        notes = [Annotation.of_sharding(name, s.unsplit([axis])) for s, axis in here]
        return _Blocks(recursion, split.tiles, tuple(notes))

    def _make(
        self,
        blocks: _Blocks,
        inputs: Sequence[Any],
        scans: Sequence[JaxprEqn],
        gradients: Sequence[JaxprEqn],
    ) -> None:
        """The equations of marked results of a scan, and of its gradients."""
        wanted = [eqn.params["number"] for eqn in scans]
        results = [eqn.outvars[0] for eqn in scans]
        like = (scans or gradients)[0]
        if not gradients:
            made, _ = equations_of(
                lambda *values: [*map(blocks.scan(values).__getitem__, wanted)],
                inputs,
                results,
                like,
            )
            self.blocked |= {v: [] for v in results} | {results[0]: made}
            return
        chosen = _of(gradients).cotangents
        moved = [n for n, a in enumerate(inputs) if jnp.issubdtype(a.aval.dtype, np.inexact)]
        trees = []

        def forward(*values: Any) -> Any:
            def of_floats(*own: Any) -> Any:
                every = dict(enumerate(values)) | dict(zip(moved, own, strict=True))
                found = blocks.scan(list(every.values()))
                return [found[n] for n in chosen], found

            _, transposed, found = jax.vjp(of_floats, *(values[n] for n in moved), has_aux=True)
            leaves, tree = jax.tree.flatten(transposed)
            trees.append(tree)
            return [found[n] for n in wanted] + leaves

        made, kept = equations_of(forward, inputs, results, like)

        def backward(*values: Any) -> Any:
            count = len(kept) - len(wanted)
            found = jax.tree.unflatten(trees[0], values[:count])(list(values[count:]))
            every = dict(zip(moved, found, strict=True))
            marks = [(eqn.params["number"], eqn.outvars[0].aval) for eqn in gradients]
            return [jnp.zeros(a.shape, a.dtype) if n < 0 else every[n] for n, a in marks]

        cotangents = [
            self.graph.makers[v].invars[0] for v in gradients[0].invars[1 + len(inputs) :]
        ]
        operands, own = [*kept[len(wanted) :], *cotangents], [e.outvars[0] for e in gradients]
        after, _ = equations_of(backward, operands, own, gradients[0])
        for number in {eqn.params["number"] for eqn in gradients}:
            alike = [e.outvars[0] for e in gradients if e.params["number"] in (number, ~number)]
            self.terms |= {v: frozenset(alike) - {v} for v in alike if len(alike) > 1}
        self.blocked |= {v: [] for v in (*results, *own)}
        if results:
            self.blocked |= {results[0]: made, own[0]: after}
        else:
            self.blocked[own[0]] = [*made, *after]

    def unfinished(self, eqn: JaxprEqn) -> list[Any]:
        """A sum whose value is not the user's: the first term of a gradient has the sum of all."""
        parts = [a for a in eqn.invars if not isinstance(a, Literal) and a in self.terms]
        if not parts:
            return []
        left = frozenset[Any]().union(*map(self.terms.__getitem__, parts))
        added = {v for a in parts for v in self.added.get(a, (a,))}
        (result,) = eqn.outvars
        self.added[result] = added
        if left <= added:
            return []
        self.terms[result] = left - added
        return [result]


def _of(marks: Sequence[JaxprEqn]) -> Recursion:
    return marks[0].params["recursion"]


class _Blocks(NamedTuple):
    """A scan in as many blocks as there are tiles, which are gathered as annotations say."""

    recursion: Recursion
    tiles: int
    gathered: tuple[Annotation, ...]

    def scan(self, inputs: Sequence[Any]) -> list[Any]:
        """The results of a scan of elements, with constants behind them."""
        recursion, count = self.recursion, len(self.gathered)
        axes, reverse, tiles = [*recursion.axes], recursion.reverse, self.tiles
        elements, combine = list(inputs[:count]), recursion.combine(inputs[count:])
        notes = list(self.gathered)
        size = elements[0].shape[axes[0]]
        rows = -(-size // tiles)
        blocks = [_cut(x, axis, tiles, rows) for x, axis in zip(elements, axes, strict=True)]
        if reverse and size < tiles * rows:  # rows that are too many come first
            blocks.append(_numbers((tiles, rows), 0, rows) < size)
            combine = _of_present(combine, axes)
            here = notes[0].sharding
            assert here
            every = Sharding.replicated(1, here.num_devices)
            notes.append(Annotation.of_sharding("the blocks that have rows", every))
            axes.append(0)
        by_block = jax.vmap(combine, (axes, axes), axes)
        inside = [axis + 1 for axis in axes]
        local = scan(by_block, blocks, inside, reverse)
        last = 0 if reverse else rows - 1
        totals = [lax.index_in_dim(x, last, a, False) for x, a in zip(local, inside, strict=True)]
        noted = functools.partial(map, _noted)
        scanned = scan(combine, [*noted(totals, notes)], axes, reverse)
        before = noted([_shifted(x, a, reverse) for x, a in zip(scanned, axes, strict=True)], notes)
        wide = [_repeated(x, a, rows) for x, a in zip(before, inside, strict=True)]
        found = []
        for own, joined, axis in zip(local, by_block(wide, local), axes[:count], strict=False):
            block = lax.broadcasted_iota(jnp.int32, own.shape, axis)
            result = lax.select(block == (tiles - 1 if reverse else 0), own, joined)
            shape = (*own.shape[:axis], tiles * rows, *own.shape[axis + 2 :])
            found.append(lax.slice_in_dim(lax.reshape(result, shape), 0, size, axis=axis))
        return found


def _cut(x: jax.Array, axis: int, tiles: int, rows: int) -> jax.Array:
    """In blocks; rows that are too many are the first of their block: as sound as these."""
    more = tiles * rows - x.shape[axis]
    ends = [(0, more if d == axis else 0, 0) for d in range(x.ndim)]
    padded = lax.pad(x, np.zeros((), x.dtype), ends) if more else x
    blocks = lax.reshape(padded, (*x.shape[:axis], tiles, rows, *x.shape[axis + 1 :]))
    if not more:
        return blocks
    first = lax.slice_in_dim(blocks, 0, 1, axis=axis + 1)
    there = _numbers(blocks.shape, axis, rows) < x.shape[axis]
    return lax.select(there, blocks, lax.broadcast_in_dim(first, blocks.shape, range(blocks.ndim)))


def _numbers(shape: Sequence[int], axis: int, rows: int) -> jax.Array:
    """The numbers of rows in blocks."""
    block, row = (lax.broadcasted_iota(jnp.int32, shape, d) for d in (axis, axis + 1))
    return block * rows + row


def _repeated(x: jax.Array, axis: int, rows: int) -> jax.Array:
    shape = (*x.shape[:axis], rows, *x.shape[axis:])
    return lax.broadcast_in_dim(x, shape, [d + (d >= axis) for d in range(x.ndim)])


def _shifted(x: jax.Array, axis: int, reverse: bool) -> jax.Array:
    """Each row one later, or earlier; one of them is left, which nobody reads."""
    size = x.shape[axis]
    kept = slice(1, size) if reverse else slice(0, size - 1)
    rows = lax.slice_in_dim(x, kept.start, kept.stop, axis=axis)
    end = lax.slice_in_dim(x, *((size - 1, size) if reverse else (0, 1)), axis=axis)
    return lax.concatenate([rows, end] if reverse else [end, rows], axis)


def _noted(x: jax.Array, note: Annotation) -> jax.Array:
    return annotate_p.bind(x, annotation=note)


def _of_present(combine: Callable[..., list[Any]], axes: Sequence[int]) -> Callable[..., list[Any]]:
    """The function of rows that exist, as their last element says; others are left out."""

    def combined(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        (*one, here), (*other, there) = before, after
        found = []
        for new, own, axis in zip(combine(one, other), other, axes, strict=False):
            mask = lax.broadcast_in_dim(here, own.shape, (axis,))
            found.append(lax.select(mask, new, own))
        return [*found, lax.bitwise_or(here, there)]

    return combined
