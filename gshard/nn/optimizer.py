"""The paper's optimizer: Adafactor as its appendix sets it, and Adam as the alternative.

The weights of all layers are stacked in one array, and an MoE layer's experts in another dim of it.
Adafactor's row and column factors, its clipping and its parameter scale belong to one matrix, not
to such a stack, so the transformation is mapped over the stacked dims. It also makes the updates of
experts independent: split by expert, they need no communication.

`fused=True` takes as few passes over each weight and its gradient as the definition allows. Written
as a chain of transformations, Adafactor reads a gradient for its rows, for its columns, for the
length of the update and for the update itself, and writes some of that in between. Fused, it takes
three passes over the gradient and two over the weight:

1. the mean square of every column, and the size of the weight;
2. the mean square of every row, and in the same pass that of every row divided by the new second
   moments of the columns. The length of the update, which clipping needs, follows from these two
   without a pass of its own: the mean of g^2 / (r_i c_j) is the mean over the rows of
   (mean over the columns of g^2 / c_j) / r_i;
3. the update, which is rounded at random where weights are bfloat16.

Second moments are always float32: in bfloat16 a moving average with a decay of 0.99 would not
change. A model with unstacked layers has hundreds of small weights of few shapes. Updating each
separately takes a dozen kernels, dominated by launch overhead. So weights of one shape are stacked
for the sums, and their moments are kept stacked.
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


def inverse_sqrt(learning_rate: float = 1.0, warmup: int = 10_000) -> optax.Schedule:
    """`learning_rate` / sqrt(max(t, warmup)): "square root decay after 10k training steps".

    It multiplies the size of the weights (Adafactor's relative step), so the paper's rate of 1.0
    moves them by at most 1% a step up to step 10,000.
    """

    def schedule(count: Any) -> Array:
        t = jnp.maximum(jnp.asarray(count, jnp.float32) + 1.0, float(warmup))
        return learning_rate * jax.lax.rsqrt(t)

    return schedule


def adafactor(
    learning_rate: float | optax.Schedule = 1.0,
    *,
    warmup: int = 10_000,
    decay: float = 0.8,
    decay_cap: float = 0.99,
    clipping: float = 1.0,
    min_dim_to_factor: int = 128,
    fused: bool = False,
) -> optax.GradientTransformation | FusedOptimizer:
    """Adafactor with factored second moments and no momentum, for stacked weights.

    The second moment's decay is min(1 - t^-0.8, 0.99), and an update's root mean square is clipped
    to 1.0. A number as `learning_rate` gets the paper's schedule, `inverse_sqrt`. `fused` computes
    the same in fewer passes (`gshard.nn.optimizer`), and rounds bfloat16 weights so that
    small updates are not lost.
    """
    schedule = learning_rate if callable(learning_rate) else inverse_sqrt(learning_rate, warmup)

    def capped(count: Any, exponent: Any) -> Array:
        t = jnp.asarray(count, jnp.float32) + 1.0
        return jnp.minimum(1.0 - t ** (-exponent), decay_cap)

    if fused:
        return _fused(schedule, lambda t: capped(t, decay), clipping, min_dim_to_factor)
    return per_matrix(
        optax.chain(
            optax.scale_by_factored_rms(
                decay_rate=decay, min_dim_size_to_factor=min_dim_to_factor, decay_rate_fn=capped
            ),
            optax.clip_by_block_rms(clipping),
            optax.scale_by_learning_rate(schedule),
            optax.scale_by_param_block_rms(),
        )
    )


def adam(
    learning_rate: float | optax.Schedule = 1e-3, b1: float = 0.9, b2: float = 0.98
) -> optax.GradientTransformation:
    """Adam, whose state has the shapes of the weights."""
    return optax.adam(learning_rate, b1=b1, b2=b2, eps=1e-9)


def per_matrix(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Run `inner` on every weight separately, mapped over the dims that stack layers and experts.

    Weights of one shape share a traced update: tracing one each would double the tracing time.
    """

    @functools.cache
    def update_of(dims: int) -> Any:
        return jax.jit(_mapped(inner.update, dims))

    def init(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, p: _mapped(inner.init, stacked_dims(path))(p), params
        )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        outs = jax.tree_util.tree_map_with_path(
            lambda path, *leaf: update_of(stacked_dims(path))(*leaf), grads, state, params
        )
        updates = jax.tree.map(lambda _, out: out[0], grads, outs)
        return updates, jax.tree.map(lambda _, out: out[1], grads, outs)

    return optax.GradientTransformation(init, update)


def _mapped(function: Any, dims: int) -> Any:
    for _ in range(dims):
        function = jax.vmap(function)
    return function


_EPSILON = 1e-30  # added to squared gradients
_MIN_SIZE = 1e-3  # of a weight, which an update is relative to
_STACKED = 1 << 23  # up to this many numbers, a copy of a weight is cheaper than separate kernels


class FusedOptimizer(NamedTuple):
    """An optimizer that applies its updates itself.

    `apply(grads, state, params, seed)` gives the params, the state and the length of all gradients.
    """

    init: Callable[[Any], Any]
    apply: Callable[[Any, Any, Any, Array], tuple[Any, Any, Array]]


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


class Alike(NamedTuple):
    """Weights of one shape: their indices, and how many leading dims of each stack matrices."""

    places: tuple[int, ...]
    stacked: int
    shared: bool


def _fused(
    schedule: optax.Schedule, decay: optax.Schedule, clipping: float, min_dim_to_factor: int
) -> FusedOptimizer:
    """Adafactor in few passes; the schedules are functions of the number of steps done."""

    def init(params: Any) -> FusedState:
        leaves, tree = jax.tree.flatten(params)
        shared: list[Moments] = []
        own: list[Moments | None] = [None] * len(leaves)
        for alike in _alike(params):
            shape = leaves[alike.places[0]].shape
            dims = _factored_dims(shape[alike.stacked :], min_dim_to_factor)
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
        pace = (schedule(state.steps), decay(state.steps))  # of the weights, and of their moments
        pace = jax.lax.optimization_barrier(pace)  # otherwise XLA recomputes it for each weight
        how = (clipping, min_dim_to_factor)
        for alike in _alike(params):
            some = (tuple(all_[n] for n in alike.places) for all_ in (grad_leaves, leaves, seeds))
            alone = None if alike.shared else own[alike.places[0]]
            moments = jax.tree.map(lambda m: m[None], alone) if alone else next(before)
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


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _apply(
    stacked: int,
    clipping: float,
    min_dim_to_factor: int,
    pace: tuple[Array, Array],
    moments: Moments,
    grads: tuple[Array, ...],
    params: tuple[Array, ...],
    seeds: tuple[Array, ...],
) -> tuple[list[Array], Moments, Array]:
    """Update weights of one shape, whose first `stacked` dims stack matrices; the sum of squares.

    Under `jax.jit`, so that it is traced once for all unstacked weights of one shape.
    """
    rate, decay = pace
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
    rate = rate * jnp.maximum(size, _MIN_SIZE)
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
