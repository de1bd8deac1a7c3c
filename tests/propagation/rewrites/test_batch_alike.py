"""Equal computations on many tensors: batched and dealt out, if that costs less."""

import jax
import jax.numpy as jnp
import pytest

import gshard
from tests.oracle import check, even_split, kinds, random_array, sent

M, H = 24, 40


def unrolled(x):
    """Newton-Schulz iterations, written out."""
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def in_a_loop(x):
    def step(_, x):
        gram = x @ x.T
        return 1.5 * x - 0.5 * gram @ x

    return jax.lax.fori_loop(0, 4, step, x / (jnp.sqrt(jnp.sum(x * x)) + 1e-7))


def root(x):
    """The inverse fourth root of a statistic, as Shampoo has it."""
    values, vectors = jnp.linalg.eigh(x @ x.T + jnp.eye(len(x)))
    return (vectors * values**-0.25) @ vectors.T @ x


def step(of, weights, momenta):
    momenta = [
        gshard.split(0.9 * m + jnp.sin(w), 0, 8) for m, w in zip(momenta, weights, strict=True)
    ]
    tall = [m.shape[0] > m.shape[1] for m in momenta]
    turned = [m.T if t else m for m, t in zip(momenta, tall, strict=True)]
    changes = [of(x) for x in turned]
    changes = [c.T if t else c for c, t in zip(changes, tall, strict=True)]
    return [gshard.split(w - 0.1 * c, 0, 8) for w, c in zip(weights, changes, strict=True)], momenta


@pytest.mark.parametrize("of", [unrolled, in_a_loop, root])
def test_two_exchanges_in_the_place_of_a_sum_for_every_product(of):
    shapes = [(M, H), (H, M)] * 8
    weights = [random_array(shape, seed=n) for n, shape in enumerate(shapes)]
    momenta = [random_array(shape, seed=n + 50) for n, shape in enumerate(shapes)]
    inputs = [even_split(2, 0, 8)] * 32
    low = check(
        lambda *args: step(of, args[:16], args[16:]), *weights, *momenta, inputs=inputs,
        rtol=2e-3, atol=2e-3,
    )  # fmt: skip
    assert kinds(low).keys() == {"all_to_all"}
    assert sent(low) == 2 * 2 * M * H * 4 * 7 // 8


def test_one_computation_that_is_written_several_times_is_not_dealt_out():
    """A spectral norm, for instance, that several losses of one step need."""

    def fn(w):
        w = gshard.split(w, 0, 8)
        return [jnp.sin(unrolled(w)) * n for n in range(8)]

    check(fn, random_array((M, H)), inputs=[even_split(2, 0, 8)], rtol=2e-3, atol=2e-3)


def test_branches_whose_rows_are_moved_stay_as_they_are():
    """A roll and a reversal in a branch are a row map, which has no batching rule."""

    def four(x, *weights):
        x = gshard.split(x, 0, 3)

        def searched(w):
            for _ in range(2):
                w = jnp.roll(x.T @ jnp.tanh(x @ w), 1)[::-1]
            return w

        return [jax.lax.cond(w[0] > 0, searched, jnp.negative, w) for w in weights]

    check(four, *(random_array(shape, seed=n) for n, shape in enumerate([(12, 4), *[(4,)] * 4])))
