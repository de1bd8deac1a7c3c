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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.associative import Recursion, are_equal, odd_rows, recursion_of, scan
from gshard.capture.simplify.passes import in_every_body
from gshard.graph import Graph, in_order, renamed, replacing
from gshard.graph.regions import with_calls_inlined
from gshard.rules.base.primitives import edge_p

_MOST = 32  # choices of cotangents that are tried


@in_every_body
def mark_recursions(graph: Graph) -> list[JaxprEqn]:
    """The equations, with marks where tensors enter and leave an associative scan."""
    runs = [list(own) for _, own in itertools.groupby(odd_rows(graph), lambda found: found[2])]
    changed = _Edges()
    sizes = [(run[0][2], tuple(axis for _, axis, _ in run)) for run in runs]
    for n, (rows, axes) in enumerate(sizes[:-2]):
        inside = n > 0 and sizes[n - 1] in [(2 * rows + odd, axes) for odd in (0, 1)]
        if not inside and sizes[n : n + 3] == [(rows >> k, axes) for k in range(3)]:
            levels = [[eqn.invars[0] for eqn, *_ in run] for run in runs[n : n + 3]]
            found = recursion_of(graph, axes, levels)
            if found:
                _mark(graph, *found, changed)
    return in_order(list(changed.eqns(graph))) if changed.before else graph.eqns


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
            return are_equal(atom, name)
        if not name.aval.size:  # the same, whatever it was computed by
            return atom.aval.shape == name.aval.shape
        if name in self.vars:
            return not isinstance(atom, Literal) and atom in self.vars[name]
        maker = self.graph.maker(atom) if name in self.makers else None
        return maker is not None and self._is_same(maker, *self.makers[name])


class _Edges:
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


def _mark(graph: Graph, recursion: Recursion, elements: list[Any], marks: _Edges) -> None:
    """Mark a scan and its gradients, if the program has all of their equations."""
    inputs = [*elements, *recursion.constants]
    structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in inputs]
    count = len(elements)

    def forward(values: Sequence[Any], uses: Sequence[Any] = ()) -> list[Any]:
        combine = recursion.combine(values[count:])
        return scan(combine, values[:count], recursion.axes, recursion.reverse, uses)

    try:
        jaxpr = jax.make_jaxpr(lambda *values: forward(values))(*structs).jaxpr
    except (TypeError, ValueError):  # of two numbers of rows, and not of any
        return
    match = _Match(graph, zip(jaxpr.invars, inputs, strict=True))
    scanned = match.run(jaxpr)
    found = list[_Gradient]()
    if not _is_closed(graph, match.eqns, scanned.values()):
        found = list(_gradients(graph, forward, inputs, recursion, scanned or range(count)))
    eqns = {**match.eqns, **{e: None for g in found for e in g.eqns}}
    leaving = [*scanned.values(), *(own for g in found for own in g.terms.values())]
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
        for number, terms in gradient.terms.items():
            for n, var in enumerate(terms):  # `~number`: the first has the sum, and this nothing
                marks.leave(graph, var, [*entered, *of], number if n == 0 else ~number, by)


class _Gradient(NamedTuple):
    """Cotangents of results of a scan, by number, and the gradients of its inputs.

    The program adds up those of the uses of an element, maybe after others: each is by itself.
    """

    cotangents: dict[int, Any]
    terms: dict[int, list[Any]]
    eqns: Mapping[JaxprEqn, None]


