"""Stencils: what is computed from windows of a tensor is computed in the tensor's own tiles.

`u.at[1:-1].add(u[2:] + u[:-2] - 2 * u[1:-1])` reads and writes windows of `u`. Between them are
tensors with two rows less, whose tiles begin elsewhere: each slice would send rows to these tiles,
and the update would send them back. So such tensors are computed with all rows of `u`. A slice is
then a shift, which sends the rows that cross the border of a tile, or nothing at all. The rows that
are too many are garbage; nobody reads them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.capture.simplify.row_maps import Origins, composed
from gshard.graph import Graph, at_every_level, live, replacing
from gshard.graph.row_map import Axis, Layer, constant, entire, through
from gshard.graph.source import source_of
from gshard.rules.base.layers import Layers
from gshard.rules.base.primitives import row_map_p
from gshard.rules.base.rule import RULES, Elementwise
from gshard.tensors.sharding import Sharding, Split

_MOST = 16  # equations on small tensors that may be computed with all rows of large ones


class Home(NamedTuple):
    """Rows of a small tensor are the rows from `first` on, `step` apart, of one of `size` rows."""

    size: int
    first: int
    step: int
    split: Split


Homes = Mapping[int, Home]  # of dims
Group = list[JaxprEqn]  # elementwise equations on tensors of one shape that read each other


@at_every_level
def align_windows(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with tensors between windows as large as what they are windows of."""
    if not any(_is_window(eqn, shardings) for eqn in jaxpr.eqns):
        return jaxpr
    windows = _WindowGroups(Graph(jaxpr.eqns, jaxpr.outvars), shardings)
    for group in windows.groups:
        if homes := windows.homes.get(group[0]):
            sizes = ", ".join(f"{home.size} rows of dim {d}" for d, home in homes.items())
            remarks.append(f"at {source_of(group[-1])}: windows are computed with {sizes}")
    graph = Graph(list(windows.aligned()), jaxpr.outvars)
    large = set(windows.grown.values())

    def near(source: Any, result: Any) -> bool:
        return source in large or (
            result in shardings and shardings.get(source) is shardings[result]
        )

    eqns = composed(graph, near)
    eqns = live(eqns, jaxpr.outvars)
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _is_window(eqn: JaxprEqn, shardings: Mapping[Any, Sharding]) -> bool:
    """Whether an equation makes a tensor with other rows of a split dim."""
    if eqn.primitive not in (p.slice_p, p.pad_p, row_map_p) or isinstance(eqn.invars[0], Literal):
        return False
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    splits = shardings[eqn.invars[0]].splits
    return any(s and n != m for s, n, m in zip(splits, before, after, strict=False))


def _groups(graph: Graph) -> list[Group]:
    found: dict[Any, Group] = {}  # by the variables that are made
    for eqn in graph.eqns:
        if not isinstance(RULES.get(eqn.primitive), Elementwise) or len(eqn.outvars) != 1:
            continue
        (out,), shape = eqn.outvars, eqn.outvars[0].aval.shape
        if eqn.effects or not shape:
            continue
        group = [eqn]
        for a in eqn.invars:
            own = None if isinstance(a, Literal) else found.get(a)
            if own is not None and own is not group and a.aval.shape == shape:
                large, small = (own, group) if len(own) >= len(group) else (group, own)
                large += small
                found.update((e.outvars[0], large) for e in small)
                group = large
        found[out] = group
    return list({id(group): group for group in found.values()}.values())


