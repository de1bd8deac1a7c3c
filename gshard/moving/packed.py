"""Combined collectives: several of one kind as one, on one array with all their operands.

An AllReduce takes the flattened operands concatenated. An AllGather does too, and its result has
one row per member; a ReduceScatter takes such rows. The equations for one of the values have the
user's line of that value, so that the program itself shows what is combined.

Each of the three can also be made of AllToAlls, with as many bytes; an AllReduce of few numbers is
a single AllToAll. Compared with a ring, in which each message waits for the previous one, that
takes fewer steps: every device sends to all others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.evaluate import bind
from gshard.graph.source import because, on_behalf_of, reason_of
from gshard.moving import costs


def run_together(
    eqns: Sequence[JaxprEqn], values: Sequence[jax.Array], by_exchange: bool = False
) -> list[jax.Array]:
    """The results of collectives that differ only in their operands and dims."""
    rows = []
    for eqn, x in zip(eqns, values, strict=True):
        with on_behalf_of(eqn):
            rows.append(_as_rows(eqn, x))
    first = eqns[0]
    scattered, gathered = (first.primitive.name == n for n in ("reduce_scatter", "all_gather"))
    reason = replace(reason_of(first), values=len(eqns))
    with on_behalf_of(first), because(reason):
        packed = lax.concatenate(rows, rows[0].ndim - 1)
        if by_exchange:
            whole = _exchanged(first, packed)
        elif scattered:
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


def can_be_exchanged(eqn: JaxprEqn) -> bool:
    """Whether a collective can be made of AllToAlls: they take groups of one size."""
    return len({len(g) for g in eqn.params.get("axis_index_groups") or [()]}) == 1


def _exchanged(eqn: JaxprEqn, packed: jax.Array) -> jax.Array:
    """The collective `eqn` of all operands, made of AllToAlls; an AllReduce may be padded.

    In an AllReduce each member sums one part and sends the sum to all others. Few numbers are sent
    to all members in one step.
    """
    params, name = eqn.params, eqn.primitive.name
    axes, groups = params.get("axes", params.get("axis_name")), params.get("axis_index_groups")

    def exchange(rows: jax.Array) -> jax.Array:
        return lax.all_to_all(rows, axes, 0, 0, tiled=True, axis_index_groups=groups)

    def to_all(x: jax.Array) -> jax.Array:
        return exchange(lax.broadcast(x, (members,)))

    members = len(groups[0]) if groups else lax.axis_size(axes)
    if name == "all_gather":
        return to_all(packed)
    if name == "reduce_scatter":
        return _reduced(exchange(packed), lax.reduce_sum)
    reduce = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}[name]
    if packed.size <= 2 or packed.nbytes * members <= costs.AT_ONCE:
        return _reduced(lax.reshape(to_all(packed), (members, packed.size)), reduce)
    parts = lax.pad(packed, packed.dtype.type(0), [(0, -packed.size % members, 0)])
    parts = lax.reshape(parts, (members, parts.size // members))
    whole = to_all(_reduced(exchange(parts), reduce))
    return lax.reshape(whole, (whole.size,))


def _reduced(rows: jax.Array, reduce: Callable[..., jax.Array]) -> jax.Array:
    """The reduction of rows; narrow floats are accumulated in float32."""
    short = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
    wide = rows.astype(jnp.float32) if short else rows
    return reduce(wide, (0,)).astype(rows.dtype)


def _members(eqn: JaxprEqn) -> tuple[int, int]:
    """The dim of the members' parts, and the number of members."""
    small, large = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dim = eqn.params.get("all_gather_dimension", eqn.params.get("scatter_dimension"))
    if eqn.primitive.name == "reduce_scatter":
        small, large = large, small
    return dim, large[dim] // max(small[dim], 1)


def _as_rows(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """An operand flattened; for a ReduceScatter, one row per member's part of the result."""
    if eqn.primitive.name != "reduce_scatter":
        return lax.reshape(x, (x.size,))
    dim, members = _members(eqn)
    shape = (*x.shape[:dim], members, x.shape[dim] // members, *x.shape[dim + 1 :])
    return lax.reshape(_moved(lax.reshape(x, shape), dim, 0), (members, x.size // members))


def _as_result(eqn: JaxprEqn, x: jax.Array) -> jax.Array:
    """The inverse, for the result."""
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
