"""Cuts: how values and equations of a plan are divided into pieces that run one after the other.

A cut divides a dim like one more split would, without devices: an equation on pieces is the
equation on smaller arrays, and a node on pieces is the node of a smaller tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph.evaluate import bind
from gshard.moving.nodes import Node, node_of
from gshard.moving.partial import Reduce
from gshard.moving.plan import Reshard
from gshard.rules.base.rule import RULES, bind_local, factors_of
from gshard.tensors.factors import Dim, Factors, Shape
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

# Operators with a partition rule, or code of their own, that is for other shardings than those in
# which a plan already has their operands.
_CUT = (p.dot_general_p, p.reshape_p, p.broadcast_in_dim_p, p.transpose_p)


@dataclass(frozen=True)
class Cut:
    """The dim is `blocks` equal blocks, and each piece has an equal part of every block.

    A dim that another device's tiles are parts of has a block for each of these tiles.
    """

    dim: int
    blocks: int = 1

    def fits(self, shape: Sequence[int], count: int) -> bool:
        """Whether it divides an array of this shape into `count` pieces."""
        return shape[self.dim] > 0 and shape[self.dim] % (self.blocks * count) == 0

    def shape(self, shape: Sequence[int], count: int) -> Shape:
        """The shape of one of `count` pieces."""
        return tuple(n // count if d == self.dim else n for d, n in enumerate(shape))

    def piece(self, x: jax.Array, number: int, count: int) -> jax.Array:
        """One of `count` pieces."""
        inside, dim = self._apart(x)
        rows = inside.shape[dim] // count
        taken = lax.slice_in_dim(inside, number * rows, (number + 1) * rows, axis=dim)
        return taken.reshape(self.shape(x.shape, count))

    def joined(self, pieces: Sequence[jax.Array]) -> jax.Array:
        """The value whose pieces these are."""
        shape = pieces[0].shape
        inside = [self._apart(x) for x in pieces]
        whole = jnp.concatenate([x for x, _ in inside], axis=inside[0][1])
        rows = shape[self.dim] * len(pieces)
        return whole.reshape(*shape[: self.dim], rows, *shape[self.dim + 1 :])

    def _apart(self, x: jax.Array) -> tuple[jax.Array, int]:
        """The array with a dim for the blocks if there are several, and the dim inside them."""
        if self.blocks == 1:
            return x, self.dim
        before, rows, after = x.shape[: self.dim], x.shape[self.dim], x.shape[self.dim + 1 :]
        return x.reshape(*before, self.blocks, rows // self.blocks, *after), self.dim + 1


@dataclass(frozen=True)
class Cuts:
    """The cuts of an equation's operands and results; None for an operand that stays whole."""

    operands: tuple[Cut | None, ...]
    results: tuple[Cut, ...]


def cuts_of(eqn: JaxprEqn, known: Mapping[Any, Cut], count: int) -> Cuts | None:
    """How an equation runs in `count` pieces if some of its values have the cuts `known`.

    None if it cannot: it sums over the dim, or moves rows between pieces.
    """
    node = node_of(eqn)
    if node is not None:
        return _cuts_of_node(eqn, node, known, count)
    rule = RULES.get(eqn.primitive)
    plain = rule and rule.by_factors and (rule.local is bind_local or _is_kernel(eqn))
    if rule is None or eqn.effects or not (plain or eqn.primitive in _CUT):
        return None
    factors = factors_of(rule, eqn)
    values = [*zip(eqn.invars, factors.operands, strict=True)]
    values += zip(eqn.outvars, factors.results, strict=True)
    found = {
        _inside(dims[known[v].dim], known[v].blocks, factors, count)
        for v, dims in values
        if not isinstance(v, Literal) and v in known
    }
    if len(found) != 1 or None in found:
        return None
    (only,) = found
    assert only is not None
    operands = [_outside(dims, *only, factors) for dims in factors.operands]
    results = [_outside(dims, *only, factors) for dims in factors.results]
    if None in results or _TWICE in (*operands, *results):
        return None
    return Cuts(tuple(operands), tuple(r for r in results if r is not None))


