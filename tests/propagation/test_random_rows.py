"""Random programs of windows, rolls, updates, borders and sums, and their gradients."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.oracle import check, even_split, random_array


def padded(x, dim, a, b):
    widths = [(a, b) if d == dim else (0, 0) for d in range(x.ndim)]
    return jnp.pad(x, widths, mode=("constant", "edge", "wrap", "reflect")[(a + b) % 4])


def window(x, dim, a, b):
    return lax.slice_in_dim(x, a, x.shape[dim] - b, axis=dim)


def update(x, dim, a, b):
    place = (*(slice(None) for _ in range(dim)), slice(a, x.shape[dim] - b))
    rows = jnp.sin(x[place]) * (jnp.mean(x) if a == b else 0.5)
    return x.at[place].add(rows) if a else x.at[place].set(rows)


def joined(x, dim, a, b):
    rows = lax.slice_in_dim(x, 0, a + 1, axis=dim)
    return jnp.concatenate([rows, x] if b else [x, rows], dim)


def taken(x, dim, a, b):
    rows = x.shape[dim]
    return jnp.take(x, (jnp.arange(rows) * (1 - 2 * (b % 2)) + a) % rows, axis=dim)


def convolved(x, dim, a, b):
    kernel = jnp.cos(jnp.arange(9.0)).reshape(1, 1, 3, 3)
    padding = "SAME" if a else "VALID"
    return lax.conv_general_dilated(x[None, None], kernel, (1, 1), padding)[0, 0]


def pooled(x, dim, a, b):
    size = (3, 1) if dim == 0 else (2, 2)
    kind = (lax.max, -jnp.inf) if b else (lax.add, 0.0)
    return lax.reduce_window(x, kind[1], kind[0], size, (1, 1), "SAME" if a else "VALID")


STEPS = [
    padded, window, update, joined, taken, convolved, pooled, window, update,
    lambda x, dim, a, b: jnp.roll(x, a - b, dim),
    lambda x, dim, a, b: jnp.flip(x, dim),
    lambda x, dim, a, b: jnp.diff(x, axis=dim),
    lambda x, dim, a, b: x + 0.1 * jnp.sum(x, dim, keepdims=True),
    lambda x, dim, a, b: jnp.where(lax.broadcasted_iota(int, x.shape, dim) < a + b, x, jnp.cos(x)),
]  # fmt: skip
ONE = st.tuples(
    st.sampled_from(STEPS), st.integers(0, 1), st.integers(0, 2), st.integers(0, 2), st.floats(0, 1)
)


def checked(steps, shape, dim, devices):
    """Each step works on the result of one before, all of them are in the sum."""

    def run(x):
        values = [x]
        for step, *how, which in steps:
            value = values[round(which * (len(values) - 1))]
            if min(value.shape) > 4:
                values.append(jnp.tanh(step(value, *how)))
        return values[-1], sum(jnp.sum(jnp.sin(value)) for value in values[-3:])

    def fn(x):
        return run(x)[0], jax.grad(lambda x: run(x)[1])(x)

    split = even_split(2, dim, devices)
    check(fn, random_array(shape), devices=devices, inputs=[split], rtol=1e-3, atol=1e-4)


DRAWN = (
    st.lists(ONE, min_size=2, max_size=7),
    st.tuples(*[st.sampled_from([8, 9, 13, 16, 24])] * 2),
    st.integers(0, 1),
    st.sampled_from([2, 4, 8]),
)


@given(*DRAWN)
def test_random_programs_of_rows(steps, shape, dim, devices):
    checked(steps, shape, dim, devices)


@pytest.mark.slow
@settings(max_examples=150)
@given(*DRAWN)
def test_many_random_programs_of_rows(steps, shape, dim, devices):
    checked(steps, shape, dim, devices)
