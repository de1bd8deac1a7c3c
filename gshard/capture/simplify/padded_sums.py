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
from gshard.graph.row_map import Layer, by_rows, constant, entire, through
from gshard.rules.base.layers import Layers
from gshard.rules.base.primitives import row_map_p

_SUMS = (p.add_p, p.add_jaxvals_p, p.sub_p)
_MOST = 64  # terms of a sum


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
        self.depths = self._depths() if self.sums else {}

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
        return scale or all(map(self._is_term, eqn.invars))

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
        if len(eqn.outvars) != 1 or not 0 < self.depths.get(out := eqn.outvars[0], 0) < _MOST:
            return [eqn]
        found = self._terms(out, [entire(out, out.aval.shape)], (), True)
        terms = list(itertools.islice(found, _MOST))
        return _added(eqn, _merged(terms)) if len(terms) < _MOST else [eqn]

    def _depths(self) -> dict[Any, int]:
        """The operators between tensors and those of the sums that they are windows or sums of."""
        found: dict[Any, int] = {}
        for eqn in self.graph.eqns:
            if len(eqn.outvars) != 1:
                continue
            (out,) = eqn.outvars
            operands: list[Any] = []
            if out in self.maps:
                operands = [layer.source for layer in self.maps[out] if not layer.is_constant]
            elif out in self.sums or _is_sum(eqn):
                operands = [a for a in eqn.invars if not isinstance(a, Literal)]
                operands = [a for a in operands if a in self.sums or self.graph.uses(a) == 1]
            depth = max([found.get(a, 0) for a in operands], default=0)
            if depth or out in self.sums:
                found[out] = depth + 1
        return found

    def _terms(
        self, var: Any, windows: Sequence[Layer], scales: tuple[JaxprEqn, ...], top: bool = False
    ) -> Iterator[Term]:
        """The terms of windows of a tensor."""
        maker = self.graph.maker(var)
        if not windows:
            return
        inside = top or var in self.sums or (maker is not None and self.graph.uses(var) == 1)
        if maker is not None and var in self.maps:
            inner = [layer for layer in self.maps[var] if not layer.is_constant]
            found = [f for w in windows for m in through(w, inner) for f in by_rows(m)]
            yield from self._terms(inner[0].source, found, scales)
        elif maker is not None and _is_sum(maker) and inside:
            first, second = maker.invars
            negation = replacing(maker, p.neg_p, maker.invars[1:], maker.outvars[0])
            turned = (negation, *scales) if maker.primitive is p.sub_p else scales
            for a, own in ((first, scales), (second, turned)):
                yield from self._terms(a, [w.of(a) for w in windows], own)
        elif maker is not None and var in self.sums:  # scaled
            (source,) = [a for a in maker.invars if not isinstance(a, Literal)]
            yield from self._terms(source, [w.of(source) for w in windows], (maker, *scales))
        else:
            yield Term(var, scales, tuple(windows))


def _is_sum(eqn: JaxprEqn) -> bool:
    floats = eqn.primitive in _SUMS and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    shape = eqn.outvars[0].aval.shape if floats else ()
    tensors = all(not isinstance(a, Literal) and a.aval.shape == shape for a in eqn.invars)
    return floats and shape != () and tensors


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
            alike = other.source is term.source and _names(other) == _names(term)
            if alike and _are_apart([*other.windows, *term.windows]):
                found[n] = other._replace(windows=(*other.windows, *term.windows))
                break
        else:
            found.append(term)
    return found


def _names(term: Term) -> list[Any]:
    """What the scales of a term are."""
    numbers = [[float(a.val) for a in e.invars if isinstance(a, Literal)] for e in term.scales]
    return [(e.primitive, *n) for e, n in zip(term.scales, numbers, strict=True)]


def _added(eqn: JaxprEqn, terms: Sequence[Term]) -> list[JaxprEqn]:
    """The equations of a sum of terms."""
    (out,), made, parts = eqn.outvars, list[JaxprEqn](), []
    aval = out.aval.update(weak_type=False)
    for term in terms:
        part, (first, *others) = term.source, term.windows
        if others or part.aval.shape != aval.shape or not first.is_all(aval.shape):
            negative = sum(e.primitive is p.neg_p or _number(e) < 0 for e in term.scales) % 2
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


def _number(eqn: JaxprEqn) -> float:
    return next(float(a.val) for a in eqn.invars if isinstance(a, Literal))
