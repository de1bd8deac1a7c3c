"""Indices that are known when a program is traced: all that `x.at` offers, and the types of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from tests.oracle import check, even_split, random_array, sent

X = random_array((13, 7))
WAYS = {
    "set": lambda at: at.set(2),
    "add": lambda at: at.add(2),
    "subtract": lambda at: at.subtract(2),
    "multiply": lambda at: at.multiply(2),
    "divide": lambda at: at.divide(2),
    "power": lambda at: at.power(2),
    "min": lambda at: at.min(0),
    "max": lambda at: at.max(0),
    "sine": lambda at: at.apply(jnp.sin),
    "shifted": lambda at: at.apply(lambda v: 3 * v + 1),
    "get": lambda at: at.get(),
}
INDICES = {
    "a row": np.s_[3],
    "the last row": np.s_[-1],
    "rows": np.s_[2:5],
    "all but the first": np.s_[1:],
    "the last column": np.s_[..., -1],
    "an element": np.s_[4, 2],
    "every other": np.s_[::2],
    "listed": np.array([0, 5, 12]),
    "one of them twice": np.array([[3, 3], [1, 12]]),
}


def check_updates(name, split):
    def fn(x):
        return {way: update(x.at[INDICES[name]]) for way, update in WAYS.items()}

    check(fn, X, inputs=[split])


@pytest.mark.parametrize("name", INDICES)
def test_every_way_to_update(name):
    check_updates(name, even_split(2, 0, 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", INDICES)
def test_every_way_to_update_where_both_dims_are_split(name):
    check_updates(name, np.arange(6).reshape(2, 3))


def test_updates_that_are_booleans_integers_and_complex():
    def fn(x):
        return [
            x.at[3].apply(lambda v: v * v),
            x.at[1:].set(x[:-1]),
            (x != 0).at[3].apply(jnp.logical_not),
            (x != 0).at[2].set(x[0] == 0),
            (x != 0).at[2].max(x[0] == 0),
        ]

    for dtype in (np.int8, np.complex64):
        check(fn, random_array((13, 7), dtype), inputs=[even_split(2, 0, 8)])


WEAK = {
    "index": lambda w: w[3],
    "slice": lambda w: w[2:5],
    "set": lambda w: w.at[0].set(0),
    "set a row": lambda w: w.at[1:].set(w[:-1]),
    "minimum": lambda w: jnp.minimum(w, w[0]),
    "roll": lambda w: jnp.roll(w, 1),
    "reversed": lambda w: w[::-1],
    "padded": lambda w: jnp.pad(w, 2),
    "sum": lambda w: w.sum(),
    "product": lambda w: w @ w,
    "in a loop": lambda w: lax.fori_loop(0, 3, lambda _, c: c + w[0], w),
    "concatenated": lambda w: jnp.concatenate([w, w]),
    "twice": lambda w: 2 * w,
    "as it is": lambda w: w,
}


@pytest.mark.parametrize("order", [np.arange(8), np.array([2, 0, 1]), np.arange(8)[::-1]])
def test_weak_types_are_those_of_jax(order):
    """Of even, uneven and irregular tilings; the oracle compares weak types."""
    weak = jax.jit(lambda: lax.broadcast(2.5, (16,)))()
    assert weak.weak_type
    check(lambda w: {name: fn(w) for name, fn in WEAK.items()}, weak, inputs=[order])
    check(lambda w: [w * 2, w + np.float32(1)], weak[:13], inputs=[order], outputs=[order, order])


def test_what_follows_is_promoted_as_with_jax():
    """A weakly typed result takes the type of what it meets."""
    weak = jax.jit(lambda: lax.broadcast(2.5, (16,)))()
    step = gshard.jit(lambda w: gshard.split(w, 0, 8).at[0].set(0))
    for _ in range(2):
        assert (step(weak) + jnp.ones(16, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("axis", [0, 1])
def test_a_diagonal_with_its_gradient(axis):
    """`jnp.diag` has a branch for kernels of TPUs, which no program runs."""

    def fn(x):
        return jax.grad(lambda x: jnp.sum(jnp.log(jnp.diag(x))))(gshard.split(x, axis, 4))

    x = random_array((13, 13)) + 20
    lowered = check(fn, x, devices=4, outputs=[even_split(2, axis, 4)])
    assert sent(lowered) <= 2 * x[0].nbytes
    assert axis or not lowered.collectives
