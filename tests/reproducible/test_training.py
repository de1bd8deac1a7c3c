"""Reproducible training steps have the values of the unpartitioned step, computed with doubles."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import annotated, even_split, random_array

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "adafactor": lambda: optax.adafactor(
        1e-2, min_dim_size_to_factor=8, multiply_by_parameter_scale=True
    ),
}


def loss(weights: Any, x: Any, labels: Any) -> Any:
    """A normalized layer, a residual and a softmax over labels."""
    centred = x - x.mean(-1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6)
    h = x + jax.nn.gelu(normal @ weights["into"] + weights["bias"]) @ weights["out"]
    logits = h @ weights["table"].T
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def step_with(name: str, microbatches: int) -> Any:
    """An update from gradients that are accumulated over so many parts of the batch."""
    optimizer = OPTIMIZERS[name]()

    def step(x: Any, labels: Any, weights: Any, state: Any) -> Any:
        parts = jax.tree.map(lambda v: v.reshape(microbatches, -1, *v.shape[1:]), (x, labels))

        def add(total: Any, part: Any) -> Any:
            found = jax.value_and_grad(loss)(weights, *part)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, weights)
        total, _ = lax.scan(add, zeros, parts)
        value, grads = jax.tree.map(lambda v: v / microbatches, total)
        updates, state = optimizer.update(grads, state, weights)
        return value, grads, optax.tree.norm(grads), optax.apply_updates(weights, updates), state

    return step


def arguments(dtype: Any) -> tuple[Any, Any, Any]:
    """A batch of 48 rows and weights of odd and even sizes."""
    shapes = {"into": (16, 40), "bias": (40,), "out": (40, 16), "table": (35, 16)}
    weights = {k: random_array(s, seed=i) / 4 for i, (k, s) in enumerate(shapes.items())}
    labels = np.random.default_rng(0).integers(0, 35, 48).astype(np.int32)
    return (
        random_array((48, 16), seed=9).astype(dtype),
        labels,
        jax.tree.map(lambda v: v.astype(dtype), weights),
    )


def compare(name: str, microbatches: int, devices: int, where: list[Any]) -> None:
    """Results on some devices beside those of doubles, as large as their largest element."""
    step = step_with(name, microbatches)
    x, labels, weights = arguments(np.float32)
    state = OPTIMIZERS[name]().init(weights)
    on = gshard.jit(annotated(step, where), devices=jax.devices()[:devices], reproducible=True)
    got = on(x, labels, weights, state)
    with jax.enable_x64(True):
        x, labels, weights = arguments(np.float64)
        expected = jax.jit(step)(x, labels, weights, OPTIMIZERS[name]().init(weights))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        b = np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(a), b, rtol=0, atol=1e-5 * (np.abs(b).max() + 1e-3))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_a_reproducible_step_has_the_values_of_doubles(data):
    """Gradients, their norm, clipped and factored updates, and several parts of a batch."""
    devices = data.draw(st.sampled_from((1, 2, 3, 4, 8)))
    rows = even_split(2, 0, devices) if data.draw(st.booleans()) else None
    split = data.draw(st.sampled_from((None, 0, 1)))
    where = [rows, None, None, None if split is None else even_split(2, split, devices)]
    name = data.draw(st.sampled_from(sorted(OPTIMIZERS)))
    compare(name, data.draw(st.sampled_from((1, 2, 4))), devices, where)
