"""Indices that count up: a gather at (b, i[b]) is a batch of gathers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from tests.oracle import check, even_split, kinds, random_array

B, N, K, M = 16, 12, 3, 4
ROWS = jnp.arange
BATCH = [even_split(3, 0, 8), even_split(2, 0, 8)]

READS = {
    "pairs": lambda x, i: x[ROWS(B)[:, None], i],
    "one for each": lambda x, i: x[ROWS(B), i[:, 0]],
    "part of a row": lambda x, i: x[ROWS(B)[:, None], i, 1:3],
    "other order": lambda x, i: x.transpose(1, 0, 2)[i, ROWS(B)[:, None]],
    "three": lambda x, i: x[ROWS(B)[:, None], i, ROWS(K)[None]],
    "two batches": lambda x, i: x[ROWS(B)[:, None], ROWS(N)[None], i[:, :1] % M],
}
WRITES = {
    "set": lambda x, i: x.at[ROWS(B)[:, None], i[:, :1]].set(1.0),
    "add": lambda x, i: x.at[ROWS(B)[:, None], i].add(jnp.cos(i)[..., None]),
    "max": lambda x, i: x.at[ROWS(B), i[:, 1]].max(0.5),
}


@pytest.mark.parametrize("name", [*READS, *WRITES])
def test_a_batch_of_rows_is_looked_up_where_it_is(name):
    fn = (READS | WRITES)[name]
    x, i = random_array((B, N, M)), np.random.default_rng(0).integers(-N, N, (B, K))

    def both(x, i):
        grad = jax.grad(lambda x: jnp.sum(jnp.sin(fn(x, i))))(x)
        return fn(x, i), grad

    assert kinds(check(both, x, i.astype(np.int32), inputs=BATCH, rtol=1e-5)) == {}


@pytest.mark.parametrize(
    "rows",
    [lambda: ROWS(B)[::-1], lambda: ROWS(B) - 1, lambda: ROWS(B) // 2, lambda: 2 * ROWS(B // 2)],
)
def test_other_indices_are_looked_up_as_they_are(rows):
    x, i = random_array((B, N, M)), np.random.default_rng(0).integers(0, N, (B, K))

    def fn(x, i):
        return x[rows()[:, None], i[: len(rows())]]

    check(fn, x, i.astype(np.int32), inputs=BATCH, exact=True)


def test_a_lookup_that_is_the_same_in_every_row_of_a_batch():
    """The learned positions of a BART: known places of the table, broadcast over the batch."""

    def f(table, x):
        places = jnp.broadcast_to(jnp.arange(6) + 2, (16, 6))
        return gshard.split(x, 0, 8) + table.at[places].get(mode="promise_in_bounds")

    table = jax.random.normal(jax.random.key(0), (12, 4))
    x = jnp.ones((16, 6, 4))
    lowered = gshard.jit(f).lower(table, x)
    assert not list(lowered.collectives)
    np.testing.assert_array_equal(lowered.compile()(table, x), x + table[2:8])
