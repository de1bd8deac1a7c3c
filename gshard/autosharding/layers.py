"""Equal layers that a program writes out: a layout is decided for one of them, and used for all.

A loop over layers in Python makes equations that repeat, once in the forward pass, once backwards
and once for each part of an optimizer. Runs of equations with a period are found. The values that
two runs share say which segment of one belongs to the same layer as a segment of the other. A
program without most layers has all decisions of the long one: a reader of a removed layer reads the
layer at the same distance after the removed ones. One layer represents the removed ones: its costs
are multiplied by their number, and memory is linear in the number of layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from gshard.autosharding.layout import Layout
from gshard.autosharding.layout.annotations import AnnotatedInside, annotated_in
from gshard.autosharding.solver.problem import Ints
from gshard.autosharding.traced import STANDING, Repeated, TracedProgram
from gshard.capture.inside import places
from gshard.graph.evaluate import bind, evaluate
from gshard.graph.regions import walk
from gshard.graph.source import on_behalf_of
from gshard.rules.base.rule import equation_key

_FEWEST = 8  # equal layers; fewer take little time as they are
_KEPT = 2  # layers at either end
_LEFT = 0.8  # the share of the equations above which a shorter program gains next to nothing

Role = tuple[int, int, bool, int]  # a run, a position in its period; whether a result, its number


def without_equal_layers(subject: TracedProgram) -> tuple[TracedProgram, TracedProgram] | None:
    """The program with few of its equal layers, and with two less; None if it has few or none."""
    layers = _Layers(subject.flat.jaxpr.eqns)
    if layers.last - layers.first + 1 < _FEWEST:
        return None
    first, last = layers.first + _KEPT, layers.last - _KEPT
    short, shorter = (layers.without(subject, range(first - n, last + 1 + n)) for n in (0, 1))
    if not short or not shorter:
        return None
    every, left = len(subject.flat.jaxpr.eqns), len(short.flat.jaxpr.eqns)
    return (short, shorter) if left <= _LEFT * every else None


def transferred(layout: Layout, source: TracedProgram, to: TracedProgram) -> dict[str, Any]:
    """The annotations of a layout of one program for another one with more layers, or fewer."""
    like = source.repeated.like
    arguments = {a.path: a for a in layout.annotations}
    results = {a.path: a for a in layout.results}
    paths = {var: path for var, (path, _) in zip(source.arguments, source.paths, strict=True)}
    result_of = {argument: result for result, argument in source.states}
    new_result_of = {argument: result for result, argument in to.states}
    new, new_results = [], {}
    for var, (path, _) in zip(to.arguments, to.paths, strict=True):
        old = paths.get(var) or paths.get(like.get(var, var), "")
        if old in arguments:
            new.append(dataclasses.replace(arguments[old], path=path))
        if path in new_result_of and result_of.get(old) in results:
            name = new_result_of[path]
            new_results[name] = dataclasses.replace(results[result_of[old]], path=name)
    inside: dict[Any, list[int]] = defaultdict(list)
    annotated, made = annotated_in(source.flat, layout.inside), places(source.flat)
    sites = places(to.flat)
    for var, (place, number) in sites.items():
        own = var if var in made else like.get(var, var)
        if (found := annotated.get(own)) is not None:
            inside[place, found.dims, found.saves].append(number)
    counts = Counter(place for place, _ in sites.values())
    more = tuple(
        AnnotatedInside(place, None if len(found) == counts[place] else tuple(found), dims, saves)
        for (place, dims, saves), found in inside.items()
    )
    return {"annotations": tuple(new), "inside": more, "results": new_results}


class _Layers:
    """The equations of a program by the equal layers that they belong to."""

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.eqns, self.runs = eqns, list(_runs(_kinds(eqns)))
        self.segments = {  # run, position and segment of an equation
            start + at: (run, at % period, at // period)
            for run, (start, period, count) in enumerate(self.runs)
            for at in range(period * count)
        }
        self.signs = self._aligned()
        self.roles: dict[Any, tuple[Role, int]] = {}  # of a value, and its layer
        for number in self.segments:
            self._name_values(number)
        self.values = {role: value for value, role in self.roles.items()}
        ends = [
            sorted((first, first + sign * (self.runs[run][2] - 1)))
            for run, (sign, first) in self.signs.items()
        ]
        self.first = max((low for low, _ in ends), default=0)
        self.last = min((high for _, high in ends), default=-1)

    def layer(self, number: int) -> int | None:
        """The layer of an equation."""
        run, _, segment = self.segments.get(number, (-1, 0, 0))
        sign, first = self.signs.get(run, (0, 0))
        return first + sign * segment if sign else None

    def _aligned(self) -> dict[int, tuple[int, int]]:
        """For each run the layer of its first segment, and 1 or -1 for the order of its layers:
        those of the longest one are in order, and of others by the values that they share."""
        shared: dict[Any, list[tuple[int, int]]] = defaultdict(list)
        for number, (run, _, segment) in self.segments.items():
            for atom in (*self.eqns[number].outvars, *self.eqns[number].invars):
                if not isinstance(atom, Literal):
                    shared[atom].append((run, segment))
        votes: dict[tuple[int, int], Counter[tuple[int, int]]] = defaultdict(Counter)
        for (one, here), *others in shared.values():
            for two, there in set(others):
                votes[one, two].update([(1, here - there), (-1, here + there)])
                votes[two, one].update([(1, there - here), (-1, here + there)])
        lengths = [period * count for _, period, count in self.runs]
        found = {lengths.index(max(lengths)): (1, 0)} if lengths else {}
        ties = {
            pair: max((count, vote) for vote, count in counted.items())
            for pair, counted in votes.items()
        }
        while near := [(ties[p], p) for p in ties if p[0] in found and p[1] not in found]:
            (count, (own, shift)), (known, other) = max(near)
            sign, first = found[known]
            if count < self.runs[other][2] // 2:  # no layer of one belongs to a layer of the other
                break
            found[other] = sign * own, first + sign * shift
        return found

    def _name_values(self, number: int) -> None:
        """The roles of what an equation of a layer makes, and of what it is the first to read."""
        layer = self.layer(number)
        run, position, _ = self.segments[number]
        for is_result, atoms in enumerate((self.eqns[number].invars, self.eqns[number].outvars)):
            for at, atom in enumerate(atoms):
                if layer is not None and not isinstance(atom, Literal):
                    self.roles.setdefault(atom, ((run, position, bool(is_result), at), layer))

    def without(self, subject: TracedProgram, gone: range) -> TracedProgram | None:
        """The program without these layers; None where what is left needs one of them."""
        eqns, standing = [], list[JaxprEqn]()
        for number, eqn in enumerate(self.eqns):
            layer = self.layer(number)
            if layer in gone:
                continue
            operands = [self._across(atom, layer, gone) for atom in eqn.invars]
            if None in operands:
                return None
            eqns.append(eqn.replace(invars=operands))
            standing += eqns[-1:] if layer == gone[0] - 1 else []
        lost = {value for value, (_, layer) in self.roles.items() if layer in gone}
        jaxpr = subject.flat.jaxpr
        results = [
            n for n, v in enumerate(jaxpr.outvars) if isinstance(v, Literal) or v not in lost
        ]
        read = {a for e in eqns for a in e.invars if not isinstance(a, Literal)}
        kept = [n for n, v in enumerate(jaxpr.invars) if v in read or v not in lost]
        short = jaxpr.replace(
            eqns=eqns,
            invars=[jaxpr.invars[n] for n in kept],
            outvars=[jaxpr.outvars[n] for n in results],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        like = {v: self.values.get((role, gone[0] - 1), v) for v, (role, _) in self.roles.items()}
        same = frozenset(walk(short.replace(eqns=standing)))
        layers = max(count for _, _, count in self.runs)
        repeated = Repeated(len(gone) + 1, same, like, layers)
        return _part(subject, subject.flat.replace(jaxpr=short), kept, results, repeated)

    def _across(self, atom: Any, layer: int | None, gone: range) -> Any | None:
        """What an equation of a layer reads; None for what is gone and has no other instead."""
        known = None if isinstance(atom, Literal) else self.roles.get(atom)
        if known is None or known[1] not in gone:
            return atom
        if layer is None:
            return None
        (role, at), gap = known, len(gone)
        return self.values.get((role, at - gap if layer > gone[-1] else at + gap))


def _part(
    subject: TracedProgram,
    flat: ClosedJaxpr,
    kept: Sequence[int],
    results: Sequence[int],
    repeated: Repeated,
) -> TracedProgram:
    """The subject with a part of its program, that has these arguments and results of it."""
    constants = [subject.constants[n] for n in kept if n < subject.closed_over]

    def interpret(eqn: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        standing = jax.named_scope(STANDING) if eqn in repeated.eqns else contextlib.nullcontext()
        with on_behalf_of(eqn), standing:
            return bind(eqn, values)

    def run(*arrays: Any) -> list[Any]:
        return evaluate(flat, [*constants, *arrays], interpret)

    first = len(constants)
    given = [var.aval for var in flat.jaxpr.invars[first:]]
    pairs = [(r, a) for r, a in subject.returned if r in results and a in kept]
    returned = [(results.index(r), kept.index(a)) for r, a in pairs]
    return TracedProgram(
        run,
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in given),
        subject.devices,
        flat,
        [(f"[{n}]", tuple(a.shape)) for n, a in enumerate(given)],
        first,
        returned,
        [(f"result[{r}]", f"[{a - first}]") for r, a in returned],
        constants,
        repeated,
    )


def _kinds(eqns: Sequence[JaxprEqn]) -> Ints:
    """A number for each equation, equal for those that do the same to other variables."""
    numbers: dict[Any, int] = {}
    found = []
    for eqn in eqns:
        key = equation_key(eqn.replace(invars=[]))  # whatever literals it has
        types = tuple(str(a.aval) for a in eqn.invars)
        kind = types, (eqn.primitive, str(eqn.params)) if key is None else key
        found.append(numbers.setdefault(kind, len(numbers)))
    return np.array(found, dtype=np.int64)


def _runs(kinds: Ints) -> Iterator[tuple[int, int, int]]:
    """Where a sequence has a period: the start, the period, and how often it repeats."""
    window = 8  # equations that a period begins with, by which it is looked for
    if len(kinds) < _FEWEST + window:
        return
    windows = np.lib.stride_tricks.sliding_window_view(kinds, window)
    begins = np.unique(windows, axis=0, return_inverse=True)[1].ravel()
    at, most = 0, len(kinds) // _FEWEST
    while at < len(begins):
        best, count = 1, 0
        for period in map(int, np.flatnonzero(begins[at + 1 : at + 1 + most] == begins[at]) + 1):
            same = np.append(kinds[at:-period] == kinds[at + period :], False)
            times = 1 + int(same.argmin()) // period
            if times >= _FEWEST and times * period > best * count:
                best, count = period, times
        if count:
            yield at, best, count
        at += best * max(count, 1)
