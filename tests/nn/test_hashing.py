"""The generator that hashes: its numbers are random enough, and no two of them alike by design."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.nn.hashing import hash_key, hashed_bits

KEY = hash_key(jax.random.key(3))


def words(keys):
    return np.asarray(jax.random.key_data(keys)).reshape(-1, 2)


def test_places_count_as_in_memory():
    """Whichever dims an array has, an element's bits are those of its place."""
    seed = jnp.array([5, 6], jnp.uint32)
    flat = hashed_bits(seed, (60,))
    for shape in [(60, 1), (1, 60), (3, 20), (3, 1, 4, 5), (2, 30)]:
        np.testing.assert_array_equal(hashed_bits(seed, shape).ravel(), flat)
    assert hashed_bits(seed, ()).shape == ()
    np.testing.assert_array_equal(hashed_bits(seed, (1, 1)).ravel(), flat[:1])


def test_keys_that_are_split_folded_and_drawn_from_are_all_different():
    split = jax.random.split(KEY, (400, 50))
    folded = jax.vmap(lambda n: jax.random.fold_in(KEY, n))(jnp.arange(20_000))
    again = jax.random.split(split[0, 0], 20_000)
    drawn = np.asarray(jax.random.bits(KEY, (20_000, 2)))
    many = np.concatenate([words(split), words(folded), words(again), drawn])
    assert len(np.unique(many, axis=0)) == len(many)
    assert not np.array_equal(words(hash_key(jax.random.key(4))), words(KEY))


@pytest.mark.parametrize("draw", ["neighbours", "one key"])
def test_draws_are_even_and_do_not_go_together(draw):
    keys = jax.random.split(KEY, 64)
    rows = jax.vmap(lambda key: jax.random.uniform(key, (4096,)))(keys)
    if draw == "one key":
        rows = jax.random.uniform(KEY, (64, 4096))
    x = np.asarray(rows, np.float64)
    assert abs(x.mean() - 0.5) < 4 * np.sqrt(1 / 12 / x.size)
    counts = np.histogram(x, 256, (0, 1))[0]
    chi2 = ((counts - x.size / 256) ** 2 / (x.size / 256)).sum()
    assert 150 < chi2 < 370  # 255 degrees: 6 deviations of 22.6 below and 5 above
    together = np.corrcoef(x) - np.eye(64)
    assert np.abs(together).max() < 6 / np.sqrt(4096)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bits_of_every_width(dtype):
    bits = np.asarray(jax.random.bits(KEY, (1 << 14,), dtype))
    assert bits.dtype == dtype
    width = 8 * bits.dtype.itemsize
    ones = [(bits >> n & 1).mean() for n in range(width)]
    np.testing.assert_allclose(ones, 0.5, atol=0.03)


def test_bits_of_64_are_two_words():
    with jax.enable_x64(True):
        bits = np.asarray(jax.random.bits(KEY, (1 << 12,), jnp.uint64))
    assert bits.dtype == np.uint64
    ones = [(bits >> np.uint64(n) & np.uint64(1)).mean() for n in range(64)]
    np.testing.assert_allclose(ones, 0.5, atol=0.05)


def test_several_devices_draw_what_one_does():
    def draws(key, x):
        first, second = jax.random.split(hash_key(key))
        x = gshard.split(x, 0, 4)
        x = x + jax.random.uniform(first, x.shape)
        return gshard.split(x, 1, 4) * jax.random.normal(jax.random.fold_in(second, 7), x.shape)

    x, key = jnp.ones((10, 6)), jax.random.key(0)
    got = gshard.jit(draws, devices=jax.devices()[:4])(key, x)
    np.testing.assert_allclose(got, jax.jit(draws)(key, x), rtol=1e-6)