class _WindowGroups:
    """The groups of a program that are computed in the tiles of what they read and write."""

    def __init__(self, graph: Graph, shardings: Mapping[Any, Sharding]):
        self.graph = graph
        self.shardings = shardings
        self.maps = Origins(graph).maps
        self.groups = [g for g in _groups(graph) if self._reads_windows(g)]
        self.group_of = {e.outvars[0]: g[0] for g in self.groups for e in g}
        self.homes: dict[JaxprEqn, Homes] = {}  # by the first equation of a group
        self.grown: dict[Any, Any] = {}  # the large tensors of small ones
        left, before = list(self.groups), -1
        while len(left) != before:  # a group may depend on others
            before = len(left)
            self.homes = {}
            for group in left:
                if homes := self._homes(group):
                    self.homes[group[0]] = homes
            useful = self._useful(left)
            left = [g for g in left if g[0] in self.homes and g[0] in useful]
        self.homes = {g[0]: self.homes[g[0]] for g in left}

    def _reads_windows(self, group: Group) -> bool:
        shape = group[0].outvars[0].aval.shape
        return any(
            not layer.is_constant and layer.is_aligned and layer.source.aval.shape != shape
            for a in self._inputs(group)
            for layer in self.maps.get(a, ())
        )

    def _inputs(self, group: Group) -> list[Any]:
        """The tensors that a group reads from elsewhere."""
        made = {eqn.outvars[0] for eqn in group}
        shape = group[0].outvars[0].aval.shape
        atoms = (a for eqn in group for a in eqn.invars if not isinstance(a, Literal))
        return list(dict.fromkeys(a for a in atoms if a.aval.shape == shape and a not in made))

    def _written(self, group: Group) -> tuple[list[Layer], list[Any], int]:
        """Where a group's results are windows of others; windows of them; how many other uses."""
        members = {eqn.outvars[0]: eqn for eqn in group}
        placed, cut, other = list[Layer](), list[Any](), 0
        for var in members:
            other += sum(var is result for result in self.graph.results)
            users = [v for e in self.graph.users(var) for v in e.outvars if self.graph.uses(v)]
            for user in users:
                if user in members:
                    continue
                layers = self.maps.get(user, ())
                own = [layer for layer in layers if layer.source is var and layer.is_aligned]
                sizes = var.aval.shape
                if any(layer.axes[d].rows < n for layer in own for d, n in enumerate(sizes)):
                    cut.append(user)
                elif own:
                    placed += own
                else:
                    other += 1
        return placed, cut, other

    def _useful(self, groups: Sequence[Group]) -> set[JaxprEqn]:
        """The groups whose results are written into large tensors, maybe after further windows."""
        useful: set[JaxprEqn] = set()
        for group in reversed(groups):
            placed, cut, _ = self._written(group)
            readers = (e for var in cut for e in self.graph.users(var))
            if placed or any(self.group_of.get(e.outvars[0]) in useful for e in readers):
                useful.add(group[0])
        return useful

    # ------------------------------------------------------------ where a group is computed

    def _homes(self, group: Group) -> Homes:
        """The dims of a group's tensors that take the size of what they are windows of."""
        placed, cut, other = self._written(group)
        read, raw = [], []
        for a in self._inputs(group):
            layers = self.layers(a)
            if layers is None:
                raw.append(a)
            else:
                read += [layer for layer in layers if not layer.is_constant]
        found = {}
        for d, n in enumerate(group[0].outvars[0].aval.shape):
            rows, ends, apart_by = read, placed, _rows_apart(read, placed, d)
            if len(apart_by) > 1:  # as if of each tensor there were only the rows that are read
                rows, ends = ([_thinned(layer, d) for layer in own] for own in (read, placed))
            homes = set()
            for layer, thin in zip(read, rows, strict=True):
                size, split = self._rows_of(layer.source, d)
                homes.add((size * thin.axes[d].stride // layer.axes[d].stride, split))
            if len(homes) != 1:
                continue
            ((size, split),) = homes
            if split is None or size <= n or (2 * n < size and len(group) > _MOST):
                continue
            apart = sum(self.shardings[a].splits[d] is not None for a in raw) + other
            if home := _home(d, n, size, split, rows, ends, apart, bool(cut)):
                found[d] = home
        return found

    def layers(self, a: Any) -> Layers | None:
        """An input's layers in terms of large tensors; None if they are not windows of such."""
        layers = self.maps.get(a)
        if layers is None:
            return None
        found: list[Layer] = []
        for layer in layers:
            homes = self._homes_of(layer.source)
            if homes and not layer.is_constant:
                found += through(layer, [_window(layer.source, layer.source.aval.shape, homes)])
            else:
                found.append(layer)
        return tuple(found) if all(n.is_constant or n.is_aligned for n in found) else None

    def _homes_of(self, var: Any) -> Homes:
        if isinstance(var, Literal):
            return {}
        return self.homes.get(self.group_of.get(var), {})

    def _rows_of(self, source: Any, dim: int) -> tuple[int, Split | None]:
        """How many rows a tensor has, and how they are split."""
        home = self._homes_of(source).get(dim)
        if home:
            return home.size, home.split
        return source.aval.shape[dim], self.shardings[source].splits[dim]

    # ------------------------------------------------------------ the equations

    def aligned(self) -> Iterator[JaxprEqn]:
        """The equations, with those of such groups on large tensors; small ones are cut of them."""
        inputs: dict[tuple[Any, JaxprEqn], Any] = {}  # large tensors for what groups read
        for eqn in self.graph.eqns:
            first = self.group_of.get(eqn.outvars[0]) if eqn.outvars else None
            homes = self.homes.get(first) if first is not None else None
            if first is None or not homes:
                yield eqn
                continue
            operands, (out,) = [], eqn.outvars
            for a in eqn.invars:
                if isinstance(a, Literal) or a.aval.shape != out.aval.shape:
                    operands.append(a)
                elif self.group_of.get(a) is first:
                    operands.append(self.grown[a])
                else:
                    if (a, first) not in inputs:
                        made, inputs[a, first] = self._large(eqn, a, homes)
                        yield from made
                    operands.append(inputs[a, first])
            large = self.grown[out] = Var(out.aval.update(shape=_shape(out, homes)))
            yield eqn.replace(invars=operands, outvars=[large])
            yield from painting(eqn, [_window(large, out.aval.shape, homes)])

    def _large(self, eqn: JaxprEqn, a: Any, homes: Homes) -> tuple[list[JaxprEqn], Any]:
        """A large tensor with the elements of `a` where they belong, and its equations."""
        aval, shape = a.aval, _shape(a, homes)
        result = replacing(eqn, row_map_p, [], Var(aval.update(shape=shape)))
        layers = self.layers(a)
        if layers is None:
            maker = self.graph.maker(a)
            if maker is not None and maker.primitive is p.broadcast_in_dim_p:
                named = maker.params["broadcast_dimensions"]
                if not any(d in named for d in homes):
                    params = maker.params | {"shape": shape}
                    made = maker.replace(params=params, outvars=result.outvars)
                    return [made], made.outvars[0]
            layers = (entire(a, aval.shape),)
        zero = Literal(np.zeros((), aval.dtype), aval.update(shape=(), weak_type=False))
        grown = [constant(zero, shape)]
        for layer in layers:
            moved = layer
            if not layer.is_constant:
                moved = layer.of(self.grown.get(layer.source, layer.source))
            for d, home in homes.items():
                moved = _extended(moved, d, home, aval.shape[d])
            grown += [moved] if moved.size > 0 else []
        whole = grown[-1]
        if not whole.is_constant and whole.is_all(shape) and whole.source.aval.shape == shape:
            return [], whole.source
        return painting(result, grown), result.outvars[0]


def _window(source: Any, shape: Sequence[int], homes: Homes) -> Layer:
    """A small tensor as a window of the large one that `source` is or becomes."""
    layer = entire(source, shape)
    for d, home in homes.items():
        axis = Axis(0, shape[d], d, 1, home.step if shape[d] > 1 else 1)
        layer = layer.along(d, axis, home.first)
    return layer


def _shape(var: Any, homes: Homes) -> tuple[int, ...]:
    return tuple(homes[d].size if d in homes else n for d, n in enumerate(var.aval.shape))


def _extended(layer: Layer, dim: int, home: Home, rows: int) -> Layer:
    """A layer of a small tensor in a large one, with as many rows as there are.

    Only beyond the rows that the small one has: those are garbage.
    """
    axis = layer.axes[dim]
    if home.step > 1 and axis.stride != home.step:  # a small tensor itself
        return layer.along(dim, axis._replace(at=home.first, step=home.step))
    if axis.dim is None:
        low = 0 if axis.at == 0 else max(0, home.first + axis.at)
        high = home.size if axis.end == rows else min(home.size, home.first + axis.end)
        return layer.along(dim, Axis(low, max(high - low, 0)))
    every = axis.stride // home.step  # rows of the source for one of the large tensor
    first = layer.base[dim] - every * (home.first + axis.at * home.step)  # for its row 0
    low = -(first // every) if axis.at == 0 else home.first + axis.at
    high = -((first - layer.source.aval.shape[dim]) // every)
    high = high if axis.end == rows else home.first + axis.end
    low, high = max(low, 0), min(high, home.size)
    return layer.along(dim, Axis(low, max(high - low, 0), dim, 1, every), first + every * low)


# ---------------------------------------------------------------- which rows send the fewest


def _home(
    dim: int,
    rows: int,
    size: int,
    split: Split,
    read: Sequence[Layer],
    placed: Sequence[Layer],
    others: int,
    cut: bool,
) -> Home | None:
    """Where `rows` rows are computed so that the fewest rows are sent; None if as they are.

    They are read from, and placed in, windows of `size` rows; there are `others` that read and
    write the small tensors themselves, and maybe windows that are cut of them.
    """
    axes, steps = [layer.axes[dim] for layer in read], _rows_apart(read, placed, dim)
    step = steps.pop() if steps else 1
    if steps or step < 1 or (step > 1 and any(a.rows < rows for a in axes)):
        return None
    if size < 4 * rows * step < 3 * size:  # halves are no borders
        return None
    starts = {(n.source, n.base[dim] - a.at * step) for n, a in zip(read, axes, strict=True)}
    ends = {n.axes[dim].at for n in placed}

    def moved(first: int) -> int:
        """Rows between tiles of the large tensor and those of its rows from `first` on."""
        if rows < split.tiles:  # the small ones are replicated
            return 2 * rows
        off = split.rows(rows) * step - split.rows(size)
        return max(abs(first), abs(first + (split.tiles - 1) * off)) // step

    def sent(first: int) -> int:
        """Rows that are sent if the small tensors begin at the row `first` of the large ones."""
        shifts = {(source, start - first) for source, start in starts}
        by = sum(abs(by) for _, by in shifts) + sum(abs(at - first) for at in ends)
        return by + others * moved(first)

    last = size - (rows - 1) * step - 1
    options = sorted({o for o in {start for _, start in starts} | ends if 0 <= o <= last})
    if not options:
        return None
    first = min(options, key=sent)
    written = 0 if rows < split.tiles else sum(map(moved, ends))
    usual = sum(moved(start) for _, start in starts) + written
    better = sent(first) < usual or (sent(first) == usual and cut)
    farthest = max([abs(start - first) for _, start in starts], default=0)
    return Home(size, first, step, split) if better and farthest <= split.rows(size) else None


def _rows_apart(read: Sequence[Layer], placed: Sequence[Layer], dim: int) -> set[int]:
    """How far apart the rows are that are read, and those that are written."""
    found = {n.axes[dim].stride for n in read if n.axes[dim].rows > 1}
    return found | {n.axes[dim].step for n in placed if n.axes[dim].rows > 1}


def _thinned(layer: Layer, dim: int) -> Layer:
    """A layer of every so many rows as one of neighbours, between tensors of only those rows."""
    axis = layer.axes[dim]
    if axis.dim is None:
        return layer
    thin = Axis(axis.at // axis.step, axis.rows, axis.dim)
    return layer.along(dim, thin, layer.base[dim] // axis.stride)
