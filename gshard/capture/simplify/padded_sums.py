"""Sums of padded tensors of which windows are read, as sums of the windows.

The gradient of a stencil on `jnp.pad(u, 1, mode="edge")` adds up padded tensors, with two rows more
than `u` has and tiles that begin elsewhere, and then adds the first and the last row of the sum to
others. Row maps are linear: a window of a sum is the sum of the windows of its terms, which are
windows of tensors as large as `u`. Windows of one tensor that do not overlap are one row map.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import painting
from gshard.graph import Graph, filling, replacing
from gshard.graph.row_map import Axis, Layer, by_rows, constant, entire, through
from gshard.rules.base.layers import Layers
from gshard.rules.base.primitives import row_map_p

_SUMS = (p.add_p, p.add_jaxvals_p, p.sub_p)
_MOST = 64  # terms of a sum
_FEW = 4  # rows that are added up


class Term(NamedTuple):
    """Windows of a tensor, in zeros, by which a sum grows; `scales` are applied to them first."""

    source: Any
    scales: tuple[JaxprEqn, ...]  # products with numbers, and negations
    windows: tuple[Layer, ...]


def distributed(graph: Graph, maps: dict[Any, Layers]) -> list[JaxprEqn]:
    """The equations, with windows of sums of padded tensors as sums of windows."""
    found = _Padded(graph, maps)
    if not found.sums:
        return graph.eqns
    needed = {a for a in graph.results if not isinstance(a, Literal)}
    eqns: list[JaxprEqn] = []
    for eqn in reversed(graph.eqns):
        if not eqn.effects and needed.isdisjoint(eqn.outvars):
            continue
        made = found.as_sum(eqn)
        needed |= {a for e in made for a in e.invars if not isinstance(a, Literal)}
        eqns += reversed(made)
    return eqns[::-1]


class _Padded:
    """The sums of padded tensors of a program of which windows are read, and nothing else."""

    def __init__(self, graph: Graph, maps: dict[Any, Layers]):
        self.graph = graph
        self.maps = {v: layers for v, layers in maps.items() if _is_linear(layers)}
        self.sums: set[Any] = set()
        if any(map(_is_padded, self.maps.values())):
            sums = (e for e in graph.eqns if _is_sum(e) or _is_scale(e))
            self.sums = {e.outvars[0] for e in sums if e.outvars[0] not in maps}
        before = -1
        while len(self.sums) != before:  # each depends on what it reads, and on who reads it
            before = len(self.sums)
            for eqn in itertools.chain(graph.eqns, reversed(graph.eqns)):
                if eqn.outvars and eqn.outvars[0] in self.sums and not self._is_one(eqn):
                    self.sums.remove(eqn.outvars[0])
        self.touched = self._touched() if self.sums else set[Any]()

    def _is_one(self, eqn: JaxprEqn) -> bool:
        (out,), scale = eqn.outvars, _is_scale(eqn)
        users = [v for e in self.graph.users(out) for v in e.outvars]
        read = users and not any(out is a for a in self.graph.results)
        if scale and self.graph.uses(out) > 1:  # a tensor that is moved as it is
            return False
        if not read or not all(
            v in self.sums or (v in self.maps and (not scale or self._pads(v, out))) for v in users
        ):
            return False
        if scale:
            return True
        known = all(a in self.sums or a in self.maps for a in eqn.invars)
        return known and any(map(self._is_term, eqn.invars))

    def _is_term(self, atom: Any) -> bool:
        if atom not in self.maps:
            return atom in self.sums
        return _is_padded(self.maps[atom]) or self._source(atom) in self.sums

    def _pads(self, var: Any, source: Any) -> bool:
        """Whether a tensor is another one, padded by less than as much again."""
        return _is_padded(self.maps[var]) and var.aval.size <= 2 * source.aval.size

    def _source(self, var: Any) -> Any:
        """The tensor that one consists of windows of, through all maps between."""
        while var in self.maps:
            (var,) = {n.source for n in self.maps[var] if not n.is_constant}
        return var

    # ------------------------------------------------------------ terms

    def as_sum(self, eqn: JaxprEqn) -> list[JaxprEqn]:
        """An equation, or the sum of windows that it is."""
        if self.touched.isdisjoint(eqn.outvars):
            return [eqn]
        (out,) = eqn.outvars
        found = self._terms(out, [entire(out, out.aval.shape)], (), 0)
        terms = list(itertools.islice(found, _MOST))
        return _added(eqn, _merged(terms)) if len(terms) < _MOST else [eqn]

    def _touched(self) -> set[Any]:
        """The sums, and the tensors that are windows or sums of these."""
        found = set(self.sums)
        for eqn in self.graph.eqns:
            out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            if out in self.maps or _is_sum(eqn):
                operands = [a for a in eqn.invars if not isinstance(a, Literal)]
                mapped = [a for a in operands if out in self.maps or self.graph.uses(a) == 1]
                if not found.isdisjoint(mapped) or not self.sums.isdisjoint(operands):
                    found.add(out)
        return found

    def _terms(
        self, var: Any, windows: Sequence[Layer], scales: tuple[JaxprEqn, ...], depth: int
    ) -> Iterator[Term]:
        """The terms of windows of a tensor."""
        maker = self.graph.maker(var) if depth < _MOST else None
        inside = not depth or var in self.sums or self.graph.uses(var) == 1
        parts: list[tuple[Sequence[Layer], tuple[JaxprEqn, ...]]] = []
        if maker is not None and var in self.maps:
            parts = [([layer for layer in self.maps[var] if not layer.is_constant], scales)]
        elif maker is not None and _is_sum(maker) and inside:
            parts = [([part], scales) for part in _parts(maker)]
            if maker.primitive is p.sub_p:
                negation = replacing(maker, p.neg_p, maker.invars[1:], maker.outvars[0])
                parts[1] = (parts[1][0], (negation, *scales))
        elif maker is not None and var in self.sums:
            (source,) = [a for a in maker.invars if not isinstance(a, Literal)]
            parts = [([entire(source, source.aval.shape)], (maker, *scales))]
        elif windows:
            yield Term(var, scales, tuple(windows))
        for inner, own in parts if windows else ():
            found = [f for w in windows for m in through(w, inner) for f in by_rows(m)]
            yield from self._terms(inner[0].source, found, own, depth + 1)


def _is_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation adds up two tensors, or a few rows, as the gradient of an edge does."""
    if eqn.primitive not in (*_SUMS, p.reduce_sum_p):
        return False
    aval, first = eqn.outvars[0].aval, eqn.invars[0].aval
    if aval.shape == () or not jnp.issubdtype(aval.dtype, jnp.floating):
        return False
    if eqn.primitive is p.reduce_sum_p:
        return 0 < first.size <= _FEW * aval.size
    return not any(isinstance(a, Literal) or a.aval.shape != aval.shape for a in eqn.invars)


