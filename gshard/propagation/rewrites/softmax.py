"""One form of softmax for all: sums over keys of `exp(logits)`, times factors of the query.

A softmax may be written with a logsumexp, with two maxima or none, with an attention sink, as the
exponential of a log-softmax. All of them sum `exp(s + a) b` over the keys, maybe times values,
where a and b are the same for all keys; and that is `exp(m + a) b` times the sum of `exp(s - m)`.
The maximum of `s + a` is `m + a`. So each sum and maximum is written in terms of the logits and
their maximum, whatever its a and b are made of.

A gradient also sums `exp(s + a) b (do . v)`. That is `exp(m + a) b` times `do . u`, where u is the
sum of `exp(s - m) v` (FlashAttention's delta): it needs no pass over the keys of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Scores that are `exp(logits + sum of added) * product of factors`, maybe times errors."""

    logits: Any
    added: tuple[_KeyRow, ...] = ()
    factors: tuple[_KeyRow, ...] = ()
    errors: JaxprEqn | None = None  # a product of what comes back with values
    over: bool = False  # over their maximum, and nothing is added

    def over_maximum(self, graph: Graph, top: Any) -> _Weights:
        """The same; `over` where only the maximum is subtracted, which -inf may be the least of."""
        row = self.added[0] if len(self.added) == 1 else None
        atom = row.value if row and row.inverse else None
        while atom is not top:
            eqn = graph.maker(atom) if atom is not None else None
            if eqn is None:
                return self
            *low, atom = eqn.invars
            if eqn.primitive is p.max_p:
                if not isinstance(low[0], Literal) or not np.isneginf(low[0].val):
                    return self
            elif eqn.primitive not in (p.broadcast_in_dim_p, p.reshape_p, p.stop_gradient_p):
                return self
        return replace(self, added=(), over=True)


@dataclass(frozen=True)
class OneForm:
    """A program with a softmax in one form: the variables of its maximum, sum, and products."""

    eqns: list[JaxprEqn]
    top: Any
    total: Any
    products: Sequence[Any]

    def softmax(self, graph: Graph, region: Scoring) -> Softmax:
        """The sums of this program's region that one pass can compute."""
        exits = {e.out: e for e in region.exits}
        marks = {out: number for number, out in enumerate(exits)}
        before, alone = upstream(graph.eqns, marks), {marks[self.top], marks[self.total]}
        weighted = [v for v in self.products if before[v] <= {marks[v], *alone}]
        return Softmax(exits[self.top], exits[self.total], tuple(exits[v] for v in weighted))


def in_one_form(graph: Graph, region: Scoring) -> OneForm | None:
    """The program with the softmax of a region in one form; None if there is none."""
    sums, tops = _read(graph, region)
    totals = [(e, found) for e, found in sums.items() if e.eqn.primitive is p.reduce_sum_p]
    cores = [found.logits for _, found in totals if found.errors is None]
    if not cores:
        return None
    logits = max(dict.fromkeys(cores), key=cores.count)
    return _Writer(graph, region, logits).rewritten(
        {exit: found for exit, found in sums.items() if found.logits is logits},
        {exit.out: found for exit, found in tops.items() if found.logits is logits},
    )


def _read(graph: Graph, region: Scoring) -> tuple[dict[Sum, _Weights], dict[Sum, _Weights]]:
    """The sums of exponentials over all keys of a query, and the maxima of logits."""
    sums: dict[Sum, _Weights] = {}
    tops: dict[Sum, _Weights] = {}
    for exit in region.exits:
        reader = _Reader(graph, region.dims[exit.scores][1])
        if exit.over != KEYS or exit.summed(exit.number) != (reader.keys,):
            continue  # not one sum for each query
        if exit.kind == "max":
            tops[exit] = reader.shifted(exit.scores)
        elif exit.kind == "sum" and (found := reader.weights(exit.scores)):
            sums[exit] = found
    return sums, tops


