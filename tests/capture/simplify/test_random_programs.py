"""Random reproducible programs: one result, bit for bit, on any devices and under any sharding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import gshard
from tests.oracle import annotated, assert_same, assignments, random_array, run

ROWS, COLUMNS = 48, 24
PLACES = np.random.default_rng(5).integers(0, ROWS, ROWS).astype(np.int32)


def product(x, w):
    return jnp.tanh(x @ w)


def transposed_product(x, w):
    return x @ (x.T @ x / ROWS) @ w


def softmax(x, w):
    return jax.nn.softmax(x + w[0], axis=0) * COLUMNS


def norm(x, w):
    return (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-3)


def scan(x, w):
    return lax.scan(lambda total, row: (0.9 * total + row @ w, total), jnp.zeros(COLUMNS), x)[1]


def shared_weight(x, w):
    return lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, 3)[0]


def scattered(x, w):
    return jnp.zeros_like(x).at[PLACES].add(x * w[1])


def dropout(x, w):
    keep = jax.random.bernoulli(jax.random.key(3), 0.8, x.shape)
    return jnp.where(keep, x / 0.8, 0)


def noise(x, w):
    return x + jax.random.normal(jax.random.key(4), x.shape, x.dtype) * jnp.sum(w)


OPERATORS = [
    product, transposed_product, softmax, norm, scan, shared_weight, scattered, dropout, noise,
]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=6, deadline=None, database=None)
@given(st.data())
def test_a_program_and_its_gradient_have_the_same_bits_everywhere(data):
    chosen = data.draw(st.lists(st.sampled_from(OPERATORS), min_size=2, max_size=4))

    def loss(w, x):
        for operator in chosen:
            x = operator(x, w)
        return jnp.mean(x * x)

    fn = jax.value_and_grad(loss, argnums=(0, 1))
    w, x = random_array((COLUMNS, COLUMNS)) / 8, random_array((ROWS, COLUMNS), seed=1)
    alone = gshard.jit(fn, devices=jax.devices()[:1], reproducible=True)(w, x)
    for devices in (2, 3, 4, 6, 8):
        where = [data.draw(assignments(2, devices)) for _ in range(2)]
        step = gshard.jit(annotated(fn, where), devices=jax.devices()[:devices], reproducible=True)
        assert_same(run(step, w, x, exact=True), alone, exact=True)
