"""Sums with shifted tensors, of which every other row goes to the next: shifted once, at the end.

The gradient of `lax.associative_scan` adds, on each level of its recursion, a product that belongs
to the row before, and passes every other row of the sum on to the next level. Where a tile ends,
the product is the next tile's: a row would be sent on every level. The rows that stay and those
that are passed on are computed apart: for the former the shift is local. For the latter, products
of all levels are added up where they are, and shifted on the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.capture.simplify.row_maps import Origins
from gshard.graph import Graph, renamed, replacing
from gshard.graph.row_map import Axis, Layer, constant, entire
from gshard.rules.base.primitives import row_map_p
from gshard.tensors.sharding import Sharding

_SUMS = (p.add_p, p.add_jaxvals_p)


class _Sum(NamedTuple):
    """A tensor and another, of as many rows, that is shifted back by `by` rows along a dim."""

    plain: Any
    shifted: Any
    dim: int
    by: int


def shifted_once(
    eqns: Sequence[JaxprEqn], results: Sequence[Any], shardings: Mapping[Any, Sharding]
) -> list[JaxprEqn]:
    """The equations, with such sums computed in halves."""
    shifted = {eqn.outvars[0] for eqn in eqns if eqn.primitive in (row_map_p, p.pad_p)}
    sums = (eqn for eqn in eqns if eqn.primitive in _SUMS and eqn.outvars[0] in shardings)
    if not any(not isinstance(a, Literal) and a in shifted for eqn in sums for a in eqn.invars):
        return list(eqns)
    return list(_Halves(Graph(eqns, results), shardings).eqns())


class _Halves:
    """A program with the even and the odd rows of such sums as tensors of their own."""

    def __init__(self, graph: Graph, shardings: Mapping[Any, Sharding]):
        self.graph, self.shardings = graph, shardings
        self.maps = Origins(graph).maps
        self.halves: dict[Any, tuple[int, list[Any]]] = {}  # of sums: the dim, and both
        self.sums: dict[Any, _Sum] = {}  # of halves that are passed on
        self.same: dict[Any, Any] = {}  # halves, by tensors that equal them

    def eqns(self) -> Iterator[JaxprEqn]:
        """The equations; nobody reads the sums themselves any more."""
        for eqn in self.graph.eqns:
            eqn = renamed(eqn, self.same) if self.same else eqn
            out: Any = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            read = [a for a in eqn.invars if not isinstance(a, Literal) and a in self.halves]
            if read and out in self.maps:
                layers = [self._of_half(layer) for layer in self.maps[out]]
                if len(layers) == 1 and layers[0].is_all(out.aval.shape):
                    self.same[out] = layers[0].source
                else:
                    yield from painting(eqn, layers)
                continue
            found = self._sum(eqn)
            before = self.sums.get(found.plain) if found else None
            if found and before and before[2:] == found[2:]:  # shifted together
                total, moved = Var(out.aval), Var(out.aval)
                yield replacing(eqn, p.add_p, [before.shifted, found.shifted], total)
                found = found._replace(plain=before.plain, shifted=total)
                yield from self._shifted(eqn, total, found.dim, found.by, moved)
                eqn = eqn.replace(invars=[found.plain, moved])
            if found and self._is_read_in_halves(out, found.dim):
                yield from self._halved(eqn, found)
            yield eqn

    def _now(self, var: Any) -> Any:
        return self.same.get(var, var)

    def _of_half(self, layer: Layer) -> Layer:
        if layer.is_constant or layer.source not in self.halves:
            return layer if layer.is_constant else layer.of(self._now(layer.source))
        dim, halves = self.halves[layer.source]
        axis, first = layer.axes[dim], layer.base[dim]
        stride = axis.stride // 2 if axis.rows > 1 else 1
        return layer.of(halves[first % 2]).along(dim, axis._replace(stride=stride), first // 2)

    def _sum(self, eqn: JaxprEqn) -> _Sum | None:
        """The sum with a shifted tensor that an equation is, along a split dim."""
        here = self.shardings.get(eqn.outvars[0]) if eqn.primitive in _SUMS else None
        if here is None or any(isinstance(a, Literal) for a in eqn.invars):
            return None
        plain, other = eqn.invars
        found = (self._shift(other, d) for d, split in enumerate(here.splits) if split)
        return next((_Sum(plain, *shift) for shift in found if shift), None)

    def _is_read_in_halves(self, out: Any, dim: int) -> bool:
        """Whether each reader of a tensor reads every other row, of at least two a tile."""
        tiles, users = self.shardings[out].tiles[dim], self.graph.users(out)
        if out.aval.shape[dim] % (2 * tiles) or any(out is a for a in self.graph.results):
            return False
        return all(self._reads_half(v, out, dim) for e in users for v in e.outvars)

    def _shift(self, var: Any, dim: int) -> tuple[Any, int, int] | None:
        """The tensor that another one is, shifted back along a dim, with zeros behind it."""
        windows = [n for n in self.maps.get(var, ()) if not n.is_constant]
        if len(windows) != 1 or not windows[0].is_aligned:
            return None
        (layer,), zeros = windows, [n.source for n in self.maps[var] if n.is_constant]
        if not all(isinstance(z, Literal) and z.val == 0 for z in zeros):
            return None
        by, rows = layer.base[dim], var.aval.shape[dim]
        there = entire(layer.source, var.aval.shape).along(dim, Axis(0, rows - by, dim), by)
        alike = layer.source.aval.shape == var.aval.shape
        return (self._now(layer.source), dim, by) if alike and by > 0 and layer == there else None

    def _reads_half(self, var: Any, source: Any, dim: int) -> bool:
        own = [n for n in self.maps.get(var, ()) if n.source is source]
        even = (n.axes[dim].rows == 1 or n.axes[dim].stride % 2 == 0 for n in own)
        return bool(own) and all(n.is_aligned for n in own) and all(even)

    def _halved(self, eqn: JaxprEqn, found: _Sum) -> Iterator[JaxprEqn]:
        """The equations of both halves."""
        (out,), dim = eqn.outvars, found.dim
        shape = tuple(n // 2 if d == dim else n for d, n in enumerate(out.aval.shape))
        aval, halves = out.aval.update(shape=shape), list[Any]()
        for number in range(2):
            plain, thin, half = Var(aval), Var(aval), Var(aval)
            yield from self._every_other(eqn, found.plain, dim, number, plain)
            yield from self._every_other(eqn, found.shifted, dim, (number + found.by) % 2, thin)
            by, moved = (number + found.by) // 2, thin
            if by:
                moved = Var(aval)
                yield from self._shifted(eqn, thin, dim, by, moved)
                self.sums[half] = _Sum(plain, thin, dim, by)
            yield replacing(eqn, p.add_p, [plain, moved], half)
            halves.append(half)
        self.halves[out] = dim, halves

    def _every_other(
        self, eqn: JaxprEqn, var: Any, dim: int, first: int, result: Any
    ) -> Iterator[JaxprEqn]:
        shape = result.aval.shape
        layer = entire(var, shape).along(dim, Axis(0, shape[dim], dim, 1, 2), first)
        yield from painting(replacing(eqn, row_map_p, [], result), [layer])

    def _shifted(
        self, eqn: JaxprEqn, var: Any, dim: int, by: int, result: Any
    ) -> Iterator[JaxprEqn]:
        shape, aval = result.aval.shape, result.aval.update(shape=(), weak_type=False)
        axis, zero = Axis(0, shape[dim] - by, dim), Literal(np.zeros((), aval.dtype), aval)
        layers = [constant(zero, shape), entire(var, shape).along(dim, axis, by)]
        yield from painting(replacing(eqn, row_map_p, [], result), layers)