@dataclass(frozen=True)
class _Reader:
    """Takes scores apart, of which one dim is of `keys`."""

    graph: Graph
    keys: int

    def weights(self, scores: Any) -> _Weights | None:
        """Scores as an exponential and factors; None if they are something else."""
        factors = list(self.taken_apart(scores, False))
        rows = tuple(row for row, _ in factors if isinstance(row, _KeyRow))
        others = [(eqn, inverse) for eqn, inverse in factors if not isinstance(eqn, _KeyRow)]
        kinds = {getattr(eqn, "primitive", None): eqn for eqn, inverse in others if not inverse}
        power, errors = kinds.pop(p.exp_p, None), kinds.pop(p.dot_general_p, None)
        if power is None or len(others) > 1 + (errors is not None):
            return None
        found = self.shifted(power.invars[0])
        return _Weights(found.logits, found.added, rows, errors)

    def taken_apart(
        self, atom: Any, inverse: bool
    ) -> Iterator[tuple[_KeyRow | JaxprEqn | None, bool]]:
        """The factors of scores, each with whether it divides: rows, and what else makes them."""
        eqn = self.graph.maker(atom)
        if row := self.row(atom, inverse):
            yield row, inverse
        elif eqn is None:
            yield None, inverse
        elif eqn.primitive in (p.mul_p, p.div_p):
            first, second = eqn.invars
            yield from self.taken_apart(first, inverse)
            yield from self.taken_apart(second, inverse != (eqn.primitive is p.div_p))
        elif eqn.primitive is p.neg_p:
            yield _KeyRow(Literal(np.float32(-1), jax.typeof(np.float32(-1)))), False
            yield from self.taken_apart(eqn.invars[0], inverse)
        elif eqn.primitive is p.convert_element_type_p:
            yield from self.taken_apart(eqn.invars[0], inverse)
        else:
            while eqn.primitive is p.transpose_p and (maker := self.graph.maker(eqn.invars[0])):
                eqn = maker
            yield eqn, inverse

    def shifted(self, atom: Any) -> _Weights:
        """Logits without what is added to all of a query's."""
        eqn = self.graph.maker(atom)
        if eqn is None or eqn.primitive not in (p.add_p, p.sub_p):
            return _Weights(atom)
        first, second = eqn.invars
        if row := self.row(second, eqn.primitive is p.sub_p):
            found = self.shifted(first)
        elif eqn.primitive is p.add_p and (row := self.row(first)):
            found = self.shifted(second)
        else:
            return _Weights(atom)
        return _Weights(found.logits, (*found.added, row))

    def row(self, atom: Any, inverse: bool = False) -> _KeyRow | None:
        """An operand beside scores that is the same for all keys; None if it may differ."""
        if isinstance(atom, Literal):
            return _KeyRow(atom, (), inverse) if not atom.aval.shape else None
        eqn, dims = self.graph.maker(atom), tuple(range(len(atom.aval.shape)))
        if eqn and eqn.primitive is p.broadcast_in_dim_p and len(eqn.invars) == 1:
            (atom,), dims = eqn.invars, tuple(map(int, eqn.params["broadcast_dimensions"]))
        sizes = dict(zip(dims, atom.aval.shape, strict=True))
        return _KeyRow(atom, dims, inverse) if sizes.get(self.keys, 1) == 1 else None


