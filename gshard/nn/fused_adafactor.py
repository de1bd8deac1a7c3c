"""Adafactor in as few passes over each weight and its gradient as its definition allows.

Written as a chain of transformations, Adafactor reads a gradient for its rows, for its columns, for
the length of the update and for the update itself, and writes some of that in between. Here it
takes three passes over the gradient and two over the weight:

1. the mean square of every column, and the size of the weight;
2. the mean square of every row, and in the same pass that of every row divided by the new second
   moments of the columns. The length of the update, which clipping needs, follows from these two
   without a pass of its own: the mean of g^2 / (r_i c_j) is the mean over the rows of
   (mean over the columns of g^2 / c_j) / r_i;
3. the update, which is rounded at random where weights are bfloat16.

Second moments are always float32: in bfloat16 a moving average with a decay of 0.99 would not
change.

A model with unstacked layers has hundreds of small weights of few shapes. Updating each separately
takes a dozen kernels, dominated by launch overhead. So weights of one shape are stacked for the
sums, and their moments are kept stacked.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gshard.nn.hashing import GOLDEN, round_stochastically
from gshard.nn.strategy import names_along, stacked_dims

_EPSILON = 1e-30  # added to squared gradients
_MIN_SIZE = 1e-3  # of a weight, which an update is relative to
_STACKED = 1 << 23  # up to this many numbers, a copy of a weight is cheaper than separate kernels


class FusedOptimizer(NamedTuple):
    """An optimizer that applies its updates itself.

    `apply(grads, state, params, seed)` gives the params, the state and the length of all gradients.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any, Array], tuple[Any, Any, Array]]


class AdafactorSettings(NamedTuple):
    """Adafactor's, with the schedules as functions of the number of steps done."""

    schedule: optax.Schedule
    decay: Callable[[Any], Array]
    clipping: float
    min_dim_to_factor: int


class Moments(NamedTuple):
    """Second moments: their means over each of two dims, or, of small weights, all of them."""

    v_row: Array | None = None
    v_col: Array | None = None
    v: Array | None = None


class FusedState(NamedTuple):
    """How many steps were done, and the moments: those of weights of one shape in one array."""

    steps: Array
    shared: tuple[Moments, ...]  # by shape, each [weights, ...]
    own: Any  # as the weights, with Moments for those that share none


class Pace(NamedTuple):
    """The learning rate of a step, and the decay of the moments."""

    rate: Array
    decay: Array


class Alike(NamedTuple):
    """Weights of one shape: their indices, and how many leading dims of each stack matrices."""

    places: tuple[int, ...]
    stacked: int
    shared: bool


def fused_adafactor(settings: AdafactorSettings) -> FusedOptimizer:
    """The optimizer that computes what `adafactor()` does with the same settings."""

    def init(params: Any) -> FusedState:
        leaves, tree = jax.tree.flatten(params)
        shared: list[Moments] = []
        own: list[Moments | None] = [None] * len(leaves)
        for alike in _alike(params):
            shape = leaves[alike.places[0]].shape
            dims = _factored_dims(shape[alike.stacked :], settings.min_dim_to_factor)
            count = (len(alike.places),) if alike.shared else ()
            if dims is None:
                moments = Moments(v=jnp.zeros((*count, *shape)))
            else:
                shapes = (np.delete(shape, alike.stacked + dim).tolist() for dim in dims)
                moments = Moments(*(jnp.zeros((*count, *rest)) for rest in shapes))
            if alike.shared:
                shared.append(moments)
            else:
                own[alike.places[0]] = moments
        return FusedState(jnp.zeros((), jnp.int32), tuple(shared), tree.unflatten(own))

    def apply(grads: Any, state: FusedState, params: Any, seed: Array) -> tuple[Any, Any, Array]:
        leaves, tree = jax.tree.flatten(params)
        grad_leaves, own = tree.flatten_up_to(grads), tree.flatten_up_to(state.own)
        numbers = jax.lax.iota(jnp.uint32, len(leaves)) * np.uint32(GOLDEN)
        seeds = _unstack(seed + numbers[:, None])
        before, shared, total = iter(state.shared), [], jnp.zeros(())
        pace = Pace(settings.schedule(state.steps), settings.decay(state.steps))
        pace = jax.lax.optimization_barrier(pace)  # otherwise XLA recomputes it for each weight
        how = (settings.clipping, settings.min_dim_to_factor)
        for alike in _alike(params):
            some = (tuple(all_[n] for n in alike.places) for all_ in (grad_leaves, leaves, seeds))
            moments = next(before) if alike.shared else _lift(own[alike.places[0]])
            updated, moments, squares = _apply(alike.stacked, *how, pace, moments, *some)
            total = total + squares
            for place, leaf in zip(alike.places, updated, strict=True):
                leaves[place] = leaf
            if alike.shared:
                shared.append(moments)
            else:
                own[alike.places[0]] = jax.tree.map(lambda m: m[0], moments)
        state = FusedState(state.steps + 1, tuple(shared), tree.unflatten(own))
        return tree.unflatten(leaves), state, jnp.sqrt(total)

    return FusedOptimizer(init, apply)