def _parts(eqn: JaxprEqn) -> list[Layer]:
    """The windows that a sum adds up: its operands, or the rows of one."""
    if eqn.primitive in _SUMS:
        return [entire(a, a.aval.shape) for a in eqn.invars]
    (source,), gone = eqn.invars, eqn.params["axes"]
    sizes = source.aval.shape
    axes = tuple(Axis(0, n, d) for d, n in enumerate(sizes) if d not in gone)
    rows = itertools.product(*(range(n if d in gone else 1) for d, n in enumerate(sizes)))
    return [Layer(source, base, axes) for base in rows]


def _is_scale(eqn: JaxprEqn) -> bool:
    if eqn.primitive is p.neg_p:
        return eqn.outvars[0].aval.shape != ()
    if eqn.primitive is not p.mul_p or eqn.outvars[0].aval.shape == ():
        return False
    numbers = [a for a in eqn.invars if isinstance(a, Literal)]
    return len(numbers) == 1 and np.ndim(numbers[0].val) == 0 and bool(np.isfinite(numbers[0].val))


def _is_linear(layers: Layers) -> bool:
    """Whether layers are windows of one tensor in zeros, which do not overlap."""
    windows = [layer for layer in layers if not layer.is_constant]
    zeros = all(_is_zero(layer.source) for layer in layers if layer.is_constant)
    if not zeros or not windows or isinstance(windows[0].source, Literal):
        return False
    return all(w.source is windows[0].source for w in windows) and _are_apart(windows)


def _is_zero(source: Any) -> bool:
    """Whether it is the number zero, which is not negative as that of an update is."""
    if not isinstance(source, Literal) or not jnp.issubdtype(source.aval.dtype, jnp.floating):
        return False
    return float(source.val) == 0 and math.copysign(1, float(source.val)) > 0


def _is_padded(layers: Layers) -> bool:
    return any(layer.is_constant for layer in layers)


def _are_apart(windows: Sequence[Layer]) -> bool:
    return all(a.is_apart_from(b) for a, b in itertools.combinations(windows, 2))


def _merged(terms: Sequence[Term]) -> list[Term]:
    """Terms of one tensor, equally scaled, that do not overlap are one."""
    found: list[Term] = []
    for term in terms:
        for n, other in enumerate(found):
            one, same = ([*map(_factor, own.scales)] for own in (other, term))
            if (
                other.source is term.source
                and one == same
                and _are_apart([*other.windows, *term.windows])
            ):
                found[n] = other._replace(windows=(*other.windows, *term.windows))
                break
        else:
            found.append(term)
    return found


def _factor(scale: JaxprEqn) -> float:
    """The number that a scale multiplies by."""
    return next((float(a.val) for a in scale.invars if isinstance(a, Literal)), -1.0)


def _added(eqn: JaxprEqn, terms: Sequence[Term]) -> list[JaxprEqn]:
    """The equations of a sum of terms."""
    (out,), made, parts = eqn.outvars, list[JaxprEqn](), []
    aval = out.aval.update(weak_type=False)
    for term in terms:
        part, (first, *others) = term.source, term.windows
        if others or part.aval.shape != aval.shape or not first.is_all(aval.shape):
            negative = sum(_factor(scale) < 0 for scale in term.scales) % 2
            zero = Literal(np.asarray(-0.0 if negative else 0.0, aval.dtype), aval.update(shape=()))
            part = Var(aval)
            layers = [constant(zero, aval.shape), *term.windows]
            made += painting(replacing(eqn, row_map_p, [], part), layers)
        for scale in term.scales:
            operands = [a if isinstance(a, Literal) else part for a in scale.invars]
            part = Var(aval)
            made.append(scale.replace(invars=operands, outvars=[part]))
        parts.append(part)
    if not parts:  # windows of zeros alone
        return [filling(eqn, Literal(np.zeros((), aval.dtype), aval.update(shape=())), out)]
    total = parts[0]
    for part in parts[1:]:
        made.append(replacing(eqn, p.add_p, [total, part], total := Var(aval)))
    if not made or made[-1].outvars[0] is not total:
        return [eqn]
    return [*made[:-1], made[-1].replace(outvars=[out])]
