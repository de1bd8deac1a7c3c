"""The operators of a reproducible program (see `simplify.fixed_order`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from gshard.operators.choose import partition_by_factors
from gshard.operators.rule import Context, Doc, Rule, register
from gshard.rules.contraction import dot_factors, dot_work
from gshard.rules.pointwise import same_dims
from gshard.rules.scatter import partition_scatter, scatter_factors
from gshard.simplify.fixed_order import leaf_dot_p, pin_p, scatter_in_order_p, tree_sum_p
from gshard.simplify.trees import neighbours
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors, Shape
from gshard.tensors.sharding import Sharding
from gshard.tensors.tile import Tile

OPAQUE = "opaque"  # in `Place.known`: 32 bits that are all set, which the compiler cannot know
ROWS = 8  # products whose result has a multiple of so many rows and columns have one kernel
CHAIN = 256  # the longest sum of products that no library cuts


Local = Callable[[Place, Sequence[Tile]], list[Tile]]


def pinning(local: Local) -> Local:
    """A per-device program whose first argument is what values are pinned with."""

    def run(place: Place, tiles: Sequence[Tile]) -> list[Tile]:
        place.known[OPAQUE] = tiles[0].array
        return local(place, tiles)

    return run


def pinned(place: Place, x: jax.Array) -> jax.Array:
    """`x`, and nothing that a compiler could know of how it was made."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return lax.complex(pinned(place, lax.real(x)), pinned(place, lax.imag(x)))
    size = x.dtype.itemsize * 8
    unsigned = jnp.dtype(f"uint{size}")
    ones = place.known[OPAQUE].astype(unsigned)
    if size == 64:
        ones = lax.shift_left(ones, jnp.asarray(32, unsigned)) | ones
    bits = lax.bitcast_convert_type(x, unsigned) & ones
    return lax.bitcast_convert_type(bits, x.dtype)


def _pin(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    return [pinned(ctx.place, tiles[0].array)]


def _leaf_factors(eqn: JaxprEqn) -> Factors:
    factors = dot_factors(eqn)
    return replace(factors, reduced={}, whole=frozenset(factors.reduced))


def _leaf_dot(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    """The product as chains of multiply-adds along the contracted rows, in the order of rows.

    Libraries have other kernels for a few rows or columns, and cut long sums as their caches
    demand: here neither happens.
    """
    (left, right), (batch, right_batch) = eqn.params["dimension_numbers"]
    dtype = eqn.params["dtype"]
    wide = jnp.promote_types(dtype, jnp.float32)
    x, y = (lax.convert_element_type(t.array, wide) for t in tiles)
    free = [d for d in range(x.ndim) if d not in (*left, *batch)]
    right_free = [d for d in range(y.ndim) if d not in (*right, *right_batch)]
    kept = (*(x.shape[d] for d in (*batch, *free)), *(y.shape[d] for d in right_free))
    b, k = math.prod(x.shape[d] for d in batch), math.prod(x.shape[d] for d in left)
    m, n = (math.prod(z.shape[d] for d in f) for z, f in ((x, free), (y, right_free)))
    if 0 in (b, k, m, n):
        return [jnp.zeros(kept, dtype)]
    x = lax.reshape(lax.transpose(x, (*batch, *free, *left)), (b, m, k))
    y = lax.reshape(lax.transpose(y, (*right_batch, *right, *right_free)), (b, k, n))
    zero = jnp.zeros((), wide)
    x = lax.pad(x, zero, ((0, 0, 0), (0, -m % ROWS, 0), (0, 0, 0)))
    y = lax.pad(y, zero, ((0, 0, 0), (0, 0, 0), (0, -n % ROWS, 0)))
    result = lax.slice(_chains(ctx.place, x, y), (0, 0, 0), (b, m, n))
    return [lax.convert_element_type(lax.reshape(result, kept), dtype)]


def _chains(place: Place, x: jax.Array, y: jax.Array) -> jax.Array:
    """Products of `CHAIN` rows at a time, added one after the other.

    They are pinned, for XLA makes a multiplication of a product of one row.
    """
    numbers = (((2,), (1,)), ((0,), (0,)))
    total = None
    for start in range(0, x.shape[2], CHAIN):
        limit = min(start + CHAIN, x.shape[2])
        part = lax.dot_general(
            lax.slice_in_dim(x, start, limit, axis=2),
            lax.slice_in_dim(y, start, limit, axis=1),
            numbers,
            precision=lax.Precision.HIGHEST,
        )
        part = pinned(place, part)
        total = part if total is None else lax.add(total, part)
    assert total is not None
    return total


def _tree_factors(eqn: JaxprEqn) -> Factors:
    """The dim that is summed may be split, if devices then hold subtrees."""
    axis = eqn.params["axis"]
    names = [f"k{d}" if d == axis else f"d{d}" for d in range(len(eqn.invars[0].aval.shape))]
    kept = [name for name in names if name[0] == "d"]
    return Factors.of(eqn, [names], [kept], {f"k{axis}": "tree"})


def _whole_factors(eqn: JaxprEqn) -> Factors:
    factors = _tree_factors(eqn)
    return replace(factors, reduced={}, whole=frozenset(factors.reduced))


def _tree_sum(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    return [neighbours(tiles[0].array, eqn.params["axis"], lax.add)]


def _partition_tree(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], targets: list[Sharding]
) -> list[Tile]:
    axis = eqn.params["axis"]
    split, n = tiles[0].sharding.splits[axis], tiles[0].shape[axis]
    subtrees = split is None or (n % split.tiles == 0 and not split.idle)
    return partition_by_factors(ctx, eqn, _SUBTREES if subtrees else _WHOLE, tiles, targets)


_SUBTREES, _WHOLE = Rule(_tree_factors, _tree_sum), Rule(_whole_factors, _tree_sum)

register(Rule(same_dims, _pin, level=0, doc=Doc(free="every dim")), pin_p)
register(
    Rule(
        _leaf_factors,
        _leaf_dot,
        work=dot_work,
        doc=Doc(
            free="batch dims; any dim of one operand alone", gather="contracting dims: AllGather"
        ),
    ),
    leaf_dot_p,
)
register(
    Rule(
        _tree_factors,
        _tree_sum,
        partition=_partition_tree,
        doc=Doc(
            free="kept dims",
            gather="the summed dim: AllToAll of subtrees, and AllGather unless the result is split",
        ),
    ),
    tree_sum_p,
)
register(
    Rule(
        scatter_factors,
        partition=partition_scatter,
        doc=Doc(
            free="batch dims, full windows, dims looked up in",
            gather="indices: AllGather of the updates",
        ),
    ),
    scatter_in_order_p,
)
