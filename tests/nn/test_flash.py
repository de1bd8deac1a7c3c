"""The attention kernel, in Pallas's interpreter, against plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.nn.attention import Attention
from gshard.nn.flash import Blocks, flash_attention, reference, seed_from_row
from gshard.nn.segments import Segments
from gshard.nn.strategy import Strategy

SEED = jnp.array([7, 11], jnp.uint32)
BLOCKS = Blocks(own=16, other=8, interpret=True)


def packed(rng, B, length):
    """Rows of a few sentences and padding; the last row is padding alone."""
    rows = np.zeros((B, length), np.int32)
    for row in rows[:-1]:
        cuts = np.sort(rng.choice(length, 3, replace=False))
        row[: cuts[0]], row[cuts[0] : cuts[1]], row[cuts[1] : cuts[2]] = 1, 2, 3
    return rows


def arrays(T, L, D=16, U=32, B=3, N=2, seed=0):
    rng = np.random.default_rng(seed)
    q, k, v = (
        jnp.float32(rng.normal(size=(B, length, N, dim)))
        for length, dim in ((T, D), (L, D), (L, U))
    )
    return q, k, v, packed(rng, B, T), packed(rng, B, L)


@pytest.mark.parametrize("rate", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize(
    ("T", "L", "causal"),
    [
        pytest.param(32, 32, True, marks=pytest.mark.slow),
        pytest.param(32, 24, False, marks=pytest.mark.slow),
        (37, 37, True),
        pytest.param(5, 19, False, marks=pytest.mark.slow),
    ],
)
def test_kernel_is_the_reference(T, L, causal, rate):
    """Lengths that are no multiple of a block, rows of padding alone, forward and backward."""
    q, k, v, q_seg, k_seg = arrays(T, L)
    segments = Segments(q_seg, q_seg if causal else k_seg, causal)
    if causal:
        k, v = k[:, :T], v[:, :T]

    def value(attend):
        def f(q, k, v):
            out = attend(q, k, v)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True))(q, k, v)

    got = value(lambda q, k, v: flash_attention(q, k, v, segments, rate, SEED, BLOCKS))
    want = value(lambda q, k, v: reference(q, k, v, segments, rate, SEED))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
    assert np.all(got[0][1][-1] == 0)  # padding sees nothing


def test_reference_is_plain_attention_where_there_is_something_to_see():
    x = jax.random.normal(jax.random.key(0), (3, 12, 8))
    segments = packed(np.random.default_rng(0), 3, 12)
    visible = Segments(segments, segments, causal=True)
    attention = Attention(8, 2, 4, 4, "float32", jax.random.key(1))
    memory = attention.keys_values(x)
    want = attention(x, memory, visible.mask())
    np.testing.assert_array_equal(attention(x, memory, visible), want)
    got = attention(x, memory, visible, kind="flash")
    seen = np.asarray(visible.mask().any(-1))
    np.testing.assert_allclose(got[seen], want[seen], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_dropout_drops_its_share_of_the_weights():
    q, k, _, segments, _ = arrays(64, 64, N=4)
    segments = np.ones_like(segments)
    v = jnp.broadcast_to(jnp.eye(64)[None, :, None], (3, 64, 4, 64))  # the weights themselves
    weights = reference(q, k, v, Segments(segments, segments), 0.0, SEED)
    for attend in (reference, lambda *a: flash_attention(*a, BLOCKS)):
        dropped = np.asarray(attend(q, k, v, Segments(segments, segments), 0.2, SEED))
        assert abs(np.mean(dropped == 0) - 0.2) < 0.01
        np.testing.assert_allclose(dropped, (dropped > 0) * weights / 0.8, rtol=1e-4)


def test_blocks_that_nobody_sees_are_left_out():
    """NaN in a sentence that others do not see stays there, block by block."""
    q, k, v, _, _ = arrays(32, 32)
    segments = np.repeat(np.arange(1, 5), 8)[None].repeat(3, 0).astype(np.int32)
    v = v.at[:, 24:].set(jnp.nan)
    out = flash_attention(q, k, v, Segments(segments, segments), 0.0, SEED, BLOCKS._replace(own=8))
    assert np.all(np.isfinite(out[:, :24]))
    assert np.all(np.isnan(out[:, 24:]))


def test_a_part_of_a_batch_draws_what_the_whole_does():
    q, k, v, segments, _ = arrays(16, 16, B=5)
    segments = np.ones_like(segments)
    whole = reference(q, k, v, Segments(segments, segments), 0.5, SEED)
    part = slice(3, 5)
    seed = seed_from_row(SEED, jnp.asarray(3), q.shape[2])
    seen = Segments(segments[part], segments[part])
    got = reference(q[part], k[part], v[part], seen, 0.5, seed)
    np.testing.assert_allclose(got, whole[part], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_kernel_runs_under_gshard_jit(devices):
    """On one device as it is; on several in a manual region, each on its own rows."""
    strategy = Strategy(devices)
    q, k, v, _, _ = arrays(16, 16, B=8)
    segments = np.ones((8, 16), np.int32)

    def attend(q, k, v, segments):
        own = [strategy.own_groups(x) for x in (q, k, v, segments)]
        blocks = Blocks(16, 16, interpret=True)
        out = flash_attention(*own[:3], Segments(own[3], own[3]), 0.0, SEED, blocks)
        return jnp.sum(jnp.sin(strategy.all_groups(out, 8)))

    def plain(q, k, v, segments):
        out = reference(q, k, v, Segments(segments, segments), 0.0, SEED)
        return jnp.sum(jnp.sin(out))

    run = gshard.jit(jax.value_and_grad(attend), devices=jax.devices()[:devices])
    want = jax.jit(jax.value_and_grad(plain))(q, k, v, segments)
    for a, b in zip(run(q, k, v, segments), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)
