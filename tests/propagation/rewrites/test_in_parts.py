"""What follows a concatenation is computed on its parts, where tiles would have to move for it."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.oracle import check, even_split, kinds, random_array, sent

ROWS = even_split(2, 0, 8)
B, K, M = 24, 16, 16


def compared(z):
    """Of each row, the score of the other view among those of all others."""
    n, z = len(z), z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    scores = jnp.where(jnp.eye(n, dtype=bool), -1e9, z @ z.T / 0.1)
    others = (jnp.arange(n) + n // 2) % n
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), others[:, None], 1).mean()


def of_inputs(w, x, y):
    return compared(jnp.tanh(jnp.concatenate([x, y]) @ w))


def of_results(w, x, y):
    return compared(jnp.concatenate([jnp.tanh(x @ w), jnp.tanh(y @ w)]))


@pytest.mark.parametrize("loss", [of_inputs, of_results])
def test_views_are_gathered_and_their_gradients_scattered(loss):
    args = random_array((K, M)), random_array((B, K), seed=1), random_array((B, K), seed=2)
    gradients = jax.grad(loss, (0, 1))
    low = check(gradients, *args, inputs=[None, ROWS, ROWS], rtol=1e-3, atol=1e-3)
    assert kinds(low).keys() == {"all_gather", "reduce_scatter", "all_reduce"}
    assert sent(low) == 2 * (2 * B * M) * 4 * 7 // 8 + 2 * K * M * 4 * 7 // 8


def test_numbers_that_are_reshaped_are_cut_by_themselves():
    """Columns of both halves are a minor part of the numbers that count up."""

    def fn(a, b, x):
        y = x @ jnp.concatenate([a, b], 1)
        return y * (jnp.arange(y.size).reshape(y.shape) % 3)

    columns, args = even_split(2, 1, 8), [random_array((16, 24), seed=k) for k in range(2)]
    check(fn, *args, random_array((8, 16)), inputs=[columns, columns], rtol=1e-4, atol=1e-4)


def test_what_reads_all_rows_moves_tiles():
    """A cumulative sum is of the concatenated tensor; before and after it, too."""

    def fn(x, y):
        return jnp.sin(jnp.cumsum(jnp.concatenate([x, y]), 0))

    low = check(fn, *[random_array((16, 4), seed=n) for n in range(2)], inputs=[ROWS, ROWS])
    plain = check(lambda z: jnp.sin(jnp.cumsum(z, 0)), random_array((32, 4)), inputs=[ROWS])
    assert sent(low) > sent(plain)


STEPS = {
    "sine": jnp.sin,
    "product": lambda z: z @ jnp.ones((z.shape[1], 3)),
    "gram": lambda z: z @ (z.T @ z),
    "scores": lambda z: jax.nn.softmax(z @ z.T) @ z,
    "mask": lambda z: jnp.where(jnp.arange(len(z))[:, None] % 3 == 0, 0.0, z),
    "halves": lambda z: z * jnp.roll(z, len(z) // 2, 0),
    "first half": lambda z: z[: len(z) // 2].repeat(2, 0),
    "turned": lambda z: jnp.flip(z, 0),
    "mean": lambda z: z - z.mean(0),
    "largest": lambda z: z / (1 + jnp.abs(z).max(1, keepdims=True)),
}


@pytest.mark.slow
@settings(max_examples=25)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=4), st.sampled_from([8, 13]), st.data())
def test_any_operators(names, rows, data):
    count = data.draw(st.integers(2, 3))

    def fn(*parts):
        z = jnp.concatenate([jnp.cos(part) for part in parts])
        for name in names:
            z = STEPS[name](z)
        return (z**2).sum(), z

    parts = [random_array((rows, 3), seed=n) for n in range(count)]
    gradients = jax.grad(fn, tuple(range(count)), has_aux=True)
    check(gradients, *parts, inputs=[ROWS] * count, rtol=1e-3, atol=1e-3)
