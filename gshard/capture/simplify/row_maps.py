"""Row maps composed into one operator.

Slices, pads, reversals, concatenations, updates of known windows, sums of disjoint padded tensors:
each paints its result with windows of its operands (`graph.row_map`), and so does any composition
of them. A roll is two slices concatenated; separately, each slice would be redistributed over all
devices. As one operator (`row_map`), only the rows that cross from one tile to the next are sent.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Primitive
from jax.extend.core import primitives as p

from gshard._jax import Var, split_p, stack_p, tile_p
from gshard.capture.simplify import known_windows
from gshard.capture.simplify.moved_first import moved_first
from gshard.capture.simplify.painting import painting, reshaped, turned, viewed
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph, filling, live, renamed, replacing
from gshard.graph.row_map import Axis, Layer, by_rows, entire, through, visible
from gshard.rules.base.layers import ROW_MAPS, Layers, layers_of
from gshard.rules.base.primitives import row_map_p

Near = Callable[[Layer, Any], bool]


def composed(graph: Graph, near: Near | None = None) -> list[JaxprEqn]:
    """The equations with compositions of row maps merged.

    What only other compositions read is not composed itself: in a chain of updates, the last is.
    A tensor of which little is used is sliced before it is moved, unless it is `near` the result.
    """
    if not any(eqn.primitive in _REWRITTEN for eqn in graph.eqns):
        return graph.eqns
    eqns = list(_plain(known_windows.without_updates(graph), graph))
    if eqns != graph.eqns:
        graph = Graph(live(eqns, graph.results), graph.results, graph.known)
    origins = Origins(graph, near)
    needed = {a for a in graph.results if not isinstance(a, Literal)}
    found: list[JaxprEqn] = []
    for eqn in reversed(graph.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            is_sum = eqn.primitive is p.reduce_sum_p
            made = _rows_added(eqn, graph, origins) if is_sum else _composed(eqn, origins)
            needed |= {a for e in made for a in e.invars if not isinstance(a, Literal)}
            found += reversed(made)
    return moved_first(Graph(_once(found[::-1], graph.results), graph.results))


def _once(eqns: Sequence[JaxprEqn], results: Sequence[Any]) -> list[JaxprEqn]:
    """The equations with equal slices, and reshapes, as one: what is read twice is sent once."""
    same, first, found = dict[Any, Any](), dict[Any, Any](), list[JaxprEqn]()
    for eqn in eqns:
        eqn = renamed(eqn, same) if same else eqn
        (out, *_), source = eqn.outvars or [None], eqn.invars[:1]
        if eqn.primitive in (p.slice_p, p.reshape_p) and out not in results:
            key = (eqn.primitive, id(source[0]), *eqn.params.values())
            same[out] = first.setdefault(key, out)
            if same[out] is not out:
                continue
        found.append(eqn)
    return found


compose_row_maps = in_every_body(composed)
compose_row_maps.__name__ = "compose_row_maps"


def _plain(eqns: Sequence[JaxprEqn], graph: Graph) -> Iterator[JaxprEqn]:
    """Splits as slices, without slices and pads that change nothing."""
    same, zeros = dict[Any, Any](), set[Any]()
    for eqn in eqns:
        eqn = renamed(eqn, same) if same else eqn
        if eqn.primitive is split_p and (len(eqn.outvars) > 1 or eqn.outvars[0] in graph.results):
            yield from _slices(eqn)
            continue
        if eqn.primitive in _INDEXED:
            yield from known_windows.batched(eqn, graph)
            continue
        if eqn.primitive is p.reduce_sum_p:
            (source,), aval = eqn.invars, eqn.outvars[0].aval
            if source.aval.size == aval.size:  # of a gradient of a broadcast
                eqn = reshaped(eqn, source, eqn.outvars[0])
            elif not source.aval.size:  # of an empty slice
                zero = Literal(np.zeros((), aval.dtype), aval.update(shape=(), weak_type=False))
                eqn = filling(eqn, zero, eqn.outvars[0])
        if eqn.primitive in (p.slice_p, p.pad_p, split_p):
            (out,), source = eqn.outvars, eqn.invars[0]
            widths = [c for around in eqn.params.get("padding_config", ()) for c in around]
            if not any(widths) and out.aval == source.aval and out not in graph.results:
                same[out] = source
                continue
            if not source.aval.size and graph.fill(eqn.invars[-1]) == 0:
                zeros.add(out)
        if eqn.primitive is p.add_jaxvals_p and zeros and eqn.outvars[0] not in graph.results:
            kept = [a for a in eqn.invars if isinstance(a, Literal) or a not in zeros]
            if len(kept) == 1:  # the others are of a roll by no rows
                same[eqn.outvars[0]] = kept[0]
                continue
        yield eqn


def _slices(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The parts of a split."""
    (source,), at, dim = eqn.invars, 0, eqn.params["axis"]
    for out, rows in zip(eqn.outvars, map(int, eqn.params["sizes"]), strict=True):
        part = entire(source, out.aval.shape).along(dim, Axis(0, rows, dim), at)
        yield from painting(eqn.replace(outvars=[out]), [part])
        at += rows