class _Writer:
    """Writes sums in terms of logits and their maximum."""

    def __init__(self, graph: Graph, region: Scoring, logits: Any):
        self.graph, self.region, self.logits = graph, region, logits
        self.keys = region.dims[logits][1]
        self.wide = jnp.promote_types(logits.aval.dtype, jnp.float32)
        self.added: list[JaxprEqn] = []

    def rewritten(self, sums: Mapping[Sum, _Weights], tops: Mapping[Any, _Weights]) -> OneForm:
        """The program with these sums and maxima written so."""
        keys = (self.keys,)
        top = next((out for out, found in tops.items() if not found.added), None)
        if top is None:
            (top,) = self.write(lambda s: lax.reduce_max(s, keys), [self.logits])
        for out, found in tops.items():
            if out is not top:
                self.write(self.shifted(found), [top, *_values(found.added)], out)
        sums = {e: found.over_maximum(self.graph, top) for e, found in sums.items()}
        plain = {e: e.out for e, f in sums.items() if f.over and not f.factors and not f.errors}
        kept = {e: out for e, out in plain.items() if out.aval.dtype == self.wide}
        totals = (out for e, out in kept.items() if e.eqn.primitive is p.reduce_sum_p)
        (powers,) = self.write(self.powers, [self.logits, top])
        (total,) = self.write(
            lambda x: lax.reduce_sum(x.astype(self.wide), keys), [powers], next(totals, None)
        )
        products = {
            e: self.product(e, powers, kept.get(e))
            for e, found in sums.items()
            if e.eqn.primitive is p.dot_general_p and not found.errors
        }
        for exit, found in sums.items():
            common = products.get(exit, total)
            if found.errors is not None:
                deltas = (self.delta(exit, found.errors, e, out) for e, out in products.items())
                common = next(filter(None, deltas), None)
            if common is not None and common is not exit.out:
                rows = _values((*found.added, *found.factors))
                self.write(self.scaled(exit, found), [common, top, *rows], exit.out)
        written = {v for eqn in self.added for v in eqn.outvars}
        eqns = [e for e in self.graph.eqns if written.isdisjoint(e.outvars)] + self.added
        return OneForm(eqns, top, total, [*products.values()])

    def product(self, exit: Sum, powers: Any, out: Any) -> Any:
        """The product of the exponentials over the maximum with the values of another."""
        dtype, wide = exit.scores.aval.dtype, self.wide
        (weights,) = self.write(lambda x: x.astype(dtype), [powers])
        eqn, out = self.graph.makers[exit.out], out or Var(exit.out.aval.update(dtype=wide))
        invars = [weights if n == exit.number else a for n, a in enumerate(eqn.invars)]
        params = {**eqn.params, "preferred_element_type": wide}
        self.added.append(eqn.replace(invars=invars, outvars=[out], params=params))
        return out

    def delta(self, exit: Sum, errors: JaxprEqn, product: Sum, out: Any) -> Any:
        """What comes back times the result of a product; None if the errors are of other values."""
        names, wanted = self.region.names, self.region.names[exit.out]
        (value,) = [a for n, a in enumerate(product.eqn.invars) if n != product.number]
        own = next((e for e in self.region.eqns if e.outvars == errors.outvars), None)
        if own is None:
            return None
        for side, contracted in enumerate(errors.params["dimension_numbers"][0]):
            back, again = own.invars[side], own.invars[1 - side]
            if errors.invars[1 - side] is not self.region.sources.get(value, value):
                continue
            called = dict(zip(names[value], names[again], strict=True))
            of_out = [called.get(n, n) for n in names[product.out]]
            gone = [names[back][d] for d in contracted]
            batch = [n for n in names[back] if n not in gone]
            if sorted(of_out) == sorted(names[back]) and sorted(batch) == sorted(wanted):
                dims = [[*map(x.index, of)] for of in (gone, batch) for x in (names[back], of_out)]
                order, precision = [*map(batch.index, wanted)], errors.params["precision"]
                product_of = functools.partial(
                    _contracted, dims=(dims[:2], dims[2:]), order=order, precision=precision
                )
                return self.write(product_of, [errors.invars[side], out])[0]
        return None

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

    def shifted(self, found: _Weights) -> Callable[..., jax.Array]:
        """The maximum of logits to which rows are added."""
        return lambda top, *values: self.sum(top, found, self.reader(values))

    def sum(self, x: jax.Array, found: _Weights, read: Callable[..., jax.Array]) -> jax.Array:
        """`x` and the rows that are added to logits."""
        for row in found.added:
            x = x - read(row) if row.inverse else x + read(row)
        return x

    def powers(self, logits: jax.Array, top: jax.Array) -> jax.Array:
        """The exponentials over the maximum."""
        return jnp.exp(logits - lax.expand_dims(top, [self.keys]))

    def scaled(self, exit: Sum, found: _Weights) -> Callable[..., jax.Array]:
        """A sum times what its terms have in common."""
        places = _places(exit, self.keys)
        order = sorted(range(len(places)), key=lambda i: places[i])

        def scale(total: jax.Array, top: jax.Array, *values: jax.Array) -> jax.Array:
            rows = self.reader(values)

            def along(row: jax.Array) -> jax.Array:
                return lax.broadcast_in_dim(lax.transpose(row, order), total.shape, sorted(places))

            if not found.over:
                nothing = lax.eq(top, lax.full_like(top, -jnp.inf))  # the query sees no key
                shift = lax.select(nothing, lax.full_like(top, 0), top)
                total = total * along(lax.exp(self.sum(shift, found, rows)))
            for row in found.factors:
                total = total / along(rows(row)) if row.inverse else total * along(rows(row))
            return total.astype(exit.out.aval.dtype)

        return scale

    def write(self, fn: Callable[..., Any], atoms: Sequence[Any], out: Any = None) -> list[Any]:
        """Add the equations of a function of these variables; its results."""
        results = [] if out is None else [out]
        eqns, results = equations_of(fn, atoms, results, like=self.region.seed)
        self.added += eqns
        return results


def _contracted(
    back: jax.Array, out: jax.Array, dims: Any, order: Sequence[int], precision: Any
) -> jax.Array:
    return lax.transpose(lax.dot_general(back.astype(out.dtype), out, dims, precision), order)


def _values(rows: Sequence[_KeyRow]) -> list[Any]:
    return [row.value for row in rows if not isinstance(row.value, Literal)]


def _places(exit: Sum, keys: int) -> list[int]:
    """The dims of a sum's result that the scores' dims other than `keys` become."""
    factors = factors_of(RULES[exit.eqn.primitive], exit.eqn)
    kept = [dim for d, dim in enumerate(factors.operands[exit.number]) if d != keys]
    return [*map(factors.results[0].index, kept)]
