"""Dims that were merged are used as they were before.

`jnp.vdot(a, b)`, `a.ravel()` and `x.reshape(len(x), -1) @ w` merge dims by a reshape. If a dim that
is split becomes a minor part of another one, or its tiles are uneven, rows of the merged dim are no
tiles any more, and all of them would move. What follows is computed without the reshape: operators
by element on the dims as they were, and products and reductions over all of them.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.capture.simplify.painting import reshaped
from gshard.graph import Graph, at_every_level, live
from gshard.graph.source import source_of
from gshard.rules.base.rule import RULES, Elementwise
from gshard.tensors.factors import Shape
from gshard.tensors.sharding import Sharding

_REDUCTIONS = (
    p.reduce_sum_p, p.reduce_max_p, p.reduce_min_p, p.reduce_prod_p, p.reduce_and_p, p.reduce_or_p,
)  # fmt: skip

Sizes = tuple[tuple[int, ...], ...]  # for each dim, the sizes of the dims that it was merged from


class _Form(NamedTuple):
    """How an equation runs on tensors whose dims are as before: the sizes of those, and of its own.

    Operands without `sizes` stay as they are.
    """

    operands: Sequence[Sizes | None]
    result: Sizes
    changes: Mapping[str, Any] = {}


@at_every_level
def undo_merges(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program without reshapes that would move rows, where nobody needs what they merge."""
    moving = {
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive is p.reshape_p and _moves(eqn, shardings)
    }
    if not moving:
        return jaxpr
    merges = _Merges(Graph(jaxpr.eqns, jaxpr.outvars), moving)
    eqns = live(list(merges.eqns()), jaxpr.outvars)
    for var in merges.moving & merges.undone:
        where = source_of(merges.graph.makers[var])
        remarks.append(f"at {where}: what is computed of {var.aval.str_short()} is not reshaped")
    return jaxpr.replace(eqns=eqns) if remarks else jaxpr


def _moves(eqn: JaxprEqn, shardings: Mapping[Any, Sharding]) -> bool:
    """Whether a reshape merges a split dim with a major one, or one whose tiles are uneven."""
    (source,), (result,) = eqn.invars, eqn.outvars
    sizes = _merged(source.aval.shape, result.aval.shape)
    if sizes is None or isinstance(source, Literal):
        return False
    ends = set(itertools.accumulate((math.prod(group) for group in sizes), operator.mul))
    at = 1  # the elements of all major dims
    for n, split in zip(source.aval.shape, shardings[source].splits, strict=True):
        minor, at = at not in {1, *ends}, at * n
        if split and n > 1 and (minor or (n % split.tiles and at not in ends)):
            return True
    return False


