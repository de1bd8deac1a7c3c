"""Stacks that are split by rows: every row may have another sharding, one AllToAll moves all."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from tests.oracle import assignments, check, even_split, kinds, random_array, sent

M, H = 16, 24
ROW = M * H * 4


def rows(count, shape=(M, H)):
    return [random_array(shape, seed=n) for n in range(count)]


def test_rows_of_two_shardings_are_stacked_and_unstacked_by_one_exchange_each():
    def both(*rows):
        turned = [x.T if n % 3 else x for n, x in enumerate(rows)]
        stack = gshard.split(jnp.stack(turned), 0, 8)
        stack = gshard.split(jnp.tanh(stack), 0, 8)
        return [gshard.split(0.5 * (y.T if n % 3 else y), 0, 8) for n, y in enumerate(stack)]

    args = [x.T if n % 3 else x for n, x in enumerate(rows(16))]
    inputs = [even_split(2, 0, 8)] * 16
    low = check(both, *args, inputs=inputs)
    assert kinds(low) == {"all_to_all": 2}
    assert sent(low) == 2 * 2 * ROW * 7 // 8


@pytest.mark.parametrize("count", [3, 11])
def test_devices_without_a_row_and_rows_read_as_slices(count):
    def both(*rows):
        stack = gshard.split(jnp.stack(rows, 1), 1, 8)
        stack = gshard.split(stack * 2, 1, 8)
        return [gshard.split(stack[:, n] - x, 1, 8) for n, x in enumerate(rows)]

    low = check(both, *rows(count), inputs=[even_split(2, 1, 8)] * count)
    assert sent(low) == 2 * -(-count // 8) * ROW * 7 // 8


@given(st.data())
def test_rows_under_any_shardings(data):
    count = data.draw(st.integers(2, 9))
    shape = data.draw(st.sampled_from([(5, 7), (8, 8), (12, 3)]))
    order = data.draw(st.permutations(range(8)))

    def both(*rows):
        stack = gshard.shard(jnp.stack(rows), np.array(order).reshape(8, 1, 1))
        return [y * 2 for y in gshard.shard(stack * 3, np.array(order).reshape(8, 1, 1))]

    inputs = [data.draw(assignments(2, 8)) for _ in range(count)]
    check(both, *rows(count, shape), inputs=inputs, outputs=inputs[::-1])
