"""The kernel of the loss against a loop over tokens in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.nn import Strategy, step
from gshard.nn.kernels.vocabulary import fits, log_z_and_grads, reference
from gshard.nn.step import LossSettings, weighted_nll
from gshard.nn.strategy import ONE_DEVICE
from tests.oracle import kinds

BY_KERNEL = functools.partial(log_z_and_grads, interpret=True)


def by_loop(logits_RV, labels_R, weights_R, smoothing):
    """log Z and the gradient of weight * -sum(target * log p), token by token."""
    V = logits_RV.shape[1]
    log_zs, grads = [], []
    for logits, label, weight in zip(np.float64(logits_RV), labels_R, weights_R, strict=True):
        log_z = np.log(np.sum(np.exp(logits - logits.max()))) + logits.max()
        target = np.full(V, smoothing / V)
        target[label] += 1.0 - smoothing
        log_zs.append(log_z)
        grads.append(np.float64(weight) * (np.exp(logits - log_z) - target))
    return np.array(log_zs), np.array(grads)


def is_the_loop(R, V, smoothing, size, seed):
    """Few and many tokens, rows of any length, logits that are all alike or far apart."""
    rng = np.random.default_rng(seed)
    logits = jnp.float32(size * rng.normal(size=(R, V)))
    labels = np.where(rng.random(R) < 0.3, V - 1, rng.integers(0, V, R)).astype(np.int32)
    weights = np.float32(np.where(rng.random(R) < 0.3, 0.0, rng.random(R)))  # 0: padding
    want = by_loop(np.asarray(logits), labels, weights, smoothing)
    for fn in (reference, BY_KERNEL):
        log_z, grads = fn(logits, labels, weights, smoothing, jnp.float32)
        np.testing.assert_allclose(log_z, want[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(grads, want[1], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    ("R", "V", "smoothing", "size"),
    [(4, 384, 0.1, 3.0), (3, 1000, 0.0, 1e4), (1, 1, 0.1, 1.0), (2, 128, 0.1, 1e-3)],
)
def test_both_versions_are_the_loop(R, V, smoothing, size):
    is_the_loop(R, V, smoothing, size, seed=0)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 1200),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([1e-3, 3.0, 1e4]),
    st.integers(0, 1 << 30),
)
def test_both_versions_are_the_loop_always(R, V, smoothing, size, seed):
    is_the_loop(R, V, smoothing, size, seed)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_have_the_dtype_asked_for(dtype):
    given = jnp.zeros((2, 128)), jnp.zeros(2, jnp.int32), jnp.ones(2)
    for fn in (reference, BY_KERNEL):
        log_z, grads = jax.eval_shape(lambda *given: fn(*given, 0.1, dtype), *given)  # noqa: B023
        assert (log_z.dtype, grads.dtype) == (jnp.float32, dtype)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_by_the_kernel_is_the_plain_one(monkeypatch, smoothing):
    rng = np.random.default_rng(0)
    x, table = (jnp.float32(rng.normal(size=s)) for s in ((3, 6, 8), (128, 8)))
    labels, weights = rng.integers(0, 128, (3, 6)), jnp.float32(rng.random((3, 6)))

    def run(*, kernels):
        def loss(x, table):
            return 3.0 * weighted_nll(
                x, table, labels, weights, LossSettings(smoothing, 2, kernels)
            )

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, table)

    want, shapes = run(kernels=None), []

    def counted(logits, *rest):
        shapes.append(logits.shape)
        return BY_KERNEL(logits, *rest)

    monkeypatch.setattr(step, "fits", lambda logits, devices: True)
    monkeypatch.setattr(step, "log_z_and_grads", counted)
    got = run(kernels=ONE_DEVICE)
    assert shapes == [(9, 128)]
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 3])
def test_each_device_runs_the_kernel_on_its_own_logits(monkeypatch, devices):
    """The loss and the table's gradient are summed over devices; logits stay where they are."""
    rng = np.random.default_rng(0)
    strategy = Strategy(devices)
    B, T, M, V = 2 * devices, 4, 8, 128
    x, table = (jnp.float32(rng.normal(size=s)) for s in ((B, T, M), (V, M)))
    labels, weights = rng.integers(0, V, (B, T)), jnp.float32(rng.random((B, T)))

    def run(jit, kernels):
        def loss(x, table):
            given = (strategy.groups(a) for a in (labels, weights))
            return weighted_nll(strategy.groups(x), table, *given, LossSettings(0.1, 2, kernels))

        return jit(jax.value_and_grad(loss, (0, 1)))

    want = run(jax.jit, None)(x, table)
    plain = run(functools.partial(gshard.jit, devices=devices), None).lower(x, table)
    monkeypatch.setattr(step, "fits", lambda logits, devices: True)
    monkeypatch.setattr(step, "log_z_and_grads", BY_KERNEL)
    by_kernel = run(functools.partial(gshard.jit, devices=jax.devices()[:devices]), strategy)
    for a, b in zip(*map(jax.tree.leaves, (by_kernel(x, table), want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    lowered = by_kernel.lower(x, table)
    assert "pallas_call" in lowered.as_text()
    assert kinds(lowered) == kinds(plain)
    assert set(kinds(lowered)) == {"all_reduce"}


def test_rows_that_registers_do_not_hold_stay_with_the_plain_version(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert fits(jax.ShapeDtypeStruct((4096, 32_000), jnp.float32))
    assert not fits(jax.ShapeDtypeStruct((4096, 64_000), jnp.float32))  # too long
    assert not fits(jax.ShapeDtypeStruct((4096, 30_001), jnp.float32))  # no powers of 2
    assert not fits(jax.ShapeDtypeStruct((131_072, 32_000), jnp.float32))  # 32 bits
    assert fits(jax.ShapeDtypeStruct((131_072, 32_000), jnp.float32), 8)
    assert not fits(jax.ShapeDtypeStruct((4095, 32_000), jnp.float32), 8)  # rows do not divide
    monkeypatch.undo()
    assert not fits(jax.ShapeDtypeStruct((4096, 32_000), jnp.float32))  # no GPU