def _merged(before: Sequence[int], after: Sequence[int]) -> Sizes | None:
    """The sizes of the parts that each dim is merged from, which are parts of dims before.

    None where dims have no common parts.
    """
    if 0 in before:
        return None
    ends, major = ({*itertools.accumulate(shape, operator.mul)} for shape in (before, after))
    every, at, found = sorted(ends | major), 1, list[tuple[int, ...]]()
    for n in after:
        group, end = list[int](), math.prod(map(math.prod, found)) * n
        while at < end:
            following = next(e for e in every if e > at)
            if following % at:
                return None
            group.append(following // at)
            at = following
        found.append(tuple(group) or (1,))
    return tuple(found) or None


class _Merges:
    """The tensors of a program that merge others' dims, and equations on the dims as before."""

    def __init__(self, graph: Graph, moving: set[Any]):
        self.graph, self.moving = graph, set(moving)
        self.sizes: dict[Any, Sizes] = {}
        self.shapes: dict[Shape, set[Shape]] = {}  # of tensors with such parts
        self.forms: dict[JaxprEqn, _Form] = {}
        for eqn in graph.eqns:
            self._read(eqn)
        self.undone = set[Any]()  # tensors that nobody needs merged
        results = {a for a in graph.results if not isinstance(a, Literal)}
        for eqn in reversed(graph.eqns):
            out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            if out not in self.moving:
                continue
            if out not in results and all(self._runs(user) for user in graph.users(out)):
                self.undone.add(out)
        for eqn, form in self.forms.items():
            read = self.undone.intersection(a for a in eqn.invars if not isinstance(a, Literal))
            if not read and not _is_plain(form.result):
                self.undone.discard(eqn.outvars[0])  # it is computed of merged tensors alone
        self.names: dict[Any, Any] = {}  # with the dims as before

    def _read(self, eqn: JaxprEqn) -> None:
        """Note what an equation makes of tensors that merge dims."""
        if len(eqn.outvars) != 1 or eqn.effects:
            return
        (out,) = eqn.outvars
        if eqn.primitive is p.reshape_p and not isinstance(eqn.invars[0], Literal):
            shape = eqn.invars[0].aval.shape
            if sizes := _merged(shape, out.aval.shape):
                self.sizes[out] = sizes
                parts = _no_ones(itertools.chain(*sizes))
                self.shapes.setdefault(parts, set()).add(_no_ones(shape))
        elif self.moving.intersection(a for a in eqn.invars if not isinstance(a, Literal)):
            form = self._form(eqn)
            if form is not None:
                self.forms[eqn] = form
                if not _is_plain(form.result):
                    self.sizes[out] = form.result
                    self.moving.add(out)

    def _runs(self, eqn: JaxprEqn) -> bool:
        """Whether an equation can run on the dims as before, and its result is used so."""
        if eqn.primitive is p.reshape_p:
            parts = _no_ones(itertools.chain(*self.sizes[eqn.invars[0]]))
            shape = _no_ones(eqn.outvars[0].aval.shape)
            return shape == parts or shape in self.shapes.get(parts, ())
        form = self.forms.get(eqn)
        return form is not None and (_is_plain(form.result) or eqn.outvars[0] in self.undone)

    def _form(self, eqn: JaxprEqn) -> _Form | None:
        """How an equation runs on the dims as before; None for those that cannot."""
        own = [None if isinstance(a, Literal) else self.sizes.get(a) for a in eqn.invars]
        sizes = next(n for n, a in zip(own, eqn.invars, strict=True) if n and a in self.moving)
        if isinstance(RULES.get(eqn.primitive), Elementwise):
            shape = eqn.outvars[0].aval.shape
            return _Form([_repeated(sizes, shape, a.aval.shape) for a in eqn.invars], sizes)
        if eqn.primitive in _REDUCTIONS:
            axes = eqn.params["axes"]
            kept = tuple(group for d, group in enumerate(sizes) if d not in axes)
            return _Form([sizes], kept, {"axes": _numbers(sizes, axes)})
        if eqn.primitive is p.transpose_p:
            order = eqn.params["permutation"]
            turned = tuple(sizes[d] for d in order)
            return _Form([sizes], turned, {"permutation": _numbers(sizes, order)})
        return _of_product(eqn, own) if eqn.primitive is p.dot_general_p else None

    # ------------------------------------------------------------ the equations

    def eqns(self) -> Iterator[JaxprEqn]:
        """The equations, on dims as before where that is possible."""
        for eqn in self.graph.eqns:
            out = eqn.outvars[0] if len(eqn.outvars) == 1 else None
            if eqn.primitive is p.reshape_p:
                source = eqn.invars[0]
                if source in self.names and source in self.undone:
                    source = self.names[source]
                    eqn = eqn.replace(invars=[source])
                yield eqn
                if out in self.undone:
                    self.names[out] = parts = _like(out, self.sizes[out])
                    yield reshaped(eqn, source, parts)
                continue
            form = self.forms.get(eqn)
            read = self.undone.intersection(a for a in eqn.invars if not isinstance(a, Literal))
            if form is None or not read:
                yield eqn
                continue
            operands = []
            for a, sizes in zip(eqn.invars, form.operands, strict=True):
                yield from self._before(eqn, a, sizes)
                operands.append(a if sizes is None else self.names[a, sizes])
            result = out
            if not _is_plain(form.result):
                result = self.names[out] = _like(out, form.result)
            yield eqn.replace(
                invars=operands, outvars=[result], params={**eqn.params, **form.changes}
            )

    def _before(self, eqn: JaxprEqn, a: Any, sizes: Sizes | None) -> Iterator[JaxprEqn]:
        """The equation of an operand with the dims as before, unless there is such a tensor."""
        if sizes is None or (a, sizes) in self.names:
            return
        known, parts = self.names[a] if a in self.undone else a, _like(a, sizes)
        same = known.aval.shape == parts.aval.shape
        self.names[a, sizes] = known if same else parts
        if not same:
            yield reshaped(eqn, known, parts)


def _of_product(eqn: JaxprEqn, own: Sequence[Sizes | None]) -> _Form | None:
    """A product over, and of, all the dims that were merged."""
    contracted, batch = eqn.params["dimension_numbers"]
    pairs = zip(own, eqn.invars, strict=True)
    sizes = [list(known or ((n,) for n in a.aval.shape)) for known, a in pairs]
    for left, right in (*zip(*contracted, strict=True), *zip(*batch, strict=True)):
        one, other = sizes[0][left], sizes[1][right]
        if len(one) > 1 and len(other) > 1 and one != other:
            return None
        sizes[0][left] = sizes[1][right] = max(one, other, key=len)
    found = [tuple(n) for n in sizes]
    numbers = tuple(
        tuple(_numbers(n, dims) for n, dims in zip(found, both, strict=True))
        for both in (contracted, batch)
    )
    result = [found[0][d] for d in batch[0]]
    for n, summed, common in zip(found, contracted, batch, strict=True):
        result += [group for d, group in enumerate(n) if d not in (*summed, *common)]
    operands = [None if _is_plain(n) else n for n in found]
    return _Form(operands, tuple(result), {"dimension_numbers": numbers})


def _no_ones(shape: Iterable[int]) -> Shape:
    return tuple(n for n in shape if n != 1)


def _repeated(sizes: Sizes, shape: Sequence[int], own: Sequence[int]) -> Sizes | None:
    """The sizes of an operand, which may have one row for all rows of a dim of the result."""
    if not own:
        return None
    pairs = zip(sizes, shape, own, strict=True)
    return tuple(group if n == m else (1,) * len(group) for group, n, m in pairs)


def _numbers(sizes: Sizes, dims: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the dims that some are merged from."""
    first = [sum(map(len, sizes[:d])) for d in range(len(sizes))]
    return tuple(first[d] + k for d in dims for k in range(len(sizes[d])))


def _is_plain(sizes: Sizes) -> bool:
    """Whether every dim is one as before."""
    return all(len(group) == 1 for group in sizes)


def _like(a: Any, sizes: Sizes) -> Var:
    """A variable for a tensor with the dims as before."""
    return Var(a.aval.update(shape=tuple(n for group in sizes for n in group)))