def _gradients(
    graph: Graph,
    forward: Callable[..., list[Any]],
    inputs: Sequence[Any],
    recursion: Recursion,
    scanned: Iterable[int],
) -> Iterator[_Gradient]:
    """The gradients of a scan that a program has, for all choices of results."""
    structs = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in inputs]
    moved = [n for n, s in enumerate(structs) if jnp.issubdtype(s.dtype, np.inexact)]
    floats, count, made = [n for n in scanned if n in moved], len(structs), set[Any]()
    copies = 1 if recursion.reverse else _USES
    numbers = [n for n in moved for _ in range(copies if n < len(recursion.axes) else 1)]
    sizes, found = range(len(floats), 0, -1), list[Any]()
    for chosen in itertools.chain(*(itertools.combinations(floats, size) for size in sizes)):

        def backward(*values: Any, chosen: Sequence[int] = chosen) -> Any:
            def of_floats(*own: Any) -> list[Any]:
                every = {n: [x] * copies for n, x in enumerate(values[:count])}
                every |= {
                    n: [x for x, m in zip(own, numbers, strict=True) if m == n] for n in moved
                }
                first = [own[0] for own in every.values()]
                uses = [*zip(*list(every.values())[: len(recursion.axes)], strict=True)]
                results = forward(first, uses if copies > 1 else ())
                return [results[n] for n in chosen]

            _, transposed = jax.vjp(of_floats, *(values[n] for n in numbers))
            return transposed(list(values[count:]))

        jaxpr = jax.make_jaxpr(backward)(*structs, *(structs[n] for n in chosen)).jaxpr
        options = [_readers(graph, jaxpr, v, inputs) for v in jaxpr.invars[count:]]
        for atoms in itertools.islice(itertools.product(*options), _MOST):
            match = _Match(graph, zip(jaxpr.invars, (*inputs, *atoms), strict=True))
            cotangents = dict(zip(chosen, atoms, strict=True))
            found.append((cotangents, match.run(jaxpr), match.eqns))
    # The most terms of the fewest cotangents first; others are of what is left.
    for cotangents, results, eqns in sorted(found, key=lambda own: (-len(own[1]), len(own[0]))):
        terms: dict[int, list[Any]] = {}
        for place, equal in results.items():
            terms.setdefault(numbers[place], []).extend(v for v in equal if v not in made)
        made.update(v for own in terms.values() for v in own)
        if any(terms.values()) and all(_are_added(graph, own) for own in terms.values()):
            yield _Gradient(cotangents, terms, eqns)


_USES = 4  # of an element, by the recursion


def _are_added(graph: Graph, terms: Sequence[Any]) -> bool:
    """Whether nobody reads terms but the equations that add all of them up."""

    def sums(var: Any) -> Iterator[Any]:
        while graph.uses(var) == 1 and len(graph.users(var)) == 1:
            (user,) = graph.users(var)
            if user.primitive not in (p.add_p, p.add_jaxvals_p):
                return
            (var,) = user.outvars
            yield var

    return len(terms) < 2 or bool(set.intersection(*(set(sums(v)) for v in terms)))


def _readers(graph: Graph, jaxpr: Jaxpr, name: Any, inputs: Sequence[Any]) -> list[Any]:
    """The variables that are read as a reference reads one of its own, by itself."""
    found: list[set[Any]] = []
    for own in jaxpr.eqns:
        if (
            own.invars
            and own.invars[0] is name
            and all(isinstance(a, Literal) for a in own.invars[1:])
        ):
            alike = (e for e in graph.eqns if e.primitive is own.primitive)
            found.append({e.invars[0] for e in alike if e.params == own.params
                          and not isinstance(e.invars[0], Literal)
                          and e.invars[0].aval.shape == name.aval.shape})  # fmt: skip
    return [v for v in set.intersection(*found) if v not in inputs] if found else []


def _is_closed(
    graph: Graph, eqns: Mapping[JaxprEqn, None], leaving: Iterable[Iterable[Any]]
) -> bool:
    """Whether nobody else reads what equations make, but for what leaves them."""
    left = {v for equal in leaving for v in equal}
    inner = {v for eqn in eqns for v in eqn.outvars if v not in left}
    users = (user for v in inner for user in graph.users(v))
    read = all(e in eqns or not any(v.aval.size for v in e.outvars) for e in users)
    results = (a for a in graph.results if not isinstance(a, Literal))
    return read and inner.isdisjoint(results)
