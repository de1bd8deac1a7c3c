"""Bags of looked-up rows: what devices found of a split table is summed before it is reduced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import assignments, check, even_split, kinds, random_array, sent

V, M, B, K = 403, 24, 64, 16  # a table of V rows of M numbers, B bags of K rows
BAG = B * M * 4
TABLE, BATCH = even_split(2, 0, 8), even_split(2, 0, 8)


def rows(shape, seed=0):
    return np.random.default_rng(seed).integers(0, V, shape).astype(np.int32)


def table(dtype=np.float32):
    return random_array((V, M)).astype(dtype)


WEIGHTED = {
    "product": lambda x, i, w: (x[i] * w[..., None]).sum(1),
    "einsum": lambda x, i, w: jnp.einsum("bkm,bk->bm", x[i], w),
    "of one bag at a time": lambda x, i, w: jax.vmap(lambda i, w: w @ x[i])(i, w),
    "a loop": lambda x, i, w: jax.lax.fori_loop(
        0, K, lambda k, c: c + w[:, k, None] * x[i[:, k]], jnp.zeros((B, M))
    ),
    "mean of some": lambda x, i, w: (
        jnp.where((w > 0)[..., None], jnp.take(x, i, axis=0), 0).sum(1)
        / jnp.maximum((w > 0).sum(1), 1)[:, None]
    ),
    "divided": lambda x, i, w: -(x[i] / (2 + jnp.cos(w))[..., None]).mean(axis=-2),
    "in segments": lambda x, i, w: jax.ops.segment_sum(
        x[i.reshape(-1)] * w.reshape(-1)[:, None], jnp.arange(B * K) // K, B
    ),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_bag_is_reduced_and_not_its_rows(name):
    args = [table(), rows((B, K)), random_array((B, K), seed=1)]
    low = check(WEIGHTED[name], *args, inputs=[TABLE], rtol=1e-4, atol=1e-4)
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * BAG * 7 // 8


@pytest.mark.parametrize("name", ["product", "einsum", "of one bag at a time"])
def test_weights_that_are_split_by_bags_go_to_the_rows(name):
    args = [table(), rows((B, K)), random_array((B, K), seed=1)]
    low = check(WEIGHTED[name], *args, inputs=[TABLE, BATCH, BATCH], rtol=1e-4, atol=1e-4)
    assert sent(low, "reduce_scatter") == BAG * 7 // 8
    assert sent(low) == (BAG + 2 * B * K * 4) * 7 // 8


INFINITE = WEIGHTED | {
    "divided by zero": lambda x, i, w: (x[i] / jnp.where(w == jnp.inf, 0, 1)[..., None]).sum(1),
    "one weight for all": lambda x, i, w: (x[i] * w[3, 5]).sum(1),
    "one for a place": lambda x, i, w: jnp.einsum("bkm,k->bm", x[i], w[3]),
    "columns": lambda x, i, w: x[i] @ jnp.stack([w[3], w[4]], 1)[:M].repeat(2, 0)[:M],
    "in another order": lambda x, i, w: (x[i].transpose(2, 0, 1)[..., None] * w[..., None]).sum(2),
}


@pytest.mark.parametrize("name", INFINITE)
def test_rows_that_a_device_lacks_stay_zero_times_infinity(name):
    """They are zeros there, and would be NaN; only rows that are zeros themselves are."""
    weights = np.abs(random_array((B, K), seed=1)) + 0.1
    weights[::2, 5] = np.inf
    weights[3, 5] = np.inf
    x = np.abs(table()) + 0.1
    x[5] = 0
    args = [x, rows((B, K)), weights]
    check(INFINITE[name], *args, inputs=[TABLE], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("take", [jnp.sum, jnp.mean])
def test_bags_in_bfloat16_are_reduced_in_the_type_of_their_sums(take):
    args = [table(jnp.bfloat16), rows((B, K))]
    low = check(lambda x, i: take(x[i], 1), *args, inputs=[TABLE], rtol=2e-2, atol=2e-2)
    assert sent(low) == 2 * BAG * 7 // 8


def test_two_rows_in_bfloat16_are_reduced_before_they_are_wider():
    args = [table(jnp.bfloat16), rows((B, 1))]
    low = check(lambda x, i: x[i].sum(1), *args, inputs=[TABLE], rtol=2e-2, atol=2e-2)
    assert sent(low) == BAG * 7 // 8


def test_products_with_one_hot_rows():
    args = [table(), rows((B, K))]
    low = check(lambda x, i: (jax.nn.one_hot(i, V) @ x).sum(1), *args, inputs=[TABLE], atol=1e-4)
    assert sent(low) == 2 * BAG * 7 // 8


def test_the_gradients_of_bags_and_of_their_weights():
    """The rows that were looked up have two uses, each of which makes less of them."""
    args = [table(), random_array((B, K), seed=1), rows((B, K))]

    def loss(x, w, i):
        return jnp.sum(jnp.tanh((x[i] * w[..., None]).sum(1)))

    low = check(jax.grad(loss, (0, 1)), *args, inputs=[TABLE], rtol=1e-4, atol=1e-4)
    assert sent(low) == 2 * (BAG + B * K * 4) * 7 // 8


def test_rows_that_are_used_otherwise_too_are_reduced():
    args = [random_array((B * K * 8, M)), rows((B, K))]

    def both(x, i):
        found = x[i]
        return found.sum(1), jnp.tanh(found)

    low = check(both, *args, inputs=[TABLE], rtol=1e-4, atol=1e-4)
    assert sent(low) == 2 * K * BAG * 7 // 8


@pytest.mark.slow
@given(st.data(), st.sampled_from([n for n in WEIGHTED if n not in ("a loop", "in segments")]))
@settings(max_examples=10)
def test_any_sizes_and_splits(data, name):
    bags, in_bag = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 5))
    inputs = [data.draw(assignments(2, 8)) for _ in range(3)]
    args = [table(), rows((bags, in_bag)), random_array((bags, in_bag), seed=1)]
    loss = jax.value_and_grad(lambda *a: jnp.sum(WEIGHTED[name](*a) ** 2), (0, 2), allow_int=True)
    check(WEIGHTED[name], *args, inputs=inputs, rtol=1e-4, atol=1e-4)
    check(lambda x, i, w: loss(x, i, w), *args, inputs=inputs, rtol=1e-3, atol=1e-3)
