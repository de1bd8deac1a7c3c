"""FlashAttention's delta: a sum over keys of a softmax's gradient, without a ring pass.

With weights p of the keys and o = sum_k p v, the backward pass of the softmax needs
sum_k p (do . v) for every query, which is do . o: it needs no pass over the keys. Factors that are
equal for all keys may be multiplied with p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph import Graph
from gshard.graph.evaluate import equations_of
from gshard.propagation.rewrites.scores import Scoring
from gshard.rules.base.ring_pass import KEYS, Sum


def factor_out_delta(
    eqns: Sequence[JaxprEqn], region: Scoring, products: Sequence[Sum]
) -> list[JaxprEqn]:
    """The program, with such sums computed from the softmax's `products`, outside the region."""
    eqns = list(eqns)
    for exit in list(region.exits):
        found = [made for product in products if (made := _delta(exit, product, region))]
        if found:
            region.exits.remove(exit)
            eqns = [e for e in eqns if exit.out not in e.outvars] + found[0]
    return eqns


@dataclass
class _Quotient:
    """The factors of a score, and whether they divide: scores, and rows, equal for all keys."""

    scores: list[tuple[Any, bool]] = field(default_factory=list)
    rows: list[tuple[Any, bool]] = field(default_factory=list)
    negative: bool = False


def _delta(exit: Sum, product: Sum, region: Scoring) -> list[JaxprEqn] | None:
    """The equations that compute the sum of `exit` from the result of `product`, if possible."""
    if exit.eqn.primitive is not p.reduce_sum_p or exit.over != KEYS:
        return None
    graph = Graph(region.eqns)
    summed, weights = _Quotient(), _Quotient()
    _take_apart(exit.scores, False, summed, region, graph)
    _take_apart(product.scores, False, weights, region, graph)
    others = list(summed.scores)
    for score in weights.scores:
        if score not in others:
            return None
        others.remove(score)
    maker = graph.maker(others[0][0]) if [divides for _, divides in others] == [False] else None
    if maker is None or maker.primitive is not p.dot_general_p:
        return None
    found = _of_errors(maker, product, region)
    rows = [*summed.rows, *((row, not divides) for row, divides in weights.rows)]
    tensors = [*(found.tensors if found else ()), *(row for row, _ in rows)]
    if found is None or {a.aval.dtype for a in tensors} != {exit.out.aval.dtype}:
        return None
    return _made(exit, found, rows, summed.negative != weights.negative, region)


def _take_apart(atom: Any, divides: bool, into: _Quotient, region: Scoring, graph: Graph) -> None:
    """Collect the factors of a product, through operators that only rearrange it."""
    if _is_row(atom, region):
        into.rows.append((atom, divides))
        return
    eqn = graph.maker(atom)
    if eqn is not None and eqn.primitive in (p.mul_p, p.div_p):
        first, second = eqn.invars
        _take_apart(first, divides, into, region, graph)
        _take_apart(second, divides != (eqn.primitive is p.div_p), into, region, graph)
    elif eqn is not None and eqn.primitive in (p.neg_p, p.transpose_p):
        into.negative ^= eqn.primitive is p.neg_p
        _take_apart(eqn.invars[0], divides, into, region, graph)
    else:
        into.scores.append((atom, divides))


def _is_row(atom: Any, region: Scoring) -> bool:
    """Whether an input is equal for all keys, as a scalar is."""
    if isinstance(atom, Literal):
        return True
    names, keys = region.names[atom], region.name_of(KEYS)
    shape = atom.aval.shape
    return atom in region.sources and all(
        n == 1 for name, n in zip(names, shape, strict=True) if name == keys
    )


@dataclass(frozen=True)
class _Errors:
    """The cotangent of the product's result, that result, and the names of the dims of both."""

    tensors: tuple[Any, Any]
    names: tuple[tuple[str, ...], tuple[str, ...]]
    contracted: frozenset[str]
    like: JaxprEqn


def _of_errors(eqn: JaxprEqn, product: Sum, region: Scoring) -> _Errors | None:
    """The operands of `do . v`, if v is what the product sums with its weights."""
    (value,) = [a for n, a in enumerate(product.eqn.invars) if n != product.number]
    for side, other in ((0, 1), (1, 0)):
        back, again = eqn.invars[side], eqn.invars[other]
        same = not isinstance(again, Literal) and region.sources.get(again) is not None
        if not same or region.sources[again] is not region.sources.get(value):
            continue
        if region.sources.get(back) is None:
            continue
        called = dict(zip(region.names[value], region.names[again], strict=True))
        out = tuple(called.get(n, n) for n in region.names[product.out])
        own = region.names[back]
        contracted = frozenset(own[d] for d in eqn.params["dimension_numbers"][0][side])
        if sorted(out) == sorted(own) and len(set(out)) == len(out):
            return _Errors((region.sources[back], product.out), (own, out), contracted, eqn)
    return None


def _made(
    exit: Sum, errors: _Errors, rows: Sequence[tuple[Any, bool]], negative: bool, region: Scoring
) -> list[JaxprEqn] | None:
    """The sum as a product of two tensors of the queries, times the rows."""
    (own, other), wanted = errors.names, region.names[exit.out]
    batch, summed = (
        [n for n in own if (n in errors.contracted) == is_in] for is_in in (False, True)
    )
    found = [_places(row, wanted, region) for row, _ in rows]
    places = [dims for dims in found if dims is not None]
    if sorted(batch) != sorted(wanted) or len(places) < len(rows):
        return None
    contracted, kept = (tuple([*map(x.index, of)] for x in (own, other)) for of in (summed, batch))
    shape, dtype = exit.out.aval.shape, exit.out.aval.dtype
    precision = errors.like.params["precision"]

    def delta(back: jax.Array, out: jax.Array, *tensors: jax.Array) -> jax.Array:
        x = lax.dot_general(back, out, (contracted, kept), precision, dtype)
        x = lax.transpose(x, [batch.index(n) for n in wanted])
        given = iter(tensors)
        for (row, divides), dims in zip(rows, places, strict=True):
            if isinstance(row, Literal):
                factor = lax.full_like(x, row.val)
            else:
                flat = lax.squeeze(next(given), [n for n, d in enumerate(dims) if d is None])
                factor = lax.broadcast_in_dim(flat, shape, [d for d in dims if d is not None])
            x = lax.div(x, factor) if divides else lax.mul(x, factor)
        return lax.neg(x) if negative else x

    named = [region.sources[row] for row, _ in rows if not isinstance(row, Literal)]
    atoms = [*errors.tensors, *named]
    return equations_of(delta, atoms, [exit.out], like=exit.eqn)[0]


def _places(row: Any, wanted: Sequence[str], region: Scoring) -> list[int | None] | None:
    """The result's dim for each dim of a row (None for that of keys), or None if one is missing."""
    if isinstance(row, Literal):
        return []
    dims = [wanted.index(n) if n in wanted else None for n in region.names[row]]
    kept = [d for d in dims if d is not None]
    lost = [n for n, d in zip(row.aval.shape, dims, strict=True) if d is None]
    return dims if kept == sorted(set(kept)) and set(lost) <= {1} else None
