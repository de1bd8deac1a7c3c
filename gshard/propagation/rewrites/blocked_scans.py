"""Associative scans along a split dim: every tile by itself, then the results of the tiles before.

A device scans its own rows. The last row of every tile, the combination of all its rows, is sent to
all devices, which scan these few; each combines the row before its tile with all of its own. JAX
differentiates that program: for the gradient one more row of each tile is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from gshard.capture.simplify.recursions import Recursion
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
    scans, same, eqns = _Scans(Graph.of(jaxpr), shardings, remarks), dict[Any, Any](), []
    for eqn in jaxpr.eqns:
        eqn = renamed(eqn, same)
        if eqn.primitive is not edge_p:
            eqns.append(eqn)
        elif eqn.outvars[0] in scans.blocked:
            eqns += scans.blocked[eqn.outvars[0]]
        else:
            same[eqn.outvars[0]] = eqn.invars[0]
    results = [a if isinstance(a, Literal) else same.get(a, a) for a in jaxpr.outvars]
    return jaxpr.replace(eqns=live(eqns, results), outvars=results)


class _Scans:
    """The equations of blocked scans and gradients, by the first of the variables they make."""

    def __init__(self, graph: Graph, shardings: Mapping[Any, Sharding], remarks: list[str]):
        self.graph, self.shardings = graph, shardings
        self.blocked: dict[Any, list[JaxprEqn]] = {}
        groups: dict[tuple[Any, ...], list[JaxprEqn]] = {}  # marks of equal scans and gradients
        for eqn in graph.eqns:
            if eqn.primitive is edge_p and eqn.params["recursion"]:
                groups.setdefault(tuple(eqn.invars[1:]), []).append(eqn)
        scans = {entered: own for entered, own in groups.items() if not _of(own).cotangents}
        for entered, own in scans.items():
            inputs = [graph.makers[v].invars[0] for v in entered]
            blocks = self._blocks(_of(own), inputs)
            if blocks is None:
                continue
            rows = inputs[0].aval.shape[blocks.recursion.axis]
            place = f"at {source_of(own[0])}: an associative scan of {rows} rows"
            remarks.append(f"{place} in {blocks.tiles} blocks")
            count = len(inputs)
            after = [g for key, g in groups.items() if key[:count] == entered and len(key) > count]
            self._make(blocks, inputs, own, after[0] if after else [])
            for gradient in after[1:]:
                self._make(blocks, inputs, [], gradient)

    def _blocks(self, recursion: Recursion, inputs: Sequence[Any]) -> _Blocks | None:
        """How a scan is divided; None if its dim is not split, or has fewer rows than tiles."""
        axis, count = recursion.axis, len(recursion.results)
        here = [self.shardings[v] for v in inputs[:count]]
        splits = {s.splits[axis] for s in here}
        split = splits.pop()
        if splits or split is None or split.idle or split.ragged:
            return None
        tiles = split.tiles
        whole = [Annotation.of_sharding("a row of each block", s.unsplit([axis])) for s in here]
        many = inputs[0].aval.shape[axis] >= tiles
        return _Blocks(recursion, tiles, tuple(whole)) if many else None

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
                lambda *values: [blocks.scan(values)[n] for n in wanted], inputs, results, like
            )
            self.blocked |= dict.fromkeys(results, []) | {results[0]: made}
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
            return [found[moved.index(eqn.params["number"])] for eqn in gradients]

        cotangents = [self.graph.makers[v].invars[0] for v in gradients[0].invars[1 + len(inputs) :]]
        operands, own = [*kept[len(wanted) :], *cotangents], [e.outvars[0] for e in gradients]
        after, _ = equations_of(backward, operands, own, gradients[0])
        self.blocked |= dict.fromkeys((*results, *own), [])
        if results:
            self.blocked |= {results[0]: made, own[0]: after}
        else:
            self.blocked[own[0]] = [*made, *after]


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
        axis, reverse = recursion.axis, recursion.reverse
        elements, combine = list(inputs[:count]), recursion.combine(inputs[count:])
        size = elements[0].shape[axis]
        rows = -(-size // self.tiles)
        more = self.tiles * rows - size
        notes = list(self.gathered)
        if more:
            elements = [_longer(x, axis, more) for x in elements]
        if more and reverse:  # rows that are too many come first
            counted = lax.broadcasted_iota(jnp.int32, (1,) * axis + (size + more,), axis)
            elements.append(counted < size)
            combine, notes = _of_present(combine, axis), [*notes, None]
        by_block = jax.vmap(combine, in_axes=axis, out_axes=axis)
        local = lax.associative_scan(
            by_block, [_cut(x, axis, self.tiles) for x in elements], reverse, axis + 1
        )
        totals = [lax.index_in_dim(x, 0 if reverse else rows - 1, axis + 1, False) for x in local]
        totals = [_noted(x, note) for x, note in zip(totals, notes, strict=True)]
        scanned = lax.associative_scan(combine, totals, reverse, axis)
        before = [
            _noted(_shifted(x, axis, reverse), note) for x, note in zip(scanned, notes, strict=True)
        ]
        wide = [_repeated(x, axis + 1, rows) for x in before]
        first = self.tiles - 1 if reverse else 0
        found = []
        for own, joined in zip(local[:count], by_block(wide, local)[:count], strict=True):
            block = lax.broadcasted_iota(jnp.int32, own.shape, axis)
            result = lax.select(block == first, own, joined)
            shape = (*own.shape[:axis], self.tiles * rows, *own.shape[axis + 2 :])
            found.append(lax.slice_in_dim(lax.reshape(result, shape), 0, size, axis=axis))
        return found


def _cut(x: jax.Array, axis: int, tiles: int) -> jax.Array:
    shape = (*x.shape[:axis], tiles, x.shape[axis] // tiles, *x.shape[axis + 1 :])
    return lax.reshape(x, shape)


def _longer(x: jax.Array, axis: int, more: int) -> jax.Array:
    """With further rows that are those before them: combined, they are as sound as these."""
    size = x.shape[axis]
    last = lax.slice_in_dim(x, size - 1, size, axis=axis)
    shape = (*x.shape[:axis], more, *x.shape[axis + 1 :])
    return lax.concatenate([x, lax.broadcast_in_dim(last, shape, range(x.ndim))], axis)


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


def _noted(x: jax.Array, note: Annotation | None) -> jax.Array:
    return x if note is None else annotate_p.bind(x, annotation=note)


def _of_present(combine: Callable[..., list[Any]], axis: int) -> Callable[..., list[Any]]:
    """Of rows that are there, and say so in their last element, and others, which are left out."""

    def combined(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        (*one, here), (*other, there) = before, after
        found = []
        for new, own in zip(combine(one, other), other, strict=True):
            mask = lax.reshape(here, (here.shape[axis],))
            mask = lax.broadcast_in_dim(mask, own.shape, (axis,))
            found.append(lax.select(mask, new, own))
        return [*found, lax.bitwise_or(here, there)]

    return combined
