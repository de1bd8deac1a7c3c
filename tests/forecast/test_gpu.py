"""What XLA for GPUs makes of rows, products and loops, as its own programs show."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.forecast.program import body_of

ROWS = 64 * 128 * 4  # the bytes of one array of the tests


def operators(fn, *shapes, style="gpu"):
    """The operators of a program: what each is, how often it runs and the bytes it moves."""
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    jaxpr = gshard.jit(fn, devices=1).lower(*arguments).jaxpr
    return [(o.root.name, times, o.bytes) for o, times, _ in body_of(jaxpr, style).walk()]


@pytest.mark.parametrize("normalized", [jax.nn.softmax, jax.nn.standardize])
def test_rows_are_read_once_and_written_once(normalized):
    assert [b for *_, b in operators(normalized, (64, 128))] == [2 * ROWS]
    assert len(operators(normalized, (64, 128), style="cpu")) > 1


def test_columns_are_read_again_for_each_reduction():
    found = operators(lambda x: jax.nn.softmax(x, axis=0), (64, 128))
    assert sum(b for *_, b in found) > 4 * ROWS


def test_rows_of_transposed_scores_do_not_lie_together():
    """A Llama's: the product writes (g, t, i, s) or (g, s, t, i), never (g, i, t, s)."""

    def scores(equation):
        return lambda q, k: jax.nn.softmax(jnp.einsum(equation, q, k))

    shapes = (16, 2, 4, 8), (16, 2, 8)
    together = operators(scores("tgid,sgd->gtis"), *shapes)
    apart = operators(scores("tgid,sgd->gits"), *shapes)
    assert len(together) == 2 < len(apart)
    # A dim of one element has no place in memory.
    assert len(operators(scores("tgid,sgd->gits"), (16, 2, 1, 8), (16, 2, 8))) == 2


def test_a_product_ends_in_its_relu():
    def layer(x, w):
        return jax.nn.relu(x @ w)

    assert [name for name, *_ in operators(layer, (64, 128), (128, 128))] == ["dot_general"]
    both = operators(lambda x, w: (x @ w, jax.nn.relu(x @ w) + 1), (64, 128), (128, 128))
    assert len(both) > 1


def test_loops_copy_what_products_read_by_slices_and_what_is_stacked_and_read():
    def stacked(change):
        def layer(x, w):
            y = change(x, w)
            return y, y

        return lambda x, ws: jax.lax.scan(layer, x, ws)

    def copies(change):
        found = operators(stacked(change), (64, 128), (5, 128, 128))
        return [(times, b) for name, times, b in found if name == "copy"]

    weight = 128 * 128 * 4
    assert copies(lambda x, w: x @ w) == [(5, 2 * weight), (5, 2 * ROWS)]
    assert copies(lambda x, w: x + w[:64]) == []


def test_a_sum_over_a_single_row_is_fused_with_its_consumers():
    def fn(x):
        return jnp.exp(x) * jnp.sum(jnp.sum(x, -1, keepdims=True), 1, keepdims=True)

    assert [b for *_, b in operators(fn, (64, 1, 128))] == [2 * ROWS]


def test_a_residual_is_stored_where_its_readers_would_read_all_terms_again():
    """The bytes of a network are linear in its depth; a sum that two kernels read is not stored."""

    def chain(layers):
        def fn(x, w):
            for _ in range(layers):
                x = x + jax.nn.softmax(x) @ w
            return x

        return sum(b for *_, b in operators(fn, (64, 128), (128, 128)))

    assert chain(32) - chain(16) == 2 * (chain(16) - chain(8))

    def kernels(count):
        def fn(x, y):
            both = x + y
            return [jnp.sum(both * (n + 1), axis=0) for n in range(count)]

        return sum(b > ROWS for *_, b in operators(fn, (64, 128), (64, 128)))

    assert [kernels(n) for n in (2, 3, 4, 5)] == [2, 3, 5, 6]
