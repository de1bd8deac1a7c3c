"""Compiled steps that are found by what they are made of: when, and that they are the same."""

import contextlib
import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gshard
from gshard.mt import config as config_module
from gshard.mt.launch import company
from gshard.mt.presets import preset
from gshard.mt.training import kept
from gshard.mt.training.programs import Programs, Setup
from gshard.nn.strategy import ONE_DEVICE
from tests.mt.runs import run_config
from tests.nn import models

SHAPE = jax.ShapeDtypeStruct((8, 4), jnp.float32)
SETTINGS = {"optimizer.rise": 5, "model.experts": 8}


def key(given=SETTINGS, arguments=(SHAPE, {"a": SHAPE}), devices=None):
    return kept.key_of(given, arguments, devices or jax.devices())


@contextlib.contextmanager
def switched(name, value):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


class TestKey:
    def test_is_of_everything_that_a_step_follows_from(self, monkeypatch):
        half = jax.ShapeDtypeStruct(SHAPE.shape, jnp.bfloat16)
        longer = jax.ShapeDtypeStruct((9, 4), jnp.float32)
        here = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        there = jax.ShapeDtypeStruct(SHAPE.shape, SHAPE.dtype, sharding=here)
        found = [key()]
        found += [key({**SETTINGS, "optimizer.rise": 6}), key({**SETTINGS, "x": None})]
        found += [key(arguments=(other, {"a": SHAPE})) for other in (half, longer, there, None)]
        found += [key(arguments=(SHAPE, {"b": SHAPE})), key(devices=jax.devices()[:4])]
        found += [key(devices=jax.devices()[::-1])]
        with switched("jax_threefry_partitionable", False):
            found += [key()]
        with jax.default_matmul_precision("highest"):
            found += [key()]
        for name in ("XLA_FLAGS", "GSHARD_RECORD"):
            with monkeypatch.context() as patch:
                patch.setenv(name, "--another")
                found += [key()]
        sources = dict(company._sources())
        sources[next(iter(sources))] = "another"
        with monkeypatch.context() as patch:
            patch.setattr(company, "_sources", lambda: sources)
            found += [key()]
        with monkeypatch.context() as patch:
            patch.setattr(company, "_version", lambda package: "another")
            found += [key()]
        assert len(set(found)) == len(found)
        assert key() == found[0]

    @settings(max_examples=15)
    @given(st.data())
    def test_any_setting_of_a_run(self, data):
        known = {name: value for name, value, _ in config_module.settings(preset("tiny"))}
        name = data.draw(st.sampled_from(sorted(known)))
        value = data.draw(st.integers() | st.text() | st.booleans() | st.none())
        same = str(value) == str(known[name])
        assert (key({**known, name: value}) == key(known)) == same

    @pytest.mark.slow
    def test_is_the_same_in_another_process(self):
        text = f"from tests.mt.training.test_kept import key; print(key({SETTINGS!r}))"
        ask = [sys.executable, "-c", f"import tests.conftest, jax; {text}"]
        first, second = (
            subprocess.run(ask, capture_output=True, text=True, check=True).stdout for _ in range(2)
        )
        assert first == second != ""


def compiled(fn, *arguments):
    return gshard.jit(fn, donate_argnums=0).lower(*arguments).compile()


def test_what_is_found_computes_the_same():
    def step(state, batch):
        batch = gshard.split(batch, 0, 8)
        return {"w": state["w"] - batch.T @ batch}, jnp.sum(batch)

    state, batch = {"w": jnp.eye(4)}, jnp.arange(64.0).reshape(16, 4)
    made, devices = compiled(step, state, batch), jax.devices()
    name = key(arguments=(state, batch))
    assert kept.find(name, (state, batch), devices) is None
    assert kept.keep(name, made, devices)
    found = kept.find(name, (state, batch), devices)
    assert jax.tree.map(lambda x: x.shape, found.in_info) == ({"w": (4, 4)}, (16, 4))
    shards = found.in_info[1].sharding.shard_shape((16, 4))
    assert shards == (2, 4)
    want = made(*made.place(*jax.tree.map(jnp.copy, (state, batch))))
    got = found(*found.place(*jax.tree.map(jnp.copy, (state, batch))))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert kept.find(key(arguments=(batch, state)), (batch, state), devices) is None


def test_what_exists_in_one_process_only_is_not_kept():
    def tells(x):
        jax.debug.callback(lambda x: None, x)
        return x + 1

    rows = jnp.ones((8, 3))
    assert not kept.keep(key(), compiled(tells, rows), jax.devices())
    uneven = compiled(lambda x: gshard.split(x, 0, 8) + 1, jnp.ones((9, 3)))
    assert not kept.keep(key(), uneven, jax.devices())


@pytest.mark.slow
def test_a_runs_step_is_found_without_tracing(corpus, monkeypatch):
    """Two updates by a step that was found, beside those by the one that was compiled.

    As on a GPU: no array may be closed over there.
    """
    config = run_config(corpus)
    optimizer = dataclasses.replace(config.optimizer, name="adafactor", fused=True)
    config = dataclasses.replace(config, optimizer=optimizer)
    batch = {name: np.asarray(x) for name, x in models.batch()._asdict().items()}

    def updated():
        model = models.config(weight_dtype="bfloat16").tuned()
        setup = Setup(config, model, jax.devices()[:1], ONE_DEVICE, keeps_step=True)
        programs = Programs(setup)
        programs.compile(batch)
        state = programs.first_state()
        for _ in range(2):
            state, figures = programs.step(state, batch)
        return jax.tree.leaves((state, figures))

    want = updated()

    def forbidden(*_):
        raise AssertionError("traced again")

    monkeypatch.setattr(Programs, "_partitioned", forbidden)
    for a, b in zip(updated(), want, strict=True):
        np.testing.assert_array_equal(a, b)
