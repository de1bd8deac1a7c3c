"""One form of softmax for all: sums over keys of `exp(logits)`, times factors of the query.

A softmax may be written with a logsumexp, with two maxima or none, with an attention sink, as the
exponential of a log-softmax. All of them sum `exp(s + a) b` over the keys, maybe times values,
where a and b are the same for all keys; and that is `exp(m + a) b` times the sum of `exp(s - m)`.
The maximum of `s + a` is `m + a`. So each sum and maximum is written in terms of the logits and
their maximum, whatever its a and b are made of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph import Graph, upstream
from gshard.graph.evaluate import equations_of
from gshard.propagation.rewrites.scores import Scoring
from gshard.rules.base.ring_pass import KEYS, Softmax, Sum
from gshard.rules.base.rule import RULES, factors_of


@dataclass(frozen=True)
class _KeyRow:
    """A value that is the same for all keys: the operand of a broadcast, or a number."""

    value: Any
    dims: tuple[int, ...] = ()  # those of the scores that its own dims are
    inverse: bool = False  # whether it is subtracted, or divides


@dataclass(frozen=True)
class _Weights:
    """Scores that are `exp(logits + sum of added) * product of factors`."""

    logits: Any
    added: tuple[_KeyRow, ...] = ()
    factors: tuple[_KeyRow, ...] = ()


def softmax_of(graph: Graph, region: Scoring) -> Softmax | None:
    """The softmax of a region in its one form: over the maximum, maybe divided by the sum."""
    sums, tops = _Reader(graph, region).read()
    if len(tops) != 1:
        return None
    ((top, level),) = tops.items()
    over_top = {}  # the sums of exponentials over the maximum, and their factors
    for exit, found in sums.items():
        *rows, last = found.added or (None,)
        same = found.logits is level.logits and tuple(rows) == level.added
        if same and last and last.inverse and _comes_from(graph, last.value, top.out):
            over_top[exit] = found.factors
    powers = [e for e, factors in over_top.items() if not factors and _is_exp(graph, e.scores)]
    totals = [e for e in powers if e.eqn.primitive is p.reduce_sum_p]
    if len(totals) != 1:
        return None
    (total,) = totals
    marks = {e.out: n for n, e in enumerate(region.exits)}
    before = upstream(graph.eqns, marks)
    weighted = {}
    for exit, factors in over_top.items():
        alone = before[exit.out] <= {marks[e.out] for e in (top, total, exit)}
        divided = [f.inverse and _comes_from(graph, f.value, total.out) for f in factors]
        if exit.eqn.primitive is p.dot_general_p and alone and divided in ([], [True]):
            weighted[exit] = bool(divided)
    return Softmax(top, total, weighted)


def _is_exp(graph: Graph, atom: Any) -> bool:
    """Whether a value is an exponential, in its own type."""
    eqn = graph.maker(atom)
    return eqn is not None and eqn.primitive is p.exp_p


def _comes_from(graph: Graph, atom: Any, source: Any) -> bool:
    """Whether a value is another one, broadcast; or the maximum of that one and -inf."""
    while atom is not source:
        eqn = graph.maker(atom)
        if eqn is None:
            return False
        *low, atom = eqn.invars
        if eqn.primitive is p.max_p:
            if not isinstance(low[0], Literal) or not np.isneginf(low[0].val):
                return False
        elif eqn.primitive not in (p.broadcast_in_dim_p, p.reshape_p, p.stop_gradient_p):
            return False
    return True


def in_one_form(graph: Graph, region: Scoring, known: Softmax | None) -> list[JaxprEqn] | None:
    """The program with all sums of a softmax in one form; None if all of them are `known`."""
    sums, tops = _Reader(graph, region).read()
    cores = [found.logits for found in sums.values()]
    if not cores or sums.keys() <= set(known.sums if known else ()):
        return None
    logits = max(dict.fromkeys(cores), key=cores.count)
    return _Writer(graph, region, logits).rewritten(
        {exit: found for exit, found in sums.items() if found.logits is logits},
        {exit.out: found for exit, found in tops.items() if found.logits is logits},
    )


class _Reader:
    """Takes scores apart."""

    def __init__(self, graph: Graph, region: Scoring):
        self.graph, self.region = graph, region

    def read(self) -> tuple[dict[Sum, _Weights], dict[Sum, _Weights]]:
        """The sums of exponentials over all keys of a query, and the maxima of logits."""
        sums: dict[Sum, _Weights] = {}
        tops: dict[Sum, _Weights] = {}
        for exit in self.region.exits:
            if exit.over != KEYS or exit.summed(exit.number) != (self.region.dims[exit.scores][1],):
                continue  # not one sum for each query
            if exit.kind == "max":
                tops[exit] = self.shifted(exit.scores)
            elif exit.kind == "sum" and (found := self.weights(exit.scores)):
                sums[exit] = found
        return sums, tops

    def weights(self, atom: Any, inverse: bool = False) -> _Weights | None:
        """Scores as an exponential and factors; None if they are something else."""
        eqn = self.graph.maker(atom)
        if eqn is None or inverse:
            return None
        if eqn.primitive is p.exp_p:
            return self.shifted(eqn.invars[0])
        if eqn.primitive is p.convert_element_type_p:
            return self.weights(eqn.invars[0])
        if eqn.primitive not in (p.mul_p, p.div_p):
            return None
        divides = eqn.primitive is p.div_p
        for number in (0, 1):
            row = self.row(eqn.invars[1 - number], eqn.invars[number], number == 0 and divides)
            found = self.weights(eqn.invars[number], number == 1 and divides) if row else None
            if row and found:
                return _Weights(found.logits, found.added, (*found.factors, row))
        return None

    def shifted(self, atom: Any) -> _Weights:
        """Logits without what is added to all of a query's."""
        eqn = self.graph.maker(atom)
        if eqn is None or eqn.primitive not in (p.add_p, p.sub_p):
            return _Weights(atom)
        first, second = eqn.invars
        if row := self.row(second, first, eqn.primitive is p.sub_p):
            found = self.shifted(first)
        elif eqn.primitive is p.add_p and (row := self.row(first, second, False)):
            found = self.shifted(second)
        else:
            return _Weights(atom)
        return _Weights(found.logits, (*found.added, row))

    def row(self, atom: Any, scores: Any, inverse: bool) -> _KeyRow | None:
        """An operand beside `scores` that is the same for all keys; None if it may differ."""
        if isinstance(scores, Literal):
            return None
        if isinstance(atom, Literal):
            return _KeyRow(atom, (), inverse) if not atom.aval.shape else None
        along = self.region.dims.get(scores)
        eqn, dims = self.graph.maker(atom), tuple(range(len(atom.aval.shape)))
        if eqn and eqn.primitive is p.broadcast_in_dim_p and len(eqn.invars) == 1:
            (atom,), dims = eqn.invars, tuple(map(int, eqn.params["broadcast_dimensions"]))
        sizes = dict(zip(dims, atom.aval.shape, strict=True))
        same = along is not None and sizes.get(along[1], 1) == 1
        return _KeyRow(atom, dims, inverse) if same else None


