"""What a model is lowered to depends on the devices that it is for, not on those that lower it."""

import functools

import jax
import jax.numpy as jnp
import pytest

import gshard
from gshard.nn import Batch, Strategy, adafactor, init_state, train_step
from gshard.tensors.annotate import target_platform
from tests.nn import models


def lowered(devices, hardware):
    """A training step whose dims all kernels take."""
    rows = 64 * max(devices, 1)
    config = models.config(
        model_dim=64, key_dim=16, value_dim=16, experts=8, groups=rows, target_vocab=128
    ).tuned()
    optimizer, strategy = adafactor(fused=True), Strategy(devices)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_state(config, optimizer, key, strategy), key)
    batch = Batch(*[jax.ShapeDtypeStruct((rows, 128), jnp.int32)] * len(Batch._fields))
    step = functools.partial(train_step, optimizer=optimizer, strategy=strategy)
    return gshard.jit(step, devices=devices, hardware=hardware).lower(state, batch, key)


def kernels(text):
    return {
        name: text.count(f"name={name}")
        for name in ("flash_forward", "flash_key_grads", "norm_grads", "vocabulary_grads")
    }


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_the_text_is_that_of_the_target_on_any_host(devices, monkeypatch):
    """One and eight devices have the same kernels: attention, normalization and loss."""
    here = lowered(devices, "h200").as_text()
    found = kernels(here)
    assert found["flash_forward"] == found["flash_key_grads"] == 2 + 2 * 2
    assert found["norm_grads"] == 2 * 2 + 2 * 3
    assert found["vocabulary_grads"] == 1
    assert not any(kernels(lowered(devices, "tpu-v5e").as_text()).values())
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert lowered(devices, "h200").as_text() == here
    assert not any(kernels(lowered(devices, "cpu").as_text()).values())


def test_the_target_is_that_of_the_devices_or_of_the_hardware_named():
    found = []

    @jax.jit  # which is traced anew for each target
    def inner(x):
        found.append(target_platform())
        return x

    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    for how in ({"devices": 8}, {"devices": 8, "hardware": "h200"}, {"hardware": "tpu-v4"}):
        gshard.jit(lambda x: inner(x), **how).lower(x)
    assert found == ["cpu", "gpu", "cpu"]  # real devices can only run what is made for them