_TWICE = Cut(-1)  # of a tensor in which the factor occurs more than once


def _is_kernel(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "pallas_call"


def _inside(dim: Dim, blocks: int, factors: Factors, count: int) -> tuple[str, int] | None:
    """The factor that a cut of a dim divides, and into how many blocks."""
    major = 1
    for factor in dim:
        size = factors.sizes[factor]
        inner = blocks // major
        if blocks % major == 0 and size % (inner * count) == 0:
            fixed = {*factors.reduced, *factors.replicated, *factors.resized}
            return None if factor in fixed else (factor, inner)
        major *= size
    return None


def _outside(dims: Sequence[Dim], factor: str, blocks: int, factors: Factors) -> Cut | None:
    """The cut of a tensor of which a factor is cut; None if it has no such dim."""
    found = [d for d, dim in enumerate(dims) if factor in dim]
    if len(found) > 1:
        return _TWICE
    for d in found:
        before = dims[d][: dims[d].index(factor)]
        return Cut(d, blocks * math.prod(factors.sizes[f] for f in before))
    return None


def _cuts_of_node(eqn: JaxprEqn, node: Node, known: Mapping[Any, Cut], count: int) -> Cuts | None:
    """A dim of a node may be cut if each tile, before and after, has entire blocks of it."""
    value, (result,) = eqn.invars[0], eqn.outvars
    ends = _ends(node)
    if ends is None or ends[0].local_shape(ends[2]) != value.aval.shape:
        return None
    (source, target, shape), tiles = ends, [s.tiles for s in ends[:2]]
    if value in known:
        cut = known[value]
        blocks = cut.blocks * tiles[0][cut.dim]
    elif result in known:
        cut = known[result]
        blocks = cut.blocks * tiles[1][cut.dim]
    else:
        return None
    d = cut.dim
    divides = not any(blocks % t[d] for t in tiles) and shape[d] % (blocks * count) == 0
    if not divides or source.idle or target.idle:
        return None
    smaller, dtype = _smaller(node, d, count), value.aval.dtype
    before, after = (Cut(d, blocks // t[d]) for t in tiles)
    local = tuple(value.aval.shape)
    if count * smaller.sent(before.shape(local, count), dtype) > node.sent(local, dtype):
        return None
    return Cuts((before, None), (after,))


def _ends(node: Node) -> tuple[Sharding, Sharding, Shape] | None:
    """The shardings before and after a node, and the shape of its tensor."""
    if isinstance(node, Reshard):
        return node.sharding, node.target, node.shape
    if isinstance(node, Reduce) and node.kind == "sum":
        return node.sharding.reduced, node.target, node.shape
    return None


def _smaller(node: Any, dim: int, count: int) -> Any:
    """The node of one of `count` pieces."""
    reason = replace(node.reason, pieces=count)
    return replace(node, shape=Cut(dim).shape(node.shape, count), reason=reason)


def on_pieces(eqn: JaxprEqn, cuts: Cuts, values: Sequence[Any], count: int) -> Sequence[Any]:
    """The results of an equation on pieces of its operands."""
    node = node_of(eqn)
    if node is not None:
        return bind(eqn, values, node=_smaller(node, cuts.results[0].dim, count))
    tiles = [Tile(x, _ONE.extended(jnp.ndim(x)), jnp.shape(x)) for x in values]
    results = zip(eqn.outvars, cuts.results, strict=True)
    shapes = [cut.shape(v.aval.shape, count) for v, cut in results]
    local = RULES[eqn.primitive].local
    # `bind_local`, or a kernel's own: neither uses the planner, and none exists in this pass.
    return local(None, eqn, tiles, shapes)  # type: ignore[arg-type]  # no planner here


_ONE = Sharding((), 1)