class _Writer:
    """Writes sums in terms of logits and their maximum."""

    def __init__(self, graph: Graph, region: Scoring, logits: Any):
        self.graph, self.region, self.logits = graph, region, logits
        self.keys = region.dims[logits][1]
        self.added: list[JaxprEqn] = []

    def rewritten(
        self, sums: Mapping[Sum, _Weights], tops: Mapping[Any, _Weights]
    ) -> list[JaxprEqn]:
        """The program with these sums and maxima written so."""
        plain = [out for out, found in tops.items() if not found.added]
        if len(plain) == 1:
            (top,) = plain
        else:
            (top,) = self.write(lambda s: lax.reduce_max(s, (self.keys,)), [self.logits])
        for out, found in tops.items():
            if out is not top:
                self.write(self.shifted(found.added), [top, *_values(found.added)], out)
        (powers,) = self.write(self.powers, [self.logits, top])
        for exit, found in sums.items():
            eqn, dtype = self.graph.makers[exit.out], exit.scores.aval.dtype
            (weights,) = self.write(lambda x, dtype=dtype: x.astype(dtype), [powers])
            invars = [weights if n == exit.number else a for n, a in enumerate(eqn.invars)]
            total = Var(exit.out.aval)
            self.added.append(eqn.replace(invars=invars, outvars=[total]))
            values = _values((*found.added, *found.factors))
            self.write(self.scaled(eqn, exit.number, found), [total, top, *values], exit.out)
        written = {v for eqn in self.added for v in eqn.outvars}
        return [e for e in self.graph.eqns if written.isdisjoint(e.outvars)] + self.added

    def reader(self, values: Sequence[jax.Array]) -> Callable[[_KeyRow], jax.Array]:
        """Rows, in order, as arrays with one key."""
        given = iter(values)
        shape = [1 if d == self.keys else n for d, n in enumerate(self.logits.aval.shape)]

        def read(row: _KeyRow) -> jax.Array:
            literal = isinstance(row.value, Literal)
            value = jnp.asarray(row.value.val) if literal else next(given)
            value = lax.broadcast_in_dim(value, shape, row.dims)
            return lax.squeeze(value, [self.keys])

        return read

    def shifted(self, added: Sequence[_KeyRow]) -> Callable[..., jax.Array]:
        """The maximum of logits to which rows are added."""

        def shift(top: jax.Array, *values: jax.Array) -> jax.Array:
            return _with_rows(top, added, self.reader(values), operator.add, operator.sub)

        return shift

    def powers(self, logits: jax.Array, top: jax.Array) -> jax.Array:
        """The exponentials over the maximum."""
        return jnp.exp(logits - lax.expand_dims(top, [self.keys]))

    def scaled(self, eqn: JaxprEqn, number: int, found: _Weights) -> Callable[..., jax.Array]:
        """A sum times what its terms have in common."""
        places = _places(eqn, number, self.keys)
        order = sorted(range(len(places)), key=lambda i: places[i])

        def scale(total: jax.Array, top: jax.Array, *values: jax.Array) -> jax.Array:
            read = self.reader(values)
            nothing = lax.eq(top, lax.full_like(top, -jnp.inf))  # the query sees no key
            shift = lax.select(nothing, lax.full_like(top, 0), top)
            factor = lax.exp(_with_rows(shift, found.added, read, operator.add, operator.sub))
            factor = _with_rows(factor, found.factors, read, operator.mul, operator.truediv)
            factor = lax.transpose(factor, order)
            factor = lax.broadcast_in_dim(factor, total.shape, sorted(places))
            return (total * factor).astype(total.dtype)

        return scale

    def write(self, fn: Callable[..., Any], atoms: Sequence[Any], out: Any = None) -> list[Any]:
        """Add the equations of a function of these variables; its results."""
        results = [] if out is None else [out]
        eqns, results = equations_of(fn, atoms, results, like=self.region.seed)
        self.added += eqns
        return results


def _with_rows(
    x: jax.Array,
    rows: Sequence[_KeyRow],
    read: Callable[[_KeyRow], jax.Array],
    join: Callable[..., jax.Array],
    undo: Callable[..., jax.Array],
) -> jax.Array:
    """`x` with rows added or multiplied, or the inverse of that."""
    for row in rows:
        x = (undo if row.inverse else join)(x, read(row))
    return x


def _values(rows: Sequence[_KeyRow]) -> list[Any]:
    return [row.value for row in rows if not isinstance(row.value, Literal)]


def _places(eqn: JaxprEqn, number: int, keys: int) -> list[int]:
    """The dims of a sum's result that the scores' dims other than `keys` become."""
    factors = factors_of(RULES[eqn.primitive], eqn)
    kept = [dim for d, dim in enumerate(factors.operands[number]) if d != keys]
    return [*map(factors.results[0].index, kept)]
