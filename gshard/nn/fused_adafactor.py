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

The state is that of `adafactor()`, except that second moments are always float32: a moving average
with a decay of 0.99 stands still in bfloat16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from gshard.nn.hashing import GOLDEN, round_stochastically
from gshard.nn.strategy import stacked_dims

_EPSILON = 1e-30  # added to squared gradients
_MIN_SIZE = 1e-3  # of a weight, which an update is relative to


class FusedOptimizer(NamedTuple):
    """An optimizer that also knows how to change the weights by itself.

    `apply(grads, state, params, seed)` gives the params, the state and the length of all gradients.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    apply: Callable[[Any, Any, Any, Array], tuple[Any, Any, Array]]


class Settings(NamedTuple):
    """Adafactor's, with the schedules as functions of the number of steps done."""

    schedule: optax.Schedule
    decay: Callable[[Any], Array]
    clipping: float
    min_dim_to_factor: int


def fused_adafactor(plain: optax.GradientTransformation, settings: Settings) -> FusedOptimizer:
    """The optimizer with the state of `plain`, which is `adafactor()` with the same settings."""

    def init(params: Any) -> Any:
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.float32), params)
        zeros = jax.eval_shape(plain.init, shapes)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), zeros)

    def apply(grads: Any, state: Any, params: Any, seed: Array) -> tuple[Any, Any, Array]:
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        states = tree.flatten_up_to(state)
        found = [
            _apply(
                stacked_dims(path),
                settings,
                grad,
                own,
                param,
                seed + np.uint32(n * GOLDEN % 2**32),
            )
            for n, ((path, param), grad, own) in enumerate(
                zip(leaves, tree.flatten_up_to(grads), states, strict=True)
            )
        ]
        params, state, squares = zip(*found, strict=True)
        norm = jnp.sqrt(sum(squares, jnp.zeros(())))
        return tree.unflatten(params), tree.unflatten(state), norm

    return FusedOptimizer(init, plain.update, apply)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(
    stacked: int, settings: Settings, grad: Array, state: Any, param: Array, seed: Array
) -> tuple[Array, Any, Array]:
    """One leaf, whose first `stacked` dims count matrices: new weight, state, sum of squares.

    Under `jax.jit` so that it is traced once for all leaves of a shape, of which there are few.
    """
    factored, clip, schedule, block = state
    count = factored.count.reshape(-1)[0]
    decay = settings.decay(count)
    dims = _factored_dims(param.shape[stacked:], settings.min_dim_to_factor)
    own_dims = tuple(range(stacked, param.ndim))
    g = grad.astype(jnp.float32)
    if dims is None:
        squares = g * g
        v = decay * factored.v + (1.0 - decay) * (squares + _EPSILON)
        scaled = g * jax.lax.rsqrt(v)
        factored = factored._replace(v=v)
        length = jnp.mean(scaled * scaled, axis=own_dims, keepdims=True)
        total = jnp.sum(squares)
    else:
        row_dim, column_dim = (stacked + dim for dim in dims)
        old = (factored.v_row, factored.v_col)
        scaled, length, (row, column), total = _factor(g, old, decay, row_dim, column_dim, own_dims)
        factored = factored._replace(v_row=row, v_col=column)

    size = jnp.sqrt(jnp.mean(jnp.square(param.astype(jnp.float32)), axis=own_dims, keepdims=True))
    rate = settings.schedule(count) * jnp.maximum(size, _MIN_SIZE)
    rate = rate / jnp.maximum(1.0, jnp.sqrt(length) / settings.clipping)
    updated = param.astype(jnp.float32) - rate * scaled
    if param.dtype == jnp.bfloat16:
        updated = round_stochastically(updated, seed)
    factored = factored._replace(count=factored.count + 1)
    state = (factored, clip, schedule._replace(count=schedule.count + 1), block)
    return updated.astype(param.dtype), state, total


def _factor(
    g: Array,
    old: tuple[Array, Array],
    decay: Array,
    row_dim: int,
    column_dim: int,
    own_dims: tuple[int, ...],
) -> tuple[Array, Array, tuple[Array, Array], Array]:
    """The scaled gradient, its mean square, the new second moments, and the sum of squares of `g`.

    `v_row` is the mean over `row_dim` and `v_col` that over `column_dim`. Whichever of the two is
    the last in memory comes second: two means in one pass are cheaper along memory than across.
    """
    dims = (row_dim, column_dim)
    first = int(np.argmin(dims))
    moments: list[Array] = [None, None]  # type: ignore[list-item]

    def moved(index: int, squares: Array) -> Array:
        mean = jnp.mean(squares, axis=dims[index], keepdims=True) + _EPSILON
        before = jnp.expand_dims(old[index], dims[index])
        moments[index] = decay * before + (1.0 - decay) * mean
        return mean

    squares = g * g
    mean = moved(first, squares)
    total = jnp.sum(mean) * g.shape[dims[first]]
    second = 1 - first
    moved(second, squares)
    divided = jnp.mean(squares / moments[first], axis=dims[second], keepdims=True)
    level = jnp.mean(moments[0], axis=column_dim, keepdims=True)
    length = jnp.mean(level * divided / moments[second], axis=own_dims, keepdims=True)
    scaled = g * jnp.sqrt(level) * jax.lax.rsqrt(moments[first]) * jax.lax.rsqrt(moments[second])
    row, column = (jnp.squeeze(m, dim) for m, dim in zip(moments, dims, strict=True))
    return scaled, length, (row, column), total


def _factored_dims(shape: tuple[int, ...], smallest: int) -> tuple[int, int] | None:
    """The dims over which `v_row` and `v_col` are means: the largest and the one before it."""
    if len(shape) < 2:
        return None
    order = np.argsort(shape)
    if shape[order[-2]] < smallest:
        return None
    return int(order[-1]), int(order[-2])
