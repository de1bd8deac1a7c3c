"""An associative scan as a value: the function that combines rows, and JAX's recursion by it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph import LOOPS, Graph
from gshard.graph.evaluate import bind

_DEPTH = 64  # operators, one after the other, that combine rows


@dataclass(frozen=True)
class Recursion:
    """A scan along `axes`, by equations that combine rows `before` with rows `after` them.

    `sizes` are the places in parameters of equations that are numbers of rows. Where a gradient is
    marked, `cotangents` are the numbers of the results whose cotangents it is made of. Recursions
    with the same text are equal: layers that are alike stay alike.
    """

    text: str
    axes: tuple[int, ...]  # of the elements
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
            rows = before[0].shape[self.axes[0]]
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


def scan(
    combine: Callable[..., list[Any]],
    elements: Sequence[Any],
    axes: Sequence[int],
    reverse: bool = False,
    uses: Sequence[Sequence[Any]] = (),
) -> list[Any]:
    """As JAX computes it, by the same equations; `uses` are copies of elements, one for each."""
    if reverse:
        turned = [lax.rev(x, (axis,)) for x, axis in zip(elements, axes, strict=True)]
        results = scan(combine, turned, axes)
        return [lax.rev(x, (axis,)) for x, axis in zip(results, axes, strict=True)]
    size = elements[0].shape[axes[0]]
    if size < 2:
        return list(elements)

    def part(own: Sequence[Any], *ends: Any) -> list[Any]:
        return [lax.slice_in_dim(x, *ends, axis=a) for x, a in zip(own, axes, strict=True)]

    before, after, even, first = uses or (elements,) * 4
    odd = scan(combine, combine(part(before, 0, -1, 2), part(after, 1, None, 2)), axes)
    others = combine(odd if size % 2 else part(odd, 0, -1), part(even, 2, None, 2))
    start = part(first, 0, 1)
    joined = [lax.concatenate(both, a) for *both, a in zip(start, others, axes, strict=True)]
    return [_interleaved(*both) for both in zip(joined, odd, axes, strict=True)]


def _interleaved(even: Any, odd: Any, axis: int) -> Any:
    alike = even.shape[axis] == odd.shape[axis]
    zero, padded = np.zeros((), even.dtype), []
    for x, ends in ((even, (0, int(alike), 1)), (odd, (1, int(not alike), 1))):
        around = [ends if d == axis else (0, 0, 0) for d in range(x.ndim)]
        padded.append(lax.pad(x, zero, around))
    return (lax.bitwise_or if even.dtype == np.bool_ else lax.add)(*padded)


# ---------------------------------------------------------------- read off a program


def odd_rows(graph: Graph) -> Iterator[tuple[JaxprEqn, int, int]]:
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
    wanted = [(first, n - 1 + first, 2) if d == axis else (0, n, 1) for d, n in enumerate(shape)]
    names = ("start_indices", "limit_indices", "strides")
    return list(zip(*(eqn.params[name] for name in names), strict=True)) == wanted


# ---------------------------------------------------------------- the function of two rows


def recursion_of(
    graph: Graph, axes: tuple[int, ...], levels: Sequence[Sequence[Any]]
) -> tuple[Recursion, list[Any]] | None:
    """The recursion of which these are the elements on three levels, and its elements.

    Elements that are all reversed are those of a reversed scan.
    """
    halves = []
    for level in levels[:2]:
        own = [(*both, first) for first in (0, 1) for both in zip(level, axes, strict=True)]
        found = [
            next((e.outvars[0] for e in graph.users(v) if _is_half(e, axis, first)), None)
            for v, axis, first in own
        ]
        halves.append(found)
    if None in halves[0] or None in halves[1]:
        return None
    template = _Template(graph, dict(zip(*halves, strict=True)))
    if not all(map(template.are_alike, levels[1], levels[2])):
        return None
    elements, count = list(levels[0]), len(levels[0])
    makers = zip(map(graph.maker, elements), axes, strict=True)
    turned = [
        m
        for m, axis in makers
        if m and m.primitive is p.rev_p and m.params["dimensions"] == (axis,)
    ]
    reverse = len(turned) == count
    eqns = template.eqns
    text = str([(e.primitive.name, e.params, [v.aval for v in e.outvars]) for e in eqns])
    recursion = Recursion(
        text,
        axes,
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
            return are_equal(one, other)
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
        found[name] = [
            k for k, pair in enumerate(zip(value, instead, strict=True)) if pair[0] != pair[1]
        ]
    return found


def are_equal(one: Any, other: Any) -> bool:
    """Whether two literals are."""
    if not (isinstance(one, Literal) and isinstance(other, Literal)):
        return False
    return one.aval.dtype == other.aval.dtype and np.array_equal(one.val, other.val)