def _composed(eqn: JaxprEqn, origins: Origins) -> list[JaxprEqn]:
    layers = origins.maps.get(eqn.outvars[0]) if len(eqn.outvars) == 1 else None
    if layers is None or eqn.primitive in _VIEWS:
        return [eqn]
    resolved = origins.resolved(layers, eqn.outvars[0])
    if eqn.primitive in _MOVING:
        same = resolved == layers or layers[0].is_all(layers[0].source.aval.shape)
        near = origins.are_near(resolved, eqn.outvars[0])
        return painting(eqn, resolved) if near and not same else [eqn]
    plain = eqn.primitive is row_map_p or (
        eqn.primitive is p.concatenate_p and len(layers) == len({*eqn.invars})  # none is empty
    )
    return [eqn] if resolved == layers and plain else painting(eqn, resolved)


def _rows_added(eqn: JaxprEqn, graph: Graph, origins: Origins) -> list[JaxprEqn]:
    """A sum of a few rows of a tensor that others consist of, as in the gradient of an edge.

    It is computed by element of slices that have the tensor's dims: in the tile with these rows.
    """
    (out,), gone = eqn.outvars, eqn.params["axes"]
    layers = origins.known.get(eqn.invars[0], ()) if gone else ()
    users = [v for e in graph.users(out) for v in e.outvars]
    read = len(layers) == 1 and users and all(v in origins.maps for v in users)
    if not read or layers[0].is_constant or not viewed(layers[0]):
        return [eqn]
    (layer,), sizes = layers, layers[0].source.aval.shape
    added = [axis for d, axis in enumerate(layer.axes) if d in gone and axis.rows > 1]
    if len(added) != 1 or any(axis.stride != 1 for axis in layer.axes):
        return [eqn]
    dim, number = added[0].dim, added[0].rows
    if number > min(_FEW, sizes[dim] // 4):
        return [eqn]
    kept = {axis.dim: axis.rows for axis in layer.axes} | {dim: 1}
    aval = layer.source.aval.update(shape=tuple(kept.get(d, 1) for d in range(len(sizes))))
    rows, made = [Var(aval) for _ in range(number)], list[JaxprEqn]()
    for k, row in enumerate(rows):
        base = tuple(n + k * (d == dim) for d, n in enumerate(layer.base))
        part = Layer(layer.source, base, entire(layer.source, aval.shape).axes)
        made += painting(eqn.replace(outvars=[row]), [part])
    total, *others = rows
    for row in others:
        made.append(replacing(eqn, p.add_p, [total, row], total := Var(aval)))
    return [*made, reshaped(eqn, total, out)]


_FEW = 4  # rows that are added up


class Origins:
    """The tensors that elements of a program come from, through all row maps between."""

    def __init__(self, graph: Graph, near: Near | None = None):
        self.near = near or (lambda layer, result: False)
        self.maps: dict[Any, Layers] = {}
        self.known: dict[Any, Layers] = {}
        for eqn in graph.eqns:  # in order: a long chain is no deep recursion
            of = _MAPS.get(eqn.primitive)
            for var in eqn.outvars if of else ():
                layers = of(eqn, var, graph, self.maps) if of and var.aval.size else None
                if layers is not None:
                    self.maps[var] = layers
                    self.known[var] = self._known(eqn, layers)

    def _known(self, eqn: JaxprEqn, layers: Layers) -> Layers:
        """The layers in terms of tensors that are not row maps."""
        if not any(not n.is_constant and n.source in self.known for n in layers):
            return layers
        first, below = layers[0], () if layers[0].is_constant else self.known.get(layers[0].source)
        if below and len(below) <= _MOST and first.is_all(first.source.aval.shape):
            above = (n for layer in layers[1:] for n in self.of_layer(layer, self.known))
            return visible(above, below)  # as in an update
        return visible(found for layer in layers for found in self.of_layer(layer, self.known))

    def resolved(self, layers: Layers, result: Any) -> Layers:
        """Layers in terms of their sources' origins, where most of each origin is used.

        A tensor of which little is used is better sliced first: less is sent. Then the tensors
        between take the place of the origin, as far as most of each is used.
        """
        far = self._in_terms_of(self.known, layers, result)
        near = self._in_terms_of(self.maps, far, result)
        return far if near == far else self.resolved(near, result)

    def _in_terms_of(self, maps: dict[Any, Layers], layers: Layers, result: Any) -> Layers:
        origins = [tuple(self.of_layer(layer, maps)) for layer in layers]
        used: dict[Any, int] = {}
        for layer in visible(found for own in origins for found in own):
            if not layer.is_constant:
                used[layer.source] = used.get(layer.source, 0) + layer.size
        resolved: list[Layer] = []
        for layer, found in zip(layers, origins, strict=True):
            mostly = all(
                r.is_constant
                or 2 * used.get(r.source, 0) >= r.source.aval.size
                or self.near(r, result)
                for r in found
            )
            # A source with other dims than the result is not split as that is.
            painted = mostly and all(
                r.is_constant or r.is_aligned or viewed(turned(r, {})) for r in found
            )
            resolved += found if painted else [layer]
        return visible(resolved)

    def are_near(self, layers: Layers, result: Any) -> bool:
        """Whether a result is painted with tensors near it alone."""
        own = [layer for layer in layers if not layer.is_constant]
        return bool(own) and all(self.near(layer, result) for layer in own)

    def of_layer(self, layer: Layer, maps: dict[Any, Layers]) -> Iterator[Layer]:
        """A layer as layers of what `maps` has for its source."""
        inner = None if isinstance(layer.source, Literal) else maps.get(layer.source)
        if inner is None or len(inner) > _MOST:
            yield layer
        elif layer.is_all(layer.source.aval.shape):
            yield from inner
        else:
            for found in through(layer, inner):
                yield from by_rows(found)


_MOST = 512  # layers of one map


# ---------------------------------------------------------------- row maps of equations

Maps = dict[Any, Layers]


def _of_reshape(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    """A reshape that adds or removes dims of size 1."""
    source, shape = eqn.invars[0].aval.shape, result.aval.shape
    left = [d for d, n in enumerate(source) if n != 1]
    if [source[d] for d in left] != [n for n in shape if n != 1]:
        return None
    dims = iter(left)
    axes = tuple(Axis(0, n, next(dims)) if n != 1 else Axis(0, 1) for n in shape)
    return tuple(by_rows(Layer(eqn.invars[0], (0,) * len(source), axes)))


def _of_transpose(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    turned = zip(eqn.params["permutation"], result.aval.shape, strict=True)
    return (Layer(eqn.invars[0], (0,) * result.aval.ndim, tuple(Axis(0, n, d) for d, n in turned)),)


def _of_stack(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    at, layers = eqn.params["axis"], list[Layer]()
    for number, a in enumerate(eqn.invars):
        axes = [Axis(0, n, d) for d, n in enumerate(a.aval.shape)]
        layers.append(Layer(a, (0,) * len(axes), (*axes[:at], Axis(number, 1), *axes[at:])))
    return tuple(layers)


def _of_broadcast(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    source, shape = eqn.invars[0], result.aval.shape
    if len(eqn.invars) > 1:
        return None
    named = {
        to: d
        for d, to in enumerate(eqn.params["broadcast_dimensions"])
        if source.aval.shape[d] == shape[to]
    }
    axes = tuple(Axis(0, n, named.get(d)) for d, n in enumerate(shape))
    return (Layer(source, (0,) * len(source.aval.shape), axes),)


def _of_copies(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    """A tensor several times over, if they are few."""
    (source,), reps = eqn.invars, eqn.params["reps"]
    shape = source.aval.shape
    if not 0 < math.prod(reps) <= _COPIES or not source.aval.size:
        return None
    layers = [entire(source, shape)]
    for d, number in enumerate(reps):
        places = [Axis(k * shape[d], shape[d], d) for k in range(number)]
        layers = [layer.along(d, axis) for layer in layers for axis in places]
    return tuple(layers)


_COPIES = 64  # windows of one map


def _of_update(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    """A scatter that sets windows at known places."""
    operand = eqn.invars[0]
    if eqn.params["update_jaxpr"] is not None:  # the update is combined with the old value
        return None
    layers = known_windows.scattered(eqn, graph) or ()
    if not layers or not all(a.is_apart_from(b) for a, b in itertools.combinations(layers, 2)):
        return None
    return visible([entire(operand, operand.aval.shape), *layers])


def _of_window(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    """An update, or a slice, that is dynamic in name: its first rows are known."""
    updates = eqn.primitive is p.dynamic_update_slice_p
    operand, *rest = eqn.invars
    window, starts = (rest[0], rest[1:]) if updates else (eqn.outvars[0], rest)
    numbers = (known_windows.known_numbers(a, graph) for a in starts)
    known = [int(number) for number in numbers if number is not None]
    if len(known) < len(starts):
        return None
    sizes = zip(known, operand.aval.shape, window.aval.shape, strict=True)
    base = tuple(min(max(n, 0), have - rows) for n, have, rows in sizes)
    if not updates:
        return (Layer(operand, base, entire(operand, window.aval.shape).axes),)
    axes = tuple(
        Axis(at, n, d) for d, (at, n) in enumerate(zip(base, window.aval.shape, strict=True))
    )
    return visible([entire(operand, operand.aval.shape), Layer(window, (0,) * len(base), axes)])


def _of_sum(eqn: JaxprEqn, result: Any, graph: Graph, maps: Maps) -> Layers | None:
    """The sum of zero-padded tensors that do not overlap.

    JAX's gradient of a roll, and of rows that are taken one by one.
    """
    if any(isinstance(a, Literal) for a in eqn.invars):
        return None
    one, other = (maps.get(a, ()) for a in eqn.invars)
    if not (_is_padded(one) and _is_padded(other)):
        return None
    apart = all(a.is_apart_from(b) for a in one[1:] for b in other[1:])
    return (*one, *other[1:]) if apart and len(one) + len(other) <= _MOST else None


def _is_padded(layers: Layers) -> bool:
    """Whether layers are windows in a tensor of zeros."""
    if len(layers) < 2 or not layers[0].is_constant or not isinstance(layers[0].source, Literal):
        return False
    return bool(layers[0].source.val == 0) and not any(a.is_constant for a in layers[1:])


# Finds the layers of a result of an equation, given those of the equations before.
_MAPS: dict[Primitive, Callable[[JaxprEqn, Any, Graph, Maps], Layers | None]] = {
    **dict.fromkeys(ROW_MAPS, lambda e, *_: tuple(n.of(e.invars[n.source]) for n in layers_of(e))),
    p.reshape_p: _of_reshape,
    p.squeeze_p: _of_reshape,
    p.broadcast_in_dim_p: _of_broadcast,
    p.transpose_p: _of_transpose,
    stack_p: _of_stack,
    tile_p: _of_copies,
    p.gather_p: lambda e, result, graph, maps: known_windows.gathered(e, graph),
    p.scatter_p: _of_update,
    p.dynamic_slice_p: _of_window,
    p.dynamic_update_slice_p: _of_window,
    p.add_p: _of_sum,
    p.add_jaxvals_p: _of_sum,
}
_REWRITTEN = {*_MAPS, *known_windows.COMBINING, split_p}
_INDEXED = (p.gather_p, p.scatter_p, *known_windows.COMBINING)
_MOVING = (p.slice_p, p.pad_p, p.rev_p)
_VIEWS = (p.reshape_p, p.squeeze_p, p.broadcast_in_dim_p, p.transpose_p, stack_p)
