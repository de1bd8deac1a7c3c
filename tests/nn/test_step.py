import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import gshard
from gshard.nn import (
    GatingConfig,
    Strategy,
    TrainState,
    adafactor,
    adam,
    choose_remat,
    cross_entropy,
    eval_step,
    loss,
    train_step,
)
from tests.nn import models

KEY = jax.eval_shape(lambda: jax.random.key(0))
DROPOUT = {"input_dropout": 0.1, "residual_dropout": 0.1, "attention_dropout": 0.1}


def state_of(model, optimizer):
    return TrainState(model, optimizer.init(model), jnp.zeros((), jnp.int32))


def test_cross_entropy():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    labels = np.array([[0, 1, 2], [3, 4, 0]])
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = -np.log(np.take_along_axis(probs, labels[..., None], -1)[..., 0])
    np.testing.assert_allclose(cross_entropy(logits, labels), picked, rtol=1e-5)
    want = 0.9 * picked + 0.1 * -np.log(probs).mean(-1)
    np.testing.assert_allclose(cross_entropy(logits, labels, 0.1), want, rtol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """Thirty steps on one batch, with dropout and random routing."""
    optimizer = adam(1e-2)
    gating = GatingConfig(z_coefficient=1e-3)
    config = models.config(gating=gating, decoder_layers=4, **DROPOUT)
    state = state_of(models.model(config), optimizer)
    step = jax.jit(functools.partial(train_step, optimizer=optimizer))
    reports = []
    for _ in range(30):
        state, metrics = step(state, models.batch(), jax.random.key(0))
        reports.append(metrics)
    return config, state, reports


@pytest.mark.slow
def test_loss_falls_and_adds_up(trained):
    config, state, reports = trained
    assert reports[-1].nll < 0.6 * reports[0].nll
    assert state.step == 30
    last = reports[-1]
    aux = last.encoder.aux_loss.sum() + last.decoder.aux_loss.sum()
    np.testing.assert_allclose(last.aux_loss, aux, rtol=1e-5)
    z = config.gating.z_coefficient * last.z_loss
    np.testing.assert_allclose(last.loss, last.nll + 0.01 * aux + z, rtol=1e-5)
    assert last.tokens == (models.batch().labels > 0).sum()


@pytest.mark.slow
def test_metrics_are_per_layer(trained):
    _, _, reports = trained
    last = reports[-1]
    assert last.encoder.load.shape == (1, 4)
    assert last.decoder.load.shape == (2, 4)
    assert last.decoder.overflow_first.shape == (2,)
    np.testing.assert_allclose(last.decoder.load.sum(-1), 1, rtol=1e-5)
    shares = last.decoder.tokens_0 + last.decoder.tokens_1 + last.decoder.tokens_2
    np.testing.assert_allclose(shares, 1, rtol=1e-5)
    assert np.abs(last.decoder.load[0] - last.decoder.load[1]).max() > 0


@pytest.mark.slow
def test_evaluation_has_nothing_random(trained):
    _, state, _ = trained
    run = jax.jit(eval_step)
    one, two = (run(state.model, models.batch()) for _ in range(2))
    np.testing.assert_array_equal(one.nll, two.nll)


@pytest.mark.slow
def test_gradients_are_the_slope_of_the_loss():
    """Along a random direction, with the routing held fixed by a tiny step."""
    config = models.config(gating=GatingConfig(second_expert="all", z_coefficient=0.01))
    model, batch = models.model(config), models.batch()
    f = jax.jit(lambda m: loss(m, batch)[0])
    gradient = jax.jit(jax.grad(lambda m: loss(m, batch)[0]))(model)
    along = models.model(config, seed=5)
    slope = sum(
        jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (gradient, along)), strict=True)
    )
    moved = [f(jax.tree.map(lambda m, a, e=e: m + e * a, model, along)) for e in (1e-3, -1e-3)]
    np.testing.assert_allclose((moved[0] - moved[1]) / 2e-3, slope, rtol=0.02, atol=2e-3)


def residual_bytes(f, *args):
    leaves = jax.tree.leaves(eqx.filter_eval_shape(lambda *a: jax.vjp(f, *a)[1], *args))
    return sum(np.prod(x.shape) * x.dtype.itemsize for x in leaves)


