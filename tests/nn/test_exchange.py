"""Tokens sent in eight bits: rounding beside NumPy's, bytes, and one device beside several."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gshard
from gshard.nn import Strategy
from gshard.nn.experts import MoE
from gshard.nn.float8 import exchanged
from tests.oracle import assert_same, random_array, run, sent


def eight(x, kind):
    """Rounded to eight bits times a power of two, as in the module's description."""
    root = np.sqrt(np.mean(np.square(x[..., :: np.gcd(x.shape[-1], 64)].astype(np.float32))))
    scale = np.float32(2.0 ** np.floor(np.log2(1 / root))) if root > 0 else np.float32(1)
    largest = float(ml_dtypes.finfo(kind).max)
    return np.clip(x * scale, -largest, largest).astype(kind).astype(np.float32) / scale


def same(x):
    return x


@given(st.integers(-40, 40), st.sampled_from([(3, 5), (2, 4, 128), (8, 64)]))
def test_what_is_received(exponent, shape):
    x = random_array(shape) * np.float32(2.0**exponent)
    grads = random_array(shape, seed=1) * np.float32(2.0**-exponent)
    got, back = jax.vjp(lambda x: exchanged(same, same, x), jnp.asarray(x))
    np.testing.assert_array_equal(got, eight(x, ml_dtypes.float8_e4m3fn))
    np.testing.assert_array_equal(back(jnp.asarray(grads))[0], eight(grads, ml_dtypes.float8_e5m2))


def test_zeros_and_large_numbers():
    x = np.zeros((4, 64), np.float32)
    np.testing.assert_array_equal(exchanged(same, same, jnp.asarray(x)), x)
    x[0, 1] = 1e30  # not in the sample: it saturates, and is finite
    assert np.isfinite(exchanged(same, same, jnp.asarray(x))).all()


def layer(exchange, strategy):
    moe = MoE(8, 16, 32, "float32", jax.random.key(0), groups=8, exchange=exchange)

    def loss(x, moe):
        y, _ = moe(x, jnp.ones(x.shape[:2], bool), None, strategy)
        return jnp.sum(jnp.sin(y))

    return jax.value_and_grad(loss), moe


@pytest.mark.slow
def test_bytes_of_the_exchange():
    """A quarter of float32's; gradients' sums and the rest stay as they are."""
    x = random_array((16, 8, 16))
    found = {}
    for exchange in ("dtype", "float8"):
        step, moe = layer(exchange, Strategy(8))
        partitioned = gshard.jit(step)
        found[exchange] = partitioned.lower(x, moe)
        alone = jax.jit(layer(exchange, Strategy(1))[0])(x, moe)
        assert_same(run(partitioned, x, moe), alone, rtol=1e-4, atol=1e-4)
    assert sent(found["float8"], "all_to_all") * 4 == sent(found["dtype"], "all_to_all")
    dtypes = {c.dtype for c in found["float8"].collectives if c.kind == "all_to_all"}
    assert dtypes == {"uint8"}
    scalars = sent(found["float8"], "all_reduce") - sent(found["dtype"], "all_reduce")
    assert 0 <= scalars <= 4 * 7  # the scales: at most a number for each exchange


def test_it_rounds_on_one_device_too():
    x = random_array((16, 8, 16))
    plain, rounded = (
        jax.jit(layer(e, Strategy(1))[0])(x, layer(e, Strategy(1))[1])[0]
        for e in ("dtype", "float8")
    )
    assert plain != rounded
    assert abs(plain - rounded) < 0.1 * abs(plain) + 1
