"""The models through `gshard.jit`: the paper's communication, and the numbers of one device."""

import functools
import math

import jax
import numpy as np
import pytest

import gshard
from gshard.nn import FAMILY, GatingConfig, Strategy, adafactor, eval_step, init_state, train_step
from tests.nn.models import batch, config, shapes
from tests.oracle import kinds

KEY = jax.eval_shape(lambda: jax.random.key(0))


def lowered_step(model, devices=None):
    """The training step of a family member, lowered from shapes alone."""
    optimizer = adafactor()
    state = jax.eval_shape(lambda key: init_state(model.config, optimizer, key), KEY)

    def step(state, batch, key):
        return train_step(state, batch, key, optimizer=optimizer, strategy=model.strategy)

    return gshard.jit(step, devices=model.devices).lower(state, model.batch, KEY)


def bytes_per_device(lowered) -> int:
    """What the arguments of a step, weights and optimizer state first of all, take on a device."""
    shardings = jax.tree.leaves(lowered.in_shardings)
    avals = jax.tree.leaves(lowered.args_info)
    return sum(math.prod(s.local_shape(a.shape)) * 4 for s, a in zip(shardings, avals, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("moe_2048e_36l", "none"),
        ("moe_128e_12l", "layer"),
        ("moe_2048e_36l", "layer"),
        ("moe_128e_12l", "none"),
    ],
)
def test_four_all_to_all_per_layer_and_six_with_rematerialization(name, remat):
    model = FAMILY[name].replace(remat=remat)
    found = kinds(lowered_step(model))
    layers = (model.config.encoder_layers + model.config.decoder_layers) // 2
    assert found["all_to_all"] == layers * {"none": 4, "layer": 6}[remat]
    assert set(found) == {"all_to_all", "all_reduce"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in FAMILY if n.startswith(("moe", "t_"))])
def test_every_model_lowers_for_its_devices(name):
    model = FAMILY[name]
    found = kinds(lowered_step(model))
    layers = (model.config.encoder_layers + model.config.decoder_layers) // 2
    assert found.get("all_to_all", 0) == (4 * layers if model.config.experts else 0)
    assert set(found) <= {"all_to_all", "all_reduce"}


@pytest.mark.slow
def test_a_device_holds_as_much_of_2048_experts_as_of_128():
    """Weights and optimizer state per device; only the gate, [M, E] a layer, grows."""
    small, large = (
        lowered_step(FAMILY[name].replace(encoder_layers=2, decoder_layers=2))
        for name in ("moe_128e_12l", "moe_2048e_12l")
    )
    gates = 2 * 1024 * (2048 - 128) * 4 * 2  # and no more than as much again for their state
    assert abs(bytes_per_device(large) - bytes_per_device(small)) < gates + 2**20


def losses(jit, strategy, settings, steps):
    """A few steps with dropout and random routing; the random numbers are part of the result."""
    optimizer = adafactor(0.3, warmup=1)
    state = init_state(settings, optimizer, jax.random.key(0))
    run = jit(
        lambda state, batch, key: train_step(
            state, batch, key, optimizer=optimizer, strategy=strategy
        )
    )
    found = []
    for i in range(steps):
        state, metrics = run(state, batch(B=8, seed=i % 2), jax.random.key(7))
        found.append(float(metrics.loss))
    return np.array(found)


@pytest.mark.parametrize(
    ("experts", "dispatch"),
    [
        pytest.param(12, "index", marks=pytest.mark.slow),
        pytest.param(8, "index", marks=pytest.mark.slow),
        pytest.param(16, "index", marks=pytest.mark.slow),
        pytest.param(12, "einsum", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_train_like_one(experts, dispatch):
    """12 experts over 8 devices are uneven."""
    dropout = dict.fromkeys(("input_dropout", "residual_dropout", "attention_dropout"), 0.1)
    settings = config(experts=experts, groups=8, dispatch=dispatch, **dropout)
    wanted = losses(jax.jit, Strategy(), settings, 4)
    got = losses(gshard.jit, Strategy(8), settings, 4)
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(got, wanted, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy(4, 2), Strategy(8, split_update=True)])
def test_other_strategies_are_other_annotations(strategy):
    settings = config(experts=8, groups=8)
    wanted = losses(jax.jit, Strategy(), settings, 3)
    np.testing.assert_allclose(losses(gshard.jit, strategy, settings, 3), wanted, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Strategy(8, stages=2, microbatches=4)])
def test_stacks_in_stages_train_like_one_device(strategy):
    """Groups of 2 sequences each, all of one microbatch; nothing is random."""
    gating = GatingConfig(second_expert="all")
    settings = config(encoder_layers=4, decoder_layers=4, experts=4, groups=4, gating=gating)
    wanted = losses(jax.jit, Strategy(), settings, 3)
    np.testing.assert_allclose(losses(gshard.jit, strategy, settings, 3), wanted, rtol=2e-5)


def test_microbatches_divide_the_groups():
    settings = config(encoder_layers=4, decoder_layers=4, groups=4)
    step = functools.partial(eval_step, strategy=Strategy(4, stages=2, microbatches=3))
    with pytest.raises(ValueError, match="8 sequences in 4 groups do not divide into 3 microbatch"):
        gshard.jit(step, devices=4).lower(shapes(settings), batch(B=8))


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["index", "einsum"])
def test_a_model_trains_under_xlas_partitioner(dispatch):
    """Its manual regions are for XLA too, so that both partitioners can be compared on models."""
    settings = config(experts=8, groups=8, dispatch=dispatch)
    wanted = losses(jax.jit, Strategy(), settings, 3)
    jit = functools.partial(gshard.jit, partitioner="xla")
    np.testing.assert_allclose(losses(jit, Strategy(8), settings, 3), wanted, rtol=2e-5)
