"""Associative scans: the recursion of `lax.associative_scan` and its gradient, found and marked.

JAX has no operator for them: a program has the slices, products and sums of all levels. Rows of
neighbours are combined in pairs, whatever tiles they are in. The function that combines them is
read off two levels. JAX's own recursion, and its gradient, are then made of that function and
compared with the program, equation by equation. Where all are found, and nobody else reads what is
between, the tensors that enter and leave are marked: `propagation.rewrites.blocked_scans` computes
those that are left from those that enter, in the tiles of a split dim.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import LOOPS, Graph, in_order, renamed, replacing
from gshard.graph.evaluate import bind
from gshard.graph.regions import with_calls_inlined
from gshard.rules.base.primitives import edge_p

_MOST = 32  # choices of cotangents that are tried
_DEPTH = 64  # operators, one after the other, that combine rows


@dataclass(frozen=True)
class Recursion:
    """A scan along `axis`, by equations that combine rows `before` with rows `after` them.

    `sizes` are the places in parameters of equations that are numbers of rows. Where a gradient is
    marked, `cotangents` are the numbers of the results whose cotangents it is made of. Recursions
    with the same text are equal: layers that are alike stay alike.
    """

    text: str
    axis: int
    reverse: bool
    cotangents: tuple[int, ...]
    eqns: tuple[JaxprEqn, ...] = field(compare=False, repr=False)
    sizes: Mapping[JaxprEqn, Mapping[str, Sequence[int]]] = field(compare=False, repr=False)
    before: tuple[Any, ...] = field(compare=False, repr=False)
    after: tuple[Any, ...] = field(compare=False, repr=False)
    constants: tuple[Any, ...] = field(compare=False, repr=False)
    results: tuple[Any, ...] = field(compare=False, repr=False)

    def combine(self, constants: Sequence[Any]) -> Callable[..., list[Any]]:
        """The function of any number of rows."""

        def combined(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
            names = (*self.before, *self.after, *self.constants)
            known = dict(zip(names, (*before, *after, *constants), strict=True))
            rows = before[0].shape[self.axis]
            for eqn in self.eqns:
                changed = {k: list(eqn.params[k]) for k in self.sizes[eqn]}
                for name, places in self.sizes[eqn].items():
                    for place in places:
                        changed[name][place] = rows
                values = [a.val if isinstance(a, Literal) else known[a] for a in eqn.invars]
                new = bind(eqn, values, **{k: tuple(v) for k, v in changed.items()})
                known.update(zip(eqn.outvars, new, strict=True))
            return [known[v] for v in self.results]

        return combined

    def scan(self, elements: Sequence[Any], constants: Sequence[Any]) -> list[Any]:
        """As JAX computes it."""
        combine = self.combine(constants)
        return lax.associative_scan(combine, list(elements), self.reverse, self.axis)


@in_every_body
def mark_recursions(graph: Graph) -> list[JaxprEqn]:
    """The equations, with marks where tensors enter and leave an associative scan."""
    runs = [list(own) for _, own in itertools.groupby(_odd_rows(graph), lambda found: found[1:])]
    changed = _Marks()
    sizes = [(*run[0][1:], len(run)) for run in runs]
    for n, (axis, rows, count) in enumerate(sizes[:-2]):
        inside = n > 0 and sizes[n - 1] in [(axis, 2 * rows + odd, count) for odd in (0, 1)]
        if not inside and sizes[n : n + 3] == [(axis, rows >> k, count) for k in range(3)]:
            levels = runs[n : n + 3]
            found = _recursion(graph, axis, [[e.invars[0] for e, *_ in own] for own in levels])
            if found:
                _mark(graph, *found, changed)
    return in_order(list(changed.eqns(graph))) if changed.before else graph.eqns


def _odd_rows(graph: Graph) -> Iterator[tuple[JaxprEqn, int, int]]:
    """The slices of every other row from the second on, with their dim and all its rows."""
    for eqn in graph.eqns:
        if eqn.primitive is p.slice_p and eqn.params["strides"] is not None:
            shape = eqn.invars[0].aval.shape
            axis = next((d for d, s in enumerate(eqn.params["strides"]) if s != 1), 0)
            if _is_half(eqn, axis, 1):
                yield eqn, axis, shape[axis]


def _is_half(eqn: JaxprEqn, axis: int, first: int) -> bool:
    """Whether an equation takes every other row of a dim, as the recursion does."""
    if eqn.primitive is not p.slice_p or eqn.params["strides"] is None:
        return False
    shape = eqn.invars[0].aval.shape
    wanted = [
        (first, n - 1 + first, 2) if d == axis else (0, n, 1) for d, n in enumerate(shape)
    ]
    names = ("start_indices", "limit_indices", "strides")
    return list(zip(*(eqn.params[name] for name in names), strict=True)) == wanted


# ---------------------------------------------------------------- the function of two rows


def _recursion(
    graph: Graph, axis: int, levels: Sequence[Sequence[Any]]
) -> tuple[Recursion, list[Any]] | None:
    """The recursion of which these are the elements on three levels, and its elements.

    Elements that are all reversed are those of a reversed scan.
    """
    halves = []
    for level in levels[:2]:
        of_level = [(v, first) for first in (0, 1) for v in level]
        found = [
            next((e.outvars[0] for e in graph.users(v) if _is_half(e, axis, first)), None)
            for v, first in of_level
        ]
        halves.append(found)
    if None in halves[0] or None in halves[1]:
        return None
    template = _Template(graph, dict(zip(*halves, strict=True)))
    if not all(map(template.are_alike, levels[1], levels[2])):
        return None
    elements, count = list(levels[0]), len(levels[0])
    makers = [graph.maker(v) for v in elements]
    turned = [m for m in makers if m and m.primitive is p.rev_p]
    reverse = len(turned) == count and all(m.params["dimensions"] == (axis,) for m in turned)
    eqns = template.eqns
    text = str([(e.primitive.name, e.params, [v.aval for v in e.outvars]) for e in eqns])
    recursion = Recursion(
        text,
        axis,
        reverse,
        (),
        tuple(eqns),
        eqns,
        (*halves[0][:count],),
        (*halves[0][count:],),
        (*template.constants,),
        (*levels[1],),
    )
    return recursion, [m.invars[0] for m in turned] if reverse else elements


class _Template:
    """Equations that occur on two levels, with other numbers of rows: where these are."""

    def __init__(self, graph: Graph, pairs: Mapping[Any, Any]):
        self.graph = graph
        self.pairs = dict(pairs)  # variables of both levels
        self.eqns: dict[JaxprEqn, dict[str, list[int]]] = {}  # of the first, in order
        self.constants: dict[Any, None] = {}

    def are_alike(self, one: Any, other: Any, depth: int = _DEPTH) -> bool:
        """Whether two atoms are the same function of what is known to be alike."""
        if isinstance(one, Literal) or isinstance(other, Literal):
            return _are_equal(one, other)
        if one in self.pairs:
            return self.pairs[one] is other
        if one is other:
            self.constants[one] = None
            return True
        makers = self.graph.maker(one), self.graph.maker(other)
        first, second = makers
        if not (first and second and depth):
            return False
        alike = first.primitive is second.primitive and len(first.outvars) == len(second.outvars)
        if not alike or first.effects or first.primitive in LOOPS:
            return False
        sizes = _sizes(first, second)
        both = zip(first.invars, second.invars, strict=True)
        if sizes is None or not all(self.are_alike(*pair, depth - 1) for pair in both):
            return False
        self.eqns[first] = sizes
        self.pairs.update(zip(first.outvars, second.outvars, strict=True))
        return self.pairs[one] is other


def _sizes(one: JaxprEqn, other: JaxprEqn) -> dict[str, list[int]] | None:
    """Where parameters of two equations differ, in tuples of numbers; None if elsewhere."""
    found: dict[str, list[int]] = {}
    for name, value in one.params.items():
        instead = other.params[name]
        if value == instead:
            continue
        if not isinstance(value, tuple) or len(value) != len(instead):
            return None
        found[name] = [k for k, pair in enumerate(zip(value, instead)) if pair[0] != pair[1]]
    return found


def _are_equal(one: Any, other: Any) -> bool:
    """Whether two literals are."""
    if not (isinstance(one, Literal) and isinstance(other, Literal)):
        return False
    return one.aval.dtype == other.aval.dtype and np.array_equal(one.val, other.val)


# ---------------------------------------------------------------- the program and JAX's recursion


class _Match:
    """The equations of a program that compute what those of a reference do."""

    def __init__(self, graph: Graph, known: Iterable[tuple[Any, Any]]):
        self.graph = graph
        self.vars = {name: {var: None} for name, var in known}  # equal variables of the program
        self.eqns: dict[JaxprEqn, None] = {}
        self.makers: dict[Any, tuple[JaxprEqn, list[Any]]] = {}  # in the reference, of constants

    def run(self, reference: Jaxpr) -> dict[int, dict[Any, None]]:
        """Find each equation of a reference; the variables that are its results, by number.

        Some are not in the program: those that it does not need.
        """
        eqns, wanted = with_calls_inlined(reference)
        for eqn, operands, results in eqns:
            read = [a for a in operands if not isinstance(a, Literal)]
            if all(a in self.makers for a in read):
                self.makers.update((v, (eqn, operands)) for v in results)
            known = next((a for a in read if a in self.vars), None)
            for user in [u for var in self.vars.get(known, ()) for u in self.graph.users(var)]:
                if self._is_same(user, eqn, operands):
                    self.eqns[user] = None
                    for name, result in zip(results, user.outvars, strict=True):
                        self.vars.setdefault(name, {})[result] = None
        return {n: self.vars[name] for n, name in enumerate(wanted) if name in self.vars}

    def _is_same(self, eqn: JaxprEqn, reference: JaxprEqn, operands: Sequence[Any]) -> bool:
        return (
            eqn.primitive is reference.primitive
            and len(eqn.invars) == len(operands)
            and eqn.params == reference.params
            and all(map(self._is_value, eqn.invars, operands))
        )

    def _is_value(self, atom: Any, name: Any) -> bool:
        if isinstance(name, Literal):
            return _are_equal(atom, name)
        if name in self.vars:
            return not isinstance(atom, Literal) and atom in self.vars[name]
        maker = self.graph.maker(atom) if name in self.makers else None
        return maker is not None and self._is_same(maker, *self.makers[name])


class _Marks:
    """What is put before equations of a program, and behind them, and new names inside."""

    def __init__(self) -> None:
        self.before: dict[JaxprEqn, list[JaxprEqn]] = {}
        self.names: dict[JaxprEqn, dict[Any, Any]] = {}
        self.after: dict[JaxprEqn, list[JaxprEqn]] = {}

    def enter(self, atoms: Sequence[Any], own: Sequence[JaxprEqn]) -> list[Any]:
        """Mark tensors that equations read; the names by which they do."""
        names = {}
        for a in dict.fromkeys(atoms):
            readers = [e for e in own if any(a is b for b in e.invars)]
            names[a] = Var(a.aval)
            mark = replacing(readers[0], edge_p, [a], names[a], recursion=None, number=0)
            self.before.setdefault(readers[0], []).append(mark)
            for eqn in readers:
                self.names.setdefault(eqn, {})[a] = names[a]
        return [names[a] for a in atoms]

    def leave(
        self, graph: Graph, var: Any, others: Sequence[Any], number: int, recursion: Recursion
    ) -> None:
        """Mark a tensor that is a function of `others`, all of them marked."""
        maker, inner = graph.makers[var], Var(var.aval)
        self.names.setdefault(maker, {})[var] = inner
        params = {"recursion": recursion, "number": number}
        mark = replacing(maker, edge_p, [inner, *others], var, **params)
        self.after.setdefault(maker, []).append(mark)

    def eqns(self, graph: Graph) -> Iterator[JaxprEqn]:
        """The equations with marks."""
        for eqn in graph.eqns:
            yield from self.before.get(eqn, ())
            yield renamed(eqn, self.names[eqn]) if eqn in self.names else eqn
            yield from self.after.get(eqn, ())


def _mark(graph: Graph, recursion: Recursion, elements: list[Any], marks: _Marks) -> None:
    """Mark a scan and its gradients, if the program has all of their equations."""
    inputs = [*elements, *recursion.constants]
    structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in inputs]
    count = len(elements)

    def forward(values: Sequence[Any]) -> list[Any]:
        return recursion.scan(values[:count], values[count:])

    jaxpr = jax.make_jaxpr(lambda *values: forward(values))(*structs).jaxpr
    match = _Match(graph, zip(jaxpr.invars, inputs, strict=True))
    scanned = match.run(jaxpr)
    if not scanned:
        return
    found = list[_Gradient]()
    if not _is_closed(graph, match.eqns, scanned.values()):
        found = list(_gradients(graph, forward, structs, inputs, scanned))
    eqns = {**match.eqns, **{e: None for g in found for e in g.eqns}}
    leaving = [*scanned.values(), *(own for g in found for own in g.results.values())]
    if not _is_closed(graph, eqns, leaving):
        return
    own = [eqn for eqn in graph.eqns if eqn in eqns]
    entered = marks.enter(inputs, own)
    for number, equal in scanned.items():
        for var in equal:
            marks.leave(graph, var, entered, number, recursion)
    for gradient in found:
        of = marks.enter(list(gradient.cotangents.values()), own)
        by = dataclasses.replace(recursion, cotangents=tuple(gradient.cotangents))
        for number, equal in gradient.results.items():
            for var in equal:
                marks.leave(graph, var, [*entered, *of], number, by)


class _Gradient(NamedTuple):
    """Cotangents of results of a scan, by number, and the gradients of its elements."""

    cotangents: dict[int, Any]
    results: dict[int, Any]
    eqns: Mapping[JaxprEqn, None]


def _gradients(
    graph: Graph,
    forward: Callable[[Sequence[Any]], list[Any]],
    structs: Sequence[Any],
    inputs: Sequence[Any],
    scanned: Mapping[int, Any],
) -> Iterator[_Gradient]:
    """The gradients of a scan that a program has, for all choices of results."""
    floats = [n for n in scanned if jnp.issubdtype(structs[n].dtype, np.inexact)]
    moved = [n for n, s in enumerate(structs) if jnp.issubdtype(s.dtype, np.inexact)]
    count = len(structs)
    sizes = range(len(floats), 0, -1)
    for chosen in itertools.chain(*(itertools.combinations(floats, size) for size in sizes)):

        def backward(*values: Any, chosen: Sequence[int] = chosen) -> Any:
            def of_floats(*own: Any) -> list[Any]:
                every = dict(enumerate(values[:count])) | dict(zip(moved, own, strict=True))
                results = forward(list(every.values()))
                return [results[n] for n in chosen]

            _, transposed = jax.vjp(of_floats, *(values[n] for n in moved))
            return transposed(list(values[count:]))

        cotangents = [structs[n] for n in chosen]
        jaxpr = jax.make_jaxpr(backward)(*structs, *cotangents).jaxpr
        options = [_readers(graph, jaxpr, v, inputs) for v in jaxpr.invars[count:]]
        for atoms in itertools.islice(itertools.product(*options), _MOST):
            match = _Match(graph, zip(jaxpr.invars, (*inputs, *atoms), strict=True))
            found = match.run(jaxpr)
            if found:
                results = {moved[n]: equal for n, equal in found.items()}
                yield _Gradient(dict(zip(chosen, atoms, strict=True)), results, match.eqns)


def _readers(graph: Graph, jaxpr: Jaxpr, name: Any, inputs: Sequence[Any]) -> list[Any]:
    """The variables that are read as a reference first reads one of its own."""
    first = next((e for e in jaxpr.eqns if any(name is a for a in e.invars)), None)
    if first is None:
        return []
    place = next(n for n, a in enumerate(first.invars) if a is name)
    found = (
        eqn.invars[place]
        for eqn in graph.eqns
        if eqn.primitive is first.primitive
        and eqn.params == first.params
        and eqn.invars[place].aval.shape == name.aval.shape
        and not isinstance(eqn.invars[place], Literal)
    )
    return [a for a in dict.fromkeys(found) if not any(a is b for b in inputs)]


def _is_closed(
    graph: Graph, eqns: Mapping[JaxprEqn, None], leaving: Iterable[Iterable[Any]]
) -> bool:
    """Whether nobody else reads what equations make, but for what leaves them."""
    left = {v for equal in leaving for v in equal}
    inner = {v for eqn in eqns for v in eqn.outvars if v not in left}
    read = all(user in eqns for v in inner for user in graph.users(v))
    results = (a for a in graph.results if not isinstance(a, Literal))
    return read and inner.isdisjoint(results)
