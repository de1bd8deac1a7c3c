"""Attention to a part of a cache: the kernel, in Pallas's interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gshard.nn.kernels.attention import Blocks, attend_to_cache, cache_reference


def check(B, T, N, L, D, U, seen, positions, first=0, seed=0):
    """The queries see some of `seen` positions from `first` on, in a ring; all else is NaN."""
    rng = np.random.default_rng(seed)
    q, k, v = (
        rng.normal(size=shape).astype(np.float32)
        for shape in ((B, T, N, D), (B, N, L, D), (B, N, L, U))
    )
    firsts = (first + 7 * np.arange(B)) % L  # sequences began at different times
    within = (np.arange(L) - firsts[:, None]) % L < seen
    mask = (rng.random((B, T, L)) < 0.4) & within[:, None]
    last = (firsts[:, None] + seen - T + np.arange(T)) % L
    mask[np.arange(B)[:, None], np.arange(T), last] = True  # each query sees itself
    want = np.asarray(cache_reference(q, k, v, jnp.asarray(mask)))
    read = within.reshape(B, -1, positions).any(axis=2).repeat(positions, axis=1)
    for x in (k, v):
        x.swapaxes(1, 2)[~read] = np.nan
    blocks = Blocks(16, positions, 2, 2, interpret=True)
    got = attend_to_cache(q, k, v, jnp.asarray(mask), blocks)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("seen", "positions", "first"), [(4, 16, 0), (33, 32, 0), (20, 16, 55)])
def test_kernel_is_the_reference_and_reads_no_other_block(seen, positions, first):
    check(2, 4, 2, 64, 16, 32, seen, positions, first)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    T=st.integers(1, 20),
    blocks=st.integers(2, 5),
    positions=st.sampled_from([16, 32]),
    more=st.integers(0, 160),
    first=st.integers(0, 159),
    seed=st.integers(0, 99),
)
def test_any_beam_at_any_step(T, blocks, positions, more, first, seed):
    L = blocks * positions
    check(2, T, 2, L, 16, 16, min(T + more, L), positions, first, seed)
