"""The kernel of a normalization's gradients against JAX's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gshard
from gshard.nn import Strategy, layers
from gshard.nn.flash import Segments
from gshard.nn.layers import NormBlocks, fits_norm, normalize, normalize_with_residual
from gshard.nn.pair import Inputs, Layer, Masks
from tests.nn import models
from tests.oracle import kinds, sent


@pytest.mark.parametrize(
    ("shape", "cut"),
    [
        ((2, 6, 64), NormBlocks(256, 3, interpret=True)),
        ((32, 128), NormBlocks(128, 1024, interpret=True)),
        ((3, 5, 64), NormBlocks(64, 4, interpret=True)),
    ],
    ids=["several rows at a time", "a program for each", "one program"],
)
def test_gradients(shape, cut):
    """With gradients of both results, a mean far from 0, and a row that is constant."""
    rng = np.random.default_rng(0)
    x, near, past = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(3))
    x = (3.0 * x + 5.0).at[0].set(1.0)
    scale, bias = (jnp.asarray(rng.normal(size=shape[-1]), jnp.float32) for _ in range(2))

    def beside(x, scale, bias):
        return normalize_with_residual(x, scale, bias, cut=cut)

    def plain(x, scale, bias):
        return normalize(x, scale, bias), x

    got, pull = jax.vjp(jax.jit(beside), x, scale, bias)
    want, plain_pull = jax.vjp(plain, x, scale, bias)
    for a, b in zip((*got, *pull((near, past))), (*want, *plain_pull((near, past))), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


def test_halves_are_rounded_once():
    """Gradients are added in float32: half of the last bit more or less, and no more."""
    rng = np.random.default_rng(1)
    x, near, past = (jnp.asarray(rng.normal(size=(8, 64)), jnp.bfloat16) for _ in range(3))
    scale, bias = jnp.ones(64, jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)
    cut = NormBlocks(128, 2, interpret=True)
    pull = jax.vjp(lambda x: normalize_with_residual(x, scale, bias, cut=cut), x)[1]
    (got,) = pull((near, past))
    wide = jax.vjp(lambda x: (normalize(x, scale, bias), x), x.astype(jnp.float32))[1]
    (want,) = wide((near.astype(jnp.float32), past.astype(jnp.float32)))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(got), want, rtol=2**-8, atol=1e-6)


@pytest.mark.slow
def test_a_layer_by_the_kernel_is_the_plain_one(monkeypatch):
    """The residual path and all three normalizations of a decoder's layer."""
    config = models.config(attention="flash", model_dim=16)
    layer = Layer(config, jax.random.key(0), sparse=False, cross=True)
    x, memory = (jax.random.normal(jax.random.key(n), (2, 8, 16)) for n in range(2))
    segments = jnp.ones((2, 8), jnp.int32)
    masks = Masks(segments > 0, Segments(segments, segments, True), Segments(segments, segments))

    def gradients(layer, x):
        def loss(layer, x):
            return jnp.sum(layer(x, Inputs(masks, memory))[0] ** 2)

        return jax.jit(jax.grad(loss, (0, 1)))(layer, x)

    want = gradients(layer, x)
    used = []

    def by_kernel(*given):
        if len(given) < 5:  # not from its own forward pass
            used.append(given)
            given = (*given, NormBlocks(32, 4, interpret=True))
        return normalize_with_residual(*given)

    monkeypatch.setattr(layers, "fits_norm", lambda x, devices: True)
    monkeypatch.setattr(layers, "normalize_with_residual", by_kernel)
    got = gradients(layer, x)
    assert len(used) == 3
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strategy", [Strategy(8), Strategy(4, 2), Strategy(3)])
def test_each_device_runs_the_kernel_on_its_own_rows(strategy):
    """The gradients of scale and bias are summed over devices, and nothing else is sent."""
    devices, M = strategy.devices, 64
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2 * devices, 3, M)), jnp.float32)
    scale, bias = (jnp.asarray(rng.normal(size=M), jnp.float32) for _ in range(2))

    def gradients(normalized):
        def loss(x, scale, bias):
            near, past = normalized(strategy.groups(x), scale, bias)
            return jnp.sum(jnp.sin(near) + jnp.cos(past))

        return jax.grad(loss, (0, 1, 2))

    cut = NormBlocks(128, 3, interpret=True)
    by_kernel = gradients(lambda *given: normalize_with_residual(*given, strategy, cut))
    want = gradients(lambda x, scale, bias: (normalize(x, scale, bias), x))(x, scale, bias)
    run = gshard.jit(by_kernel, devices=jax.devices()[:devices])
    for a, b in zip(run(x, scale, bias), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)
    lowered = run.lower(x, scale, bias)
    assert lowered.as_text().count("pallas_call") == 1
    assert kinds(lowered) == {"all_reduce": 2}
    assert sent(lowered) <= 2 * 2 * M * 4


def test_rows_that_do_not_divide_stay_with_the_plain_version(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fits_norm(jax.ShapeDtypeStruct((512, 8, 1024), jnp.bfloat16), 8)
    assert not fits_norm(jax.ShapeDtypeStruct((512, 7, 1024), jnp.bfloat16), 8)
    assert not fits_norm(jax.ShapeDtypeStruct((500, 1024, 1024), jnp.bfloat16), 8)
    assert not fits_norm(jax.ShapeDtypeStruct((512, 8, 1000), jnp.bfloat16), 8)
