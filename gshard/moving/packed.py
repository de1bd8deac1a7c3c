"""Several collectives of one kind as one, on one array that holds all their operands.

An AllReduce takes the operands end to end. An AllGather does too, and its result has one row for
each member; a ReduceScatter takes such rows. What an equation of this makes for one of the values
belongs to the user's line of that value, so that the program itself says what travels together.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.evaluate import bind
from gshard.source import because, on_behalf_of, reason_of, together


def run_together(eqns: Sequence[JaxprEqn], values: Sequence[jax.Array]) -> list[jax.Array]:
    """The results of collectives that differ in nothing but their operands and dims."""
    rows = []
    for eqn, x in zip(eqns, values, strict=True):
        with on_behalf_of(eqn):
            rows.append(_as_rows(eqn, x))
    first = eqns[0]
    scattered, gathered = (first.primitive.name == n for n in ("reduce_scatter", "all_gather"))
    with on_behalf_of(first), because(together(len(eqns), reason_of(first))):
        packed = lax.concatenate(rows, rows[0].ndim - 1)
        if scattered:
            (whole,) = bind(first, [lax.reshape(packed, (packed.size,))], scatter_dimension=0)
        elif gathered:
            (whole,) = bind(first, [packed], all_gather_dimension=0)
            whole = lax.reshape(whole, (whole.size // packed.size, packed.size))
        else:
            (whole,) = bind(first, [packed])
    results, start = [], 0
    for eqn, row in zip(eqns, rows, strict=True):
        end = start + row.shape[-1]
        with on_behalf_of(eqn):
            results.append(_as_result(eqn, lax.slice_in_dim(whole, start, end, axis=-1)))
        start = end
    return results


def _members(eqn: JaxprEqn) -> tuple[int, int]:
    """The dim along which members' parts stand, and how many there are."""
    small, large = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dim = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension"))
    if eqn.primitive.name == "reduce_scatter":
        small, large = large, small
    return dim, large[dim] // max(small[dim], 1)


def _as_rows(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """An operand end to end; for a ReduceScatter, a row for each member's part of the result."""
    if eqn.primitive.name != "reduce_scatter":
        return lax.reshape(x, (x.size,))
    dim, members = _members(eqn)
    shape = (*x.shape[:dim], members, x.shape[dim] // members, *x.shape[dim + 1 :])
    return lax.reshape(_moved(lax.reshape(x, shape), dim, 0), (members, x.size // members))


def _as_result(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """The opposite, of the result."""
    shape = eqn.outvars[0].aval.shape
    if eqn.primitive.name != "all_gather":
        return lax.reshape(x, shape)
    dim, members = _members(eqn)
    parts = lax.reshape(x, (members, *eqn.invars[0].aval.shape))
    return lax.reshape(_moved(parts, 0, dim), shape)


def _moved(x: jax.Array, dim: int, to: int) -> jax.Array:
    """`x` with one dim moved to another place."""
    order = [d for d in range(x.ndim) if d != dim]
    order.insert(to, dim)
    return lax.transpose(x, order)
