"""The operators of a reproducible program (see `reproducible.order`): their types and rules."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from gshard._jax import mlir
from gshard.graph.kinds import ALIASES
from gshard.graph.reason import Reason
from gshard.moving.halo import window
from gshard.moving.plan import reshard_cost
from gshard.moving.reductions import halved, neighbours
from gshard.reproducible.products import chained_product, pinned
from gshard.rules.base.rule import Context, Doc, Elementwise, Rule, Way, bind_local, register, rule
from gshard.rules.base.ways import FactorSplit, by_factors
from gshard.rules.contraction import dot_factors, dot_work
from gshard.rules.scatter import run_scatter, scatter_factors, scatter_ways
from gshard.tensors.devices import Place
from gshard.tensors.factors import Factors, Shapes
from gshard.tensors.sharding import Sharding, Shardings, Split, Targets
from gshard.tensors.tile import Arrays, Tile, Tiles

# A sum within leaves, whose dims are not split.
leaf_sum_p = Primitive("leaf_sum")


@leaf_sum_p.def_abstract_eval
def _leaf_sum_aval(x: Any, *, axes: tuple[int, ...]) -> ShapedArray:
    return ShapedArray(tuple(n for d, n in enumerate(x.shape) if d not in axes), x.dtype)


# An operator that is split along its first `batch` dims alone, which all its tensors have.
in_one_piece_p = Primitive("in_one_piece")
in_one_piece_p.multiple_results = True


@in_one_piece_p.def_effectful_abstract_eval
def _in_one_piece_aval(*avals: Any, of: Primitive, params: Any, batch: int) -> Any:
    found, effects = of.abstract_eval(*avals, **dict(params))
    return (found if of.multiple_results else [found]), effects


# A `dot_general` whose contracting dims are not split.
leaf_dot_p = Primitive("leaf_dot")


@leaf_dot_p.def_abstract_eval
def _leaf_dot_aval(x: Any, y: Any, *, dimension_numbers: Any, dtype: Any) -> ShapedArray:
    (left, right), (batch, right_batch) = dimension_numbers
    shape = [x.shape[d] for d in batch]
    shape += [n for d, n in enumerate(x.shape) if d not in (*left, *batch)]
    shape += [n for d, n in enumerate(y.shape) if d not in (*right, *right_batch)]
    return ShapedArray(tuple(shape), dtype)


# A `scatter_add` that applies its updates one after the other.
scatter_in_order_p = Primitive("scatter_in_order")
scatter_in_order_p.def_abstract_eval(
    lambda x, indices, updates, **params: ShapedArray(x.shape, x.dtype)
)
mlir.register_lowering(
    scatter_in_order_p, mlir.lower_fun(p.scatter_add_p.bind, multiple_results=False)
)


def scatter_by_loop(x: Any, indices: Any, updates: Any, **params: Any) -> Any:
    """One update at a time: XLA's deterministic scatter on GPUs adds in an order of sizes."""
    numbers = params["dimension_numbers"]
    rows = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    kept = numbers.scatter_indices_batching_dims  # each has a part of `x` of its own
    dims = [d for d in range(indices.ndim - 1) if d not in kept]
    sizes = [indices.shape[d] for d in dims]

    def add(number: Any, total: Any) -> Any:
        own, update = indices, updates
        for d, place in zip(dims, jnp.unravel_index(number, sizes), strict=True):
            own = lax.dynamic_slice_in_dim(own, place, 1, d)
            update = lax.dynamic_slice_in_dim(update, place, 1, rows[d])
        return p.scatter_add_p.bind(total, own, update, **params | {"unique_indices": True})

    return lax.fori_loop(0, math.prod(sizes), add, x)


mlir.register_lowering(
    scatter_in_order_p, mlir.lower_fun(scatter_by_loop, multiple_results=False), platform="gpu"
)

# The same value, as bits that the compiler knows nothing about; broadcast to the shape of a second
# operand, on which the bits seem to depend.
pin_p = Primitive("pin")


