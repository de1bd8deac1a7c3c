"""Gather and scatter: what they send, as in lookups of a table of embeddings and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import gshard
from gshard.moving.inventory import count_equations
from tests.oracle import (
    annotated,
    check,
    even_split,
    kinds,
    random_array,
    sent,
)

V, M = 4096, 32  # a vocabulary of V words, embeddings of M numbers
TABLE = V * M * 4


def lowered(fn, *shapes, inputs=(), outputs=(), devices=8):
    args = [jax.ShapeDtypeStruct(s, d) for s, d in shapes]
    return gshard.jit(annotated(fn, inputs, outputs), devices=devices).lower(*args)


def embed(tokens, inputs, outputs=(), devices=8):
    shapes = [((V, M), jnp.float32), ((tokens,), jnp.int32)]
    return lowered(lambda x, i: x[i], *shapes, inputs=inputs, outputs=outputs, devices=devices)


def embed_grad(tokens, inputs, outputs=(), devices=8):
    shapes = [((V, M), jnp.float32), ((tokens,), jnp.int32)]
    grad = jax.grad(lambda x, i, u: jnp.sum(x[i] * u))
    shapes.append(((tokens, M), jnp.float32))
    return lowered(grad, *shapes, inputs=inputs, outputs=outputs, devices=devices)


def test_lookup_split_by_vocabulary_sums_the_result():
    low = embed(64, [even_split(2, 0, 8)])
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 64 * M * 4 * 7 // 8


@pytest.mark.parametrize("dim", [0, 1])
def test_lookup_split_by_vocabulary_scatters_a_split_result(dim):
    low = embed(64, [even_split(2, 0, 8)], [even_split(2, dim, 8)])
    assert "all_reduce" not in kinds(low)
    assert sent(low, "reduce_scatter") == 64 * M * 4 * 7 // 8
    assert sent(low, "all_gather") in (0, 7 * 8 * 4)  # the indices, if they arrive split


def test_lookup_split_by_vocabulary_and_by_batch():
    low = embed(64, [even_split(2, 0, 8), even_split(1, 0, 8)])
    assert kinds(low) == {"all_gather": 1, "reduce_scatter": 1}
    assert sent(low) == 7 * 8 * 4 + 64 * M * 4 * 7 // 8


def test_a_table_larger_than_the_result_is_never_gathered():
    low = embed(V - 8, [even_split(2, 0, 8), even_split(1, 0, 8)])
    assert max(c.bytes for c in low.collectives if c.kind == "all_gather") < TABLE // 2


@pytest.mark.parametrize("times", [8, 64])
def test_a_table_smaller_than_the_result_is_gathered_if_that_sends_less(times):
    low = embed(times * V, [even_split(2, 0, 8), even_split(1, 0, 8)])
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == TABLE * 7 // 8


@pytest.mark.parametrize(
    "inputs",
    [[None, even_split(1, 0, 8)], [even_split(2, 1, 8)], [even_split(2, 1, 8), np.arange(1)]],
)
def test_lookup_split_by_indices_or_windows_sends_nothing(inputs):
    assert embed(64, inputs).collectives == []


def test_lookup_on_a_mesh_sums_over_the_vocabulary_only():
    table, ids = np.arange(8).reshape(2, 4).T[:, :1], np.arange(0, 8, 4)
    low = embed(64, [table, ids])
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * 32 * M * 4 * 3 // 4


def test_batched_lookups_send_nothing():
    shapes = [((16, 24, 8), jnp.float32), ((16, 5, 8), jnp.int32)]
    for dim in (0, 2):
        low = lowered(
            lambda x, i: jnp.take_along_axis(x, i, axis=1), *shapes, inputs=[even_split(3, dim, 8)]
        )
        assert low.collectives == []


@pytest.mark.parametrize("update", ["set", "add", "subtract", "multiply", "min", "max"])
@pytest.mark.parametrize("dim", [0, 1])
def test_updates_of_a_split_tensor_are_local(update, dim):
    shapes = [((V, M), jnp.float32), ((64,), jnp.int32), ((64, M), jnp.float32)]
    low = lowered(
        lambda x, i, u: getattr(x.at[i], update)(u), *shapes, inputs=[even_split(2, dim, 8)]
    )
    assert low.collectives == []


@pytest.mark.parametrize("update", ["set", "add", "subtract", "multiply", "min", "max"])
def test_split_updates_are_gathered_where_the_table_is_larger(update):
    shapes = [((V, M), jnp.float32), ((64,), jnp.int32), ((64, M), jnp.float32)]
    inputs = [even_split(2, 0, 8), even_split(1, 0, 8), even_split(2, 0, 8)]
    low = lowered(lambda x, i, u: getattr(x.at[i], update)(u), *shapes, inputs=inputs)
    assert kinds(low) == {"all_gather": 2}
    assert sent(low) == 7 * 8 * 4 * (1 + M)


def test_gradient_of_a_table_split_by_vocabulary():
    table, ids = even_split(2, 0, 8), even_split(1, 0, 8)
    assert embed_grad(64, [table], [table]).collectives == []
    few = embed_grad(64, [table, ids, table], [table])
    assert kinds(few) == {"all_gather": 2}  # the updates and their indices
    assert sent(few) == 7 * 8 * 4 * (1 + M)
    many = embed_grad(16 * V, [table, ids, table], [table])
    assert kinds(many) == {"reduce_scatter": 1}  # partial tables
    assert sent(many) == TABLE * 7 // 8


def test_gradient_of_a_whole_table_sums_over_the_batch():
    low = embed_grad(16 * V, [None, even_split(1, 0, 8), even_split(2, 0, 8)])
    assert kinds(low) == {"all_reduce": 1}
    assert sent(low) == 2 * TABLE * 7 // 8


def test_windows_across_the_borders_of_tiles():
    """Slices of 300 rows out of tiles of 512: neither a gather nor a halo of the table."""

    def slices(x, i):
        return jax.vmap(lambda at: lax.dynamic_slice(x, (at, 0), (300, M)))(i)

    shapes = [((V, M), jnp.float32), ((4,), jnp.int32)]
    low = lowered(slices, *shapes, inputs=[even_split(2, 0, 8)])
    assert kinds(low) == {"all_reduce": 1}

    grad = jax.grad(lambda x, i: jnp.sum(jnp.cos(slices(x, i))))
    assert kinds(lowered(grad, *shapes, inputs=[even_split(2, 0, 8)])) == {"all_reduce": 1}


def test_promises_about_indices_hold_only_without_padding():
    def fn(x, i, u):
        return x.at[i].add(u, unique_indices=True, indices_are_sorted=True)

    for tokens, kept in ((64, True), (61, False)):
        shapes = [((V, M), jnp.float32), ((tokens,), jnp.int32), ((tokens, M), jnp.float32)]
        low = lowered(fn, *shapes, inputs=[None, even_split(1, 0, 8), even_split(2, 0, 8)])
        for eqn in low.jaxpr.eqns:
            if eqn.primitive.name == "scatter-add" and eqn.invars[2].aval.shape[0] < tokens:
                assert eqn.params["unique_indices"] == eqn.params["indices_are_sorted"] == kept


def test_one_program_for_any_number_of_devices():
    def fn(x, i):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.cos(x[i])))(x)

    shapes = [((V, M), jnp.float32), ((128,), jnp.int32)]
    counts = {
        count_equations(
            lowered(fn, *shapes, inputs=[even_split(2, 0, n), even_split(1, 0, n)], devices=n).jaxpr
        )
        for n in (2, 8, 64)
    }
    assert len(counts) == 1


def test_a_group_of_copies_reduces_the_rows_that_its_members_want():
    """Updates over 4 of 2 x 4 devices, rows over all 8: each 4 of these sum half of the rows."""
    updates, rows = np.arange(8).reshape(2, 4)[0], even_split(2, 0, 8)
    i, u = np.arange(4096, dtype=np.int32) * 7 % 64, random_array((4096, M))
    scatter = lambda i, u: jnp.zeros((64, M)).at[i].add(u)  # noqa: E731
    low = check(scatter, i, u, inputs=[updates, updates[:, None]], outputs=[rows])
    assert kinds(low) == {"reduce_scatter": 1}
    assert sent(low) == 64 * M * 4 // 2 * 3 // 4


def test_products_of_rows_that_two_lookups_find_in_parts_take_the_table_once():
    """Each might wait for the sum over its row, but not both."""
    x, (i, j) = random_array((64, M)), np.arange(8192, dtype=np.int32).reshape(2, -1) * 7 % 64
    scores = lambda x, i, j: jnp.tanh(jnp.sum(x[i] * x[j], -1))  # noqa: E731
    low = check(scores, x, i, j, inputs=[even_split(2, 0, 8)])
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == 64 * M * 4 * 7 // 8


def test_rows_that_are_wanted_whole_are_looked_up_in_the_gathered_table():
    """And their gradient is summed into the table before it is reduced."""
    x, w = random_array((64, M)), random_array((M, M), seed=1)
    i = np.arange(4096, dtype=np.int32) * 7 % 64
    inputs = [even_split(2, 1, 8), even_split(2, 1, 8)]
    low = check(lambda x, w, i: jnp.tanh(x[i] @ w), x, w, i, inputs=inputs)
    assert kinds(low) == {"all_gather": 1}
    assert sent(low) == 64 * M * 4 * 7 // 8
    grad = jax.grad(lambda x, w, i: jnp.sum(jnp.tanh(x[i] @ w)), (0, 1))
    low = check(grad, x, w, i, inputs=inputs, outputs=inputs, rtol=1e-4, atol=1e-3)
    assert kinds(low) == {"all_gather": 1, "reduce_scatter": 1}
    assert sent(low) == 2 * 64 * M * 4 * 7 // 8
