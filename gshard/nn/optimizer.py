"""The paper's optimizer: Adafactor as its appendix sets it, and Adam as the alternative.

The weights of all layers are stacked in one array, and an MoE layer's experts in another dim of it.
Adafactor's row and column factors, its clipping and its parameter scale belong to one matrix, not
to such a stack, so the transformation is mapped over the stacked dims. It also makes the updates of
experts independent: split by expert, they need no communication.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from gshard.nn.fused_adafactor import AdafactorSettings, FusedOptimizer, fused_adafactor
from gshard.nn.strategy import stacked_dims


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
    the same in fewer passes (`gshard.nn.fused_adafactor`), and rounds bfloat16 weights so that
    small updates are not lost.
    """
    schedule = learning_rate if callable(learning_rate) else inverse_sqrt(learning_rate, warmup)

    def capped(count: Any, exponent: Any) -> Array:
        t = jnp.asarray(count, jnp.float32) + 1.0
        return jnp.minimum(1.0 - t ** (-exponent), decay_cap)

    if fused:
        settings = AdafactorSettings(
            schedule, lambda t: capped(t, decay), clipping, min_dim_to_factor
        )
        return fused_adafactor(settings)
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