@pin_p.def_abstract_eval
def _pin_aval(x: Any, *others: Any) -> ShapedArray:
    return ShapedArray(np.broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


# A sum over one dim by a binary tree of neighbours; devices may hold subtrees of it.
tree_sum_p = Primitive("tree_sum")


@tree_sum_p.def_abstract_eval
def _tree_sum_aval(x: Any, *, axis: int) -> ShapedArray:
    return ShapedArray((*x.shape[:axis], *x.shape[axis + 1 :]), x.dtype)


def _leaf_factors(eqn: JaxprEqn) -> Factors:
    """Devices that split contracted rows exchange them for leaves, or for another batch dim."""
    factors = dot_factors(eqn)
    most = max(factors.priority, key=factors.sizes.__getitem__, default=None)
    instead = dict.fromkeys(factors.reduced, (most,)) if most else {}
    return replace(factors, reduced={}, replicated=frozenset(factors.reduced), instead=instead)


def _leaf_dot(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    """The product as chains of multiply-adds along the contracted rows, in the order of rows."""
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
    result = chained_product(ctx.place, x, y)
    return [lax.convert_element_type(lax.reshape(result, kept), dtype)]


def _tree_factors(eqn: JaxprEqn) -> Factors:
    """The dim that is summed may be split, if devices then hold subtrees."""
    axis = eqn.params["axis"]
    names = [f"k{d}" if d == axis else f"d{d}" for d in range(len(eqn.invars[0].aval.shape))]
    kept = [name for name in names if name[0] == "d"]
    return Factors.of(eqn, [names], [kept], {f"k{axis}": "tree"})


def _tree_sum(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    return [neighbours(tiles[0].array, eqn.params["axis"], lax.add)]


@rule(
    leaf_sum_p,
    local=lambda ctx, eqn, tiles, _: [
        functools.reduce(
            lambda x, d: halved(x, d, lax.add), eqn.params["axes"][::-1], tiles[0].array
        )
    ],
    doc=Doc(free="kept dims", gather="the summed dims of a leaf: AllGather"),
)
def _leaf_sum_factors(eqn: JaxprEqn) -> Factors:
    axes = eqn.params["axes"]
    names = [None if d in axes else f"d{d}" for d in range(len(eqn.invars[0].aval.shape))]
    return Factors.of(eqn, [names], [[name for name in names if name]])


def _in_one_piece(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    """The operator itself; padding of batch dims is set to zero, for libraries that may hang.

    It is a branch that is always taken, which the compiler cannot know. Fused with operators before
    or after it, its loops might be vectorized or not, and have other bits.
    """
    clean = [t.masked(ctx.place, jnp.zeros((), t.array.dtype)) for t in tiles]
    inner = eqn.replace(primitive=eqn.params["of"], params=dict(eqn.params["params"]))

    def run(*arrays: jax.Array) -> list[jax.Array]:
        own = [t.holding(a) for t, a in zip(clean, arrays, strict=True)]
        return list(bind_local(ctx, inner, own, shapes))

    arrays = [t.array for t in clean]
    if eqn.effects:
        return run(*arrays)
    zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(run, *arrays)]
    return lax.cond(ctx.place.opaque != 0, run, lambda *_: zeros, *arrays)


@rule(
    in_one_piece_p,
    local=_in_one_piece,
    doc=Doc(free="batch dims, where it has them", gather="all other dims: AllGather"),
)
def _batch_factors(eqn: JaxprEqn) -> Factors:
    batch = [f"b{d}" for d in range(eqn.params["batch"])]
    operands, results = (
        [[*batch, *[None] * (len(a.aval.shape) - len(batch))] for a in atoms]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return Factors.of(eqn, operands, results)


def tree_ways(eqn: JaxprEqn, shardings: Shardings, targets: Targets, limit: int) -> Iterable[Way]:
    """Each device has an equal subtree; else they exchange nodes for parts of another dim.

    `Way.how` is then the sharding under which a device completes its part of the tree.
    """
    (here,), axis, aval = shardings, eqn.params["axis"], eqn.invars[0].aval
    split, n = here.splits[axis], aval.shape[axis]
    if split is None or (n % split.tiles == 0 and not split.idle):
        return by_factors(eqn, _tree_factors(eqn), shardings, targets)
    others = [d for d, s in enumerate(here.splits) if s is None and aval.shape[d] > 1]
    if split.idle or not others:
        whole = replace(_tree_factors(eqn), reduced={}, replicated=frozenset({f"k{axis}"}))
        return by_factors(eqn, whole, shardings, targets)
    dim = max(others, key=lambda d: aval.shape[d])
    exchanged = here.replace(axis, None).replace(dim, split)
    kept = tuple(s for d, s in enumerate(exchanged.splits) if d != axis)
    nodes = _nodes(-(-n // split.tiles)) * split.tiles
    shape = (*aval.shape[:axis], nodes, *aval.shape[axis + 1 :])
    sent = reshard_cost(here, exchanged, shape, aval.dtype)
    return [Way((here,), (Sharding(kept, here.num_devices),), exchanged, sent=sent)]


@rule(
    tree_sum_p,
    factors=_tree_factors,
    local=_tree_sum,
    ways=tree_ways,
    doc=Doc(
        free="kept dims",
        gather="the summed dim: AllToAll of subtrees, and AllGather unless the result is split",
    ),
)
def _run_tree(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    if isinstance(way.how, FactorSplit):
        return way.how.run(ctx, eqn, _tree_sum, tiles, targets)
    why, axis = Reason("operand", eqn.primitive.name), eqn.params["axis"]
    tile = ctx.reshard(tiles[0], way.operands[0], why)
    split, n = tile.sharding.splits[axis], tile.shape[axis]
    assert split
    moved = ctx.reshard(_own_nodes(ctx.place, tile, axis, split), way.how, why)
    total = _completed(moved.array, axis, split.tiles, -(-n // split.tiles), n)
    return [Tile(total, way.results[0], tuple(eqn.outvars[0].aval.shape))]


def _nodes(count: int) -> int:
    """How many nodes of the tree a device with so many leaves has."""
    return 1 if _is_power(count) else (count + 1 + (count + 1) % 2) // 2


def _is_power(n: int) -> bool:
    return n & (n - 1) == 0


def _own_nodes(place: Place, tile: Tile, axis: int, split: Split) -> Tile:
    """The nodes of the tree that a device has leaves of: as many on each device.

    An even number of leaves that is a power of 2 is a subtree. In another number, neighbouring
    leaves are added where both are here. Places without a leaf have -0.0, which adds nothing to any
    number, not even to -0.0.
    """
    nothing = jnp.asarray(-0.0, tile.array.dtype)
    leaves = tile.masked(place, nothing, [axis]).array
    count = leaves.shape[axis]
    if _is_power(count):
        nodes = lax.expand_dims(neighbours(leaves, axis, lax.add), [axis])
    else:
        pads = [(1, count % 2 + 1, 0) if d == axis else (0, 0, 0) for d in range(leaves.ndim)]
        first = 1 - (split.own * count) % 2
        width = count + 1 + (count + 1) % 2
        shifted = window(place, lax.pad(leaves, nothing, pads), axis, first, width)
        nodes = _pairs(shifted, axis)
    total = nodes.shape[axis] * split.tiles
    shape = (*tile.shape[:axis], total, *tile.shape[axis + 1 :])
    return Tile(nodes, tile.sharding, shape)


def _pairs(x: jax.Array, axis: int) -> jax.Array:
    """Each two neighbours added."""
    shape = (*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    return neighbours(lax.reshape(x, shape), axis + 1, lax.add)


def _completed(x: jax.Array, axis: int, tiles: int, count: int, leaves: int) -> jax.Array:
    """The tree over the nodes of all devices, each of which had `count` leaves."""
    each = x.shape[axis] // tiles
    size = count if _is_power(count) else 2  # leaves of a node
    found: list[jax.Array | None] = [None] * (leaves // size)
    for device in range(tiles):
        for number in range(each):
            node = device * count // size + number
            if node < len(found):
                at = device * each + number
                part = lax.slice_in_dim(x, at, at + 1, axis=axis)
                before = found[node]
                found[node] = part if before is None else lax.add(before, part)
    return neighbours(lax.concatenate([f for f in found if f is not None], axis), axis, lax.add)


ALIASES.add(pin_p)
register(
    Elementwise(local=lambda ctx, eqn, tiles, _: [pinned(ctx.place, *(t.array for t in tiles))]),
    pin_p,
)
register(
    Rule(
        _leaf_factors,
        _leaf_dot,
        ways=lambda eqn, shardings, targets, limit: by_factors(
            eqn, _leaf_factors(eqn), shardings, targets, work=dot_work
        ),
        doc=Doc(
            free="batch dims; any dim of one operand alone", gather="contracting dims: AllGather"
        ),
    ),
    leaf_dot_p,
)
register(
    Rule(
        scatter_factors,
        ways=scatter_ways,
        run=run_scatter,
        doc=Doc(
            free="batch dims, full windows, dims looked up in",
            gather="indices: AllGather of the updates",
        ),
    ),
    scatter_in_order_p,
)
