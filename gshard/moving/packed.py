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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.graph.source import because, on_behalf_of
from gshard.moving import costs
from gshard.moving.collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    CollectiveNode,
    ReduceScatter,
)
from gshard.moving.nodes import add_node, node_of


def run_together(
    eqns: Sequence[JaxprEqn], values: Sequence[jax.Array], by_exchange: bool = False
) -> list[jax.Array]:
    """The results of nodes that are collectives and differ only in their operands and dims."""
    nodes: list[Any] = [node_of(eqn) for eqn in eqns]
    rows = []
    for eqn, node, x in zip(eqns, nodes, values, strict=True):
        with on_behalf_of(eqn), because(node.reason):
            rows.append(_as_rows(node, x))
    node = replace(nodes[0], reason=replace(nodes[0].reason, values=len(eqns)))
    with on_behalf_of(eqns[0]), because(node.reason):
        packed = lax.concatenate(rows, rows[0].ndim - 1)
        if by_exchange:
            whole = _exchanged(node, packed)
        elif isinstance(node, ReduceScatter):
            whole = add_node(replace(node, dim=0), lax.reshape(packed, (packed.size,)))
        elif isinstance(node, AllGather):
            whole = add_node(replace(node, dim=0), packed)
            whole = lax.reshape(whole, (whole.size // packed.size, packed.size))
        else:
            whole = add_node(node, packed)
    results, start = [], 0
    for eqn, node, row in zip(eqns, nodes, rows, strict=True):
        end = start + row.shape[-1]
        with on_behalf_of(eqn), because(node.reason):
            part = lax.slice_in_dim(whole, start, end, axis=-1)
            results.append(_as_result(eqn, node, part))
        start = end
    return results


def can_be_exchanged(node: CollectiveNode) -> bool:
    """Whether a collective can be made of AllToAlls: they take groups of one size."""
    return len(set(map(len, node.groups))) == 1


def _exchanged(node: CollectiveNode, packed: jax.Array) -> jax.Array:
    """The collective of all operands, made of AllToAlls; an AllReduce may be padded.

    In an AllReduce each member sums one part and sends the sum to all others. Few numbers are sent
    to all members in one step.
    """
    members = len(node.groups[0])

    def exchange(rows: jax.Array) -> jax.Array:
        return add_node(AllToAll(node.reason, node.groups), rows)

    def to_all(x: jax.Array) -> jax.Array:
        return exchange(lax.broadcast(x, (members,)))

    if isinstance(node, AllGather):
        return to_all(packed)
    if isinstance(node, ReduceScatter):
        return _reduced(exchange(packed), lax.reduce_sum)
    assert isinstance(node, AllReduce)
    reduce = {"sum": lax.reduce_sum, "max": lax.reduce_max, "min": lax.reduce_min}[node.kind]
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


def _as_rows(node: CollectiveNode, x: jax.Array) -> jax.Array:
    """An operand flattened; for a ReduceScatter, one row per member's part of the result."""
    if not isinstance(node, ReduceScatter):
        return lax.reshape(x, (x.size,))
    dim, members = node.dim, len(node.groups[0])
    shape = (*x.shape[:dim], members, x.shape[dim] // members, *x.shape[dim + 1 :])
    return lax.reshape(_moved(lax.reshape(x, shape), dim, 0), (members, x.size // members))


def _as_result(eqn: JaxprEqn, node: CollectiveNode, x: jax.Array) -> jax.Array:
    """The inverse, for the result."""
    shape = eqn.outvars[0].aval.shape
    if not isinstance(node, AllGather):
        return lax.reshape(x, shape)
    parts = lax.reshape(x, (len(node.groups[0]), *eqn.invars[0].aval.shape))
    return lax.reshape(_moved(parts, 0, node.dim), shape)


def _moved(x: jax.Array, dim: int, to: int) -> jax.Array:
    """`x` with one dim moved to another place."""
    order = [d for d in range(x.ndim) if d != dim]
    order.insert(to, dim)
    return lax.transpose(x, order)
