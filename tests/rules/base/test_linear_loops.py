"""Loops that are linear in a carried value carry it unreduced, and sum once, after the loop."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from tests.oracle import (
    annotated,
    assert_same,
    assignments,
    check,
    even_split,
    kinds,
    random_array,
    run,
    sent,
)


def in_loops(low):
    return sum(c.count * c.bytes for c in low.collectives if c.count > 1)


def test_the_gradient_of_a_linear_recursion_is_summed_after_the_loop():
    """The covariance of a filter does not depend on the data, and its gradient on all of them."""
    w, x = random_array((6, 6)) / 4, random_array((4, 16, 6), seed=1)

    def fn(w):
        def move(state, x_BM):
            return w @ state @ w.T + jnp.eye(6), jnp.sum(jnp.tanh(x_BM @ state))

        return jnp.sum(jax.lax.scan(move, jnp.eye(6), gshard.split(x, 1, 8))[1])

    low = check(jax.value_and_grad(fn), w, rtol=1e-4, atol=1e-4)
    assert set(kinds(low)) == {"all_reduce"}
    assert in_loops(low) == 0
    assert sent(low) == 2 * (1 + 6 * 6) * 4 * 7 // 8  # the value, and its gradient


def test_what_a_loop_needs_reduced_is_reduced_in_it():
    """Not all uses of the carried value are linear: nothing is delayed."""
    w, x = random_array((6, 6)) / 4, random_array((4, 6, 16), seed=1)

    def fn(w, x):
        def step(state, x_MB):
            return jnp.tanh(w @ state) + x_MB @ x_MB.T, None

        return jax.lax.scan(step, jnp.eye(6), x)[0]

    low = check(fn, w, x, inputs=[None, even_split(3, 2, 8)], rtol=1e-4, atol=1e-4)
    assert in_loops(low) == 4 * 2 * 6 * 6 * 4 * 7 // 8


_STEPS = {
    "scaled": lambda c, w: 0.5 * c,
    "transposed": lambda c, w: c.T,
    "product": lambda c, w: w @ c,
    "other side": lambda c, w: c @ w.T,
    "masked": lambda c, w: jnp.where(w > 0, c, 0),
    "reversed": lambda c, w: c[::-1],
    "shifted": lambda c, w: jnp.pad(c[1:], ((0, 1), (0, 0))),
    "solved": lambda c, w: jax.scipy.linalg.solve_triangular(w + 4 * jnp.eye(len(w)), c),
    "squared": lambda c, w: c * c / 9,  # not linear
}


recursions = given(
    st.lists(st.sampled_from(sorted(_STEPS)), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3]),
    assignments(2, 8),
    assignments(3, 8),
)


def any_recursion(steps, uses, carried, data):
    """Its values are those of the unpartitioned one."""
    w, x = random_array((6, 6)) / 4, random_array((3, 6, 16), seed=1)

    def fn(w, x):
        def step(carry, x_MB):
            state, total = carry
            new = state
            for name in steps:
                new = _STEPS[name](new, w)
            term = x_MB @ x_MB.T
            state = sum([new + term] * uses) / uses
            return (state, total + state @ w), None

        start = jnp.ones((6, 6))
        start = start if carried is None else gshard.shard(start, carried)
        return jax.lax.scan(step, (start, jnp.zeros((6, 6))), x)[0]

    wanted = jax.jit(fn)(w, x)
    close = {"rtol": 2e-3, "atol": 2e-3}
    jitted = gshard.jit(annotated(fn, [None, data], [None, None]))
    assert_same(run(jitted, w, x, **close), wanted, **close)


@recursions
def test_any_recursion(steps, uses, carried, data):
    any_recursion(steps, uses, carried, data)


@pytest.mark.slow
@settings(max_examples=150)
@recursions
def test_many_recursions(steps, uses, carried, data):
    any_recursion(steps, uses, carried, data)