def _alike(params: Any) -> list[Alike]:
    """The weights by shape. Large ones, and experts, which may be split, are not stacked."""
    found = collections.defaultdict(list)
    for place, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(params)[0]):
        alone = leaf.size > _STACKED or "experts" in names_along(path)
        apart = place if alone else -1
        found[leaf.shape, leaf.dtype, stacked_dims(path), apart].append(place)
    return [Alike(tuple(p), stacked, apart < 0) for (_, _, stacked, apart), p in found.items()]


def _lift(moments: Moments) -> Moments:
    return jax.tree.map(lambda m: m[None], moments)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply(
    stacked: int,
    clipping: float,
    min_dim_to_factor: int,
    pace: Pace,
    moments: Moments,
    grads: tuple[Array, ...],
    params: tuple[Array, ...],
    seeds: tuple[Array, ...],
) -> tuple[list[Array], Moments, Array]:
    """Update weights of one shape, whose first `stacked` dims stack matrices; the sum of squares.

    Under `jax.jit`, so that it is traced once for all unstacked weights of one shape.
    """
    decay = pace.decay
    g, p = (_together(some).astype(jnp.float32) for some in (grads, params))
    own_dims = tuple(range(stacked + 1, g.ndim))
    if moments.v is not None:
        squares = g * g
        v = decay * moments.v + (1.0 - decay) * (squares + _EPSILON)
        moments, scales = Moments(v=v), (jnp.ones(()), jax.lax.rsqrt(v))
        length = jnp.mean(squares / v, axis=own_dims, keepdims=True)
        total = jnp.sum(squares)
    else:
        dims = _factored_dims(params[0].shape[stacked:], min_dim_to_factor)
        assert dims is not None
        row_dim, column_dim = (stacked + 1 + dim for dim in dims)
        scales, length, moments, total = _factor(g, moments, decay, row_dim, column_dim, own_dims)

    size = jnp.sqrt(jnp.mean(jnp.square(p), axis=own_dims, keepdims=True))
    rate = pace.rate * jnp.maximum(size, _MIN_SIZE)
    rate = rate / jnp.maximum(1.0, jnp.sqrt(length) / clipping)
    firsts, seconds = (_unstack(x) for x in (rate * scales[0], scales[1]))
    # Each from its own arrays: only the sums read the stack.
    updated = [_move(*given) for given in zip(params, grads, firsts, seconds, seeds, strict=True)]
    return updated, moments, total


@jax.jit
def _move(param: Array, grad: Array, first: Array, second: Array, seed: Array) -> Array:
    """A weight less its gradient, which is scaled by both, each the only one in its array.

    Under `jax.jit` to be traced once.
    """
    now = param.astype(jnp.float32) - grad.astype(jnp.float32) * first[0] * second[0]
    if param.dtype == jnp.bfloat16:
        now = round_stochastically(now, seed[0])
    return now.astype(param.dtype)


def _together(arrays: tuple[Array, ...]) -> Array:
    """Stacked, in one copy that every sum reads, instead of one in each."""
    if len(arrays) == 1:
        return arrays[0][None]
    return jax.lax.optimization_barrier(jnp.stack(arrays))


def _unstack(x: Array) -> list[Array]:
    """Arrays of one of `x` each, by one operator, which is quicker to trace than many."""
    return jax.lax.split(x, (1,) * len(x))


def _factor(
    g: Array, old: Moments, decay: Array, row_dim: int, column_dim: int, own_dims: tuple[int, ...]
) -> tuple[tuple[Array, Array], Array, Moments, Array]:
    """The gradients' factors, their scaled mean square, the new moments, and the sum of squares.

    `v_row` is the mean over `row_dim` and `v_col` that over `column_dim`. Whichever of the two is
    the last in memory comes second: two means in one pass are cheaper along memory than across.
    """
    dims = (row_dim, column_dim)
    first = int(np.argmin(dims))
    second = 1 - first
    means, moments = {}, {}

    def move(index: int, squares: Array) -> None:
        before = jnp.expand_dims(old[index], dims[index])
        means[index] = jnp.mean(squares, axis=dims[index], keepdims=True) + _EPSILON
        moments[index] = decay * before + (1.0 - decay) * means[index]

    squares = g * g
    move(first, squares)
    move(second, squares)
    divided = jnp.mean(squares / moments[first], axis=dims[second], keepdims=True)
    level = jnp.mean(moments[0], axis=column_dim, keepdims=True)
    length = jnp.mean(level * divided / moments[second], axis=own_dims, keepdims=True)
    scales = (jnp.sqrt(level) * jax.lax.rsqrt(moments[first]), jax.lax.rsqrt(moments[second]))
    total = jnp.sum(means[first]) * g.shape[dims[first]]
    row, column = (jnp.squeeze(moments[n], dim) for n, dim in enumerate(dims))
    return scales, length, Moments(row, column), total


def _factored_dims(shape: tuple[int, ...], smallest: int) -> tuple[int, int] | None:
    """The dims over which `v_row` and `v_col` are means: the largest and the one before it."""
    if len(shape) < 2:
        return None
    order = np.argsort(shape)
    if shape[order[-2]] < smallest:
        return None
    return int(order[-1]), int(order[-2])
