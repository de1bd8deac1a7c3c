"""Attention to a cache that is filled in part: the kernel, in Pallas's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.nn.kernels.attention import CacheBlocks, attend_to_cache, cache_reference


def check(B, T, N, L, D, U, filled, positions, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((B, T, N, D), (B, N, L, D), (B, N, L, U))
    )
    mask = rng.random((B, T, L)) < 0.4
    mask[..., filled:] = False
    mask[:, np.arange(T), filled - T + np.arange(T)] = True  # each query sees itself
    want = np.asarray(cache_reference(q, k, v, jnp.asarray(mask)))
    unread = -(-filled // positions) * positions
    k[:, :, unread:], v[:, :, unread:] = np.nan, np.nan
    blocks = CacheBlocks(positions, interpret=True)
    got = attend_to_cache(q, k, v, jnp.asarray(mask), jnp.asarray(filled), blocks)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("filled", "positions"), [(4, 16), (33, 32)])
def test_kernel_is_the_reference_and_reads_no_block_beyond(filled, positions):
    check(2, 4, 2, 64, 16, 32, filled, positions)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    T=st.integers(1, 20),
    blocks=st.integers(2, 5),
    positions=st.sampled_from([16, 32]),
    more=st.integers(0, 160),
    seed=st.integers(0, 99),
)
def test_any_beam_at_any_step(T, blocks, positions, more, seed):
    L = blocks * positions
    check(1, T, 2, L, 16, 16, min(T + more, L), positions, seed)
