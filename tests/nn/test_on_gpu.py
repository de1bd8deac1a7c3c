"""The kernels themselves against plain JAX, where there is a GPU (elsewhere: the interpreter's)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gshard.nn import float8
from gshard.nn.flash import Segments, flash_attention, joint_attention
from gshard.nn.flash import reference as plain_attention
from gshard.nn.kernels.float8 import E4M3, E5M2, by_kernel, gated_by_kernel, gated_reference
from gshard.nn.kernels.float8 import reference as plain_eight
from gshard.nn.kernels.vocabulary import fits as loss_fits
from gshard.nn.kernels.vocabulary import log_z_and_grads
from gshard.nn.kernels.vocabulary import reference as plain_loss
from gshard.nn.layers import fits_norm, normalize, normalize_with_residual

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")


SEED = jnp.array([7, 9], jnp.uint32)


RANDOM = np.random.default_rng(0)  # no two draws alike: a query equal to its key sees it alone


def draw(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.bfloat16)


def same(kernel, plain, *given):
    """Values and gradients as near to those of float32 as plain JAX's are."""

    def value(fn, given):
        y, pull = jax.vjp(fn, *given)
        return y, *pull(jnp.cos(y.astype(jnp.float32)).astype(y.dtype))

    with jax.default_matmul_precision("highest"):
        exact = value(plain, [x.astype(jnp.float32) for x in given])
    found = zip(jax.jit(lambda: value(kernel, given))(), value(plain, given), exact, strict=True)
    for got, rough, want in found:
        got, rough, want = (np.asarray(x, np.float32) for x in (got, rough, want))
        off, length = np.linalg.norm(got - want), np.linalg.norm(want)
        assert off <= 1.5 * np.linalg.norm(rough - want) + 1e-3 * length
        assert off <= 0.05 * length


def packed(T, L, causal):
    """Rows of several sentences, with padding."""
    rng = np.random.default_rng(0)
    q_BT, k_BL = (np.sort(rng.integers(1, 4, (3, n))).astype(np.int32) for n in (T, L))
    return Segments(jnp.asarray(q_BT).at[:, -2:].set(0), jnp.asarray(k_BL), causal)


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(("T", "L", "causal"), [(64, 64, True), (37, 37, True), (5, 19, False)])
def test_attention(T, L, causal, rate):
    """Rows that blocks do not divide, padding, and several sentences in a row."""
    segments = packed(T, L, causal)
    q, k, v = draw(3, T, 2, 64), draw(3, L, 2, 64), draw(3, L, 2, 64)
    same(
        lambda q, k, v: flash_attention(q, k, v, segments, rate, SEED),
        lambda q, k, v: plain_attention(q, k, v, segments, rate, SEED),
        q,
        k,
        v,
    )


@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize(
    ("parts", "T", "L", "causal"),
    [
        ((3,), 64, 64, True),
        ((3,), 37, 37, False),
        ((1, 2), 128, 64, False),
        ((1, 2), 5, 19, False),
        ((2, 1), 37, 37, True),
    ],
)
def test_attention_to_parts_of_arrays(parts, T, L, causal, rate):
    """Queries, keys and values together, or keys and values: gradients too lie as they do."""
    segments = packed(T, L, causal)
    lengths = (T, L)[-len(parts) :]
    arrays = [draw(3, n, count, 2, 64) for n, count in zip(lengths, parts, strict=True)]

    def plain(*arrays):
        apart = (x[:, :, part] for x in arrays for part in range(x.shape[2]))
        return plain_attention(*apart, segments, rate, SEED)

    same(lambda *arrays: joint_attention(arrays, segments, rate, SEED), plain, *arrays)


@pytest.mark.parametrize("shape", [(64, 128, 512), (1024, 1024)])
def test_normalization_beside_the_residual(shape):
    x, scale, bias = draw(*shape), draw(1, shape[-1])[0], draw(shape[-1])
    assert fits_norm(x)
    same(
        lambda *given: sum(normalize_with_residual(*given)),
        lambda x, scale, bias: normalize(x, scale, bias) + x,
        x,
        scale,
        bias,
    )


@pytest.mark.parametrize("V", [128, 16_000, 32_000, 32_768])
def test_gradients_of_logits(V):
    logits = jnp.asarray(3.0 * RANDOM.normal(size=(264, V)), jnp.float32)
    labels = jnp.asarray(RANDOM.integers(0, V, 264), jnp.int32).at[:2].set(jnp.array([0, V - 1]))
    weights = jnp.asarray(RANDOM.random(264), jnp.float32).at[2].set(0.0)
    assert loss_fits(logits)
    given = logits, labels, weights, 0.1
    for dtype, near in ((jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)):
        log_z, grads = jax.jit(lambda: log_z_and_grads(*given, dtype))()  # noqa: B023
        want = plain_loss(*given, jnp.float32)
        np.testing.assert_allclose(log_z, want[0], rtol=1e-5)
        np.testing.assert_allclose(np.float32(grads), want[1], rtol=near, atol=1e-7)


def test_both_orders_in_eight_bits():
    """Bit by bit: kernels round as plain JAX does."""
    x, scale = draw(3, 128, 256) * 100, jnp.array([1.0, 0.25, 64.0])
    for dtype in (E4M3, E5M2):
        want = jax.jit(plain_eight, static_argnums=2)(x, scale, dtype)
        for a, b in zip(by_kernel(x, scale, dtype), want, strict=True):
            np.testing.assert_array_equal(np.float32(a), np.float32(b))
    given = x.astype(E5M2), jnp.maximum(draw(3, 128, 256), 0).astype(E4M3)
    for a, b in zip(gated_by_kernel(*given), jax.jit(gated_reference)(*given), strict=True):
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@pytest.mark.parametrize("E", [1, 4])
def test_products_in_eight_bits(E):
    """As on a machine without them: the same rounded operands, multiplied in float32."""
    x, wi, wo = draw(E, 256, 128), draw(E, 128, 512) / 11, draw(E, 512, 128) / 23
    g = draw(E, 256, 128) * 1e-6

    def value(fn, *given):
        y, pull = jax.vjp(fn, *given)
        return y, *pull(g[..., : y.shape[-1]] if y.shape[-1] == 128 else jnp.tile(g, 4))

    for fn, given in ((float8.feed_forward, (x, wi, wo)), (float8.product, (x, wi))):
        got = jax.jit(lambda *given, fn=fn: value(fn, *given))(*given)
        with jax.default_device(jax.devices("cpu")[0]), pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "default_backend", lambda: "cpu")
            jax.clear_caches()
            want = value(fn, *given)
            jax.clear_caches()
        for a, b in zip(got, want, strict=True):
            a, b = np.float32(a), np.float32(b)
            assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(b)