@pytest.mark.slow
def test_rematerialization_changes_memory_and_not_values():
    config = models.config(residual_dropout=0.1)
    model, batch, key = models.model(config), models.batch(), jax.random.key(0)

    def value(remat):
        return lambda m: loss(m, batch, key, remat=remat)[0]

    plain, layer = (jax.jit(jax.value_and_grad(value(r)))(model) for r in ("none", "layer"))
    for a, b in zip(*map(jax.tree.leaves, (plain, layer)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert residual_bytes(value("layer"), model) < 0.8 * residual_bytes(value("none"), model)


def test_remat_is_chosen_by_what_fits():
    """The cheapest setting within a budget; the estimate is asked for what is needed alone."""
    asked = []

    def memory(setting):
        asked.append(setting)
        return {"none": 1000, "layer": 600}[setting]

    assert choose_remat("layer", memory) == "layer"
    assert asked == []
    assert choose_remat(1000, memory) == "none"
    assert asked == ["none"]
    assert choose_remat(999, memory) == "layer"
    assert choose_remat(600, memory) == "layer"
    with pytest.raises(ValueError, match="holds about 600 bytes"):
        choose_remat(599, memory)


@pytest.mark.slow
def test_the_forecast_chooses_remat():
    """A budget between what both settings hold, by the one estimate that there is."""
    model = models.shapes(models.config(encoder_layers=8))
    optimizer, batch = adafactor(), models.batch(B=64)
    state = jax.eval_shape(lambda m: state_of(m, optimizer), model)

    def memory(setting):
        step = functools.partial(train_step, optimizer=optimizer, remat=setting)
        return gshard.jit(step, devices=1).lower(state, batch, KEY).forecast().memory_bytes

    plain, least = memory("none"), memory("layer")
    assert least < 0.8 * plain
    assert choose_remat(plain, memory) == "none"
    assert choose_remat((plain + least) // 2, memory) == "layer"


def test_a_budget_is_refused_until_it_is_a_setting():
    model, optimizer = models.shapes(models.config(remat=1 << 30)), adafactor()
    state = jax.eval_shape(lambda m: state_of(m, optimizer), model)
    step = functools.partial(train_step, optimizer=optimizer)
    with pytest.raises(ValueError, match="choose_remat turns it into"):
        jax.eval_shape(step, state, models.batch(), KEY)
    jax.eval_shape(functools.partial(step, remat="layer"), state, models.batch(), KEY)


def annotations(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "annotate":
            found.append((eqn.invars[0].aval.shape, eqn.params["annotation"]))
        for sub in jaxprs_in_params(eqn.params):
            found += annotations(sub)
    return found


def traced(strategy, optimizer):
    model = models.shapes(models.config(model_dim=16, experts=8))
    state = jax.eval_shape(lambda m: state_of(m, optimizer), model)
    step = functools.partial(train_step, optimizer=optimizer, strategy=strategy)
    return annotations(jax.make_jaxpr(step)(state, models.batch(), jax.random.key(0)).jaxpr)


def test_paper_strategy_splits_groups_and_experts_and_nothing_else():
    marks = traced(Strategy(8), adam())
    for shape, mark in marks:
        split = [dim for dim, tiles in enumerate(mark.tiles) if tiles > 1]
        if not split:
            assert shape[-2:] == (16, 8)  # the gate
        elif shape in {(8, 16, 24), (8, 24, 16)} or (len(shape) == 4 and shape[0] == 8):
            assert split == [0]  # experts of a layer, or tokens at their experts
        elif shape in {(1, 8, 16, 24), (1, 8, 24, 16)}:
            assert split == [1]  # the stacked experts, their gradients and Adam's moments
        else:
            assert split == [0]
            assert shape[0] == 4  # the batch
    assert not traced(Strategy(), adam())


@pytest.mark.slow
def test_other_strategies_are_other_annotations():
    tensor = {(shape, mark.tiles) for shape, mark in traced(Strategy(4, 2), adam())}
    assert ((8, 16, 24), (4, 1, 2)) in tensor
    assert ((8, 24, 16), (4, 2, 1)) in tensor
    assert ((16, 2, 6), (1, 2, 1)) in tensor  # heads
    assert ((16, 24), (1, 2)) in tensor
    update = [(shape, mark) for shape, mark in traced(Strategy(8, split_update=True), adam())]
    table = [mark.tiles for shape, mark in update if shape == (23, 16)]
    assert table.count((8, 1)) >= 3  # gradient and both moments
    assert (1, 1) in table  # gathered after the update
