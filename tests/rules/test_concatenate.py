"""Concatenation along a split dim sends no more than XLA does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent


def joined(x, y):
    return jnp.concatenate([x, y])


@pytest.mark.parametrize(("first", "second"), [(8, 8), (24, 8), (40, 24), (64, 8)])
def test_no_more_bytes_than_xla(first, second):
    """Halves that all change tiles go through a split of the other dim: 14% less than permutes."""
    x, y = random_array((first, 16)), random_array((second, 16))
    split = even_split(2, 0, 8)
    ours = check(joined, x, y, inputs=[split, split], outputs=[split], exact=True)

    def annotated(x, y):
        return gshard.split(joined(gshard.split(x, 0, 8), gshard.split(y, 0, 8)), 0, 8)

    theirs = gshard.jit(annotated, devices=jax.devices(), partitioner="xla").lower(x, y)
    assert sent(ours) <= sum(c.total_bytes for c in theirs.collectives)


def test_a_few_rows_at_the_end_move_only_the_borders():
    """Few rows change tiles: permutes of those, and no exchange of everything."""
    x, y = random_array((64, 16)), random_array((8, 16))
    split = even_split(2, 0, 8)
    lowered = check(joined, x, y, inputs=[split, split], outputs=[split], exact=True)
    assert set(kinds(lowered)) == {"collective_permute"}


@pytest.mark.parametrize("shape", [(13, 5), (7, 3)])
def test_uneven_operands_by_another_dim(shape):
    x, y = random_array(shape), random_array((shape[0] + 2, shape[1]))
    split = even_split(2, 0, 8)
    check(joined, x, y, inputs=[split, split], outputs=[split], exact=True)


def test_the_gradient_of_a_roll_is_a_roll():
    def fn(x, y):
        return jax.grad(lambda x: jnp.sum(jnp.roll(gshard.split(x, 0, 8), 3, 0) * y))(x)

    x, y = random_array((16, 5)), random_array((16, 5), seed=1)
    low = check(fn, x, y)
    assert set(kinds(low)) == {"collective_permute"}
    assert sent(low) == 2 * 5 * 4  # of a device's two rows, one goes one device on, one goes two


def test_a_padded_sum_that_overlaps_stays_a_sum():
    def fn(x, y):
        return jnp.pad(x, ((0, 3), (0, 0))) + jnp.pad(y, ((4, 0), (0, 0)))

    check(fn, random_array((13, 5)), random_array((12, 5)), inputs=[even_split(2, 0, 8)] * 2)
    check(fn, random_array((4, 5)), random_array((3, 5)), inputs=[even_split(2, 1, 8)] * 2)


def test_a_pipeline_sends_nothing_round():
    """What arrives at the first stage is new, so that the last one sends nothing, in both loops."""

    def fn(x, w):
        def tick(state, x):
            state = gshard.split(jnp.roll(state, 1, 0).at[0].set(x), 0, 8)
            state = jnp.tanh(state * w)
            return state, state[-1]

        def loss(w):
            nothing = gshard.split(jnp.zeros((8, 5)), 0, 8)
            return jnp.sum(jax.lax.scan(tick, nothing, x * w)[1] ** 2)

        return jax.value_and_grad(loss)(w)

    low = check(fn, random_array((3, 5)), np.float32(0.5), rtol=1e-4, atol=1e-4)
    permutes = [line for line in low.as_text().splitlines() if " = ppermute[" in line]
    assert len(permutes) == 2
    assert "(6, 7))]" in permutes[0]
    assert "(7, 6))]" in permutes[1]


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(-4, 4), st.integers(0, 12), st.integers(1, 3)), max_size=4))
def test_rolls_and_updates_after_each_other(changes):
    def fn(x, y):
        for shift, row, rows in changes:
            x = jnp.roll(x, shift, 0).at[row : row + rows].set(y[: min(rows, 13 - row)])
        return x

    split = even_split(2, 0, 8)
    check(fn, random_array((13, 3)), random_array((3, 3)), inputs=[split], outputs=[split])
